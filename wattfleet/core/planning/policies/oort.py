"""The policy `oort`: devices with a high statistical utility, unless they are slow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning.curves import Indices, Values
from wattfleet.core.planning.history import History
from wattfleet.core.planning.policies.policy import (
    PlanningContext,
    SelectionRequest,
    only_devices,
    require_count,
    require_seed,
)

# The paper's settings (section 7.1). Where the paper gives none, those of its published implementation.
_EXPLORATION, _MIN_EXPLORATION, _EXPLORATION_DECAY = 0.9, 0.2, 0.98
_PENALTY = 2.0
_CUTOFF = 0.95
_CLIPPED_AT = 0.95
_CONFIDENCE = 0.1
_PACER_WINDOW = 20
_PACER_STEP = 0.1


@dataclass(frozen=True)
class Oort:
    """Guided selection by statistical times system utility, with exploration and a pacer (arXiv 2010.06081).

    A device's utility is its samples times its latest loss, plus a bonus that grows while it is not selected. If the
    device takes longer than the preferred duration, its utility is divided by the square of the ratio. The preferred
    duration is a quantile of the devices' times. It is raised whenever the utility of the last 20 rounds is below that
    of the 20 rounds before. A share of every round, falling from 90 to 20 %, explores devices that never trained.
    Faster ones are more likely to be drawn.

    Attributes:
        count: number of devices in a round; None for half the fleet, rounded up.
        quantile: initial quantile of the devices' times for the preferred duration.
        seed: seed of the draws.
    """

    count: int | None = None
    quantile: float = 0.5
    seed: int = 0
    name: str = "oort"
    has_count: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count(self.count)
        require_seed(self.seed)
        if not 0 <= self.quantile <= 1:
            raise InvalidInputError(f"the quantile of the devices' times must be 0 to 1, not {self.quantile}")

    def request(self, context: PlanningContext) -> SelectionRequest:
        """Request a draw of devices with high utility and of unexplored devices."""
        n = len(context.offers)
        count = context.places(self.count, n)
        draw = np.random.default_rng([self.seed, context.server_round])
        known = np.array([offer.device_id in context.history.latest for offer in context.offers], dtype=np.bool_)
        able = np.isfinite(context.curves.fastest_s)
        explored, unexplored = np.flatnonzero(known & able), np.flatnonzero(~known & able)
        exploration = max(_MIN_EXPLORATION, _EXPLORATION * _EXPLORATION_DECAY ** (context.server_round - 1))
        exploring = min(len(unexplored), max(round(exploration * count), count - len(explored)))
        picked = np.zeros(n, dtype=np.bool_)
        picked[_drawn(draw, unexplored, 1.0 / context.curves.fastest_s[unexplored], exploring)] = True
        reasons = {int(k): "drawn for exploration" for k in np.flatnonzero(picked)}
        exploiting = min(len(explored), count - exploring)
        if exploiting:
            utility = self._utility(context, explored)
            cutoff = _CUTOFF * np.sort(utility)[-exploiting]
            good = utility >= cutoff
            picked[_drawn(draw, explored[good], utility[good], exploiting)] = True
        reasons |= {int(k): "drawn for its high utility" for k in np.flatnonzero(picked) if k not in reasons}
        return only_devices(picked, reasons, "not drawn, neither for utility nor for exploration")

    def _utility(self, context: PlanningContext, devices: Indices) -> Values:
        """`[len(devices)]` utility of devices that have trained before."""
        history = context.history
        ids = [context.offers[k].device_id for k in devices]
        statistical = np.array([history.statistical_utility(device_id) or 0.0 for device_id in ids])
        scale = float(np.quantile(statistical, _CLIPPED_AT)) or 1.0
        waited = np.array([history.latest[device_id][0] for device_id in ids], dtype=np.float64)
        bonus = np.sqrt(_CONFIDENCE * math.log(max(2, context.server_round)) / waited)
        preferred_s = float(np.quantile(context.curves.fastest_s[devices], self._pace(history)))
        slowdown = np.maximum(1.0, context.curves.fastest_s[devices] / preferred_s)
        return np.asarray((np.minimum(statistical, scale) / scale + bonus) / slowdown**_PENALTY)

    def _pace(self, history: History) -> float:
        """The quantile of the preferred duration: one step higher for each window with less utility than the last."""
        utility = [past.utility for past in history.rounds]
        windows = [sum(utility[k : k + _PACER_WINDOW]) for k in range(0, len(utility), _PACER_WINDOW)]
        if len(utility) % _PACER_WINDOW:
            windows = windows[:-1]
        return min(1.0, self.quantile + _PACER_STEP * _falls(windows))


def _falls(values: Sequence[float]) -> int:
    return sum(later < earlier for earlier, later in zip(values, values[1:], strict=False))


def _drawn(draw: np.random.Generator, devices: Indices, weight: Values, count: int) -> Indices:
    """Draw some of the devices with probabilities in proportion to their weights."""
    if count == 0:
        return devices[:0]
    chances = np.maximum(weight, 1e-12)
    return np.asarray(draw.choice(devices, count, replace=False, p=chances / chances.sum()))
