"""What a run does while the coordinator does not answer: wait, end, or train without plans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Literal, get_args

from flwr.common.logger import log

from wattfleet.common.clock import Clock
from wattfleet.common.console import duration_text
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.core.errors import InvalidInputError
from wattfleet.flower.server.errors import PlanningError

OnCoordinatorAway = Literal["wait", "stop", "unplanned"]

_LOG_INTERVAL_S = 600.0
_REMEDY = "Start the coordinator ('wattfleet coordinator serve'), or correct its address in the app"


@dataclass(frozen=True)
class AwayPolicy:
    """What to do while the coordinator does not answer.

    Attributes:
        action: wait until it answers, end the run, or train without plans.
        patience_s: seconds to wait before the run ends; None to wait forever.

    Raises:
        InvalidInputError: the action is unknown, or the patience is not valid.
    """

    action: OnCoordinatorAway = "wait"
    patience_s: float | None = None

    def __post_init__(self) -> None:
        if self.action not in get_args(OnCoordinatorAway):
            raise InvalidInputError(f"on_coordinator_away must be 'wait', 'stop' or 'unplanned', not {self.action!r}")
        if self.patience_s is None:
            return
        if not 0 <= self.patience_s < math.inf:
            raise InvalidInputError(
                f"coordinator_patience_s must be 0 or more and finite, not {self.patience_s}; None waits forever"
            )
        if self.action != "wait":
            raise InvalidInputError(
                "coordinator_patience_s can only be used with on_coordinator_away='wait': leave it out"
            )


class Outage:
    """An outage of the coordinator, as one run sees it: when it began, and what was logged about it."""

    def __init__(self, policy: AwayPolicy, strategy: str, clock: Clock) -> None:
        """Start without an outage.

        Args:
            policy: what to do during one.
            strategy: the wrapped strategy's name, for logs.
            clock: measures how long it lasts.
        """
        self.policy = policy
        self._strategy = strategy
        self._clock = clock
        self._began_s: float | None = None
        self._logged_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that the run may still wait for the coordinator; infinite without a limit."""
        if self.policy.patience_s is None:
            return math.inf
        return max(0.0, self.policy.patience_s - self._lasted_s)

    def continues(self, unreachable: CoordinatorUnreachableError, are_exclusions_known: bool) -> None:
        """Note that the coordinator did not answer, and log it now and then.

        Args:
            unreachable: the failed attempt.
            are_exclusions_known: whether the coordinator has reported which devices must not train.

        Raises:
            PlanningError: the run has to end.
        """
        if self.policy.action == "stop":
            raise PlanningError(
                f"{unreachable}. The coordinator does not answer, and the run ends because of"
                f" on_coordinator_away='stop'. {_REMEDY}, and start the run again"
            ) from None
        now_s = self._clock.now_s()
        if self._began_s is None:
            self._began_s = self._logged_s = now_s
            log(WARNING, "%s. %s", unreachable, self._consequence(are_exclusions_known))
        if self.policy.action == "unplanned":
            return
        if self.left_s <= 0:
            raise PlanningError(
                f"{unreachable}. The coordinator did not answer for {self.policy.patience_s:g} s"
                f" (coordinator_patience_s), so the run ends. {_REMEDY}, and start the run again"
            ) from None
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now_s
            log(WARNING, "still waiting for the coordinator, for %s: %s", duration_text(self._lasted_s), unreachable)

    def end(self, coordinator: str) -> None:
        """Note that the coordinator answers again."""
        if self._began_s is not None:
            words = duration_text(self._lasted_s)
            log(INFO, "the coordinator at %s is back after %s: rounds are planned again", coordinator, words)
        self._began_s = None

    @property
    def _lasted_s(self) -> float:
        return 0.0 if self._began_s is None else self._clock.now_s() - self._began_s

    def _consequence(self, are_exclusions_known: bool) -> str:
        if self.policy.action == "wait":
            return (
                f"The run waits, and no device trains, until the coordinator answers. {_REMEDY}. PowerAware's"
                " on_coordinator_away can stop the run or train without plans instead."
            )
        who = (
            "every node may train, except those of drained and excluded devices"
            if are_exclusions_known
            else "every node may train, even drained devices, since only the coordinator knows which they are"
        )
        return (
            f"Training continues with plain {self._strategy}, and NO BUDGET IS KEPT: {who}. Each device trains in its"
            f" current power mode. {_REMEDY}; rounds are planned again once it answers."
        )
