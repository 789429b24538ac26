"""What the coordinator knows, asked over its own service."""

from __future__ import annotations

from types import TracebackType

import grpc

from wattfleet_proto.v1 import session_pb2, view_pb2, view_pb2_grpc

_TIMEOUT_S = 30.0


def state_word(state: session_pb2.DeviceState.ValueType) -> str:
    """A device's state in one word."""
    return session_pb2.DeviceState.Name(state).removeprefix("DEVICE_STATE_").lower()


class CoordinatorView:
    """A connection to the coordinator's read-only service."""

    def __init__(self, address: str) -> None:
        """Connect to host:port."""
        self._channel = grpc.insecure_channel(address)
        self._stub = view_pb2_grpc.ViewServiceStub(self._channel)

    def __enter__(self) -> CoordinatorView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def devices(self) -> list[view_pb2.DeviceView]:
        """All devices, by id."""
        return list(self._stub.GetFleet(view_pb2.GetFleetRequest(), timeout=_TIMEOUT_S).devices)

    def rounds(self) -> view_pb2.ListRoundsResponse:
        """The newest run and its rounds."""
        return self._stub.ListRounds(view_pb2.ListRoundsRequest(), timeout=_TIMEOUT_S)
