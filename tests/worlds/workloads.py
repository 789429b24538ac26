"""The workloads of a world's runs: each Flower server has its own."""

from __future__ import annotations


def workload_of(run_or_plan: str) -> str:
    """The workload of a run, or of a run's plan: the name of its Flower server."""
    return run_or_plan[0]
