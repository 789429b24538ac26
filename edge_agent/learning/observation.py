"""The observation of one round's training, from which the predictor learns."""

from __future__ import annotations

from dataclasses import dataclass

from edge_agent.profiling.journal_records import require_above_zero
from wattfleet.modes import PowerMode


@dataclass(frozen=True)
class Observed:
    """The observation of a round's training.

    Attributes:
        mode: the mode in force.
        epoch_s: seconds per epoch at the pace of steady minibatches, without the warm-up.
        power_w: mean power while training, without the warm-up, W.
        is_shared: whether the training waited for requests that the device answered meanwhile. If so, its time and
            power are not those of a training alone, which the predictor needs.
        first_minibatch_s: seconds from the start until the first minibatch had ended, with the app's preparations; None
            if the app has not reported it.

    Raises:
        InvalidInputError: the time or the power is not finite and above 0.
    """

    mode: PowerMode
    epoch_s: float
    power_w: float
    is_shared: bool = False
    first_minibatch_s: float | None = None

    def __post_init__(self) -> None:
        require_above_zero(epoch_s=self.epoch_s, power_w=self.power_w)
