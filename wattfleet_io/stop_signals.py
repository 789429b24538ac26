"""Signals that end a command: heeded while it works, and only noted while it puts back what it changed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedBySignal(BaseException):  # noqa: N818 - no error: someone wanted it to end
    """A signal ended the work.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended."""
        return 128 + self.number


def heeded_signals() -> list[signal.Signals]:
    """Those that end this process; what it was started to ignore, as by `nohup`, it goes on to ignore."""
    return [number for number in _NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]


class StopSignals:
    """Ctrl-C, a terminal that closes, and what `systemctl stop` sends; use `held`, in the main thread."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._interrupts = False

    @classmethod
    @contextmanager
    def held(cls) -> Iterator[StopSignals]:
        """Let none of them end the process until the block ends; only `interrupting` heeds them."""
        signals = cls()
        before = {number: signal.signal(number, signals._noted) for number in heeded_signals()}
        try:
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Work that the first of them interrupts, wherever it is; any others are too late to matter.

        Raises:
            StoppedBySignal: there was one, in the block or before it.
        """
        self._interrupts = True
        try:
            if self._number is not None:
                raise StoppedBySignal(self._number)
            yield
        finally:
            self._interrupts = False

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if self._number is None:
            self._number = number
            if self._interrupts:
                raise StoppedBySignal(number)
