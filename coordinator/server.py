"""The coordinator process: its gRPC server, its metrics and its store, from start to a clean stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from coordinator.errors import STATUS
from coordinator.fleet import Fleet
from coordinator.metrics import serve_metrics
from coordinator.references import open_reference
from coordinator.service import register
from coordinator.store import Store
from wattfleet.addresses import split_address
from wattfleet.errors import InvalidInputError
from wattfleet.planning import Policy
from wattfleet_proto.error_boundary import ErrorInterceptor

_MAX_MESSAGE_BYTES = 1024 * 1024
_STOP_GRACE_S = 2.0


@dataclass(frozen=True)
class CoordinatorConfig:
    """How a coordinator runs.

    Attributes:
        address: host:port of the gRPC service; port 0 takes a free one.
        metrics_address: host:port of `/metrics`; port 0 takes a free one.
        store: the database file.
        reference: name or directory of the reference predictor.
        site_budget_w: watts for all devices together.
        policy: who is chosen for a round.
        profile_modes: modes that each agent measures at most.
    """

    address: str
    metrics_address: str
    store: Path
    reference: str
    site_budget_w: float
    policy: Policy
    profile_modes: int

    def __post_init__(self) -> None:
        if self.profile_modes < 5:
            raise InvalidInputError(f"a predictor needs 5 or more measured modes, not {self.profile_modes}")


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
    """
    reference = open_reference(config.reference)
    store = Store(config.store)
    fleet = Fleet(config.site_budget_w, config.policy, store.devices(), store.nodes(), store.runs(), store.rounds())
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor(STATUS)],
        # Without it a second coordinator would share the port instead of failing.
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)],
    )
    register(server, fleet, store, reference, config.profile_modes)
    healthy = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    host, port = split_address(config.address)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        raise InvalidInputError(
            f"{config.address} cannot be listened on; is another coordinator running? Choose another port"
        ) from None
    metrics_host, metrics_port = split_address(config.metrics_address)
    metrics = serve_metrics(fleet, metrics_host, metrics_port)
    try:
        await server.start()
        await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
        if stop is None:
            stop = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
        on_ready(BoundAddresses(f"{host}:{bound}", f"{metrics_host}:{metrics.server_port}"))
        await stop.wait()
        await healthy.enter_graceful_shutdown()
        await server.stop(_STOP_GRACE_S)
    finally:
        metrics.shutdown()
        metrics.server_close()
        store.close()
