"""The device's side of Flower: a mod that trains every round in the power mode the plan assigned.

from edge_agent.flower import power_mode_mod

app = ClientApp(mods=[power_mode_mod])
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import grpc
from flwr.app import ConfigRecord, Context, Message, RecordDict

from edge_agent.paths import DEFAULT_SOCKET
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, RECORD_KEY, RoundAssignment
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc


class AgentUnreachableError(WattfleetError):
    """The device's agent cannot be reached or refused; without it no watts can be kept."""


def power_mode_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Apply the assigned mode, train, let the agent report what was observed; other messages pass untouched.

    Raises:
        InvalidInputError: the SuperNode has no `device-id`, or the assignment cannot be read.
        AgentUnreachableError: the agent's socket cannot be reached, or the agent refused.
    """
    if RECORD_KEY not in message.content:
        return call_next(message, context)
    record = message.content[RECORD_KEY]
    if IDENTIFY_KEY in record:
        identity = ConfigRecord({DEVICE_ID_KEY: _device_id(context)})
        return Message(RecordDict({RECORD_KEY: identity}), reply_to=message)

    assignment = RoundAssignment.from_record(record)
    # The app sees the message that its strategy wrote.
    del message.content[RECORD_KEY]
    socket = str(context.node_config.get("agent-socket", DEFAULT_SOCKET))
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        training = _Training(channel)
        try:
            training.start(assignment)
            reply = None
            try:
                reply = call_next(message, context)
            finally:
                training.finish(failed=reply is None or reply.has_error())
        except grpc.RpcError as error:
            raise AgentUnreachableError(
                f"{assignment.device_id}: the agent at {socket} answered {error.code().name}: {error.details()}"
            ) from None
    return reply


class _Training:
    """One training on the agent's socket; if this process dies, the stream ends and the agent parks the device."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: SimpleQueue[local_pb2.TrainRequest | None] = SimpleQueue()
        self._responses: Any = local_pb2_grpc.LocalAgentServiceStub(channel).Train(iter(self._requests.get, None))

    def start(self, assignment: RoundAssignment) -> None:
        """Have the assigned mode put in force."""
        start = local_pb2.StartTraining(
            plan_id=assignment.plan_id,
            device_id=assignment.device_id,
            mode=mode_to_message(assignment.mode),
            epochs=assignment.epochs,
        )
        self._requests.put(local_pb2.TrainRequest(start=start))
        try:
            next(self._responses)
        except grpc.RpcError:
            self._requests.put(None)
            raise

    def finish(self, failed: bool) -> None:
        """Have the device parked, and what was observed reported."""
        self._requests.put(local_pb2.TrainRequest(finish=local_pb2.FinishTraining(failed=failed)))
        self._requests.put(None)
        next(self._responses)


def _device_id(context: Context) -> str:
    device_id = context.node_config.get(DEVICE_ID_KEY)
    if not device_id:
        raise InvalidInputError(
            f"this SuperNode has no {DEVICE_ID_KEY}: start it with --node-config '{DEVICE_ID_KEY}=\"...\"'"
        )
    return str(device_id)
