"""Ids of plans: of a run's rounds, and those that grants to measure have in place of one."""

from __future__ import annotations

_TO_MEASURE = "measuring-"


def plan_id_to_measure(run_id: str, number: int) -> str:
    """The id that stands in place of a plan's for devices that measure outside of rounds."""
    return f"{run_id}/{_TO_MEASURE}{number}"


def is_to_measure(plan_id: str) -> bool:
    """Whether an id stands in place of a plan's, for devices that measure outside of rounds."""
    return plan_id.rpartition("/")[2].startswith(_TO_MEASURE)


def plan_in_words(plan_id: str, run_name: str) -> str:
    """What a plan is of, such as "round 3 of run digits-0714-1532", or "measurements of run digits-0714-1532".

    Args:
        plan_id: the id.
        run_name: what people call its run.
    """
    what = "measurements" if is_to_measure(plan_id) else f"round {plan_id.rpartition('/')[2]}"
    return f"{what} of run {run_name}"
