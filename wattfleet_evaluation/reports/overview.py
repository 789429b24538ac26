"""The tables at the top of the page: every method on every file, at one number of modes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from wattfleet_evaluation.reports.cases import CHOICE_MODES
from wattfleet_evaluation.reports.published import Published

Report = Mapping[str, Any]
T = TypeVar("T")


class Overview(NamedTuple):
    """The evaluations of the methods, one column for each target.

    Attributes:
        columns: each target with the reference that is transferred from, the published one where there is a choice.
        errors: for each predictor, its evaluation on every target; None where there is none.
        published: for each published predictor, the paper's errors from equally many modes, likewise.
        choices: for each choice method, its evaluation on every target, likewise.
    """

    columns: list[tuple[str, str]]
    errors: dict[str, list[Report | None]]
    published: dict[str, list[Published | None]]
    choices: dict[str, list[Report | None]]


def overview_of(pairs: Sequence[Report]) -> Overview:
    """The overview of all targets.

    Args:
        pairs: the evaluations of each reference and target, as the page shows them; of the pairs with the same target,
            the first is used.
    """
    first: dict[str, Report] = {}
    for pair in pairs:
        first.setdefault(pair["target"], pair)
    shown = list(enumerate(first.values()))
    return Overview(
        [(pair["target"], pair["reference"]) for _, pair in shown],
        _by_method(len(shown), ((row["name"], k, row) for k, pair in shown for row in pair["intervals"])),
        _by_method(
            len(shown),
            ((one.method, k, one) for k, pair in shown for one in pair["published"] if one.modes == CHOICE_MODES),
        ),
        _by_method(len(shown), ((row["name"], k, row) for k, pair in shown for row in pair["choices"])),
    )


def _by_method(columns: int, cells: Iterable[tuple[str, int, T]]) -> dict[str, list[T | None]]:
    """Arrange the cells in one row for each method; None where a column has no cell."""
    found: dict[str, list[T | None]] = {}
    for method, column, cell in cells:
        row = found.setdefault(method, [None] * columns)
        row[column] = cell
    return found
