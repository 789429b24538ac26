"""The training in progress of a running agent, for its owner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from edge_agent.runtime.peer_credentials import user_name
from wattfleet_proto.local_socket import owner_socket
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc

_TIMEOUT_S = 5.0


def training_now(socket: Path) -> dict[str, Any] | None:
    """What the agent behind a socket trains, and for whom; None if nothing, or if this user may not know.

    Args:
        socket: the agent's.
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
