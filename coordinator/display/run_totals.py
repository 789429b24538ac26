"""The totals of a run: its rounds, their time, failures and joules, and the rounds over their budget."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.display.view_values import Values, round_values, run_values
from wattfleet_proto.v1 import view_pb2


def run_totals(view: view_pb2.RunView, rounds: Iterable[view_pb2.RoundView]) -> Values:
    """A run's values with the totals of its rounds.

    Args:
        view: the run.
        rounds: its rounds, without their devices.
    """
    values = [round_values(each) for each in rounds]
    observed = sum(each["observed_trainings"] for each in values)
    joules = [each["training_j"] for each in values if each["training_j"] is not None]
    return {
        **run_values(view),
        "rounds_done": sum(each["wall_s"] is not None for each in values),
        "wall_s": sum(each["wall_s"] or 0.0 for each in values),
        "failed_trainings": sum(len(each["failed"]) for each in values),
        "training_j": sum(joules) if joules else None,
        "rounds_with_energy": len(joules),
        "observed_j": sum(each["observed_j"] or 0.0 for each in values) if observed else None,
        "observed_trainings": observed,
        "trainings": sum(each["devices"] for each in values if not each["unplanned"]),
        "rounds_over_budget": sum(is_over_budget(each) for each in values),
    }


def is_over_budget(round_: Values) -> bool:
    """Whether a round, given as `round_values`, drew more watts than the budget in force at its end."""
    observed_w, trimmed_w = round_["observed_site_w"], round_["trimmed_site_budget_w"]
    budget_w = round_["site_budget_w"] if trimmed_w is None else trimmed_w
    return observed_w is not None and budget_w is not None and observed_w > budget_w
