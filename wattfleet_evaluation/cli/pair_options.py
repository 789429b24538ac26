"""The options that `evaluate duty` and `evaluate interleave` share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wattfleet.errors import InvalidInputError
from wattfleet_evaluation.cli.ranges import parse_range

if TYPE_CHECKING:
    from wattfleet.choosing import ServiceLimits
    from wattfleet.modes import Profile, Task
    from wattfleet_evaluation.corpus_predictions import Fit

DEFAULT_REFERENCE = "agx_orin_resnet18"
"""The shipped reference that strategies transfer from."""

InferenceOption = Annotated[
    Path, typer.Option(help="Answer requests with the workload whose measured modes and batches are in this CSV.")
]
ArrivalOption = Annotated[
    str,
    typer.Option(
        help="Evaluate all arrival rates FIRST:LAST:STEP, in requests a second. Default: 30:120:10.",
        show_default=False,
    ),
]
BudgetsOption = Annotated[
    str,
    typer.Option(help="Evaluate all power budgets FIRST:LAST:STEP, in watts. Default: 10:50:1.", show_default=False),
]
ReferenceOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Let wattfleet transfer from this shipped reference, without the network that is evaluated, or from"
        f" one trained on the corpus in this CSV. Repeatable. Default: {DEFAULT_REFERENCE}.",
        show_default=False,
    ),
]
SeedOption = Annotated[int, typer.Option(help="Set the seed of random draws. Default: 0.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def problems_of(latencies_ms: Sequence[float], arrival_per_s: str, budgets: str) -> list[ServiceLimits]:
    """A problem for each latency, arrival rate and power budget.

    Args:
        latencies_ms: the latency limits, ms.
        arrival_per_s: `--arrival-per-s`.
        budgets: `--budgets`.

    Raises:
        InvalidInputError: a range is invalid.
    """
    from wattfleet.choosing import ServiceLimits

    return [
        ServiceLimits(limit_ms, rate, 1e3 * budget_w)
        for limit_ms in latencies_ms
        for rate in parse_range("--arrival-per-s", arrival_per_s, 10)
        for budget_w in parse_range("--budgets", budgets, 1)
    ]


def require_measurements(measure: int, seed: int, fewest: int) -> None:
    """Check `--measure` and `--seed`.

    Raises:
        InvalidInputError: one is out of range.
    """
    if measure < fewest:
        raise InvalidInputError(f"--measure must be {fewest} or more, not {measure}")
    if seed < 0:
        raise InvalidInputError(f"--seed must be 0 or more, not {seed}")


def require_task(option: str, profile: Profile, task: Task) -> None:
    """Check that the file of an option holds measurements of a task.

    Raises:
        InvalidInputError: it holds measurements of the other task.
    """
    if profile.task is not task:
        raise InvalidInputError(f"{option}: the file holds measurements of {profile.task}: give measurements of {task}")


def fit_named(path: Path, target: Profile, names: Sequence[str] | None) -> Fit:
    """Return the function that fits the predictor to rows of a target, from references without the target's network.

    Args:
        path: the target's file, for errors.
        target: all measured rows in the file.
        names: shipped references, or files of corpora; None for the default.

    Raises:
        InvalidInputError: a reference is unknown, was trained on the target, or is for the other task.
    """
    from wattfleet.modes import board_with_modes, stated_facts
    from wattfleet.prediction import DEFAULT_PREDICTOR, fit_from, predictor_class
    from wattfleet_evaluation.judging.reference_source import find_reference, references_of

    facts = stated_facts(str(path), target)
    sources = [find_reference(name, target) for name in dict.fromkeys(names or [DEFAULT_REFERENCE])]
    known = references_of(sources, DEFAULT_PREDICTOR, board_with_modes(target.modes))
    return lambda profile: fit_from(predictor_class(DEFAULT_PREDICTOR), profile, known, facts)
