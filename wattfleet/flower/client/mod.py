"""The ClientApp's mod: it trains each round in the power mode that the plan assigned."""

from __future__ import annotations

import errno
import os
import pwd
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from logging import WARNING
from typing import Any

import grpc
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.logger import log

from wattfleet.common.console import plain_text
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.flower.client.agent_training import (
    CURRENT_TRAINING,
    SIMULATED_AGENT,
    AgentTraining,
    AgentUnreachableError,
    MeasuredError,
    TrainingDeadline,
)
from wattfleet.flower.client.automatic_profiling import automatic_profiling, why_unprofiled
from wattfleet_proto.assignment import (
    APP_WEIGHS_KEY,
    CUT_KEY,
    DEVICE_ID_KEY,
    IDENTIFY_KEY,
    MEASURED_KEY,
    OBSERVED_EPOCH_S_KEY,
    OBSERVED_POWER_W_KEY,
    PAIRING_PROBLEM_KEY,
    RECORD_KEY,
    SHARE_KEY,
    TOOK_EPOCHS_KEY,
    UNPROFILED_KEY,
    WORK_KEY,
    AssignedWork,
    RoundAssignment,
)
from wattfleet_proto.names import CURRENT_SOCKET, DEFAULT_SOCKET
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc

# --- Pairing ----------------------------------------------------------------------------------------------------------
# Checks that a SuperNode reaches the agent of the device that it names; if not, says how to fix it.


_WITHIN_S = 10.0
_NAME_SOCKET = "name its socket with the SuperNode's --node-config 'agent-socket=\"...\"'"
_START_AGENT = "start it, such as with `systemctl start wattfleet-agent`"


def pairing_problem(device_id: str, path: str) -> str:
    """Return why a SuperNode cannot train on the device that it names, and the remedy.

    Args:
        device_id: the device that the SuperNode names.
        path: path of the agent's socket.

    Returns:
        The problem; empty if the device's agent answers.
    """
    try:
        # A plain socket gives the kernel's reason. gRPC reports UNAVAILABLE for all of them, and tries again.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_WITHIN_S)
            probe.connect(path)
    except OSError as error:
        return _unconnected(path, error)
    try:
        with grpc.insecure_channel(f"unix:{path}") as channel:
            stub = local_pb2_grpc.LocalAgentServiceStub(channel)
            agent_device_id = stub.GetDevice(local_pb2.GetDeviceRequest(), timeout=_WITHIN_S).device_id
    except grpc.RpcError as error:
        details = plain_text(error.details() or error.code().name)
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return f"the agent at {path} refused access: {details}; then start the SuperNode again"
        return f"the agent at {path} does not answer ({details}): see its log"
    if agent_device_id == device_id:
        return ""
    agent_device_id = plain_text(agent_device_id)
    return (
        f"the socket {path} belongs to {agent_device_id}, but the SuperNode names {device_id}: start the SuperNode with"
        f" --node-config 'device-id=\"{agent_device_id}\"', or {_NAME_SOCKET}"
    )


def _unconnected(path: str, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return (
            f"there is no socket {path}: if the agent is not running, {_START_AGENT}; if it uses another socket,"
            f" {_NAME_SOCKET}"
        )
    if error.errno == errno.EACCES:
        return (
            f"the SuperNode's user {_user_name()} may not use the socket {path}: add the user to the socket's group,"
            " such as with `usermod -aG wattfleet USER`, and start the SuperNode again"
        )
    if error.errno == errno.ECONNREFUSED:
        return f"no agent listens at {path}: {_START_AGENT}"
    return f"the socket {path} cannot be used ({error.strerror or error}): {_NAME_SOCKET}"


def _user_name() -> str:
    """The name of this process's user, or the user id if it has no name on this system."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


# --- Mod --------------------------------------------------------------------------------------------------------------

_AUTO_PROFILE_KEY = "auto-profile"


class UnplannedTrainingError(WattfleetError):
    """The app trains without a plan, which the site's rules do not allow."""


def power_mode_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Have the agent apply the assigned mode and observe the training; pass other messages on unchanged.

    The agent is told of a training without an assignment, since it is outside of the budget.

    Raises:
        UnplannedTrainingError: the training has no assignment, and the site does not allow this.
        InvalidInputError: the SuperNode has no `device-id`, its `auto-profile` is not true or false, or the assignment
            cannot be read.
        AgentUnreachableError: the agent's socket cannot be reached, or the agent refused.
    """
    if RECORD_KEY not in message.content:
        if message.metadata.message_type.startswith("train"):
            _note_unplanned(context)
        return call_next(message, context)
    record = message.content[RECORD_KEY]
    if IDENTIFY_KEY in record:
        return Message(RecordDict({RECORD_KEY: _identity(context)}), reply_to=message)

    assignment = RoundAssignment.from_record(record)
    # The app sees the message as its strategy wrote it.
    del message.content[RECORD_KEY]
    work = AssignedWork.from_record(message.content[WORK_KEY]) if WORK_KEY in message.content else None
    is_automatic = _profiles_automatically(context)
    profiles = automatic_profiling() if is_automatic else nullcontext()
    socket = _socket(context)
    simulated = SIMULATED_AGENT.get()
    with _channel(socket) as channel:
        training = AgentTraining(channel)
        training.work = work
        try:
            training.start(assignment)
            deadline = training.set_deadline(
                TrainingDeadline(assignment.epochs, assignment.deadline_s)
                if simulated is None
                else simulated.deadline(assignment)
            )
            reply, is_out_of_memory, has_measured = None, False, False
            token = CURRENT_TRAINING.set(training)
            socket_token = CURRENT_SOCKET.set(socket)
            try:
                with profiles:
                    reply = call_next(message, context)
            except MeasuredError:
                has_measured = True
                reply = Message(RecordDict({RECORD_KEY: ConfigRecord({MEASURED_KEY: True})}), reply_to=message)
            except Exception as error:
                is_out_of_memory = _is_out_of_memory(error)
                raise
            finally:
                CURRENT_SOCKET.reset(socket_token)
                CURRENT_TRAINING.reset(token)
                failed = reply is None or reply.has_error()
                ignores_epochs = work is not None and work.epochs is not None and not training.has_taken_epochs
                # An app that has not asked for its epochs may have trained any number.
                epochs_done = 0.0 if ignores_epochs or has_measured else deadline.epochs_done
                finished = training.finish(failed, epochs_done, is_out_of_memory)
        except grpc.RpcError as error:
            details = plain_text(error.details() or "")
            raise AgentUnreachableError(
                f"{assignment.device_id}: the agent at {socket} answered {error.code().name}: {details}"
            ) from error
    if has_measured:
        return reply
    done = _done(deadline, finished)
    if work is not None and work.epochs is not None:
        done[TOOK_EPOCHS_KEY] = not ignores_epochs
    if (why := why_unprofiled(training, is_automatic)) is not None:
        done[UNPROFILED_KEY] = why
    if not reply.has_error() and done:
        reply.content[RECORD_KEY] = ConfigRecord(done)
    return reply


def _note_unplanned(context: Context) -> None:
    """Tell the agent, if there is one, that the app is about to train without a plan.

    Raises:
        UnplannedTrainingError: the site does not allow this.
    """
    try:
        with _channel(_socket(context)) as channel:
            request = local_pb2.NoteUnplannedRequest(run_id=str(context.run_id))
            noted = local_pb2_grpc.LocalAgentServiceStub(channel).NoteUnplanned(request, timeout=_WITHIN_S)
    except grpc.RpcError as error:
        if os.path.exists(_socket(context)):
            log(WARNING, "the agent was not told of a training without a plan: %s", plain_text(error.details() or ""))
        return
    if noted.refusal:
        raise UnplannedTrainingError(plain_text(noted.refusal))


def _identity(context: Context) -> ConfigRecord:
    """Return the device that this SuperNode names, and why it cannot train there if it cannot.

    A problem is reported in an ordinary reply, since a Flower reply with an error has no content.
    """
    device_id = _device_id(context)
    problem = "" if SIMULATED_AGENT.get() is not None else pairing_problem(device_id, _socket(context))
    return ConfigRecord({DEVICE_ID_KEY: device_id, PAIRING_PROBLEM_KEY: problem})


def _channel(socket: str) -> AbstractContextManager[Any]:
    """Return the channel to the device's agent."""
    simulated = SIMULATED_AGENT.get()
    return grpc.insecure_channel(f"unix:{socket}") if simulated is None else nullcontext(simulated.channel)


def _socket(context: Context) -> str:
    return str(context.node_config.get("agent-socket", DEFAULT_SOCKET))


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a batch did not fit into the memory of the GPU or of the board; torch has several errors for that."""
    return isinstance(error, MemoryError) or "out of memory" in str(error).lower()


def _done(deadline: TrainingDeadline, finished: local_pb2.TrainingFinished) -> dict[str, bool | float | str]:
    """Return what the reply reports about the training: how much was done, seconds per epoch and watts."""
    done: dict[str, bool | float | str] = {}
    if deadline.used:
        done |= {CUT_KEY: deadline.cut, APP_WEIGHS_KEY: deadline.app_weighs}
        if deadline.share is not None:
            done[SHARE_KEY] = deadline.share
    if finished.HasField("epoch_s"):
        done[OBSERVED_EPOCH_S_KEY] = finished.epoch_s
    if finished.HasField("power_w"):
        done[OBSERVED_POWER_W_KEY] = finished.power_w
    return done


def _profiles_automatically(context: Context) -> bool:
    stated = context.node_config.get(_AUTO_PROFILE_KEY, True)
    if not isinstance(stated, bool):
        raise InvalidInputError(
            f"{_AUTO_PROFILE_KEY} must be true or false, not {stated!r}: start the SuperNode with --node-config"
            f" '{_AUTO_PROFILE_KEY}=false' so that only loaders in profiled(...) are profiled"
        )
    return stated


def _device_id(context: Context) -> str:
    device_id = context.node_config.get(DEVICE_ID_KEY)
    if not device_id:
        raise InvalidInputError(
            f"this SuperNode has no {DEVICE_ID_KEY}: start it with --node-config '{DEVICE_ID_KEY}=\"...\"'"
        )
    return str(device_id)
