"""How often a SuperNode polls for a message."""

from __future__ import annotations

import pytest

from tests.fakes.flower_in_process import RecordingClock
from wattfleet_flower.supernode.fork_server import Receiver


class SuperLink:
    """A SuperLink that has a message after `after_s`, and takes `answers_in_s` for every answer."""

    def __init__(self, after_s: float, answers_in_s: float = 0.0) -> None:
        self.clock = RecordingClock()
        self.requests = 0
        self._from_s = self.clock.now_s() + after_s
        self._answers_in_s = answers_in_s

    def receive(self) -> str | None:
        self.requests += 1
        self.clock.advance(self._answers_in_s)
        return "message" if self.clock.now_s() >= self._from_s else None


@pytest.mark.parametrize(("after_s", "late_s"), [(0.0, 0.0), (1.0, 0.25), (30.0, 1.5), (3600.0, 3.0)])
def test_a_message_is_late_by_5_percent_of_the_wait_at_most(after_s: float, late_s: float) -> None:
    superlink = SuperLink(after_s)
    began_s = superlink.clock.now_s()
    assert Receiver(superlink.receive, 0.25, superlink.clock)() == "message"
    assert 0.0 <= superlink.clock.now_s() - began_s - after_s <= late_s + 1e-6


def test_an_idle_supernode_asks_as_rarely_as_flowers() -> None:
    superlink = SuperLink(24 * 3600.0)
    Receiver(superlink.receive, 0.25, superlink.clock)()
    assert superlink.requests < 1.01 * 24 * 3600 / 3.0


def test_a_busy_superlink_is_asked_less_often() -> None:
    superlink = SuperLink(20.0, answers_in_s=0.2)
    Receiver(superlink.receive, 0.25, superlink.clock)()
    assert min(superlink.clock.slept) >= 2.0


def test_a_longer_pause_than_flowers_is_kept() -> None:
    superlink = SuperLink(100.0)
    Receiver(superlink.receive, 10.0, superlink.clock)()
    assert set(superlink.clock.slept) == {10.0}
