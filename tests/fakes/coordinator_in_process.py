"""A coordinator of a few lines in a thread of its own, that may go away and come back at the same address."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

import reference_models
from wattfleet.prediction import read_artefact
from wattfleet_proto.v1 import session_pb2, session_pb2_grpc

REFERENCE = read_artefact(Path(reference_models.__file__).parent / "agx_orin_resnet18")
_WITHIN_S = 60.0
Result = TypeVar("Result")


class CoordinatorInProcess(session_pb2_grpc.SessionServiceServicer):
    """Notes what one agent reports, in order; `address` stays the same, what it asks for may be set anew."""

    def __init__(self, folder: Path, profile_modes: int) -> None:
        self.address = f"unix:{folder}/coordinator.sock"
        self.reports: list[session_pb2.SessionRequest] = []
        self.profile_modes = profile_modes
        self.reference = REFERENCE
        self._server: grpc.aio.Server | None = None

    async def Session(  # noqa: N802 - named by the protocol
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[session_pb2.SessionResponse]:
        await anext(request_iterator)
        welcome = session_pb2.Welcome(
            reference_digest=self.reference.digest, profile_modes=self.profile_modes, lease_s=5
        )
        yield session_pb2.SessionResponse(welcome=welcome)
        async for request in request_iterator:
            self.reports.append(request)
            yield session_pb2.SessionResponse(ack=session_pb2.Ack(sequence=request.sequence))

    async def FetchReference(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchReferenceRequest, context: Any
    ) -> AsyncIterator[session_pb2.FetchReferenceResponse]:
        yield session_pb2.FetchReferenceResponse(
            manifest=self.reference.manifest, weights_bytes=len(self.reference.weights)
        )
        yield session_pb2.FetchReferenceResponse(weights_chunk=self.reference.weights)

    @property
    def states(self) -> list[session_pb2.DeviceState.ValueType]:
        return [report.state.state for report in self.reports if report.HasField("state")]

    @property
    def details(self) -> list[str]:
        return [report.state.detail for report in self.reports if report.HasField("state")]

    @property
    def observed(self) -> list[str]:
        return [report.observation.plan_id for report in self.reports if report.HasField("observation")]

    @property
    def fronts(self) -> list[session_pb2.FrontReport]:
        return [report.front for report in self.reports if report.HasField("front")]

    def is_ready(self) -> bool:
        return self.states[-1:] == [session_pb2.DEVICE_STATE_READY]

    def come(self) -> None:
        on_loop(self._come()).result(_WITHIN_S)

    def go(self) -> None:
        assert self._server is not None, "it was started"
        on_loop(self._server.stop(None)).result(_WITHIN_S)

    async def _come(self) -> None:
        self._server = grpc.aio.server()
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    @contextmanager
    def running(self) -> Iterator[CoordinatorInProcess]:
        self.come()
        try:
            yield self
        finally:
            self.go()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all tests, never closed: gRPC goes on telling a loop of calls that were cancelled."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def on_loop(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Begin a coroutine beside the test's own thread."""
    return asyncio.run_coroutine_threadsafe(work, _loop())
