"""The coordinator process: its gRPC server, its metrics and its store, from start to a clean stop."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from sqlalchemy import URL

from coordinator.budgets.budget_watch import BudgetWatch
from coordinator.budgets.site_file import SiteFile
from coordinator.budgets.trimmer import Trimmer
from coordinator.errors import STATUS
from coordinator.metrics import serve_metrics
from coordinator.references import ReferenceShelf, open_reference
from coordinator.services.message_sizes import SizeInterceptor
from coordinator.services.operations import OperatorServicer
from coordinator.services.planning import PlanningServicer
from coordinator.services.sessions import SessionServicer
from coordinator.services.views import ViewServicer
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Leases
from coordinator.state.orders import Orders
from coordinator.state.records import DeviceState
from coordinator.store.archive import archive
from coordinator.store.errors import NotOwnerError
from coordinator.store.retention import forget_daily
from coordinator.store.standby import open_store
from coordinator.store.writer import Writer
from wattfleet.errors import InvalidInputError
from wattfleet.planning import Allowance, Selection
from wattfleet.planning.policies import Policy
from wattfleet_io.addresses import split_address
from wattfleet_proto.error_boundary import ErrorInterceptor
from wattfleet_proto.message_sizes import MAX_MESSAGE_BYTES
from wattfleet_proto.v1 import (
    operator_pb2,
    operator_pb2_grpc,
    planning_pb2,
    planning_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    view_pb2,
    view_pb2_grpc,
)

_STOP_GRACE_S = 2.0
_SERVICES = [
    service.full_name
    for module in (session_pb2, planning_pb2, view_pb2, operator_pb2, health_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
OPTIONS = [
    # Without it a second coordinator would share the port instead of failing.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # What it measures serves downloads over long distances, and costs a fifth of what a lease takes.
    ("grpc.http2.bdp_probe", 0),
    # Ten thousand connections keep what nobody asks for: gRPC's own statistics, tables of headers seen before, and what
    # compresses answers.
    ("grpc.enable_channelz", 0),
    ("grpc.http2.hpack_table_size.decoder", 0),
    ("grpc.http2.hpack_table_size.encoder", 0),
    ("grpc.per_message_compression", 0),
    # A large fleet that comes back has thousands of sessions begin in the same seconds. By itself gRPC cancels those
    # beyond 1,000 that wait, or that wait for 30 s, and each is then tried again.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    ("grpc.server_max_unrequested_time_in_server", 120),
]


@dataclass(frozen=True)
class CoordinatorConfig:
    """How a coordinator runs.

    Attributes:
        address: host:port of the gRPC service; port 0 takes a free one.
        metrics_address: host:port of `/metrics`; port 0 takes a free one.
        store: the database: path of an SQLite file, or a URL (see `coordinator.store.database.database_url`).
        reference: name or directory of the reference predictor.
        site: supplies, their budgets, and which devices hang where.
        policy: who is chosen for a round.
        selection: the operator's own say in who is.
        profile_modes: modes that each agent measures at most.
        stands_by: wait while another coordinator serves from the store, and take over when it is gone.
        keep: how long runs are kept after their end; None for ever.
    """

    address: str
    metrics_address: str
    store: Path | URL
    reference: str
    site: SiteFile
    policy: Policy
    profile_modes: int
    selection: Selection = field(default_factory=Selection)
    stands_by: bool = False
    keep: timedelta | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep <= timedelta(0):
            raise InvalidInputError("runs that are over have to be kept for some time")
        if self.profile_modes < 5:
            raise InvalidInputError(f"a predictor needs 5 or more measured modes, not {self.profile_modes}")
        if self.selection.over_selection and not self.policy.has_count:
            raise InvalidInputError(
                f"policy {self.policy.name!r} takes as many devices as it finds best: over-selection adds to a"
                " number of devices (--clients), which it was not given or does not take"
            )


@dataclass(frozen=True)
class BoundAddresses:
    """Where a coordinator really listens."""

    address: str
    metrics_address: str

    def announce(self, file: Path) -> None:
        """Write them as JSON, whole or not at all."""
        draft = file.with_name(f".{file.name}.tmp")
        draft.write_text(json.dumps({"address": self.address, "metrics_address": self.metrics_address}))
        os.replace(draft, file)


async def serve(
    config: CoordinatorConfig, on_ready: Callable[[BoundAddresses], None], stop: asyncio.Event | None = None
) -> None:
    """Serve until `stop` is set, or until SIGINT or SIGTERM where none is given.

    Raises:
        InvalidInputError: an address cannot be listened on, or the store or reference cannot be used.
        StoreInUseError: another coordinator serves from the store, and this one is not to stand by.
        StoreUnavailableError: the store's database does not answer.
        NotOwnerError: another coordinator has taken the store over meanwhile.
    """
    host, port = split_address(config.address)
    metrics_host, metrics_port = split_address(config.metrics_address)
    _allow_connections()
    reference = open_reference(config.reference)
    # Before the store, so that a start that cannot succeed leaves no file behind.
    _require_free(host, port)
    _require_free(metrics_host, metrics_port)
    async with AsyncExitStack() as held:
        store = await open_store(config.store, config.stands_by)
        held.callback(store.close)
        if config.keep is not None:
            store.forget(config.keep)
        kept = store.load()
        references = ReferenceShelf(reference.artefact, kept.references, kept.pinned)
        fleet = Fleet(
            # Until the watch has looked, no supply has any watts.
            Allowance(config.site.supplies, dict.fromkeys(config.site.supplies.names, 0.0)),
            config.policy,
            kept.devices,
            kept.nodes,
            kept.runs,
            kept.rounds,
            kept.archived,
            config.site,
            config.selection,
            kept.says,
        )
        expected = [record.device_id for record in kept.devices if record.state is not DeviceState.OFFLINE]
        leases = Leases(time.monotonic(), expected)
        writer = Writer(store)
        held.push_async_callback(writer.close)
        orders = Orders()
        trimmer = Trimmer(fleet, writer, orders)
        budgets = BudgetWatch(config.site.budgets, trimmer.budget_changed, overrides=kept.overrides)
        held.push_async_callback(budgets.stop)
        await budgets.start()
        metrics = serve_metrics(fleet, metrics_host, metrics_port)
        held.callback(metrics.server_close)
        held.callback(metrics.shutdown)
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor(STATUS), SizeInterceptor()],
            options=OPTIONS,
        )
        # Before the writer is closed: sessions that end are still written.
        held.push_async_callback(server.stop, _STOP_GRACE_S)
        sessions = SessionServicer(fleet, writer, leases, orders, references, config.profile_modes)
        held.push_async_callback(sessions.close)
        session_pb2_grpc.add_SessionServiceServicer_to_server(sessions, server)
        planning = PlanningServicer(fleet, writer, leases)
        planning_pb2_grpc.add_PlanningServiceServicer_to_server(planning, server)
        view_pb2_grpc.add_ViewServiceServicer_to_server(ViewServicer(fleet, writer), server)
        operator = OperatorServicer(fleet, writer, budgets, references, sessions.have_all_back, planning.clear_way)
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(operator, server)
        healthy = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        reflection.enable_server_reflection([*_SERVICES, reflection.SERVICE_NAME], server)
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            raise _in_use(f"{host}:{port}") from None
        await server.start()
        await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
        if stop is None:
            stop = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
        on_ready(BoundAddresses(f"{host}:{bound}", f"{metrics_host}:{metrics.server_port}"))
        background: list[Coroutine[Any, Any, object]] = [stop.wait(), writer.lost.wait()]
        background += [sessions.sweep(), trimmer.watch(), archive(fleet, writer), writer.watch_owner()]
        if config.keep is not None:
            background.append(forget_daily(fleet, writer, config.keep))
        await _first_of(background)
        await healthy.enter_graceful_shutdown()
        if writer.lost.is_set():
            raise NotOwnerError("another coordinator has taken the store over: this one ends")


async def _first_of(awaited: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Wait for whichever ends first, well or with its error, and end the others."""
    tasks = [asyncio.ensure_future(each) for each in awaited]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def _allow_connections() -> None:
    """Let this process hold as many connections as the system allows it; most shells begin with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _require_free(host: str, port: int) -> None:
    """Make sure that an address can be listened on.

    Raises:
        InvalidInputError: it cannot.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            raise _in_use(f"{host}:{port}") from None


def _in_use(address: str) -> InvalidInputError:
    return InvalidInputError(f"{address} cannot be listened on; is another coordinator running? Choose another port")
