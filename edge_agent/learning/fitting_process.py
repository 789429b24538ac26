"""Fits in a child process that runs only while it is needed.

A fit needs scipy, which takes more memory than the rest of an agent that idles for days. The process answers pickled
requests one after the other. It ends when its standard input is closed, so also when the agent is killed.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from edge_agent.learning.fitting import Fitted, FittingHere, OpenFitting
from edge_agent.learning.transfer import Transfer
from edge_agent.profiling.profiling_plan import StoppedError
from wattfleet.choosing import SamplingSettings
from wattfleet.errors import WattfleetError
from wattfleet.modes import ModeArray, Profile
from wattfleet_io.child_process import python_process

ANSWERS_WITHIN_S = 600.0
"""Default limit on one answer. One core at its lowest clock needs about a minute."""

_POLL_S = 0.1
# An app or a profiled workload may train at the same time, and is being measured.
_NICENESS = 10


class FittingFailedError(WattfleetError):
    """The fitting process has failed; its own message is in the agent's log."""


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
        answers_within_s: limit on one answer, seconds.
    """

    @contextmanager
    def open_fitting() -> Iterator[_FittingProcess]:
        try:
            process = python_process(__name__)
        except OSError as error:
            raise FittingFailedError(f"cannot start a process to fit the predictor: {error.strerror}") from None
        with process:
            fitting = _FittingProcess(process, stopping, answers_within_s)
            try:
                fitting.send((transfer, modes))
                yield fitting
            finally:
                fitting.end()

    return open_fitting


class _FittingProcess:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stopping: threading.Event,
        answers_within_s: float,
    ) -> None:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        self._process = process
        self._requests, self._answers = process.stdin, process.stdout
        self._stopping = stopping
        self._answers_within_s = answers_within_s

    def fit(self, profile: Profile, measured_modes: int) -> Fitted:
        found: Fitted = self._answer("fit", profile, measured_modes)
        return found

    def next_modes(self, profile: Profile, settings: SamplingSettings, exclude: ModeArray) -> ModeArray:
        found: ModeArray = self._answer("next_modes", profile, settings, exclude)
        return found

    def _answer(self, method: str, *arguments: Any) -> Any:
        self.send((method, arguments))
        give_up_s = time.monotonic() + self._answers_within_s
        while not select.select([self._answers], [], [], _POLL_S)[0]:
            self._require_patience(give_up_s)
        try:
            answer = pickle.load(self._answers)
        except (EOFError, pickle.UnpicklingError):
            raise FittingFailedError(
                f"the fitting process ended with exit code {self._process.wait()}; see its own message in this log"
            ) from None
        if isinstance(answer, WattfleetError):
            raise answer
        return answer

    def send(self, request: Any) -> None:
        # A request may be larger than the pipe's buffer, and the process may never read it.
        pipe = self._requests.fileno()
        os.set_blocking(pipe, False)
        left = memoryview(pickle.dumps(request))
        give_up_s = time.monotonic() + self._answers_within_s
        # If the process has ended, reading its answer will tell.
        with suppress(BrokenPipeError):
            while left:
                if select.select([], [pipe], [], _POLL_S)[1]:
                    left = left[os.write(pipe, left) :]
                else:
                    self._require_patience(give_up_s)

    def _require_patience(self, give_up_s: float) -> None:
        if self._stopping.is_set():
            raise StoppedError
        if time.monotonic() > give_up_s:
            raise FittingFailedError(f"the predictor was not fitted within {self._answers_within_s:g} s")

    def end(self) -> None:
        # The process has no state that could be lost.
        self._process.kill()
        with suppress(BrokenPipeError):
            self._requests.close()


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    fitting = None
    transfer, modes = pickle.load(requests)
    while True:
        try:
            method, arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            fitting = fitting or FittingHere(transfer, modes)
            answer = getattr(fitting, method)(*arguments)
        except WattfleetError as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


def give_way() -> None:
    """Lower this process's priority, if it is allowed to; the service's unit does not allow it."""
    with suppress(OSError):
        os.nice(_NICENESS)


def main() -> None:
    """Serve the agent that started this process."""
    give_way()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    # Output of libraries goes to standard error, as answers go to standard output.
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
