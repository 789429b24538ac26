"""The options of `wattfleet evaluate choice` that are for inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Task

if TYPE_CHECKING:
    from wattfleet.choosing import Objective, ServiceLimits


def problems(
    latencies_ms: Sequence[float] | None, arrivals_per_s: Sequence[float] | None, budgets_w: Sequence[float]
) -> list[ServiceLimits]:
    """All combinations of latency, arrival rate and power budget.

    Raises:
        InvalidInputError: no latency or no arrival rate is given, or one is not finite and above 0.
    """
    from wattfleet.choosing import ServiceLimits

    if not latencies_ms or not arrivals_per_s:
        raise InvalidInputError(
            "--task inference needs the latency and the arrival rate: give --latency-ms and --arrival-per-s"
        )
    return [
        ServiceLimits(latency_ms, arrival_per_s, 1e3 * budget_w)
        for latency_ms in latencies_ms
        for arrival_per_s in arrivals_per_s
        for budget_w in budgets_w
    ]


def require_inference(
    task: Task,
    latencies_ms: Sequence[float] | None,
    arrivals_per_s: Sequence[float] | None,
    objective: Objective | None,
) -> None:
    """Check that options for inference are given only with its task.

    Raises:
        InvalidInputError: one is given for training.
    """
    given = [
        name
        for name, value in (
            ("--latency-ms", latencies_ms),
            ("--arrival-per-s", arrivals_per_s),
            ("--objective", objective),
        )
        if value
    ]
    if given and task is not Task.INFERENCE:
        raise InvalidInputError(f"{given[0]} is for inference: add --task inference, or leave it out")
