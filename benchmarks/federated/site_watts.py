"""Tracks the watts of a site over time while trainings begin and end independently."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Draw:
    """The power that a training draws above its device's idle power.

    Attributes:
        since_s: when its plan was made. From this time its watts are set aside and count as drawn.
        steady_s: when its first minibatch was done. Its energy is counted from this time, as in rounds.
        until_s: when it ended.
        planned_w: watts above idle power that the plan set aside.
        true_w: watts above idle power without noise.
        observed_w: the same as reported by the device's agent.
    """

    since_s: float
    steady_s: float
    until_s: float
    planned_w: float
    true_w: float
    observed_w: float

    def energy_kj(self, begin_s: float, end_s: float) -> float:
        """Return the energy above idle power between two times."""
        return self.observed_w * max(0.0, min(self.until_s, end_s) - max(self.steady_s, begin_s)) / 1e3


@dataclass(frozen=True)
class Stretch:
    """The energy and the maximum watts of a site in an interval of time.

    Attributes:
        training_kj: energy of all devices above idle power.
        planned_w: maximum watts of the site that were set aside.
        true_w: maximum watts of the site, without noise.
        observed_w: the same as reported by the agents.
    """

    training_kj: float
    planned_w: float
    true_w: float
    observed_w: float


class SiteWatts:
    """The watts of a site.

    Args:
        idle_w: watts of all devices while none trains.
    """

    def __init__(self, idle_w: float) -> None:
        self._idle_w = idle_w
        self._draws: list[Draw] = []
        self._from_s = 0.0

    def add(self, draw: Draw) -> None:
        """Add a training whose plan is made at the end of the last interval, or later."""
        self._draws.append(draw)

    def until(self, end_s: float) -> Stretch:
        """Return the interval from the end of the last one to the given time."""
        begin_s, self._from_s = self._from_s, end_s
        training_kj = sum(draw.energy_kj(begin_s, end_s) for draw in self._draws)
        # The watts rise only when a plan is made, so the maximum is at such a time.
        moments = {begin_s, *(draw.since_s for draw in self._draws if begin_s < draw.since_s < end_s)}
        above_w = [
            np.sum(
                [
                    (draw.planned_w, draw.true_w, draw.observed_w)
                    for draw in self._draws
                    if draw.since_s <= moment < draw.until_s
                ],
                axis=0,
            )
            + np.zeros(3)
            for moment in moments
        ]
        self._draws = [draw for draw in self._draws if draw.until_s > end_s]
        return Stretch(training_kj, *(self._idle_w + np.max(above_w, axis=0)).tolist())
