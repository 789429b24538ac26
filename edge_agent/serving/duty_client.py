"""A client for the duty's commands, over the socket of a running agent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from wattfleet.duties import Duty, KeptDuty
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import Profile
from wattfleet_io.console import plain_text
from wattfleet_proto.convert import batches_to_messages, kept_duty_from_message
from wattfleet_proto.local_socket import owner_socket
from wattfleet_proto.v1 import duty_pb2, duty_pb2_grpc

_TIMEOUT_S = 5.0


class NoAgentError(WattfleetError):
    """No agent of this version serves the socket."""


class DutyClient:
    """Sends the duty's commands to the agent at a socket.

    Args:
        socket: the path of the agent's socket.

    Every method raises:
        NoAgentError: no agent serves the socket, or it does not answer.
        InvalidInputError: the agent refused.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def set(self, duty: Duty, measured: Profile | None = None) -> None:
        """Put a duty in force; it stays in force after a restart of the agent.

        Args:
            duty: the duty.
            measured: inference rows measured on this device, with their batches; None for none.
        """
        rows = [] if measured is None else batches_to_messages(measured)
        self._ask_as_owner("SetDuty", duty_pb2.SetDutyRequest(duty=duty.to_json(), measured=rows))

    def show(self) -> tuple[Duty, KeptDuty] | None:
        """Return the duty in force and how it is kept; None if there is none."""
        answer = self._ask("ShowDuty", duty_pb2.ShowDutyRequest())
        return (Duty.from_json(answer.duty), kept_duty_from_message(answer.figures)) if answer.duty else None

    def clear(self) -> bool:
        """End the duty in force, and return whether there was one."""
        return bool(self._ask_as_owner("ClearDuty", duty_pb2.ClearDutyRequest()).was_set)

    def _ask_as_owner(self, method: str, request: Any) -> Any:
        socket = owner_socket(self._socket)
        if socket.exists() and not os.access(socket, os.W_OK):
            raise InvalidInputError(
                f"only {socket.owner()}, the user of the agent, may set or clear the duty: run the command with sudo"
            )
        return self._ask(method, request, socket)

    def _ask(self, method: str, request: Any, socket: Path | None = None) -> Any:
        with self._translated(), grpc.insecure_channel(f"unix:{socket or self._socket}") as channel:
            return getattr(duty_pb2_grpc.DutyServiceStub(channel), method)(request, timeout=_TIMEOUT_S)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            code, details = error.code(), plain_text(error.details() or "")
            if code is grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidInputError(details) from None
            if code is grpc.StatusCode.UNIMPLEMENTED:
                raise NoAgentError(f"the agent at {self._socket} does not support duties: update it") from None
            raise NoAgentError(
                f"no agent answers at {self._socket} ({code.name}): start it with `wattfleet agent run` or `systemctl"
                " start wattfleet-agent`, or pass its --socket"
            ) from None
