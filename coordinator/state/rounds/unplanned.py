"""Rounds that trained without a plan: which exist, and the checks of a Flower server's report of one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from coordinator.state.names import require_metrics
from coordinator.state.records import DeviceResult, UnplannedRound
from wattfleet.errors import InvalidInputError

LONGEST_S = 366 * 24 * 3600.0
"""A reported round that began longer ago, or took longer, is refused as a mistake."""


class UnplannedRounds:
    """The numbers of the rounds without a plan, by run; the rounds themselves are only in the store."""

    def __init__(self, known: Iterable[tuple[str, int]] = ()) -> None:
        """Start from what a store holds.

        Args:
            known: run id and round number of each.
        """
        self._numbers: dict[str, set[int]] = {}
        for run_id, number in known:
            self._numbers.setdefault(run_id, set()).add(number)

    def __len__(self) -> int:
        """The number of rounds without a plan in all runs."""
        return sum(map(len, list(self._numbers.values())))

    def of_run(self, run_id: str) -> list[int]:
        """The numbers of a run's rounds without a plan, in order."""
        return sorted(self._numbers.get(run_id, ()))

    def is_known(self, run_id: str, number: int) -> bool:
        """Whether a round was reported and stored."""
        return number in self._numbers.get(run_id, ())

    def stored(self, record: UnplannedRound) -> None:
        """Record a round that is on disk."""
        self._numbers.setdefault(record.run_id, set()).add(record.number)

    def remove_runs(self, run_ids: Collection[str]) -> None:
        """Remove the rounds of runs that were deleted from the store."""
        for run_id in run_ids:
            self._numbers.pop(run_id, None)


def reported(
    run_id: str,
    number: int,
    now: datetime,
    began_ago_s: float,
    wall_s: float,
    results: Sequence[DeviceResult],
    metrics: Mapping[str, float],
) -> UnplannedRound:
    """Build the record of a round without a plan from its Flower server's report.

    Args:
        run_id: Flower's run.
        number: from 1.
        now: the date and time of the report.
        began_ago_s: when the round began, in seconds before the report.
        wall_s: duration at the Flower server in seconds.
        results: results of the nodes that were sent a training.
        metrics: what the strategy reported.

    Raises:
        InvalidInputError: the report is not plausible.
    """
    if number < 1:
        raise InvalidInputError(f"rounds are numbered from 1, not {number}")
    if not 0 <= began_ago_s <= LONGEST_S:
        raise InvalidInputError(
            f"a round must have begun 0 to {LONGEST_S:,.0f} s before it is reported, not {began_ago_s} s"
        )
    if not 0 <= wall_s <= LONGEST_S:
        raise InvalidInputError(f"a round's duration must be 0 to {LONGEST_S:,.0f} s, not {wall_s} s")
    require_metrics(run_id, number, metrics)
    return UnplannedRound(run_id, number, now - timedelta(seconds=began_ago_s), wall_s, tuple(results), dict(metrics))
