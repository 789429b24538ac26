"""Training until a deadline, with a clock that the batches advance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from wattfleet_flower import profiled, until_deadline
from wattfleet_flower.client.agent_training import Deadline


class App:
    """An app whose batches take time."""

    def __init__(self, deadline_s: float | None, epochs: float = 1.0) -> None:
        self.at_s = 100.0
        self.deadline = Deadline(epochs, deadline_s, lambda: self.at_s)
        self.seen: list[int] = []

    def trains(self, loader: Iterable[int], took_s: Callable[[int], float] = lambda batch: 1.0) -> None:
        for batch in self.deadline.bounded(loader):
            self.seen.append(batch)
            self.at_s += took_s(batch)


def without_length(loader: Iterable[int]) -> Iterator[int]:
    yield from loader


def test_no_batch_is_begun_that_would_end_too_late() -> None:
    app = App(deadline_s=10.5)
    app.trains(range(100))
    assert app.seen == list(range(10))
    assert app.at_s - 100 <= 10.5
    assert (app.deadline.cut, app.deadline.share, app.deadline.epochs_done) == (True, 0.1, 0.1)


def test_what_ends_in_time_is_whole() -> None:
    app = App(deadline_s=5.0)
    app.trains(range(5))
    assert app.seen == list(range(5))
    assert (app.deadline.cut, app.deadline.share, app.deadline.epochs_done) == (False, 1.0, None)


def test_after_the_deadline_later_epochs_give_nothing() -> None:
    app = App(deadline_s=12.0, epochs=3.0)
    for _ in range(3):
        app.trains(range(8))
    assert app.seen == [*range(8), *range(4)]
    assert (app.deadline.share, app.deadline.epochs_done) == (0.5, 1.5)


def test_a_deadline_between_two_epochs_cuts_the_second() -> None:
    app = App(deadline_s=8.0, epochs=2.0)
    app.trains(range(8))
    assert not app.deadline.cut
    app.trains(range(8))
    assert (app.deadline.cut, app.deadline.share, app.deadline.epochs_done) == (True, 0.5, 1.0)


@pytest.mark.parametrize("deadline_s", [1e-9, 0.5])
def test_at_least_one_batch_is_trained(deadline_s: float) -> None:
    app = App(deadline_s=deadline_s)
    app.trains(range(4))
    assert (app.seen, app.deadline.share) == ([0], 0.25)


def test_one_batch_that_stalls_does_not_end_the_training() -> None:
    app = App(deadline_s=40.0)
    app.trains(range(100), lambda batch: 15.0 if batch == 5 else 1.0)
    assert len(app.seen) == 26


def test_fetching_counts_too() -> None:
    app = App(deadline_s=10.0)

    def slow() -> Iterator[int]:
        for batch in range(100):
            app.at_s += 1.0
            yield batch

    app.trains(slow())
    assert len(app.seen) == 5 and app.at_s - 100 <= 10.0


def test_a_loader_without_a_length_has_one_once_an_epoch_has_ended() -> None:
    app = App(deadline_s=12.0, epochs=2.0)
    app.trains(without_length(range(8)))
    app.trains(without_length(range(8)))
    assert (app.deadline.share, app.deadline.epochs_done) == (0.75, 1.5)


def test_the_share_of_a_first_epoch_of_unknown_length_is_unknown() -> None:
    app = App(deadline_s=5.0)
    app.trains(without_length(range(8)))
    assert (app.deadline.cut, app.deadline.share, app.deadline.epochs_done) == (True, None, 0.0)


def test_without_a_deadline_every_batch_is_given() -> None:
    app = App(deadline_s=None)
    app.trains(range(1000))
    assert len(app.seen) == 1000 and app.deadline.share == 1.0


def test_a_loader_that_is_left_early_is_closed() -> None:
    closed = []

    def measures() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    app = App(deadline_s=3.0)
    app.trains(measures())
    assert closed == [True]


def test_outside_of_a_training_the_batches_are_the_loaders() -> None:
    batches = until_deadline(profiled([3, 1, 2]))
    assert [list(batches), list(batches)] == [[3, 1, 2], [3, 1, 2]]
    assert len(batches) == 3  # type: ignore[arg-type]
    assert list(until_deadline(iter([1, 2]))) == [1, 2]
    with pytest.raises(TypeError, match="has no length"):
        len(until_deadline(iter([1, 2])))  # type: ignore[arg-type]
