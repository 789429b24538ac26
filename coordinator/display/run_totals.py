"""The totals of a run: its rounds, their time, failures and joules, and the rounds over their budget."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.display.view_values import Values, round_values, run_values
from wattfleet_io.console import count_of, energy_text
from wattfleet_proto.v1 import view_pb2


def run_totals(view: view_pb2.RunView, rounds: Iterable[view_pb2.RoundView]) -> Values:
    """A run's values with the totals of its rounds.

    Args:
        view: the run.
        rounds: its rounds, without their devices.
    """
    values = [round_values(each) for each in rounds]
    joules = [each["training_j"] for each in values if each["training_j"] is not None]
    return {
        **run_values(view),
        "rounds_done": sum(each["wall_s"] is not None for each in values),
        "wall_s": sum(each["wall_s"] or 0.0 for each in values),
        "failed_trainings": sum(len(each["failed"]) for each in values),
        "training_j": sum(joules) if joules else None,
        "observed_trainings": sum(each["observed_trainings"] for each in values),
        "trainings": sum(each["devices"] for each in values if not each["unplanned"]),
        "rounds_over_budget": sum(is_over_budget(each) for each in values),
    }


ENERGY_NOTE = "*: not all trainings were observed"
"""Explains the mark of `energy_words` below a table."""


def is_in_part(values: Values) -> bool:
    """Whether the energy of a run or a round, given as its values, covers only some of its trainings."""
    trainings: int = values["trainings"] if "trainings" in values else values["devices"]
    return values["training_j"] is not None and values["observed_trainings"] < trainings


def energy_words(values: Values) -> str:
    """The energy of a run or a round for a table, such as "12.5 kJ", or "9.8 kJ*" if it covers only some trainings."""
    return energy_text(values["training_j"]) + ("*" if is_in_part(values) else "")


def trainings_words(observed: int, trainings: int) -> str:
    """The trainings that an energy covers, such as "9 trainings", or "7 of 9 trainings" if not all were observed."""
    all_of_them = count_of(trainings, "training")
    return all_of_them if observed >= trainings else f"{observed:,} of {all_of_them}"


def is_over_budget(round_: Values) -> bool:
    """Whether a round, given as `round_values`, drew more watts than the budget in force at its end."""
    observed_w, trimmed_w = round_["observed_site_w"], round_["trimmed_site_budget_w"]
    budget_w = round_["site_budget_w"] if trimmed_w is None else trimmed_w
    return observed_w is not None and budget_w is not None and observed_w > budget_w
