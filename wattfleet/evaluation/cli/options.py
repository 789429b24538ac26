"""What commands of the evaluation share: tables of figures, ranges and pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wattfleet.core.errors import InvalidInputError

if TYPE_CHECKING:
    from wattfleet.core.choosing import ServiceLimits
    from wattfleet.core.modes import Profile, Task
    from wattfleet.evaluation.methods import Fit


# --- Figures table ----------------------------------------------------------------------------------------------------
# Figures as a table of two columns.


def print_figures(figures: Mapping[str, object], title: str) -> None:
    """Print figures, and the parts of those that have several."""
    from rich.console import Console

    from wattfleet.common.tables import FittingTable, columns, numbers, texts

    table = FittingTable(columns(texts("figure"), numbers("value")), title=title, has_lines=True)
    for name, value in figures.items():
        parts = value if isinstance(value, Mapping) else {"": value}
        for part, number in parts.items():
            shown = f"{number:g}" if isinstance(number, (int, float)) else str(number or "-")
            table.add(f"{name} {part}".strip().replace("_", " "), shown)
    Console().print(table)


# --- Ranges -----------------------------------------------------------------------------------------------------------
# Ranges of numbers in options: FIRST:LAST:STEP.

_MAX_NUMBERS = 10_000


def parse_range(option: str, text: str, step: float) -> list[float]:
    """The numbers from `FIRST:LAST:STEP` or `FIRST:LAST`, both ends included; a single number is one value.

    Args:
        option: the option's name, for errors.
        text: what was given.
        step: the step, if none is stated.

    Raises:
        InvalidInputError: the text has another form, a number is not finite and above 0, the last is below the first,
            or there are more than 10,000 numbers.
    """
    parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or not all(0 < number < math.inf for number in numbers):
        raise InvalidInputError(f"{option}: invalid range {text!r}: give FIRST:LAST:STEP, such as 30:120:10")
    first, last = numbers[0], numbers[-1] if len(numbers) == 1 else numbers[1]
    step = numbers[2] if len(numbers) == 3 else step
    if last < first:
        raise InvalidInputError(f"{option}: the range {text!r} ends below its start: give the lower number first")
    # A rounding error must not leave out the last number.
    steps = (last - first) / step + 1e-9
    if steps >= _MAX_NUMBERS:
        raise InvalidInputError(f"{option}: the range {text!r} has too many numbers: give at most {_MAX_NUMBERS:,}")
    return [round(first + number * step, 9) for number in range(math.floor(steps) + 1)]


# --- Pair options -----------------------------------------------------------------------------------------------------
# The options that `evaluate duty` and `evaluate interleave` share.

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
    from wattfleet.core.choosing import ServiceLimits

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
    from wattfleet.core.modes import board_with_modes, stated_facts
    from wattfleet.core.prediction import DEFAULT_PREDICTOR, fit_from, predictor_class
    from wattfleet.evaluation.judging.sources import find_reference, references_of

    facts = stated_facts(str(path), target)
    sources = [find_reference(name, target) for name in dict.fromkeys(names or [DEFAULT_REFERENCE])]
    known = references_of(sources, DEFAULT_PREDICTOR, board_with_modes(target.modes))
    return lambda profile: fit_from(predictor_class(DEFAULT_PREDICTOR), profile, known, facts)
