"""What a policy is asked, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from wattfleet.errors import InvalidInputError
from wattfleet.planning.curves import Curves, Mask
from wattfleet.planning.headroom import Headroom
from wattfleet.planning.history import History
from wattfleet.planning.offers import Offer


@dataclass(frozen=True)
class Situation:
    """What a policy knows of the round it is asked for.

    Attributes:
        server_round: its number, from 1.
        offers: the `n` devices that can be taken, by id.
        curves: of these devices, for the epochs that each chosen one trains.
        headroom: of the supplies behind them.
        history: of the run.
        over_selection: share by which more devices are to be taken than a policy wants, so that some may fail.
    """

    server_round: int
    offers: Sequence[Offer]
    curves: Curves
    headroom: Headroom
    history: History
    over_selection: float = 0.0

    def seats(self, count: int | None, among: int) -> int:
        """How many of some devices a round takes: `count` or, if None, half of them, and more by over-selection."""
        wanted = (among + 1) // 2 if count is None else count
        # 20 % more than 5 is 6, though 5 * 1.2 may be a little more than that in binary.
        return min(among, math.ceil(round(wanted * (1 + self.over_selection), 9)))


@dataclass(frozen=True)
class Wish:
    """Whom a policy wants; the plan takes those among them that are done soonest.

    Attributes:
        count: devices in the round.
        eligible: `[n]` devices that may be taken.
        first: `[n]` devices that are to be taken before any other.
        aside: why a device may not be taken, in words, by its index.
        because: why a device is wanted, in words, by its index; where nothing is said, because it is done soonest.
        deadline_s: seconds of training after which a device stops; None where it trains to its end.
    """

    count: int
    eligible: Mask
    first: Mask
    aside: Mapping[int, str] = field(default_factory=dict)
    because: Mapping[int, str] = field(default_factory=dict)
    deadline_s: float | None = None


class Policy(Protocol):
    """Which devices a round takes: a pure function of the situation, so that a plan can be repeated."""

    @property
    def name(self) -> str:
        """As it is written on command lines."""
        ...

    @property
    def counts(self) -> bool:
        """Whether it wants a number of devices, to which over-selection adds; else it takes what it finds best."""
        ...

    def wish(self, situation: Situation) -> Wish:
        """Whom to take."""
        ...


def everyone_of(situation: Situation, count: int | None) -> Wish:
    """Any devices, `count` of them; None for half of them, rounded up."""
    n = len(situation.offers)
    return Wish(situation.seats(count, n), np.ones(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_))


def only(chosen: Mask, because: str | Mapping[int, str], aside: str | Mapping[int, str]) -> Wish:
    """All of some devices.

    Args:
        chosen: `[n]` the devices, one or more.
        because: why these, in words; for all of them or by index.
        aside: why not the others, likewise.
    """

    def said(words: str | Mapping[int, str], devices: Mask) -> Mapping[int, str]:
        return dict.fromkeys(map(int, np.flatnonzero(devices)), words) if isinstance(words, str) else words

    return Wish(
        int(chosen.sum()),
        chosen,
        np.zeros(len(chosen), dtype=np.bool_),
        aside=said(aside, ~chosen),
        because=said(because, chosen),
    )


def require_count(count: int | None) -> None:
    """Make sure that a number of devices is one.

    Raises:
        InvalidInputError: it is below 1.
    """
    if count is not None and count < 1:
        raise InvalidInputError(f"a round takes 1 device or more, not {count}")


def require_seed(seed: int) -> None:
    """Make sure that a seed is one.

    Raises:
        InvalidInputError: it is negative.
    """
    if seed < 0:
        raise InvalidInputError(f"a seed is 0 or more, not {seed}")
