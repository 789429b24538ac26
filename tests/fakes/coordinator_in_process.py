"""A minimal coordinator in a thread of its own, which can go away and come back at the same address."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

import reference_models
from tests.fakes.polling import until
from wattfleet.core.errors import WattfleetError
from wattfleet.core.modes import PowerMode
from wattfleet.core.prediction import read_artefact
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.limits import MAX_SHARED_MODES
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import power_pb2, session_pb2, session_pb2_grpc

REFERENCE = read_artefact(Path(reference_models.__file__).parent / "agx_orin_resnet18")
_WITHIN_S = 60.0
Result = TypeVar("Result")


class CoordinatorInProcess(session_pb2_grpc.SessionServiceServicer):
    """Records one agent's reports in order; it keeps its `address`, and what it requests can be changed."""

    is_up = False
    grant_lifetime_s = 120.0

    def __init__(self, folder: Path, profile_modes: int) -> None:
        self.address = f"unix:{folder}/coordinator.sock"
        self.reports: list[session_pb2.SessionRequest] = []
        self.profile_modes = profile_modes
        self.reference = REFERENCE
        self.further: list[Any] = []
        self.metadata: Callable[[str], bytes] | None = None
        self._server: grpc.aio.Server | None = None
        self._sessions: list[Any] = []
        self._writing = asyncio.Lock()  # a session cannot send two messages at once
        self._grants: list[session_pb2.Grant] = []

    async def Session(  # type: ignore[override]  # noqa: N802 - named by the protocol; it writes to its context
        self, request_iterator: Any, context: Any
    ) -> None:
        await anext(request_iterator)
        welcome = session_pb2.Welcome(
            reference_digest=self.reference.digest,
            further_reference_digests=[each.digest for each in self.further],
            profile_modes=self.profile_modes,
            lease_s=5,
            protocol=own_version(),
            grant_lifetime_s=self.grant_lifetime_s,
            share_modes=MAX_SHARED_MODES,
        )
        await context.write(session_pb2.SessionResponse(welcome=welcome))
        self._sessions.append(context)
        try:
            for grant in self._grants[-1:]:
                await self._write(context, session_pb2.SessionResponse(grant=grant))
            async for request in request_iterator:
                self.reports.append(request)
                ack = session_pb2.Ack(sequence=request.sequence, lease_number=request.lease.number)
                await self._write(context, session_pb2.SessionResponse(ack=ack))
        finally:
            self._sessions.remove(context)

    def grant(self, plan_id: str, mode: PowerMode | None, power_limit_w: float = 25.0, workload: str = "") -> None:
        """Grant a training, or revoke it, and wait until the agent has put this in force."""
        grant = session_pb2.Grant(
            id=1 + len(self._grants),
            plan_id=plan_id,
            mode=None if mode is None else mode_to_message(mode),
            power_limit_w=power_limit_w,
            longest_s=600,
            workload=workload,
        )
        self._grants.append(grant)
        self.send(grant=grant)
        until(lambda: any(report.lease.grant_id == grant.id for report in list(self.reports)))

    def send(self, **body: Any) -> None:
        """Send one message to the agent."""
        on_loop(self._send(session_pb2.SessionResponse(**body))).result(_WITHIN_S)

    def announce(self, *workloads: str, measured: Sequence[session_pb2.MeasuredUnit] = ()) -> None:
        """Announce these workloads as those of all live runs, with other devices' measurements of them."""
        messages = [power_pb2.Workload(name=name) for name in workloads]
        self.send(announced=session_pb2.WorkloadsAnnounced(workloads=messages, measured=measured))

    async def _send(self, response: session_pb2.SessionResponse) -> None:
        for session in self._sessions:
            await self._write(session, response)

    async def _write(self, session: Any, response: session_pb2.SessionResponse) -> None:
        async with self._writing:
            await session.write(response)

    async def FetchReference(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchReferenceRequest, context: Any
    ) -> AsyncIterator[session_pb2.FetchReferenceResponse]:
        (sent,) = (each for each in (self.reference, *self.further) if each.digest == request.digest)
        yield session_pb2.FetchReferenceResponse(manifest=sent.manifest, weights_bytes=len(sent.weights))
        yield session_pb2.FetchReferenceResponse(weights_chunk=sent.weights)

    async def FetchMetadata(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchMetadataRequest, context: Any
    ) -> session_pb2.FetchMetadataResponse:
        try:
            content = b"" if self.metadata is None else self.metadata(request.name)
        except WattfleetError:
            content = b""
        if not content:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no {request.name}")
        return session_pb2.FetchMetadataResponse(content=content, coordinator_unix_s=time.time())

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

    @property
    def removed(self) -> list[str]:
        return [report.removed.workload for report in self.reports if report.HasField("removed")]

    def front_of(self, workload: str) -> session_pb2.FrontReport | None:
        """The latest front of a workload."""
        return next((front for front in reversed(self.fronts) if front.workload.name == workload), None)

    def is_ready(self) -> bool:
        return self.states[-1:] == [session_pb2.DEVICE_STATE_READY]

    def come(self) -> None:
        on_loop(self._come()).result(_WITHIN_S)

    def go(self) -> None:
        assert self._server is not None, "it was started"
        self.is_up = False
        on_loop(self._server.stop(None)).result(_WITHIN_S)

    async def _come(self) -> None:
        self._server = grpc.aio.server()
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()
        self.is_up = True

    @contextmanager
    def running(self) -> Iterator[CoordinatorInProcess]:
        self.come()
        try:
            yield self
        finally:
            self.go()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for all tests, never closed, since gRPC still reports cancelled calls to it later."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def on_loop(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Start a coroutine outside the test's own thread."""
    return asyncio.run_coroutine_threadsafe(work, _loop())
