"""Trust in a device: how well the observations of its latest trainings agree with its own predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wattfleet.core.choosing import MAX_EPOCH_S, MIN_EPOCH_S, Front
from wattfleet.core.errors import ImplausibleError
from wattfleet.core.modes import PowerMode
from wattfleet.core.planning.round_plan import Assignment

# --- Plausibility -----------------------------------------------------------------------------------------------------
# Plausible ranges of what a device reports: watts by kind of board, observations, and a training's results.
#
# The ranges are wide. They reject only values that no device can have, such as milliwatts that are reported as watts.
# A front's own ranges are in `wattfleet/core/choosing/front.py`.


MAX_LOSS = 1e9
"""Largest plausible loss, positive or negative; a larger one counts as not reported."""

MAX_EXAMPLES = 1e9
"""Largest plausible number of samples of one training; a larger one counts as not reported."""

_CHECK = "Does it report milliwatts as watts? Check its readings with `wattfleet agent doctor`, then profile it again"

_SETTINGS = ". If the board really draws that much, raise `claims.other_board_w` or `claims.other_board_idle_w`"


@dataclass(frozen=True)
class PowerRange:
    """The maximum watts that boards of one kind can draw.

    Attributes:
        training_w: maximum watts set aside for a training, in the mode with the highest power.
        idle_w: maximum watts while parked.
    """

    training_w: float
    idle_w: float


def _range_for_preset(watts: float) -> PowerRange:
    """The range of a board from the watts of its largest preset; the whole board draws more than its module."""
    return PowerRange(2.5 * watts, 0.5 * watts + 5.0)


POWER_RANGES: Mapping[str, PowerRange] = {
    "agx-orin": _range_for_preset(60.0),
    "orin-nx": _range_for_preset(40.0),
    "orin-nano": _range_for_preset(25.0),
    "xavier-agx": _range_for_preset(60.0),
    "nano": _range_for_preset(10.0),
    "host": PowerRange(1_000.0, 150.0),
    "rtx-3090": PowerRange(1_000.0, 150.0),
    "raspberry-pi-5": PowerRange(60.0, 15.0),
}
"""Ranges by kind of board, from NVIDIA's presets including `MAXN`. A host is a workstation, or another machine."""


def require_plausible_power(
    device_id: str,
    board: str,
    front: Front | None,
    idle_w: float,
    others: PowerRange,
    is_idle_with_duty: bool = False,
) -> None:
    """Check the watts that a device reports against its kind of board.

    Args:
        device_id: the device.
        board: its kind.
        front: its front; None if it has none now.
        idle_w: watts while parked, not negative.
        others: the range for unknown kinds.
        is_idle_with_duty: whether the device answers requests while idle, which may take as much power as training.

    Raises:
        ImplausibleError: no board of its kind draws as much.
    """
    most = POWER_RANGES.get(board, others)
    for name, watts, most_w in (
        ("idle power", idle_w, most.training_w if is_idle_with_duty else most.idle_w),
        ("largest planned power", 0.0 if front is None else front.max_planned_w, most.training_w),
    ):
        if watts > most_w:
            raise ImplausibleError(
                f"{device_id} reports {_watts(watts)} as its {name}, more than the {_watts(most_w)} of any"
                f" {_described(board)}. {_CHECK}{'' if board in POWER_RANGES else _SETTINGS}"
            )


def require_plausible_observation(
    device_id: str, board: str, epoch_s: float, power_w: float, others: PowerRange
) -> None:
    """Check the observation of a training.

    Args:
        device_id: the device.
        board: its kind.
        epoch_s: observed seconds per epoch.
        power_w: observed mean watts.
        others: the range for unknown kinds of boards.

    Raises:
        ImplausibleError: no device can observe this.
    """
    most_w = POWER_RANGES.get(board, others).training_w
    if not MIN_EPOCH_S <= epoch_s <= MAX_EPOCH_S:
        raise ImplausibleError(
            f"{device_id}: observed {epoch_s:g} s per epoch is not plausible: it must be {MIN_EPOCH_S:g} to"
            f" {MAX_EPOCH_S:,.0f} s. Check the device's clock"
        )
    if not 0 < power_w <= most_w:
        raise ImplausibleError(
            f"{device_id}: observed {_watts(power_w)} is not plausible: it must be above 0 and at most the"
            f" {_watts(most_w)} of any {_described(board)}. {_CHECK}"
        )


def plausible_loss(loss: float | None) -> float | None:
    """A reported loss; None if it is not plausible."""
    return loss if loss is not None and abs(loss) <= MAX_LOSS else None


def plausible_examples(num_examples: float | None) -> float | None:
    """A reported number of samples; None if it is not plausible."""
    return num_examples if num_examples is not None and 0 <= num_examples <= MAX_EXAMPLES else None


def _watts(watts: float) -> str:
    return f"{watts:,.0f} W" if 10 <= watts < 1e9 else f"{watts:.3g} W"


def _described(board: str) -> str:
    return board if board in POWER_RANGES else "board of an unknown kind"


# --- Trust ------------------------------------------------------------------------------------------------------------

WINDOW = 8
"""Number of a device's latest observed trainings that its trust is computed from; the settings' text states it, too."""

TIME_FACTOR = 3.0
"""Observed seconds contradict a prediction if they differ from it by this factor, or by more if it is uncertain."""

_TIME_SDS = 3.0

POWER_FACTOR = 1.5
"""Observed watts contradict a prediction if they exceed the watts that were set aside by this factor."""


@dataclass(frozen=True)
class Contradiction:
    """An observation that is far from the device's prediction.

    Attributes:
        mode: the mode that the device trained in.
        epoch_s: observed seconds per epoch; None if there was no predicted time to compare them with.
        power_w: observed mean watts.
        text: the observed and the predicted values, as text for people.
    """

    mode: PowerMode
    epoch_s: float | None
    power_w: float
    text: str


@dataclass(frozen=True)
class PredictionError:
    """How far an observation is from its prediction. Most are errors without being contradictions.

    Attributes:
        time_ratio: observed by predicted seconds per epoch; None if there was no predicted time to compare them with.
        power_ratio: observed by predicted watts.
    """

    time_ratio: float | None
    power_ratio: float


@dataclass(frozen=True)
class Trust:
    """The latest observed trainings of one device.

    Attributes:
        contradicted: for each of up to `WINDOW` trainings, oldest first, whether its prediction was contradicted.
        latest: the latest contradiction; None if there was none.
        errors: how far the same trainings were from their predictions.
    """

    contradicted: tuple[bool, ...] = ()
    latest: Contradiction | None = None
    errors: tuple[PredictionError, ...] = ()

    @property
    def contradictions(self) -> int:
        """The number of contradicted predictions among the latest trainings."""
        return sum(self.contradicted)

    @property
    def share(self) -> float:
        """From 1, if no prediction was contradicted, to 0, if all of the last `WINDOW` were."""
        return 1.0 - self.contradictions / WINDOW

    def after(self, contradiction: Contradiction | None, error: PredictionError) -> Trust:
        """The trust after one more training, whose prediction may have been contradicted."""
        contradicted = (*self.contradicted, contradiction is not None)[-WINDOW:]
        return Trust(contradicted, contradiction or self.latest, (*self.errors, error)[-WINDOW:])

    def exclusion_reason(self, front: Front, max_contradictions: int) -> str | None:
        """Why the device is left out of rounds; None if it may be selected.

        A device with too many contradictions may be selected again once its front agrees with the latest contradicting
        observation: an agent learns from each training. If all of its last trainings contradict its predictions, only
        the operator can include it again.

        Args:
            front: its current front.
            max_contradictions: number of contradictions from which it is left out.
        """
        if self.latest is None or self.contradictions < max_contradictions:
            return None
        remedy = "it may train again once its front agrees"
        if self.contradictions == WINDOW:
            remedy = "include it again with `wattfleet coordinator drain ID --undo`"
        elif _contradiction_of_front(front, self.latest) is None:
            return None
        return (
            f"its predictions were contradicted in {self.contradictions} of its last {len(self.contradicted)} observed"
            f" rounds; the latest: {self.latest.text}; {remedy}"
        )


def contradiction_of(
    assignment: Assignment, epoch_s: float, power_w: float, beside_duty: bool = False
) -> Contradiction | None:
    """How an observation contradicts a device's prediction; None if it is close enough.

    Seconds contradict the prediction if they differ by a factor of 3, or by 3 of its standard deviations if that is
    more. Watts contradict it if they exceed the watts that were set aside by more than half; fewer watts do no harm.
    Seconds are not compared while the number of minibatches in the device's epoch is unknown. Nor are they compared
    after a training beside a duty: they depend on the requests that arrived, for which the prediction had only assumed
    a rate.

    Args:
        assignment: the prediction for the round, and the watts that were set aside.
        epoch_s: observed seconds per epoch.
        power_w: observed mean watts.
        beside_duty: whether the device answered requests while it trained.
    """
    seen_s = _comparable_s(assignment, epoch_s, beside_duty)
    text = _compared(assignment.epoch_s, assignment.epoch_log_sd, assignment.power_limit_w, seen_s, power_w)
    return None if text is None else Contradiction(assignment.mode, seen_s, power_w, text)


def prediction_error(
    assignment: Assignment, epoch_s: float, power_w: float, beside_duty: bool = False
) -> PredictionError:
    """How far an observation is from a device's prediction; arguments as for `contradiction_of`."""
    seen_s = _comparable_s(assignment, epoch_s, beside_duty)
    return PredictionError(None if seen_s is None else seen_s / assignment.epoch_s, power_w / assignment.power_w)


def _comparable_s(assignment: Assignment, epoch_s: float, beside_duty: bool) -> float | None:
    return None if assignment.is_length_assumed or beside_duty else epoch_s


def _contradiction_of_front(front: Front, observed: Contradiction) -> str | None:
    """How a front contradicts an earlier observation; None if it agrees, or no longer has the mode."""
    point = _point_of(front, observed.mode)
    if point is None:
        return None
    epoch_s, log_sd = float(front.epoch_s[point]), float(front.epoch_log_sd[point])
    return _compared(epoch_s, log_sd, float(front.planned_w[point]), observed.epoch_s, observed.power_w)


def _point_of(front: Front, mode: PowerMode) -> int | None:
    """The index of a mode on a front; None if the front does not have it."""
    found = np.flatnonzero((front.modes == np.array(mode)).all(axis=1))
    return int(found[0]) if len(found) else None


def _is_within(predicted: float, factor: float, observed: float) -> bool:
    return predicted / factor <= observed <= predicted * factor


def _compared(predicted_s: float, log_sd: float, planned_w: float, epoch_s: float | None, power_w: float) -> str | None:
    """How an observation contradicts a prediction, as text; None if it does not."""
    factor = max(TIME_FACTOR, math.exp(_TIME_SDS * log_sd))
    if epoch_s is not None and not _is_within(predicted_s, factor, epoch_s):
        return f"{epoch_s:.4g} s per epoch, predicted {predicted_s:.4g} s"
    if power_w > POWER_FACTOR * planned_w:
        return f"{power_w:.1f} W, at most {planned_w:.1f} W planned"
    return None
