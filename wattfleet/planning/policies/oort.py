"""Devices that there is much to learn from, unless they are slow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wattfleet.errors import InvalidInputError
from wattfleet.planning.curves import Indices, Values
from wattfleet.planning.history import History
from wattfleet.planning.policies.policy import Situation, Wish, only, require_count, require_seed

# The paper's own settings (section 7.1), and those of its published implementation where the paper gives none.
_EXPLORATION, _LEAST_EXPLORATION, _EXPLORATION_DECAY = 0.9, 0.2, 0.98
_PENALTY = 2.0
_CUTOFF = 0.95
_CLIPPED_AT = 0.95
_CONFIDENCE = 0.1
_PACER_WINDOW = 20
_PACER_STEP = 0.1


@dataclass(frozen=True)
class Oort:
    """Guided selection: statistical times system utility, with exploration and a pacer (arXiv 2010.06081).

    A device's utility is its samples times its latest loss, plus a bonus that grows while it is left out; where it
    needs longer than the preferred duration, it shrinks by the square of the ratio. The preferred duration is a
    quantile of the devices' times, raised whenever the utility gained in the last 20 rounds falls behind that of the
    20 before. A share of every round, falling from 90 to 20 %, goes to devices that never trained, faster ones more
    likely.

    Attributes:
        count: devices in a round; None takes half the fleet, rounded up.
        quantile: of the devices' times that the preferred duration begins with.
        seed: of the draws.
    """

    count: int | None = None
    quantile: float = 0.5
    seed: int = 0
    name: str = "oort"
    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count(self.count)
        require_seed(self.seed)
        if not 0 <= self.quantile <= 1:
            raise InvalidInputError(f"a quantile of the devices' times is 0 to 1, not {self.quantile}")

    def wish(self, situation: Situation) -> Wish:
        """A draw of useful and of unknown devices."""
        n = len(situation.offers)
        count = situation.seats(self.count, n)
        draw = np.random.default_rng([self.seed, situation.server_round])
        known = np.array([offer.device_id in situation.history.latest for offer in situation.offers], dtype=np.bool_)
        able = np.isfinite(situation.curves.fastest_s)
        explored, unexplored = np.flatnonzero(known & able), np.flatnonzero(~known & able)
        exploration = max(_LEAST_EXPLORATION, _EXPLORATION * _EXPLORATION_DECAY ** (situation.server_round - 1))
        exploring = min(len(unexplored), max(round(exploration * count), count - len(explored)))
        picked = np.zeros(n, dtype=np.bool_)
        picked[_drawn(draw, unexplored, 1.0 / situation.curves.fastest_s[unexplored], exploring)] = True
        because = {int(k): "drawn to be explored" for k in np.flatnonzero(picked)}
        exploiting = min(len(explored), count - exploring)
        if exploiting:
            utility = self._utility(situation, explored)
            cutoff = _CUTOFF * np.sort(utility)[-exploiting]
            good = utility >= cutoff
            picked[_drawn(draw, explored[good], utility[good], exploiting)] = True
        because |= {int(k): "drawn from those of high utility" for k in np.flatnonzero(picked) if k not in because}
        return only(picked, because, "not drawn, by its utility or to be explored")

    def _utility(self, situation: Situation, devices: Indices) -> Values:
        """`[len(devices)]` utility of devices that have trained."""
        history = situation.history
        ids = [situation.offers[k].device_id for k in devices]
        statistical = np.array([history.statistical_utility(device_id) or 0.0 for device_id in ids])
        scale = float(np.quantile(statistical, _CLIPPED_AT)) or 1.0
        waited = np.array([history.latest[device_id][0] for device_id in ids], dtype=np.float64)
        bonus = np.sqrt(_CONFIDENCE * math.log(max(2, situation.server_round)) / waited)
        preferred_s = float(np.quantile(situation.curves.fastest_s[devices], self._pace(history)))
        slowdown = np.maximum(1.0, situation.curves.fastest_s[devices] / preferred_s)
        return np.asarray((np.minimum(statistical / scale, 1.0) + bonus) / slowdown**_PENALTY)

    def _pace(self, history: History) -> float:
        """The quantile that the preferred duration is at: one step up for each window that gained less."""
        gained = [past.gained for past in history.rounds]
        windows = [sum(gained[k : k + _PACER_WINDOW]) for k in range(0, len(gained), _PACER_WINDOW)]
        if len(gained) % _PACER_WINDOW:
            windows = windows[:-1]
        return min(1.0, self.quantile + _PACER_STEP * _falls(windows))


def _falls(values: Sequence[float]) -> int:
    return sum(later < earlier for earlier, later in zip(values, values[1:], strict=False))


def _drawn(draw: np.random.Generator, devices: Indices, weight: Values, count: int) -> Indices:
    """Some of the devices, each as likely as its weight."""
    if count == 0:
        return devices[:0]
    chances = np.maximum(weight, 1e-12)
    return np.asarray(draw.choice(devices, count, replace=False, p=chances / chances.sum()))
