"""The coordinator process from start to stop: store, gRPC server, metrics and background tasks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import resource
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from coordinator.budgets.budget_watch import BudgetWatch
from coordinator.clocks import BootClock
from coordinator.composition import policy_of, selection_of, site_of, weights_of
from coordinator.identity.callers import certificate_of
from coordinator.identity.first_operator import adopted
from coordinator.identity.http_access import HttpAccess
from coordinator.identity.server_credentials import ServerCredentials
from coordinator.listeners import (
    Listeners,
    authority_of,
    await_free,
    listeners_of,
    public_addresses,
    require_free,
)
from coordinator.metrics_server import serve_metrics
from coordinator.references import ReferenceShelf, open_reference
from coordinator.repository.repository import FleetRepository
from coordinator.repository.retention import delete_old_runs_daily, drop_expired_hourly
from coordinator.repository.standby import open_store
from coordinator.repository.writer import Writer
from coordinator.services.audit import AuditLog
from coordinator.services.enrolment import EnrolmentServicer
from coordinator.services.identities import IdentityServicer
from coordinator.services.issuing import Issuing
from coordinator.services.operations import OperatorServicer
from coordinator.services.orders import Orders
from coordinator.services.peer_quotas import PeerQuotas
from coordinator.services.planning import PlanningServicer
from coordinator.services.round_planning import RoundPlanning
from coordinator.services.sessions import SessionServicer
from coordinator.services.trimmer import Trimmer
from coordinator.services.views import ViewServicer
from coordinator.settings import CoordinatorSettings
from coordinator.state.fleet import Fleet
from coordinator.state.identities import Identities
from coordinator.state.leases import Leases
from coordinator.state.shared_modes import SharedModes
from coordinator.state.stored_grants import GrantLifetime
from coordinator.stopping import stop_on_signals
from coordinator.store.database import database_url
from coordinator.store.errors import NotOwnerError
from wattfleet.planning import Allowance
from wattfleet_identity.channels import is_loopback
from wattfleet_io.addresses import split_address
from wattfleet_io.atomic_files import replace_file
from wattfleet_io.clock import utc_now
from wattfleet_io.tasks import run_until_first
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
    view_pb2,
    view_pb2_grpc,
)

if TYPE_CHECKING:
    from coordinator.reference_metadata import ReferenceMetadata

SERVICES = [  # with their methods, by which a test finds RPCs without a row in the table of roles
    service
    for module in (session_pb2, planning_pb2, view_pb2, operator_pb2, identity_pb2, enrolment_pb2, health_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]


@dataclass(frozen=True)
class BoundAddresses:
    """The addresses that a coordinator listens on, with the ports it took."""

    address: str
    metrics_address: str
    enrolment_address: str | None = None
    operator_address: str | None = None
    plaintext_address: str | None = None

    def announce(self, file: Path) -> None:
        """Write them to a file as JSON, replacing it atomically."""
        bound = {name: address for name, address in dataclasses.asdict(self).items() if address is not None}
        replace_file(file, json.dumps(bound).encode())


async def serve(
    settings: CoordinatorSettings, on_ready: Callable[[BoundAddresses], None], stop: asyncio.Event | None = None
) -> None:
    """Serve until `stop` is set, or until SIGINT or SIGTERM if it is None.

    Args:
        settings: how to serve.
        on_ready: called with the bound addresses once everything answers.
        stop: ends the coordinator.

    Raises:
        InvalidInputError: an address is in use, or a setting, the store or the reference cannot be used.
        StoreInUseError: another coordinator serves from the store, and this one is no standby.
        StoreUnavailableError: the store's database does not answer.
        NotOwnerError: another coordinator has taken the store over.
    """
    site = site_of(settings.site)
    policy = policy_of(settings.policy)
    selection = selection_of(settings.selection, policy)
    weights = weights_of(settings.rounds)
    location = database_url(settings.store.location)
    keep = None if settings.store.keep_days is None else timedelta(days=settings.store.keep_days)
    authority = authority_of(settings)
    credentials = None if authority is None else ServerCredentials(authority)
    identities = Identities()
    listeners = listeners_of(settings, credentials, identities.is_revoked)
    access = listeners[0].access
    metrics_host, metrics_port = split_address(settings.server.metrics_address)
    _allow_connections()
    reference = open_reference(settings.profiling.reference)
    addresses = [*(listener.address for listener in listeners), settings.server.metrics_address]
    if not settings.store.standby:
        # Before the store, so that a start that cannot succeed leaves no file behind.
        require_free(addresses)
    async with AsyncExitStack() as held:
        store = await open_store(location, settings.store)
        held.callback(store.close)
        if settings.store.standby:
            # The one before may have listened there, and may need a moment to notice that it has lost the store.
            await await_free(addresses, settings.store.owner_check_s + settings.server.stop_limit_s)
        if keep is not None:
            store.delete_old_runs(keep)
        # As the store's owner: a standby leaves the folder alone.
        metadata = _metadata_in(settings.profiling.reference_metadata)
        kept = store.load()
        identities.restore(kept.invites, kept.certificates)
        references = ReferenceShelf(reference.artefact, kept.references, kept.pinned)
        fleet = Fleet(
            # No supply has any watts until the budget watch has read them.
            Allowance(site.supplies, dict.fromkeys(site.supplies.names, 0.0)),
            policy,
            kept.devices,
            kept.nodes,
            kept.runs,
            kept.rounds,
            kept.archived,
            site,
            selection,
            kept.overrides,
            grants=settings.grants,
            now_s=time.monotonic,
            claims=settings.claims,
            unplanned=kept.unplanned,
            stored_grants=kept.grants,
            weights=weights,
            max_workloads=settings.sessions.max_workloads,
        )
        # Before a device is told of a longer lifetime than that of an earlier process.
        store.save(GrantLifetime(fleet.rounds.grants.unstored.lifetime_s))
        expected = [record.device_id for record in kept.devices if record.state is not DeviceState.OFFLINE]
        leases = Leases(time.monotonic(), expected, settings.sessions, settings.grants.lifetime_s / 3)
        writer = Writer(store, settings=settings.store)
        held.push_async_callback(writer.close)
        orders = Orders(fleet, settings.sessions.max_workloads, SharedModes(settings.sessions.share_modes))
        held.push_async_callback(orders.close)
        repository = FleetRepository(fleet, writer, settings.store)
        trimmer = Trimmer(repository, orders, settings=settings.site)
        budgets = BudgetWatch(
            site.budgets,
            trimmer.budget_changed,
            overrides=kept.budget_overrides,
            settings=settings.site,
            since_boot_s=BootClock.of_system().since_boot_s,
            is_clock_doubtful=kept.is_clock_doubtful,
        )
        held.push_async_callback(budgets.stop)
        await budgets.start()
        # Other machines reach these metrics, so they are for peers with a certificate.
        guard = None
        if credentials is not None and access is not None and not is_loopback(metrics_host):
            guard = HttpAccess(credentials, access)
        metrics = serve_metrics(fleet, metrics_host, metrics_port, settings.server, guard)
        held.callback(metrics.server_close)
        held.callback(metrics.shutdown)
        sessions = SessionServicer(
            repository,
            leases,
            orders,
            references,
            settings.profiling.modes,
            settings=settings.sessions,
            peers=settings.peers,
            metadata=metadata,
            access=access,
            has_certificate=lambda device_id: identities.has_certificate(device_id, utc_now()),
        )
        planning = RoundPlanning(repository, leases, orders, settings=settings.rounds)
        planner = PlanningServicer(repository, planning, orders, settings=settings.rounds)
        operator = OperatorServicer(
            repository, planning, budgets, references, sessions.reconnect_all, leases, orders, settings.site, metadata
        )
        bound: dict[str, str] = {}
        issuing = enrolment = None
        if credentials is not None:
            repository.save_soon(*adopted(credentials.folder, identities, utc_now()))
            lifetime = timedelta(days=settings.identity.certificate_days)
            issuing = Issuing(identities, credentials, lambda: public_addresses(settings, bound), lifetime)
            enrolment = EnrolmentServicer(repository, issuing, certificate_of, sessions.end_invalid)
        identity = IdentityServicer(repository, issuing, certificate_of, sessions.end_invalid)
        healthy = HealthServicer()
        absent = ("wattfleet.v1.EnrolmentService",) if enrolment is None else ()
        names = [service.full_name for service in SERVICES if service.full_name not in absent]

        def add_services(server: Any) -> None:
            session_pb2_grpc.add_SessionServiceServicer_to_server(sessions, server)
            planning_pb2_grpc.add_PlanningServiceServicer_to_server(planner, server)
            view_pb2_grpc.add_ViewServiceServicer_to_server(ViewServicer(repository), server)
            operator_pb2_grpc.add_OperatorServiceServicer_to_server(operator, server)
            identity_pb2_grpc.add_IdentityServiceServicer_to_server(identity, server)
            if enrolment is not None:
                enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(enrolment, server)
            health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
            reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)

        audit = AuditLog(repository, certificate_of)
        idle_s = settings.server.idle_connection_s
        servers = Listeners(listeners, PeerQuotas(settings.peers), audit, add_services, idle_s)
        # Before the writer is closed, so that the end of a session is still stored; after the sessions' end.
        held.push_async_callback(servers.stop, settings.server.stop_grace_s)
        held.push_async_callback(sessions.close)
        bound.update(await servers.start())
        await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
        if stop is None:
            stop = asyncio.Event()
            stop_on_signals(stop, settings.server.stop_limit_s)
        on_ready(
            BoundAddresses(
                bound["main"],
                f"{metrics_host}:{metrics.server_port}",
                bound.get("enrolment"),
                bound.get("operators"),
                bound.get("plaintext"),
            )
        )
        background: dict[str, Coroutine[Any, Any, object]] = {
            "stop": stop.wait(),
            "lost ownership": writer.ownership_lost.wait(),
            "end silent sessions": sessions.sweep(),
            "trim rounds in flight": trimmer.watch(),
            "evict stored rounds": repository.keep_evicting(),
            "watch the store's owner": writer.watch_owner(),
            "drop expired identities": drop_expired_hourly(repository, identities),
        }
        if metadata is not None:
            background["renew signed metadata"] = metadata.keep_renewing()
        if credentials is not None:
            background["renew the server's certificate"] = credentials.keep_renewed()
        if keep is not None:
            background["delete old runs"] = delete_old_runs_daily(repository, keep)
        await run_until_first(background)
        await healthy.enter_graceful_shutdown()
        if writer.ownership_lost.is_set():
            raise NotOwnerError("another coordinator has taken the store over; this one stops")


def _metadata_in(folder: Path | None) -> ReferenceMetadata | None:
    """The signed metadata of references, if there is a folder for it.

    Raises:
        InvalidInputError: the folder cannot be used, or a file in it is damaged.
    """
    if folder is None:
        return None
    # Imported here, as most coordinators do without.
    from coordinator.reference_metadata import ReferenceMetadata

    return ReferenceMetadata(folder)


def _allow_connections() -> None:
    """Raise the limit on open files to the most that the system allows; most shells start with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
