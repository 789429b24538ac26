"""Starts a run at the coordinator: a run belongs to the process that started it, which proves it with a token."""

from __future__ import annotations

from logging import WARNING

import grpc
from flwr.common.logger import log

from wattfleet_flower.server.errors import RefusedError
from wattfleet_flower.server.planning_client import PlanningClient
from wattfleet_proto.v1 import planning_pb2

_MOST_IDS = 20


def start_run(planner: PlanningClient, run: planning_pb2.StartRunRequest) -> planning_pb2.StartRunRequest:
    """Start a run; if another process has started a run of this id, start it as ID-2, ID-3 and so on.

    Flower resumes no run. A process that comes anew to a Flower run begins with round 1, which the coordinator has
    planned already for the process before.

    Args:
        planner: the coordinator.
        run: the run with this process's token.

    Returns:
        The run as it was started, or will be as soon as the coordinator can be reached.

    Raises:
        RefusedError: the coordinator refused the run.
    """
    started = run
    for number in range(2, _MOST_IDS + 2):
        try:
            planner.report("StartRun", started)
            break
        except RefusedError as refused:
            if refused.code is not grpc.StatusCode.PERMISSION_DENIED or number > _MOST_IDS:
                raise
        started = planning_pb2.StartRunRequest()
        started.CopyFrom(run)
        started.run_id = f"{run.run_id}-{number}"
    if started is not run:
        log(
            WARNING,
            "run %s was started by another process: this one continues as run %s. Devices that still train for the"
            " former are free after `wattfleet coordinator delete %s --end`",
            run.run_id,
            started.run_id,
            run.run_id,
        )
    return started
