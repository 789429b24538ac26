"""Devices of like speed train together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wattfleet.errors import InvalidInputError
from wattfleet.planning.policies.policy import Situation, Wish, only, require_count, require_seed

_MOST_OF_ITS_TURNS = 2.0


@dataclass(frozen=True)
class Tiers:
    """Every round draws from one tier of devices that are about as fast as each other (TiFL, arXiv 2001.09249).

    The tier is drawn by its devices' mean loss, so that tiers which learn less well are trained more often, but none
    more often than `_MOST_OF_ITS_TURNS` times as often as in turn (TiFL's credits).

    Attributes:
        count: devices in a round; None takes half of a tier, rounded up.
        tiers: number of tiers, at most as many as devices.
        seed: of the draws.
    """

    count: int | None = None
    tiers: int = 5
    seed: int = 0
    name: str = "tiers"
    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count(self.count)
        require_seed(self.seed)
        if self.tiers < 1:
            raise InvalidInputError(f"a fleet has 1 tier or more, not {self.tiers}")

    def wish(self, situation: Situation) -> Wish:
        """Some devices of one tier."""
        n = len(situation.offers)
        by_speed = np.argsort(situation.curves.fastest_s, kind="stable")
        members = [part for part in np.array_split(by_speed, min(self.tiers, n)) if len(part)]
        draw = np.random.default_rng([self.seed, situation.server_round])
        tier = int(draw.choice(len(members), p=self._chances(situation, members)))
        count = situation.seats(self.count, len(members[tier]))
        eligible = np.zeros(n, dtype=np.bool_)
        eligible[draw.choice(members[tier], count, replace=False)] = True
        of = {int(k): number for number, part in enumerate(members, 1) for k in part}
        aside = {
            k: "not drawn from its tier" if of[k] == tier + 1 else f"in tier {of[k]}; it is tier {tier + 1}'s turn"
            for k in map(int, np.flatnonzero(~eligible))
        }
        return only(eligible, f"drawn from tier {tier + 1}, whose turn it is", aside)

    def _chances(self, situation: Situation, members: list[np.ndarray]) -> np.ndarray:
        tier_of = {situation.offers[k].device_id: tier for tier, part in enumerate(members) for k in part}
        turns = Counter[int]()
        for past in situation.history.rounds:
            seen = Counter(tier_of[device_id] for device_id in past.device_ids if device_id in tier_of)
            if seen:
                turns[seen.most_common(1)[0][0]] += 1
        most = _MOST_OF_ITS_TURNS * (sum(turns.values()) / len(members)) + 1
        losses = [
            [loss for k in part if (loss := situation.history.loss_of(situation.offers[k].device_id)) is not None]
            for part in members
        ]
        known = all(losses)
        chances = np.array(
            [
                0.0 if turns[tier] >= most else max(float(np.mean(losses[tier])), 1e-9) if known else 1.0
                for tier in range(len(members))
            ]
        )
        return np.asarray(chances / chances.sum())
