"""How often a SuperNode polls the SuperLink for a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from wattfleet_io.clock import Clock

FLOWER_POLL_S = 3.0
"""The pause between two requests of Flower's own SuperNode."""

_WAITED_SHARE = 0.05
_REQUEST_SHARE = 0.1

Received = TypeVar("Received")


class Receiver(Generic[Received]):
    """Polls for a message until there is one.

    The pause between two requests is 5 % of the time waited so far, so that a message is late by at most this share. It
    is at least `poll_s`, and at most Flower's 3 s. Requests take at most about a tenth of the time, so that a busy
    SuperLink gets fewer requests.
    """

    def __init__(self, receive: Callable[[], Received | None], poll_s: float, clock: Clock) -> None:
        """Wrap Flower's request.

        Args:
            receive: sends one request; returns the message, or None if there is none.
            poll_s: seconds of the shortest pause.
            clock: measures the waiting.
        """
        self._receive = receive
        self._poll_s = poll_s
        self._clock = clock

    def __call__(self) -> Received:
        """Wait for a message."""
        began_s = self._clock.now_s()
        while True:
            asked_s = self._clock.now_s()
            if (received := self._receive()) is not None:
                return received
            now_s = self._clock.now_s()
            pause_s = max(self._poll_s, _WAITED_SHARE * (now_s - began_s), (now_s - asked_s) / _REQUEST_SHARE)
            self._clock.sleep_s(min(pause_s, max(FLOWER_POLL_S, self._poll_s)))
