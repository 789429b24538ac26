"""What the runs of a world train: each Flower server has a workload of its own."""

from __future__ import annotations


def workload_of(run_or_plan: str) -> str:
    """The workload of a run, or of a plan of it: the name of its Flower server."""
    return run_or_plan[0]
