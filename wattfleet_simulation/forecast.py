"""How long a simulation still takes: by usual times at first, then by the times of its own rounds."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class Stage(Enum):
    """A stage of the start, with its usual seconds: a fixed part, and a part for each device."""

    COORDINATOR = ("starting the coordinator", 8.0, 0.0)
    FLOWER = ("starting Flower's SuperLink and SuperNodes", 20.0, 2.0)
    IDLE_POWER = ("measuring idle power", 8.0, 1.0)

    def __init__(self, text: str, fixed_s: float, device_s: float) -> None:
        self.text = text
        self._fixed_s = fixed_s
        self._device_s = device_s

    def usual_s(self, devices: int) -> float:
        """The usual seconds of the stage on two cores that do nothing else."""
        return self._fixed_s + devices * self._device_s


_FIRST_ROUND_AFTER_S = 25.0
"""The usual seconds from the start of a run to its first plan."""
_ROUND_S = 40.0
"""The usual seconds of a round, for each app that trains at the same time."""


class Forecast:
    """Estimates the seconds that a simulation still takes."""

    def __init__(self, devices: int, rounds: int, together: Sequence[int], now_s: float = 0.0) -> None:
        """Begin with the first stage of the start.

        Args:
            devices: the number of boards.
            rounds: the rounds of each run.
            together: how many runs train at the same time, for each group of runs in turn.
            now_s: the time now.
        """
        self._devices = devices
        self._rounds = rounds
        self._together = list(together)
        self._stage: Stage | None = Stage.COORDINATOR
        self._stage_began_s = now_s
        self._group = 0
        self._first_plan_s: float | None = None
        self._done = 0
        self._done_s = now_s
        self._round_s = _ROUND_S  # of a single app

    def begin(self, stage: Stage, now_s: float) -> None:
        """Begin a stage of the start, unless it has begun."""
        if self._stage is not stage:
            self._stage, self._stage_began_s = stage, now_s

    def begin_group(self, index: int, now_s: float) -> None:
        """Begin the runs of a group."""
        self._stage, self._stage_began_s = None, now_s
        self._group, self._first_plan_s, self._done = index, None, 0

    def note_rounds(self, planned_s: Sequence[float], done: int, now_s: float) -> None:
        """Note the rounds of the current run.

        Args:
            planned_s: the predicted seconds of each round that is planned.
            done: how many rounds have ended.
            now_s: the time now.
        """
        if self._first_plan_s is None:
            if not planned_s:
                return
            self._first_plan_s = self._done_s = now_s
            self._round_s = max(self._round_s, planned_s[0] / self._together[self._group])
        if done > self._done:
            self._done, self._done_s = done, now_s
            self._round_s = (now_s - self._first_plan_s) / done / self._together[self._group]

    def left_s(self, now_s: float) -> float:
        """The estimated seconds until the last round has ended."""
        since_s = now_s - self._stage_began_s
        if self._stage is not None:
            stages = list(Stage)
            later = stages[stages.index(self._stage) + 1 :]
            left_s = max(0.0, self._stage.usual_s(self._devices) - since_s)
            left_s += sum(stage.usual_s(self._devices) for stage in later)
            return left_s + self._groups_s(self._together, self._round_s)
        together, later_groups = self._together[self._group], self._together[self._group + 1 :]
        if self._first_plan_s is None:
            left_s = max(0.0, _FIRST_ROUND_AFTER_S - since_s) + self._rounds * together * self._round_s
            return left_s + self._groups_s(later_groups, self._round_s)
        in_round_s = now_s - self._done_s
        rounds_left = self._rounds - self._done
        # A round that takes longer than expected is no exception: the machine may be busy.
        round_s = max(together * self._round_s, in_round_s if rounds_left else 0.0)
        left_s = max(0.0, rounds_left * round_s - in_round_s)
        return left_s + self._groups_s(later_groups, round_s / together)

    def _groups_s(self, groups: Sequence[int], round_s: float) -> float:
        """The seconds of whole groups of runs, given those of a round of a single app."""
        return sum(_FIRST_ROUND_AFTER_S + self._rounds * together * round_s for together in groups)


def left_text(left_s: float) -> str:
    """An estimate of the time that is left, as text with the precision that it has."""
    if left_s < 10:
        return "almost done"
    if left_s < 60:
        return f"about {10 * round(left_s / 10)} s left"
    return f"about {round(left_s / 60)} min left"
