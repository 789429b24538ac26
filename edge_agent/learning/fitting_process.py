"""Fits predictors in a child process that runs only while it is needed.

A fit needs scipy, which takes more memory than all the rest of the agent, and the agent idles for days. The process
answers pickled requests one after the other. It ends when its standard input is closed, and therefore also when the
agent is killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edge_agent.learning.fitting import Fitted, FittingHere, OpenFitting
from edge_agent.learning.transfer import Transfer
from edge_agent.profiling.profiled_workload import StoppedError
from wattfleet.common.child_process import (
    ChildEndedError,
    ChildProcess,
    ParentConnection,
    lower_priority,
    parent_connection,
)
from wattfleet.common.logs import start_logging
from wattfleet.core.choosing import SamplingSettings
from wattfleet.core.errors import WattfleetError
from wattfleet.core.modes import ModeArray, Profile

ANSWERS_WITHIN_S = 600.0
"""Time limit for one answer, s. One core at its lowest clock needs about a minute."""


class FittingFailedError(WattfleetError):
    """The fitting process has failed; its message is in the agent's log."""


def fitting_process(
    transfer: Transfer, modes: ModeArray, stopping: threading.Event, answers_within_s: float = ANSWERS_WITHIN_S
) -> OpenFitting:
    """Return a function that opens a fitting in a new process.

    Every request raises the same errors as `FittingHere`, `FittingFailedError` if the process fails, and
    `StoppedError` once the agent stops.

    Args:
        transfer: the reference and the device.
        modes: `[n, 4]` modes of the device.
        stopping: set once the agent stops.
        answers_within_s: time limit for one answer, s.
    """

    @contextmanager
    def open_fitting() -> Iterator[_FittingProcess]:
        try:
            process = ChildProcess(__name__)
        except OSError as error:
            raise FittingFailedError(f"cannot start a process to fit the predictor: {error.strerror}") from None
        with process:
            fitting = _FittingProcess(process, stopping, answers_within_s)
            fitting.begin(transfer, modes)
            yield fitting

    return open_fitting


class _FittingProcess:
    def __init__(self, process: ChildProcess, stopping: threading.Event, answers_within_s: float) -> None:
        self._process = process
        self._stopping = stopping
        self._answers_within_s = answers_within_s

    def begin(self, transfer: Transfer, modes: ModeArray) -> None:
        self._process.send((transfer, modes), self._deadline())

    def fit(self, profile: Profile, measured_modes: int) -> Fitted:
        fitted: Fitted = self._ask("fit", profile, measured_modes)
        return fitted

    def next_modes(self, profile: Profile, settings: SamplingSettings, exclude: ModeArray) -> ModeArray:
        modes: ModeArray = self._ask("next_modes", profile, settings, exclude)
        return modes

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return self._process.ask((method, arguments), self._deadline())
        except ChildEndedError as ended:
            raise FittingFailedError(f"the fitting process {ended}; see its own message in this log") from None

    def _deadline(self) -> Callable[[], None]:
        """Return a check that raises an error once the agent stops or the time for one answer is over."""
        give_up_s = time.monotonic() + self._answers_within_s

        def check() -> None:
            if self._stopping.is_set():
                raise StoppedError
            if time.monotonic() > give_up_s:
                raise FittingFailedError(f"the predictor was not fitted within {self._answers_within_s:g} s")

        return check


def _serve(parent: ParentConnection) -> None:
    requests, fitting = parent.requests(), None
    if (begun := next(requests, None)) is None:
        return
    transfer, modes = begun
    for method, arguments in requests:
        try:
            fitting = fitting or FittingHere(transfer, modes)
            parent.answer(getattr(fitting, method)(*arguments))
        except WattfleetError as error:
            parent.answer(error)


def main() -> None:
    """Serve the agent that started this process."""
    lower_priority()
    start_logging()
    with parent_connection() as parent:
        _serve(parent)


if __name__ == "__main__":
    main()
