"""Handles stop signals: they interrupt a command while it works, but not while it restores what it changed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedBySignal(BaseException):  # noqa: N818 - a request to stop is not an error
    """A signal interrupted the work.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect after this signal."""
        return 128 + self.number


def handled_signals() -> list[signal.Signals]:
    """Return the signals that stop this process. Signals ignored since its start, as with `nohup`, stay ignored."""
    return [number for number in _NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]


class StopSignals:
    """Holds back Ctrl-C, a closed terminal and `systemctl stop`; use `held`, in the main thread."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._interrupts = False

    @classmethod
    @contextmanager
    def held(cls) -> Iterator[StopSignals]:
        """Keep signals from ending the process within this context; only `interrupting` reacts to them."""
        signals = cls()
        before = {number: signal.signal(number, signals._receive) for number in handled_signals()}
        try:
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let the first signal interrupt this block; further ones are ignored.

        Raises:
            StoppedBySignal: a signal arrived in this block or before it.
        """
        self._interrupts = True
        try:
            if self._number is not None:
                raise StoppedBySignal(self._number)
            yield
        finally:
            self._interrupts = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._number is None:
            self._number = number
            if self._interrupts:
                raise StoppedBySignal(number)
