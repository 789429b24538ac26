"""An app's training on a virtual board."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from wattfleet.modes import Workload
from wattfleet_io.clock import Clock


class SteppedBoard(Protocol):
    """A board whose clock advances only while it trains."""

    @property
    def clock(self) -> Clock:
        """The board's virtual time."""
        ...

    def pace(self, workload: Workload | None) -> None:
        """Switch to another workload."""
        ...

    def stay_warm(self) -> None:
        """Train the next minibatch without a warm-up, although the mode has changed."""
        ...

    def step(self) -> None:
        """Train one minibatch in the current mode."""
        ...

    def run(self, minibatches: int) -> None:
        """Train several minibatches at once."""
        ...


class VirtualTraining:
    """Advances a virtual board by the minibatches that an app trains elsewhere (an `AppTraining`).

    The first minibatch is trained at once, so that observations do not include it. When the mode changes during the
    training, the app's process continues, so there is no further warm-up.

    Args:
        board: the board, in the mode to train in.
        workload: the trained workload; None for the board's built-in workload.
    """

    first_minibatch_observed = False

    def __init__(self, board: SteppedBoard, workload: Workload | None = None) -> None:
        self._board = board
        self._reported = 0
        board.pace(workload)
        board.step()

    def minibatches_ended(self, seconds: Sequence[float], ended: Callable[[int, float], bool]) -> None:
        """Train the reported number of minibatches, each in its current mode; ignore the reported times."""
        for index in range(len(seconds)):
            self._board.stay_warm()
            self._board.step()
            self._reported += 1
            ended(index, self._board.clock.now_s())

    def learned(self, workload: Workload | None) -> None:
        """Use the times of the workload as it is known now."""
        self._board.pace(workload)

    def finish(self, minibatches: int) -> None:
        """Train the minibatches that were not yet reported."""
        self._board.stay_warm()
        self._board.run(max(0, minibatches - self._reported))
