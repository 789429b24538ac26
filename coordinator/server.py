"""The coordinator process from start to stop: store, gRPC server, metrics and background tasks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2

from coordinator.fleet_in_service import FleetInService
from coordinator.identity.callers import certificate_of
from coordinator.identity.first_operator import folder_of
from coordinator.listeners import Listeners, exposed_plaintext, page_address, public_addresses
from coordinator.lock_file import note_address
from coordinator.metrics.server import metrics_served
from coordinator.preparation import Preparation
from coordinator.repository.retention import delete_old_runs_daily, drop_expired_hourly
from coordinator.rpc_services import RpcServices
from coordinator.services.audit import AuditLog
from coordinator.services.peer_quotas import PeerQuotas
from coordinator.services.rpc_latencies import RpcLatencies
from coordinator.settings import CoordinatorSettings
from coordinator.stopping import stop_on_signals
from coordinator.store.errors import NotOwnerError
from wattfleet.errors import InvalidInputError
from wattfleet_identity.channels import is_loopback
from wattfleet_identity.http_access import HttpAccess
from wattfleet_identity.http_server import HttpLimits
from wattfleet_identity.identity_folder import note_coordinator
from wattfleet_io.addresses import reachable_here, split_address
from wattfleet_io.atomic_files import replace_file
from wattfleet_io.clock import utc_now
from wattfleet_io.tasks import run_until_first
from wattfleet_io.version import installed_versions

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BoundAddresses:
    """The addresses that a coordinator listens on, with their actual ports."""

    address: str
    metrics_address: str
    enrolment_address: str | None = None
    operator_address: str | None = None
    plaintext_address: str | None = None
    page_address: str | None = None

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
        metrics_address = await _serve_metrics(preparation, serving, held)
        bound: dict[str, str] = {}
        services = RpcServices(preparation, serving, lambda: public_addresses(settings, bound))
        audit = AuditLog(serving.repository, certificate_of)
        quotas = PeerQuotas(settings.peers)
        idle_s = settings.server.idle_connection_s
        page = await _serve_page(preparation, services, held)
        latencies = RpcLatencies(serving.figures)
        servers = Listeners(preparation.listeners, quotas, audit, latencies, services.add_to, idle_s)
        held.push_async_callback(services.operator.close)
        # After the sessions have ended, and before the writer is closed, so that their ends are still stored.
        held.push_async_callback(servers.stop, settings.server.stop_grace_s)
        held.push_async_callback(services.sessions.close)
        bound.update(await servers.start())
        serving.events.started(installed_versions()["wattfleet"] or "unknown")
        await services.healthy.set("", health_pb2.HealthCheckResponse.SERVING)
        if stop is None:
            stop = asyncio.Event()
            stop_on_signals(stop, settings.server.stop_limit_s)
        _note_address(preparation, reachable_here(bound.get("operators", bound["main"])))
        enrolment, operators, plaintext = (bound.get(name) for name in ("enrolment", "operators", "plaintext"))
        on_ready(BoundAddresses(bound["main"], metrics_address, enrolment, operators, plaintext, page))
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


async def _serve_metrics(preparation: Preparation, serving: FleetInService, held: AsyncExitStack) -> str:
    """Serve `/metrics` until `held` is left; returns its host:port."""
    host, port = preparation.metrics_address
    settings = preparation.settings
    exposed = exposed_plaintext(settings, preparation.credentials is not None)
    served = metrics_served(
        serving.fleet,
        host,
        port,
        settings.server,
        _http_access(preparation, host),
        len(exposed),
        serving.figures,
        lambda: preparation.expiries(utc_now()),
    )
    return f"{host}:{await held.enter_async_context(served)}"


def _http_access(preparation: Preparation, host: str) -> HttpAccess | None:
    """The access control of an HTTP address: only peers with a certificate if other machines can reach it."""
    credentials, access = preparation.credentials, preparation.access
    if credentials is None or access is None or is_loopback(host):
        return None
    return HttpAccess(lambda: credentials.folder.server_tls, access.certificates)


async def _serve_page(preparation: Preparation, services: RpcServices, held: AsyncExitStack) -> str | None:
    """Serve the web page until `held` is left; returns its host:port, or None if there is no page.

    Raises:
        InvalidInputError: the address that the settings name is in use or does not exist.
    """
    settings = preparation.settings
    address = page_address(settings)
    if address is None:
        return None
    # Imported here, because a coordinator without a page does not need it.
    from coordinator.page.queries import Queries
    from coordinator.page.server import page_served

    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    queries = Queries(services.viewer, services.operator, services.identity, loop)
    limits = HttpLimits(settings.server.max_http_connections, settings.server.http_timeout_s)
    access, has_authority = _http_access(preparation, host), preparation.credentials is not None
    served = page_served(queries, host, port, limits, access, has_authority)
    try:
        return f"{host}:{await held.enter_async_context(served)}"
    except InvalidInputError as error:
        if settings.server.page_address is not None:
            raise
        _log.warning("%s. This coordinator serves without a page", error)
        return None


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
