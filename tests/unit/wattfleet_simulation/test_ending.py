"""What ends `wattfleet simulate`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.fakes.polling import until
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


def test_a_signal_during_a_call_of_grpc_ends_it_once_the_call_has_ended(number: signal.Signals) -> None:
    signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    ended: list[bool] = []
    scope = {"__name__": "grpc._channel", "send": lambda: os.kill(os.getpid(), number)}
    exec("def call():\n    send()\n    return True", scope)
    with pytest.raises(KeyboardInterrupt), terminable():
        ended.append(scope["call"]())  # type: ignore[operator]
        until(lambda: False)
    assert ended == [True], "an exception in it would leave gRPC's locks held"


def test_a_signal_that_was_ignored_at_the_start_does_not_end_it(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with terminable():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is signal.SIG_IGN
