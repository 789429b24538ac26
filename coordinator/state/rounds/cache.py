"""A cache of rounds in memory; all others are in the store only."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coordinator.state.records import RoundRecord, parts_of, run_of
from wattfleet.planning import History

# Limits of the cache; the least recently used entries are evicted first. This many decisions are three rounds of 10,000
# devices, or three hundred rounds of 100.
_DECISIONS = 30_000
_HISTORIES = 4


class RoundCache:
    """The most recently used rounds, and the histories of the runs that were planned last.

    A round must be in the store before it is evicted, and must be restored before it is used again.

    Attributes:
        rounds: the cached rounds by plan id; the newest round is the last one.
    """

    def __init__(self, rounds: Sequence[RoundRecord] = (), archived: Collection[str] = ()) -> None:
        """Start from what a store holds.

        Args:
            rounds: oldest first.
            archived: ids of the runs that have rounds only in the store.
        """
        self.rounds = {record.plan_id: record for record in rounds}
        self._archived = set(archived)
        # Both are in order of use, least recent first.
        self._used = dict.fromkeys(self.rounds)
        self._histories: dict[str, History] = {}

    def put(self, record: RoundRecord) -> RoundRecord:
        """Cache a round that is new or has changed."""
        self.rounds[record.plan_id] = record
        self.touch(record.plan_id)
        return record

    def touch(self, plan_id: str) -> None:
        """Mark a cached round as used."""
        self._used.pop(plan_id, None)
        self._used[plan_id] = None

    def of_run(self, run_id: str) -> list[RoundRecord]:
        """The cached rounds of a run, oldest first."""
        return [record for record in self.rounds.values() if record.run_id == run_id]

    def round_finished(self, record: RoundRecord) -> None:
        """Add a finished round to its run's history, which the next plan takes into account."""
        if record.run_id in self._histories:
            history = self._histories[record.run_id]
            self._histories[record.run_id] = history.after(record.number, parts_of(record.results))

    def history(self, run_id: str) -> History:
        """The finished rounds of a run; if its history is missing, only the cached ones."""
        history = self._histories.pop(run_id, None)
        if history is None:
            self.restore_history(run_id, History())
        else:
            self._histories[run_id] = history
        return self._histories[run_id]

    # --- the store ----------------------------------------------------------------------------------------------

    def is_archived(self, run_id: str) -> bool:
        """Whether rounds of a run may be only in the store."""
        return run_id in self._archived

    def is_missing(self, plan_id: str) -> bool:
        """Whether a round may be only in the store."""
        return plan_id not in self.rounds and self.is_archived(run_of(plan_id))

    def is_history_missing(self, run_id: str) -> bool:
        """Whether the history of a run may be only in the store."""
        return run_id not in self._histories and self.is_archived(run_id)

    def restore(self, record: RoundRecord) -> None:
        """Cache a round from the store; a round that is not missing stays as it is."""
        if self.is_missing(record.plan_id):
            self.rounds = {record.plan_id: record, **self.rounds}
            self.touch(record.plan_id)

    def restore_history(self, run_id: str, history: History) -> None:
        """Cache a run's history from the store, plus the cached rounds; a cached history stays as it is."""
        if run_id in self._histories:
            return
        for record in self.of_run(run_id):
            if record.wall_s is not None:
                history = history.after(record.number, parts_of(record.results))
        self._histories[run_id] = history

    def evictable(self, in_flight: Collection[str]) -> list[str]:
        """The rounds beyond the cache's limit, which may be evicted once they are stored.

        Args:
            in_flight: plans that must stay cached, because devices are still committed to them.
        """
        newest = next(reversed(self.rounds), None)
        found, decisions = [], 0
        for plan_id in reversed(self._used):
            decisions += len(self.rounds[plan_id].plan.decisions)
            if decisions > _DECISIONS and plan_id not in in_flight and plan_id != newest:
                found.append(plan_id)
        return found

    def evict(self, plan_ids: Collection[str]) -> None:
        """Remove rounds and the least recently used histories from memory; the store keeps them."""
        for plan_id in plan_ids:
            self._archived.add(self.rounds.pop(plan_id).run_id)
            del self._used[plan_id]
        for run_id in list(self._histories)[:-_HISTORIES]:
            del self._histories[run_id]

    def run_finished(self, run_id: str) -> None:
        """Remove the history of a finished run, because it plans no more rounds."""
        self._histories.pop(run_id, None)

    def remove_runs(self, run_ids: Collection[str]) -> None:
        """Remove runs that were deleted from the store."""
        for plan_id in [record.plan_id for record in self.rounds.values() if record.run_id in run_ids]:
            del self.rounds[plan_id], self._used[plan_id]
        for run_id in run_ids:
            self._archived.discard(run_id)
            self._histories.pop(run_id, None)
