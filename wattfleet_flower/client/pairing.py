"""Checks that a SuperNode reaches the agent of the device that it names; if not, says how to fix it."""

from __future__ import annotations

import errno
import os
import pwd
import socket

import grpc

from wattfleet_io.console import plain_text
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc

_WITHIN_S = 10.0
_NAME_SOCKET = "name its socket with the SuperNode's --node-config 'agent-socket=\"...\"'"
_START_AGENT = "start it, such as with `systemctl start wattfleet-agent`"


def pairing_problem(device_id: str, path: str) -> str | None:
    """Return why a SuperNode cannot train on the device that it names, and the remedy.

    Args:
        device_id: the device that the SuperNode names.
        path: path of the agent's socket.

    Returns:
        The problem; empty if the device's agent answers; None if the agent is too old to report its device.
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
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return None
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
