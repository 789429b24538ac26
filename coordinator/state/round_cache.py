"""The rounds that the coordinator has at hand; the others are in its store until somebody asks for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coordinator.state.records import RoundRecord, parts_of, run_of
from wattfleet.planning import History

# What was used last stays: rounds of so many devices that were decided on, and the histories of so many runs. Of 10,000
# devices that is three rounds, of 100 three hundred.
_DECISIONS = 30_000
_HISTORIES = 4


class RoundCache:
    """Rounds that were used lately, and of the runs that go on what their earlier rounds come to.

    A round that is let go of has to be stored already, and has to be recalled before anything else is done with it.

    Attributes:
        rounds: those at hand, by plan id; the newest is the last one.
    """

    def __init__(self, rounds: Sequence[RoundRecord] = (), archived: Collection[str] = ()) -> None:
        """Begin with what a store holds.

        Args:
            rounds: oldest first.
            archived: ids of the runs of which rounds are left out.
        """
        self.rounds = {record.plan_id: record for record in rounds}
        self._archived = set(archived)
        # Both in the order in which they were used last.
        self._used = dict.fromkeys(self.rounds)
        self._histories: dict[str, History] = {}

    def copy(self) -> RoundCache:
        """A memory that goes its own way from here."""
        copied = RoundCache()
        copied.rounds, copied._archived = self.rounds.copy(), self._archived.copy()  # noqa: SLF001 - of its own kind
        copied._used, copied._histories = self._used.copy(), self._histories.copy()  # noqa: SLF001
        return copied

    def put(self, record: RoundRecord) -> RoundRecord:
        """A round is new, or has changed."""
        self.rounds[record.plan_id] = record
        self.use(record.plan_id)
        return record

    def round_over(self, record: RoundRecord) -> None:
        """A round is over: what came of it counts in the next one's plan."""
        if record.run_id in self._histories:
            history = self._histories[record.run_id]
            self._histories[record.run_id] = history.after(record.number, parts_of(record.results))

    def use(self, plan_id: str) -> None:
        """A round at hand is looked at."""
        self._used.pop(plan_id, None)
        self._used[plan_id] = None

    def of_run(self, run_id: str) -> list[RoundRecord]:
        """The rounds of a run that are at hand."""
        return [record for record in self.rounds.values() if record.run_id == run_id]

    def history(self, run_id: str) -> History:
        """The rounds of a run that are over; if it is lacked, those at hand."""
        history = self._histories.pop(run_id, None)
        if history is None:
            self.recall_history(run_id, History())
        else:
            self._histories[run_id] = history
        return self._histories[run_id]

    # --- the store ----------------------------------------------------------------------------------------------

    def is_archived(self, run_id: str) -> bool:
        """Whether rounds of a run may be in the store only."""
        return run_id in self._archived

    def lacks(self, plan_id: str) -> bool:
        """Whether a round may be in the store only."""
        return plan_id not in self.rounds and self.is_archived(run_of(plan_id))

    def lacks_history(self, run_id: str) -> bool:
        """Whether rounds that are over may be missing from the history of a run."""
        return run_id not in self._histories and self.is_archived(run_id)

    def recall(self, record: RoundRecord) -> None:
        """Take a round from the store; one that is not lacked stays as it is."""
        if self.lacks(record.plan_id):
            self.rounds = {record.plan_id: record, **self.rounds}
            self.use(record.plan_id)

    def recall_history(self, run_id: str, history: History) -> None:
        """Take the history of a run from the store, with what is newer at hand; one that is at hand stays."""
        if run_id in self._histories:
            return
        for record in self.of_run(run_id):
            if record.wall_s is not None:
                history = history.after(record.number, parts_of(record.results))
        self._histories[run_id] = history

    def dispensable(self, awaited: Collection[str]) -> list[str]:
        """The rounds that can be let go of once they are stored, as others were used since.

        Args:
            awaited: plans in which some device is waited for.
        """
        newest = next(reversed(self.rounds), None)
        found, decisions = [], 0
        for plan_id in reversed(self._used):
            decisions += len(self.rounds[plan_id].plan.decisions)
            if decisions > _DECISIONS and plan_id not in awaited and plan_id != newest:
                found.append(plan_id)
        return found

    def let_go(self, plan_ids: Collection[str]) -> None:
        """Leave rounds to the store, and the histories that were used longest ago."""
        for plan_id in plan_ids:
            self._archived.add(self.rounds.pop(plan_id).run_id)
            del self._used[plan_id]
        for run_id in list(self._histories)[:-_HISTORIES]:
            del self._histories[run_id]

    def run_over(self, run_id: str) -> None:
        """A run is over: no round of it is planned any more."""
        self._histories.pop(run_id, None)

    def forget(self, run_ids: Collection[str]) -> None:
        """Let go of runs for good, as the store has."""
        for plan_id in [record.plan_id for record in self.rounds.values() if record.run_id in run_ids]:
            del self.rounds[plan_id], self._used[plan_id]
        for run_id in run_ids:
            self._archived.discard(run_id)
            self._histories.pop(run_id, None)
