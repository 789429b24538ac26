"""Runs in the test's own process the computations for which an agent starts low-priority processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from edge_agent.learning.fitting import Fitted, FittingHere
from edge_agent.learning.transfer import Transfer
from wattfleet.duties import ModesWithDuty, keep_duty
from wattfleet.modes import ModeArray, Profile
from wattfleet.prediction import Predictor


def fitting_here(
    transfer: Transfer, modes: ModeArray, stopping: threading.Event, answers_within_s: float
) -> Callable[[], nullcontext[FittingHere]]:
    """Replaces `fitting_process`, so that no process is started for each round."""
    fitting = FittingHere(transfer, modes)
    return lambda: nullcontext(fitting)


class FittingOnce(FittingHere):
    """Fits to the first profile only, for tests that train often."""

    _first: Predictor | None = None
    _first_fit: Fitted | None = None

    def fit(self, profile: Profile, measured_modes: int) -> Fitted:
        """The first fit."""
        if self._first_fit is None:
            self._first_fit = super().fit(profile, measured_modes)
        return self._first_fit

    def _fitted(self, profile: Profile) -> Predictor:
        if self._first is None:
            self._first = super()._fitted(profile)
        return self._first


def keep_duty_here(is_stopping: Callable[[], bool], *arguments: Any) -> ModesWithDuty:
    """Replaces `keep_duty_in_process`."""
    return keep_duty(*arguments)
