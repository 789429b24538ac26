"""The device's side of Flower: a mod that trains every round in the power mode the plan assigned.

from edge_agent.flower import power_mode_mod

app = ClientApp(mods=[power_mode_mod])
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
from flwr.app import ConfigRecord, Context, Message, RecordDict

from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, RECORD_KEY, RoundAssignment
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc

DEFAULT_SOCKET = "/run/wattfleet/agent.sock"
"""Where the agent listens unless the SuperNode's `--node-config` names another `agent-socket`."""

_SWITCH_TIMEOUT_S = 60.0


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
        agent = local_pb2_grpc.LocalAgentServiceStub(channel)
        try:
            agent.StartTraining(
                local_pb2.StartTrainingRequest(
                    plan_id=assignment.plan_id,
                    device_id=assignment.device_id,
                    mode=mode_to_message(assignment.mode),
                    epochs=assignment.epochs,
                ),
                timeout=_SWITCH_TIMEOUT_S,
            )
            trained = False
            try:
                reply = call_next(message, context)
                trained = not reply.has_error()
            finally:
                agent.FinishTraining(
                    local_pb2.FinishTrainingRequest(plan_id=assignment.plan_id, failed=not trained),
                    timeout=_SWITCH_TIMEOUT_S,
                )
        except grpc.RpcError as error:
            raise AgentUnreachableError(
                f"{assignment.device_id}: the agent at {socket} answered {error.code().name}: {error.details()}"
            ) from None
    return reply


def _device_id(context: Context) -> str:
    device_id = context.node_config.get(DEVICE_ID_KEY)
    if not device_id:
        raise InvalidInputError(
            f"this SuperNode has no {DEVICE_ID_KEY}: start it with --node-config '{DEVICE_ID_KEY}=\"...\"'"
        )
    return str(device_id)
