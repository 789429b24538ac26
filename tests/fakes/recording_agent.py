"""An agent's local socket that records an app's messages and gives configured replies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from wattfleet_proto.v1 import local_pb2, local_pb2_grpc


@dataclass
class RecordingAgent(local_pb2_grpc.LocalAgentServiceServicer):
    """An agent without a device.

    Attributes:
        socket: path of its socket.
        protocol_minor: minor version of its protocol.
        wants: minibatches that it requests in each training.
        observed: the observation that it returns at the end of each training.
        requests: the messages that it received, by training.
    """

    socket: Path
    protocol_minor: int = 1
    wants: int = 1_000_000
    observed: local_pb2.TrainingFinished = field(default_factory=local_pb2.TrainingFinished)
    requests: list[list[local_pb2.TrainRequest]] = field(default_factory=list)

    def Train(  # noqa: N802 - named by the protocol
        self, request_iterator: Iterator[local_pb2.TrainRequest], context: Any
    ) -> Iterator[local_pb2.TrainResponse]:
        received: list[local_pb2.TrainRequest] = []
        self.requests.append(received)
        for request in request_iterator:
            received.append(request)
            match request.WhichOneof("body"):
                case "start":
                    started = local_pb2.TrainingStarted(protocol_minor=self.protocol_minor)
                    yield local_pb2.TrainResponse(started=started)
                case "minibatches":
                    measuring = len(minibatches(received)) < self.wants
                    yield local_pb2.TrainResponse(noted=local_pb2.MinibatchesNoted(measuring=measuring))
                case "finish":
                    yield local_pb2.TrainResponse(finished=self.observed)

    def ShowTraining(  # noqa: N802 - named by the protocol
        self, request: local_pb2.ShowTrainingRequest, context: Any
    ) -> local_pb2.ShowTrainingResponse:
        return local_pb2.ShowTrainingResponse()

    def GetDevice(  # noqa: N802 - named by the protocol
        self, request: local_pb2.GetDeviceRequest, context: Any
    ) -> local_pb2.GetDeviceResponse:
        return local_pb2.GetDeviceResponse()

    @property
    def loaders(self) -> list[local_pb2.LoaderSeen]:
        """The reported loaders."""
        return [request.loader for requests in self.requests for request in requests if request.HasField("loader")]

    @property
    def minibatches(self) -> int:
        """The number of minibatches that were reported."""
        return sum(len(minibatches(requests)) for requests in self.requests)

    @property
    def reports(self) -> list[local_pb2.MinibatchesTrained]:
        """The reports of minibatches, in order."""
        return [
            request.minibatches for requests in self.requests for request in requests if request.HasField("minibatches")
        ]


def minibatches(requests: list[local_pb2.TrainRequest]) -> list[local_pb2.MinibatchTimes]:
    """The minibatches that were reported."""
    return [times for request in requests for times in request.minibatches.minibatches]


@contextmanager
def recording_agent(socket: Path) -> Iterator[RecordingAgent]:
    """An agent that listens on a socket."""
    agent = RecordingAgent(socket)
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        local_pb2_grpc.add_LocalAgentServiceServicer_to_server(agent, server)
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        try:
            yield agent
        finally:
            server.stop(None).wait()
