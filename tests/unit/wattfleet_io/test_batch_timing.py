"""Timing minibatches from inside a training loop."""

from wattfleet_io.wrapped_loader import BatchTimes, timed_batches


class FakeClock:
    """A clock that only moves when a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        return self.now


def test_fetching_and_computing_are_timed_apart() -> None:
    clock = FakeClock()
    times: list[BatchTimes] = []

    def loader():
        for batch in "ab":
            clock.now += 0.25
            yield batch

    def finish_step() -> None:
        clock.now += 0.5

    for _ in timed_batches(loader(), lambda: True, times.append, finish_step, clock.now_s):
        clock.now += 1.0

    assert times == [BatchTimes(250.0, 1500.0, 1.75), BatchTimes(250.0, 1500.0, 3.5)]


def test_batches_pass_untimed_once_timing_is_off() -> None:
    times: list[BatchTimes] = []

    batches = list(timed_batches(range(4), lambda: len(times) < 2, times.append, lambda: None))

    assert batches == [0, 1, 2, 3]
    assert len(times) == 2
