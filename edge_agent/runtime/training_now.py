"""Asks a running agent for its training in progress; only the agent's owner may ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from edge_agent.runtime.peer_credentials import user_name
from wattfleet_proto.local_socket import owner_socket
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc

_TIMEOUT_S = 5.0


def training_now(socket: Path) -> dict[str, Any] | None:
    """Return the training in progress of the agent at a socket; None if there is none, or if this user may not see it.

    Args:
        socket: the path of the agent's socket.
    """
    owner = owner_socket(socket)
    try:
        if not owner.exists():
            return None
        with grpc.insecure_channel(f"unix:{owner}") as channel:
            stub: Any = local_pb2_grpc.LocalAgentServiceStub(channel)
            answer = stub.ShowTraining(local_pb2.ShowTrainingRequest(), timeout=_TIMEOUT_S)
    except (grpc.RpcError, PermissionError):
        return None
    if not answer.HasField("training"):
        return None
    training = answer.training
    return {
        "plan_id": training.plan_id,
        "running_s": training.running_s,
        "uid": training.uid,
        "user": user_name(training.uid),
        "pid": training.pid,
    }
