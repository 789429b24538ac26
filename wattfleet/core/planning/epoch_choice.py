"""The numbers of local epochs that a plan may choose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from wattfleet.core.errors import InvalidInputError

MAX_EPOCHS = 1e6
"""Largest plausible number of local epochs in a round; the smallest is its reciprocal."""

_MAX_OPTIONS = 16


def require_epochs(epochs: float) -> None:
    """Check the local epochs of a round.

    Raises:
        InvalidInputError: they are not above 0, or implausibly many.
    """
    if not 1 / MAX_EPOCHS <= epochs <= MAX_EPOCHS:
        raise InvalidInputError(
            f"a round needs a number of epochs above 0 and at most {MAX_EPOCHS:,.0f}, not {epochs:g}"
        )


@dataclass(frozen=True)
class EpochOption:
    """A number of local epochs, and the progress that a round makes with it.

    Attributes:
        epochs: number of passes of each selected device over its data.
        progress: progress of a round with all devices, relative to the other options.
        half_devices: number of devices of a much larger fleet with which a round makes half of that progress; None for
            the policy's own number. The more local epochs, the further the devices' models drift apart, and the more
            devices are needed (Li et al., arXiv 1907.02189, theorem 3).

    Raises:
        InvalidInputError: a number is out of range.
    """

    epochs: float
    progress: float = 1.0
    half_devices: float | None = None

    def __post_init__(self) -> None:
        require_epochs(self.epochs)
        if not 0 < self.progress < math.inf:
            raise InvalidInputError(
                f"the progress of a round with {self.epochs:g} epochs must be above 0 and finite, not {self.progress:g}"
            )
        if self.half_devices is not None and not 0 < self.half_devices < math.inf:
            raise InvalidInputError(
                f"the number of devices for half the progress of a round with {self.epochs:g} epochs must be above 0"
                f" and finite, not {self.half_devices:g}"
            )


@dataclass(frozen=True)
class EpochChoice:
    """The numbers of local epochs that a plan may choose.

    Attributes:
        options: by ascending epochs; more epochs make more progress.
        is_per_device: devices of one round may train different numbers of epochs, so that nobody waits for slow ones.

    Raises:
        InvalidInputError: there are no options, or too many, or the options are not in order.
    """

    options: Sequence[EpochOption]
    is_per_device: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(self.options))
        if not 1 <= len(self.options) <= _MAX_OPTIONS:
            raise InvalidInputError(
                f"give 1 to {_MAX_OPTIONS} numbers of local epochs to choose from, not {len(self.options)}"
            )
        if len(self.options) > 1 and any(option.epochs % 1 for option in self.options):
            raise InvalidInputError(
                f"a plan chooses whole numbers of local epochs, not {', '.join(f'{o.epochs:g}' for o in self.options)}"
            )
        for fewer, more in zip(self.options, self.options[1:], strict=False):
            if fewer.epochs >= more.epochs or fewer.progress >= more.progress:
                raise InvalidInputError(
                    f"{more.epochs:g} local epochs with a progress of {more.progress:g} follow {fewer.epochs:g} with"
                    f" {fewer.progress:g}: state each number once, by ascending epochs and progress, and leave out"
                    " numbers that bring no more progress"
                )

    @classmethod
    def fixed(cls, epochs: float) -> EpochChoice:
        """A single option: every device trains the same number of epochs.

        Raises:
            InvalidInputError: the number is out of range.
        """
        return cls((EpochOption(epochs),))

    @classmethod
    def of(
        cls,
        progress: Mapping[int, float] | Iterable[int],
        half_devices: Mapping[int, float] | None = None,
        is_per_device: bool = False,
    ) -> EpochChoice:
        """Create a choice among whole numbers of epochs.

        Args:
            progress: progress of a round by its local epochs, on any scale. For epochs without a stated progress, it is
                assumed to be proportional to their square root: each further local epoch brings less.
            half_devices: number of devices for half the progress by the local epochs, where it is known.
            is_per_device: devices of one round may train different numbers of epochs.

        Raises:
            InvalidInputError: a number is out of range or not whole, or more epochs make no more progress.
        """
        if not isinstance(progress, Mapping):
            numbers = tuple(progress)
            if len(set(numbers)) < len(numbers):
                raise InvalidInputError(f"state each number of local epochs once, not {numbers}")
            progress = {epochs: math.sqrt(epochs) if epochs > 0 else 1.0 for epochs in numbers}  # checked below
        half_devices = half_devices or {}
        if unknown := sorted(set(half_devices) - set(progress)):
            raise InvalidInputError(
                f"half_devices states {unknown[0]} local epochs, which are not an option: leave them out"
            )
        for epochs in progress:
            if not (1 <= epochs < math.inf and epochs % 1 == 0):
                raise InvalidInputError(f"a device trains a whole number of local epochs, 1 or more, not {epochs}")
        return cls(
            tuple(EpochOption(e, progress[e], half_devices.get(e)) for e in sorted(progress)),
            is_per_device,
        )

    @property
    def fewest(self) -> float:
        """The smallest number of epochs, which devices train if the policy does not choose."""
        return self.options[0].epochs
