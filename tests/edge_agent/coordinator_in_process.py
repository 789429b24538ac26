"""A coordinator of a few lines in a thread of its own, that may go away and come back at the same address."""

import asyncio
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import grpc

import reference_models
from wattfleet.artefact import read_directory
from wattfleet_proto.v1 import session_pb2, session_pb2_grpc

REFERENCE = read_directory(Path(reference_models.__file__).parent / "agx_orin_resnet18")
_WITHIN_S = 60.0


class CoordinatorInProcess(session_pb2_grpc.SessionServiceServicer):
    """Notes what one agent reports, in order; `address` stays the same."""

    def __init__(self, folder, profile_modes):
        self.address = f"unix:{folder}/coordinator.sock"
        self.reports = []
        self._profile_modes = profile_modes
        self._loop = asyncio.new_event_loop()
        self._server = None

    async def Session(self, request_iterator, context):  # noqa: N802 - named by the protocol
        await anext(request_iterator)
        welcome = session_pb2.Welcome(reference_digest=REFERENCE.digest, profile_modes=self._profile_modes, lease_s=5)
        yield session_pb2.SessionResponse(welcome=welcome)
        async for request in request_iterator:
            self.reports.append(request)
            yield session_pb2.SessionResponse(ack=session_pb2.Ack(sequence=request.sequence))

    async def FetchReference(self, request, context):  # noqa: N802 - named by the protocol
        yield session_pb2.FetchReferenceResponse(manifest=REFERENCE.manifest)
        yield session_pb2.FetchReferenceResponse(weights_chunk=REFERENCE.weights)

    @property
    def states(self):
        return [report.state.state for report in self.reports if report.HasField("state")]

    @property
    def observed(self):
        return [report.observation.plan_id for report in self.reports if report.HasField("observation")]

    def is_ready(self):
        return self.states[-1:] == [session_pb2.DEVICE_STATE_READY]

    def come(self):
        self._wait(self._come())

    def go(self):
        self._wait(self._server.stop(None))

    async def _come(self):
        self._server = grpc.aio.server()
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    def _wait(self, work) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.result(_WITHIN_S)

    @contextmanager
    def running(self):
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        try:
            self.come()
            yield self
        finally:
            self.go()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(_WITHIN_S)
            self._loop.close()


def until(condition):
    """Wait for something that another thread or process brings about."""
    give_up_s = time.monotonic() + _WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_s, "it did not come about"
        time.sleep(0.005)
