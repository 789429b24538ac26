"""What ends `wattfleet simulate`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from wattfleet_simulation.simulate import terminable

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(params=SIGNALS)
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal whose handling is the same after the test as before."""
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_ends_it_as_ctrl_c_does(number: signal.Signals) -> None:
    signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt), terminable():
        os.kill(os.getpid(), number)


def test_a_signal_that_was_ignored_at_the_start_does_not_end_it(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with terminable():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is signal.SIG_IGN
