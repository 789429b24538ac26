"""Plausible ranges of what a device reports: watts by kind of board, observations, and a training's results.

The ranges are wide. They reject only values that no device can have, such as milliwatts that are reported as watts. A
front's own ranges are in `wattfleet/choosing/front.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wattfleet.choosing import MAX_EPOCH_S, MIN_EPOCH_S, Front
from wattfleet.errors import ImplausibleError

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
}
"""Ranges by kind of board, from NVIDIA's presets including `MAXN`. A host is a workstation without power modes."""


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
