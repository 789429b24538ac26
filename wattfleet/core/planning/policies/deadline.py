"""The policy `deadline`: as many or as useful devices as can finish by a deadline."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError, NoCandidatesError
from wattfleet.core.planning.curves import Mask, Values, min_makespan
from wattfleet.core.planning.policies.policy import PlanningContext, SelectionRequest, any_devices, only_devices
from wattfleet.core.planning.utility import max_utility

UTILITIES = ("equal", "loss")


@dataclass(frozen=True)
class Deadline:
    """Selects the most devices, or the most useful ones, that can finish by a deadline (FedCS, arXiv 1804.08333).

    Attributes:
        deadline_s: seconds that a round's training may take.
        utility: `equal` selects as many devices as possible. `loss` selects the set with the highest utility, the sum
            of samples times latest loss. A device that never trained gets the highest utility of the others.
    """

    deadline_s: float
    utility: str = "equal"
    name: str = "deadline"
    has_count: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.deadline_s) and self.deadline_s > 0):
            raise InvalidInputError(f"the deadline must be above 0 s, not {self.deadline_s}")
        if self.utility not in UTILITIES:
            raise InvalidInputError(f"unknown utility {self.utility!r}: choose one of {', '.join(UTILITIES)}")

    def request(self, context: PlanningContext) -> SelectionRequest:
        """Request the best set of devices that can meet the deadline.

        Raises:
            InfeasibleBudgetError: no device can meet the deadline within the budgets; the text gives the earliest
                possible one.
            NoCandidatesError: no device could meet it even with more watts.
        """
        curves = context.curves
        step = curves.steps_within(self.deadline_s)
        extra_w = curves.extra_at(step)
        in_time = np.isfinite(extra_w)
        if not len(context.headroom.largest_set(extra_w)):
            return self._any_device(context)
        chosen = self._chosen(context, extra_w)
        fastest_s = curves.fastest_s
        exclusion_reasons = {
            int(k): f"too slow: {fastest_s[k]:.1f} s in its fastest mode, the deadline is {self.deadline_s:g} s"
            for k in np.flatnonzero(~in_time & np.isfinite(fastest_s))
        }
        for k in np.flatnonzero(in_time & ~chosen):
            exclusion_reasons[int(k)] = (
                f"too much power: meeting the deadline needs {extra_w[k]:.1f} W above idle; other devices"
                " make better use of them"
            )
        if not chosen.any():  # no device has any utility, so select the fastest
            return SelectionRequest(1, in_time, np.zeros_like(chosen), exclusion_reasons, deadline_s=self.deadline_s)
        if self.utility == "equal":
            reason = f"in the largest set that meets the deadline of {self.deadline_s:g} s"
        else:
            reason = f"in the most useful set that meets the deadline of {self.deadline_s:g} s"
        return replace(only_devices(chosen, reason, exclusion_reasons), deadline_s=self.deadline_s)

    def _any_device(self, context: PlanningContext) -> SelectionRequest:
        """Request any device if the budgets allow none at any speed, so that planning fails with the missing watts."""
        request = any_devices(context, 1)
        one = min_makespan(context.curves, context.headroom, 1, request.eligible, request.priority)
        if one is not None:
            remedy = f"allow at least {math.ceil(one.limit_s)} s"
            if self.deadline_s < np.min(context.curves.fastest_s):
                raise NoCandidatesError(
                    f"no device can finish within {self.deadline_s:g} s, even in its fastest mode:"
                    f" {remedy} under this budget"
                )
            raise InfeasibleBudgetError(
                f"under the power budget, no device can finish within {self.deadline_s:g} s: {remedy}"
            )
        return request

    def _chosen(self, context: PlanningContext, extra_w: Values) -> Mask:
        chosen = np.zeros(len(extra_w), dtype=np.bool_)
        if self.utility == "equal":
            chosen[context.headroom.largest_set(extra_w)] = True
            return chosen
        utility = [context.history.statistical_utility(offer.device_id) for offer in context.offers]
        most = max((value for value in utility if value is not None), default=1.0) or 1.0
        worth = np.array([most if value is None else value for value in utility])
        return max_utility(extra_w, worth, context.headroom).chosen
