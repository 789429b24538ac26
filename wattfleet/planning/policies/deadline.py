"""As much as can be done by a deadline."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from wattfleet.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.planning.curves import Mask, Values
from wattfleet.planning.makespan import min_makespan
from wattfleet.planning.policies.policy import Situation, Wish, everyone_of, only
from wattfleet.planning.utility import max_utility

UTILITIES = ("equal", "loss")


@dataclass(frozen=True)
class Deadline:
    """The most devices, or the most useful ones, that can be done by a deadline (FedCS, arXiv 1804.08333).

    Attributes:
        deadline_s: seconds that a round's training may take.
        utility: `equal` takes as many devices as possible; `loss` those that there is the most to learn from, by
            their samples times their latest loss, and devices that never trained as much as the best of the others.
    """

    deadline_s: float
    utility: str = "equal"
    name: str = "deadline"
    counts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.deadline_s) and self.deadline_s > 0):
            raise InvalidInputError(f"a deadline must be above zero seconds, not {self.deadline_s}")
        if self.utility not in UTILITIES:
            raise InvalidInputError(f"unknown utility {self.utility!r}: choose one of {', '.join(UTILITIES)}")

    def wish(self, situation: Situation) -> Wish:
        """The best set by the deadline.

        Raises:
            InfeasibleBudgetError: no device can be done by then; the text says by when one can.
        """
        curves = situation.curves
        step = curves.steps_within(self.deadline_s)
        extra_w = curves.extra_at(step)
        in_time = np.isfinite(extra_w)
        if not len(situation.headroom.carried(extra_w)):
            return self._anyone(situation)
        chosen = self._chosen(situation, extra_w)
        fastest_s = curves.fastest_s
        aside = {
            int(k): f"too slow: {fastest_s[k]:.1f} s in its fastest mode, the deadline is {self.deadline_s:g} s"
            for k in np.flatnonzero(~in_time & np.isfinite(fastest_s))
        }
        for k in np.flatnonzero(in_time & ~chosen):
            aside[int(k)] = (
                f"too hungry: done by the deadline it would take {extra_w[k]:.1f} W above idling,"
                " which others make better use of"
            )
        if not chosen.any():  # there is nothing to learn from any: the soonest done
            return Wish(1, in_time, np.zeros_like(chosen), aside, deadline_s=self.deadline_s)
        if self.utility == "equal":
            because = f"among the most devices that can be done within {self.deadline_s:g} s"
        else:
            because = f"among those that there is the most to learn from within {self.deadline_s:g} s"
        return replace(only(chosen, because, aside), deadline_s=self.deadline_s)

    def _anyone(self, situation: Situation) -> Wish:
        """Any devices, where the watts carry none in whatever time; the plan then says how many would.

        Raises:
            InfeasibleBudgetError: the watts carry one, but later.
        """
        wish = everyone_of(situation, 1)
        one = min_makespan(situation.curves, situation.headroom, 1, wish.eligible, wish.first)
        if one is not None:
            raise InfeasibleBudgetError(
                f"the watts carry no device that is done within {self.deadline_s:g} s: allow at least"
                f" {math.ceil(one.limit_s)} s"
            )
        return wish

    def _chosen(self, situation: Situation, extra_w: Values) -> Mask:
        chosen = np.zeros(len(extra_w), dtype=np.bool_)
        if self.utility == "equal":
            chosen[situation.headroom.carried(extra_w)] = True
            return chosen
        utility = [situation.history.statistical_utility(offer.device_id) for offer in situation.offers]
        most = max((value for value in utility if value is not None), default=1.0) or 1.0
        worth = np.array([most if value is None else value for value in utility])
        return max_utility(extra_w, worth, situation.headroom).chosen
