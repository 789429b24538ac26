"""A ClientApp on the agent's socket that sends what a test specifies, message by message."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from wattfleet_proto.v1 import local_pb2, local_pb2_grpc

FINISH = local_pb2.TrainRequest(finish=local_pb2.FinishTraining())


def started(plan_id: str, epochs: float = 1.0, device_id: str = "orin-nano-0") -> local_pb2.TrainRequest:
    return local_pb2.TrainRequest(start=local_pb2.StartTraining(plan_id=plan_id, device_id=device_id, epochs=epochs))


class App:
    """One stream of trainings, message by message."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self.call: Any = local_pb2_grpc.LocalAgentServiceStub(channel).Train(iter(self._requests.get, None))

    def send(self, *requests: Any) -> None:
        for request in requests:
            self._requests.put(request)

    def answer(self) -> Any:
        return next(self.call)

    def end(self) -> None:
        self._requests.put(None)

    def refusal(self) -> tuple[grpc.StatusCode, str]:
        """The error with which the agent ends the stream."""
        with pytest.raises(grpc.RpcError):
            while True:
                self.answer()
        return self.call.code(), self.call.details()
