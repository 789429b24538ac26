"""Starts the coordinator, serves its fleet, and stops it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import logging
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from sqlalchemy import URL

from coordinator.budgets.battery_watch import BatteryWatch
from coordinator.budgets.budget_watch import BudgetWatch
from coordinator.budgets.site_file import SiteFile, read_site_file
from coordinator.clocks import BootClock
from coordinator.errors import NotOwnerError
from coordinator.identity.access import Access, LiveCalls, ServerCredentials, certificate_of
from coordinator.identity.authority_folder import adopted, folder_of
from coordinator.listeners import (
    Listener,
    Listeners,
    authority_of,
    await_free,
    exposed_plaintext,
    listeners_of,
    public_addresses,
    require_free,
)
from coordinator.lock_file import note_address
from coordinator.metrics import coordinator_registry
from coordinator.page.application import http_served
from coordinator.page.queries import Queries
from coordinator.references.published import Reference, ServedReferences, open_reference
from coordinator.repository.repository import FleetRepository, delete_old_runs_daily, drop_expired_hourly, open_store
from coordinator.repository.writer import OWNER_CHECK_S, Writer
from coordinator.service_figures import ServiceFigures
from coordinator.services.audit import AuditLog
from coordinator.services.event_log import EventLog, StateTimes
from coordinator.services.identities import EnrolmentServicer, IdentityServicer, SuperLinkServicer
from coordinator.services.issuing import Issuing, PublicAddresses
from coordinator.services.operations import OperatorServicer
from coordinator.services.orders import Orders, Trimmer
from coordinator.services.planning import PlanningServicer, RoundPlanning
from coordinator.services.request_limits import PeerQuotas, RpcLatencies
from coordinator.services.sessions import SessionServicer
from coordinator.services.views import ViewServicer
from coordinator.settings import (
    CoordinatorSettings,
    PolicySettings,
    RoundSettings,
    SelectionSettings,
    SiteSettings,
)
from coordinator.state.fleet import Fleet
from coordinator.state.identities import Identities
from coordinator.state.leases import Leases
from coordinator.state.measuring import SharedModes
from coordinator.state.records import GrantLifetime
from coordinator.store.database import database_url
from coordinator.store.store import StoredState
from wattfleet.common.addresses import reachable_here, split_address
from wattfleet.common.atomic_files import replace_file
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.channels import is_loopback
from wattfleet.common.identity.http_access import VIEWING, HttpAccess
from wattfleet.common.identity.http_server import HttpLimits
from wattfleet.common.identity.identity_folder import note_coordinator
from wattfleet.common.stop_signals import handled_signals
from wattfleet.common.tasks import run_until_first
from wattfleet.common.version import version_of
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import require_workload_name
from wattfleet.core.planning import Allowance, Selection
from wattfleet.core.planning.policies import Policy, policy_named
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    identity_pb2,
    identity_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    planning_pb2,
    planning_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    superlink_pb2,
    superlink_pb2_grpc,
    view_pb2,
    view_pb2_grpc,
)

if TYPE_CHECKING:
    from coordinator.references.metadata import ReferenceMetadata

_log = logging.getLogger(__name__)


# --- Interpreter ------------------------------------------------------------------------------------------------------
# Settings of the Python interpreter for a process that serves a large fleet.


# Exporting metrics or planning for a large fleet keeps another thread busy for a second. With the default switch
# interval of 5 ms, each answer to an agent would wait that long for its turn.
_SWITCH_S = 0.0005


def serve_many() -> None:
    """Keep other threads and the garbage collector from delaying answers to agents.

    A full collection over ten thousand sessions takes half a second and finds nothing, because a session frees its
    objects when it ends. Objects that survive one full collection are therefore left out of the next.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


# --- Preparation ------------------------------------------------------------------------------------------------------
# Reads and checks everything needed before the store is opened, so that a failing start leaves no file behind.


@dataclass(frozen=True)
class Preparation:
    """Everything that a coordinator has read and checked before it serves.

    Attributes:
        settings: all settings.
        basis: the settings that determine plans.
        location: the store's file or database.
        keep: how long ended runs are kept; None forever.
        credentials: the server's TLS credentials; None without an authority.
        identities: invites and certificates; empty until the store is loaded.
        calls: the calls that end when their certificate expires or is revoked.
        listeners: the gRPC addresses, the main one first.
        http_address: host and port of the page and the metrics.
        reference: the reference predictor of the settings.
    """

    settings: CoordinatorSettings
    basis: PlanningBasis
    location: Path | URL
    keep: timedelta | None
    credentials: ServerCredentials | None
    identities: Identities
    calls: LiveCalls
    listeners: list[Listener]
    http_address: tuple[str, int]
    reference: Reference

    @classmethod
    def of(cls, settings: CoordinatorSettings) -> Preparation:
        """Read the files that the settings name, and check that the addresses are free, unless this is a standby.

        Raises:
            InvalidInputError: an address is in use, or a setting or the reference cannot be used.
        """
        basis, location = PlanningBasis.of(settings), database_url(settings.store.location)
        keep = None if settings.store.keep_days is None else timedelta(days=settings.store.keep_days)
        authority = authority_of(settings)
        credentials = None if authority is None else ServerCredentials(authority)
        identities, calls = Identities(), LiveCalls()
        listeners = listeners_of(settings, credentials, identities.is_revoked, calls)
        http_address = split_address(settings.server.http_address)
        _allow_connections()
        reference = open_reference(settings.profiling.reference)
        prepared = cls(
            settings, basis, location, keep, credentials, identities, calls, listeners, http_address, reference
        )
        if not settings.store.standby:
            require_free(prepared.addresses)
        return prepared

    @property
    def addresses(self) -> list[str]:
        """All addresses to listen on."""
        return [*(listener.address for listener in self.listeners), self.settings.server.http_address]

    def expiries(self, now: datetime) -> dict[str, datetime]:
        """When the first valid certificate of each role expires; of an owner's certificates, the newest counts."""
        if self.credentials is None:
            return {}
        server = self.credentials.folder.server.not_after
        return {"coordinator": server, **self.identities.expiries(now)}

    @property
    def access(self) -> Access | None:
        """Which role may call which RPC at the main address; None without an authority."""
        return self.listeners[0].access


def _allow_connections() -> None:
    """Raise the limit on open files to the system's maximum; most shells start with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# --- Composition ------------------------------------------------------------------------------------------------------
# Builds from the settings what a coordinator plans with: the site, the client-selection policy and the selection.


@dataclass(frozen=True)
class PlanningBasis:
    """The settings that determine plans; they are read before the store is opened.

    Attributes:
        site: the supplies, their budgets and the devices behind them.
        policy: selects devices.
        selection: the devices that it may select from.
        weights: the weights of runs that wait for each other, by workload.
    """

    site: SiteFile
    policy: Policy
    selection: Selection
    weights: Mapping[str, float]

    @classmethod
    def of(cls, settings: CoordinatorSettings) -> PlanningBasis:
        """Read the settings.

        Raises:
            InvalidInputError: a setting cannot be used.
        """
        policy = policy_of(settings.policy)
        selection = selection_of(settings.selection, policy)
        return cls(site_of(settings.site), policy, selection, weights_of(settings.rounds))

    def fleet(self, kept: StoredState, settings: CoordinatorSettings, now_s: Callable[[], float]) -> Fleet:
        """Build the fleet from its stored state.

        Args:
            kept: the stored state.
            settings: the settings of grants, claims and sessions.
            now_s: a clock, in seconds.
        """
        return Fleet(
            # No supply has any watts until the budget watch has read them.
            Allowance(self.site.supplies, dict.fromkeys(self.site.supplies.names, 0.0)),
            self.policy,
            kept.devices,
            kept.nodes,
            kept.runs,
            kept.rounds,
            kept.archived,
            self.site,
            self.selection,
            kept.overrides,
            grants=settings.grants,
            now_s=now_s,
            claims=settings.claims,
            unplanned=kept.unplanned,
            stored_grants=kept.grants,
            weights=self.weights,
            max_workloads=settings.sessions.max_workloads,
            pairing_problems=kept.pairing_problems,
            energy=kept.energy,
            now=utc_now,
            batteries=[each.placed for each in self.site.batteries],
            energy_budgets=kept.energy_budgets,
            counted=kept.counted,
            charges=kept.charges,
        )


def site_of(settings: SiteSettings) -> SiteFile:
    """The site's supplies and budgets.

    Raises:
        InvalidInputError: neither or both of a budget and a site file are given, or the one given cannot be used.
    """
    if settings.file is not None and settings.budget_w is None:
        return read_site_file(settings.file)
    if settings.budget_w is not None and settings.file is None:
        return SiteFile.of_site(settings.budget_w)
    raise InvalidInputError("pass exactly one of --site-budget-w, --site-file")


def policy_of(settings: PolicySettings) -> Policy:
    """The client-selection policy.

    Raises:
        InvalidInputError: a parameter is missing, unknown or invalid for the policy.
    """
    return policy_named(
        settings.name,
        count=settings.clients,
        seed=settings.seed,
        deadline_s=settings.deadline_s,
        utility=settings.utility,
        tiers=settings.tiers,
        floor=settings.floor,
        half_devices=settings.half_devices,
        overhead_s=settings.overhead_s,
    )


def selection_of(settings: SelectionSettings, policy: Policy) -> Selection:
    """The devices that the policy may select from, and the share of additional devices.

    Raises:
        InvalidInputError: a selector cannot be used, or devices cannot be added because the policy takes no number.
    """
    if settings.over_selection and not policy.has_count:
        raise InvalidInputError(
            f"policy {policy.name!r} determines the number of devices itself, so over_selection in [selection] cannot"
            " add to it: leave it out, or pass --clients with a policy that takes it"
        )
    return Selection(settings.include, settings.exclude, settings.over_selection)


def weights_of(settings: RoundSettings) -> dict[str, float]:
    """The weights of runs that wait for each other, by workload.

    Raises:
        InvalidInputError: an entry is not WORKLOAD=WEIGHT, or its weight is not above 0.
    """
    weights: dict[str, float] = {}
    for text in settings.weights:
        name, equals, weight = text.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            equals = ""
        if not equals or not 0 < weights[name] < math.inf:
            raise InvalidInputError(f"invalid weight {text!r}: write WORKLOAD=WEIGHT, with a weight above 0")
        require_workload_name(name)
    return weights


# --- Fleet in service -------------------------------------------------------------------------------------------------
# The parts of a serving fleet: its state and store, the budgets in force, and the orders to devices.


@dataclass(frozen=True)
class FleetInService:
    """A fleet whose store this coordinator owns.

    Attributes:
        fleet: the state.
        writer: writes to the store.
        repository: the state together with the store.
        references: the published predictors.
        metadata: the signed metadata of references; None if they are not signed.
        leases: the leases of sessions.
        orders: sends orders to devices.
        trimmer: changes rounds in flight when budgets fall.
        budgets: the budgets in force.
        figures: measurements of the coordinator itself.
        state_times: since when devices are in their states.
        events: the log of what happens to the fleet.
    """

    fleet: Fleet
    writer: Writer
    repository: FleetRepository
    references: ServedReferences
    metadata: ReferenceMetadata | None
    leases: Leases
    orders: Orders
    trimmer: Trimmer
    budgets: BudgetWatch
    figures: ServiceFigures
    state_times: StateTimes
    events: EventLog

    @classmethod
    async def opened(cls, preparation: Preparation, held: AsyncExitStack) -> FleetInService:
        """Open the store, and continue with its state.

        Args:
            preparation: what was read before; its identities are restored.
            held: closes everything that is opened here.

        Raises:
            InvalidInputError: the store or the signed metadata cannot be used, or an address stays in use.
            StoreInUseError: another coordinator uses the store, and this one is not a standby.
            StoreUnavailableError: the store's database does not answer.
        """
        settings = preparation.settings
        store = await open_store(preparation.location, settings.store)
        held.callback(store.close)
        if settings.store.standby:
            # The previous coordinator may still listen there until it notices that it has lost the store.
            await await_free(preparation.addresses, OWNER_CHECK_S + settings.server.stop_limit_s)
        if preparation.credentials is not None:
            # While this coordinator was a standby, the other may have renewed or replaced the folder's contents.
            preparation.credentials.read_again()
        # Only the store's owner writes to the folder; a standby does not.
        metadata = _metadata_in(settings.profiling.reference_metadata)
        kept = store.load()
        preparation.identities.restore(kept.invites, kept.certificates)
        references = ServedReferences(preparation.reference.artefact, kept.references, kept.pinned)
        fleet = preparation.basis.fleet(kept, settings, time.monotonic)
        # Before any device can receive a longer lifetime than that of an earlier process.
        store.save(GrantLifetime(fleet.rounds.grants.unstored.lifetime_s))
        expected = [record.device_id for record in kept.devices if record.state is not DeviceState.OFFLINE]
        leases = Leases(time.monotonic(), expected, settings.sessions, settings.grants.lifetime_s / 3)
        figures = ServiceFigures()
        writer = Writer(store, figures=figures)
        held.push_async_callback(writer.close)
        shared = SharedModes(settings.sessions.share_modes)
        identities = preparation.identities
        orders = Orders(
            fleet,
            settings.sessions.max_workloads,
            shared,
            # Devices serve metrics to these roles.
            revoked=lambda: identities.revoked(VIEWING, utc_now()),
        )
        held.push_async_callback(orders.close)
        repository = FleetRepository(fleet, writer)
        state_times = StateTimes(fleet.agents.devices, settings.profiling.modes)
        events = EventLog(fleet, repository.save_soon, state_times.throttled_unix_s, kept.devices)
        trimmer = Trimmer(repository, orders, events=events)
        budgets = BudgetWatch(
            preparation.basis.site.budgets,
            trimmer.budget_changed,
            overrides=kept.budget_overrides,
            settings=settings.site,
            since_boot_s=BootClock.of_system().since_boot_s,
            is_clock_doubtful=kept.is_clock_doubtful,
            on_event=events.budget_changed,
        )
        held.push_async_callback(budgets.stop)
        await budgets.start()
        batteries = BatteryWatch(preparation.basis.site.batteries, fleet, settings=settings.site)
        held.push_async_callback(batteries.stop)
        await batteries.start()
        return cls(
            fleet,
            writer,
            repository,
            references,
            metadata,
            leases,
            orders,
            trimmer,
            budgets,
            figures,
            state_times,
            events,
        )


def _metadata_in(folder: Path | None) -> ReferenceMetadata | None:
    """The signed metadata of references, if there is a folder for it."""
    if folder is None:
        return None
    # Imported here, because most coordinators do not need it.
    from coordinator.references.metadata import ReferenceMetadata

    return ReferenceMetadata(folder)


# --- RPC services -----------------------------------------------------------------------------------------------------
# Assembles the servicers of a coordinator, which answer its RPCs.

SERVICES = [  # with their methods, so that a test finds RPCs that are missing in the table of roles
    service
    for module in (
        session_pb2,
        planning_pb2,
        view_pb2,
        operator_pb2,
        identity_pb2,
        enrolment_pb2,
        superlink_pb2,
        health_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
]


class RpcServices:
    """The servicers of one coordinator, which all its addresses share.

    Attributes:
        sessions: the agents' sessions.
        viewer: answers queries about the fleet.
        operator: answers queries and changes what is planned and allowed.
        identity: manages invites and certificates, and lists what operators changed.
        healthy: reports whether the coordinator serves.
    """

    def __init__(
        self, preparation: Preparation, serving: FleetInService, addresses: Callable[[], PublicAddresses]
    ) -> None:
        """Build the servicers.

        Args:
            preparation: the settings, and the files that they name.
            serving: the fleet.
            addresses: returns the addresses that enrolled machines receive; ports are known once the server has
                started.
        """
        settings, identities, repository = preparation.settings, preparation.identities, serving.repository
        leases, orders, references = serving.leases, serving.orders, serving.references
        self.healthy = HealthServicer()
        events = serving.events
        self.sessions = SessionServicer(
            repository,
            leases,
            orders,
            references,
            settings.profiling.modes,
            serving.state_times,
            settings=settings.sessions,
            peers=settings.peers,
            metadata=serving.metadata,
            has_certificate=lambda device_id: identities.has_certificate(device_id, utc_now()),
            events=events,
            refuses_unplanned=preparation.basis.site.refuses_unplanned,
        )
        planning = RoundPlanning(
            repository,
            leases,
            orders,
            settings=settings.rounds,
            figures=serving.figures,
            events=events,
            profile_modes=settings.profiling.modes,
        )
        self._planner = PlanningServicer(repository, planning, orders, settings=settings.rounds, events=events)
        self.viewer = ViewServicer(repository, serving.state_times, events)
        reconnect_all = self.sessions.reconnect_all
        self.operator = OperatorServicer(
            repository,
            planning,
            serving.budgets,
            references,
            reconnect_all,
            leases,
            orders,
            serving.metadata,
            revoke=lambda device_ids: identities.forget(device_ids, utc_now()),
            events=events,
        )
        issuing = self._enrolment = self._superlink = None
        if preparation.credentials is not None:
            repository.save_soon(*adopted(preparation.credentials.folder, identities, utc_now()))
            lifetime = timedelta(days=settings.identity.certificate_days)
            issuing = Issuing(identities, preparation.credentials, addresses, lifetime)
            self._enrolment = EnrolmentServicer(repository, issuing, certificate_of, preparation.calls.end_invalid)
            self._superlink = SuperLinkServicer(issuing, settings.superlink.hosts)
        self.identity = IdentityServicer(
            repository, issuing, certificate_of, preparation.calls.end_invalid, orders.announce_revocations
        )

    def add_to(self, server: Any) -> None:
        """Add the services to a gRPC server."""
        session_pb2_grpc.add_SessionServiceServicer_to_server(self.sessions, server)
        planning_pb2_grpc.add_PlanningServiceServicer_to_server(self._planner, server)
        view_pb2_grpc.add_ViewServiceServicer_to_server(self.viewer, server)
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(self.operator, server)
        identity_pb2_grpc.add_IdentityServiceServicer_to_server(self.identity, server)
        if self._enrolment is not None:
            enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(self._enrolment, server)
        if self._superlink is not None:
            superlink_pb2_grpc.add_SuperLinkServiceServicer_to_server(self._superlink, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.healthy, server)
        absent = ("wattfleet.v1.EnrolmentService", "wattfleet.v1.SuperLinkService") if self._enrolment is None else ()
        names = [service.full_name for service in SERVICES if service.full_name not in absent]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)


# --- Stopping ---------------------------------------------------------------------------------------------------------
# Stops the coordinator's process on a signal, at the latest after a time limit.

_EXIT_FAILED = 1
_LOGS_FOR_S = 0.5
"""The most seconds to wait for the log, whose reader may have stopped reading."""


def stop_on_signals(stop: asyncio.Event, limit_s: float) -> None:
    """Set `stop` on a signal, and terminate the process if it has not ended `limit_s` later.

    Threads cannot be cancelled: without the limit, a thread that hangs in a query of the store or in a plan would keep
    the process alive. As with a power cut, terminating it loses nothing that was acknowledged.

    Args:
        stop: stops the coordinator when set; an event of the running loop.
        limit_s: seconds from the first signal to the end of the process.
    """
    loop = asyncio.get_running_loop()
    limit = threading.Timer(limit_s, _end, (limit_s,))
    limit.daemon = True

    # Not `loop.add_signal_handler`, because the limit must hold even if the loop is blocked.
    def handle(number: int, frame: FrameType | None) -> None:
        if limit.ident is None:
            limit.start()
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    for number in handled_signals():
        signal.signal(number, handle)


def _end(limit_s: float) -> None:
    logging_it = threading.Thread(target=_log_end, args=(limit_s,), name="end", daemon=True)
    logging_it.start()
    logging_it.join(_LOGS_FOR_S)
    os._exit(_EXIT_FAILED)


def _log_end(limit_s: float) -> None:
    busy = sorted({thread.name for thread in threading.enumerate() if not thread.daemon})
    _log.error(
        "the coordinator did not stop within %g s and is terminated now (threads: %s); acknowledged data is on disk",
        limit_s,
        ", ".join(busy),
    )
    sys.stdout.flush()
    sys.stderr.flush()


# --- Server -----------------------------------------------------------------------------------------------------------
# The coordinator process from start to stop: store, gRPC server, metrics and background tasks.


@dataclass(frozen=True)
class BoundAddresses:
    """The addresses that a coordinator listens on, with their actual ports."""

    address: str
    http_address: str
    enrolment_address: str | None = None
    operator_address: str | None = None
    plaintext_address: str | None = None

    def announce(self, file: Path) -> None:
        """Write the addresses to a file as JSON, replacing it atomically."""
        bound = {name: address for name, address in dataclasses.asdict(self).items() if address is not None}
        replace_file(file, json.dumps(bound).encode())


async def serve(
    settings: CoordinatorSettings, on_ready: Callable[[BoundAddresses], None], stop: asyncio.Event | None = None
) -> None:
    """Serve until `stop` is set, or until a signal if it is None.

    Args:
        settings: all settings.
        on_ready: called with the bound addresses once everything answers.
        stop: stops the coordinator when set.

    Raises:
        InvalidInputError: an address is in use, or a setting, the store or the reference cannot be used.
        StoreInUseError: another coordinator uses the store, and this one is not a standby.
        StoreUnavailableError: the store's database does not answer.
        NotOwnerError: another coordinator has taken the store over.
    """
    preparation = Preparation.of(settings)
    async with AsyncExitStack() as held:
        serving = await FleetInService.opened(preparation, held)
        bound: dict[str, str] = {}
        services = RpcServices(preparation, serving, lambda: public_addresses(settings, bound))
        audit = AuditLog(serving.repository, certificate_of)
        quotas = PeerQuotas(settings.peers)
        idle_s = settings.server.idle_connection_s
        http_address = await _serve_http(preparation, serving, services, held)
        latencies = RpcLatencies(serving.figures)
        servers = Listeners(preparation.listeners, quotas, audit, latencies, services.add_to, idle_s)
        held.push_async_callback(services.operator.close)
        # After the sessions have ended, and before the writer is closed, so that their ends are still stored.
        held.push_async_callback(servers.stop, settings.server.stop_grace_s)
        held.push_async_callback(services.sessions.close)
        bound.update(await servers.start())
        serving.events.started(version_of("wattfleet") or "unknown")
        await services.healthy.set("", health_pb2.HealthCheckResponse.SERVING)
        if stop is None:
            stop = asyncio.Event()
            stop_on_signals(stop, settings.server.stop_limit_s)
        _note_address(preparation, reachable_here(bound.get("operators", bound["main"])))
        enrolment, operators, plaintext = (bound.get(name) for name in ("enrolment", "operators", "plaintext"))
        on_ready(BoundAddresses(bound["main"], http_address, enrolment, operators, plaintext))
        await run_until_first(_until_stopped(preparation, serving, services, stop))
        await services.healthy.enter_graceful_shutdown()
        if serving.writer.ownership_lost.is_set():
            raise NotOwnerError("another coordinator has taken the store over; this one stops")


def _note_address(preparation: Preparation, address: str) -> None:
    """Note where operators are served, so that their commands on this machine find it."""
    location, credentials = preparation.location, preparation.credentials
    database = location if isinstance(location, Path) else Path(location.database or "")
    try:
        if isinstance(location, Path) or location.drivername == "sqlite":
            note_address(database, address)
        if credentials is not None:
            note_coordinator(folder_of(credentials.folder.folder), address)
    except (OSError, InvalidInputError) as error:
        _log.warning("commands on this machine need --coordinator %s, which could not be noted: %s", address, error)


async def _serve_http(
    preparation: Preparation, serving: FleetInService, services: RpcServices, held: AsyncExitStack
) -> str:
    """Serve the web page and `/metrics` until `held` is left; returns their host:port.

    If other machines can reach the address, only peers with a certificate may read.
    """
    host, port = preparation.http_address
    settings, credentials, access = preparation.settings.server, preparation.credentials, preparation.access
    http_access = None
    if credentials is not None and access is not None and not is_loopback(host):
        http_access = HttpAccess(lambda: credentials.folder.server_tls, access.certificates)
    registry = coordinator_registry(
        serving.fleet,
        settings.metrics_devices,
        len(exposed_plaintext(preparation.settings, credentials is not None)),
        serving.figures,
        lambda: preparation.expiries(utc_now()),
    )
    queries = Queries(services.viewer, services.operator, services.identity, asyncio.get_running_loop())
    limits = HttpLimits(settings.max_http_connections, settings.http_timeout_s)
    served = http_served(queries, registry, host, port, limits, http_access, has_authority=credentials is not None)
    return f"{host}:{await held.enter_async_context(served)}"


def _until_stopped(
    preparation: Preparation, serving: FleetInService, services: RpcServices, stop: asyncio.Event
) -> dict[str, Coroutine[Any, Any, object]]:
    """The background tasks by name; the coordinator stops as soon as the first of them ends."""
    settings = preparation.settings
    works: dict[str, Coroutine[Any, Any, object]] = {
        "stop": stop.wait(),
        "lost ownership": serving.writer.ownership_lost.wait(),
        "end silent sessions": services.sessions.sweep(),
        "trim rounds in flight": serving.trimmer.watch(),
        "evict stored rounds": serving.repository.keep_evicting(),
        "watch the store's owner": serving.writer.watch_owner(),
        "drop expired identities": drop_expired_hourly(serving.repository, preparation.identities),
    }
    if serving.metadata is not None:
        works["renew signed metadata"] = serving.metadata.keep_renewing()
    if preparation.credentials is not None:
        works["renew the server's certificate"] = preparation.credentials.keep_renewed()
        works["end calls of invalid certificates"] = preparation.calls.keep_ending(settings.sessions.check_s)
    if preparation.keep is not None:
        works["delete old runs"] = delete_old_runs_daily(serving.repository, preparation.keep)
    return works
