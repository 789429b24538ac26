"""The batch sizes that an app can train with, so that a plan chooses one for each device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from wattfleet.errors import InvalidInputError
from wattfleet.modes.workload_facts import LARGEST_COUNT

MAX_BATCH_OPTIONS = 16
"""Maximum number of batch sizes that an app can train with."""

_MAX_RATIO = 1000.0
"""Maximum ratio of the samples that two batch sizes need."""


@dataclass(frozen=True)
class BatchOptions:
    """The batch sizes that an app can train with, and the samples that each needs for the same progress.

    An epoch with a batch size makes the same progress as one pass over the data with the batch size that the app was
    written for. With a batch that needs a tenth more samples, it is a tenth longer than a pass.

    Attributes:
        batches: distinct batch sizes, ascending, samples.
        relative_samples: samples to the same accuracy with each of them, relative to any of them (R_b of
            arXiv:2502.18323).

    Raises:
        InvalidInputError: there are no batch sizes or too many; they are not distinct, ascending and whole; the
            lengths differ; or the samples are not finite and above 0.
    """

    batches: tuple[int, ...]
    relative_samples: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.batches) <= MAX_BATCH_OPTIONS:
            raise InvalidInputError(f"batches: state 1 to {MAX_BATCH_OPTIONS} batch sizes, not {len(self.batches)}")
        if any(type(batch) is not int or not 1 <= batch <= LARGEST_COUNT for batch in self.batches):
            raise InvalidInputError(
                f"batches: each must be a whole number of samples, from 1 to {LARGEST_COUNT:,}, not {self.batches}"
            )
        if any(left >= right for left, right in zip(self.batches, self.batches[1:], strict=False)):
            raise InvalidInputError(f"batches: must be distinct and ascending, not {self.batches}")
        if len(self.relative_samples) != len(self.batches):
            raise InvalidInputError(
                f"batches: {len(self.batches)} batch sizes need as many relative samples, not"
                f" {len(self.relative_samples)}"
            )
        if not all(0 < samples < math.inf for samples in self.relative_samples):
            raise InvalidInputError(f"relative samples: must be finite and above 0, not {self.relative_samples}")
        if max(self.relative_samples) > _MAX_RATIO * min(self.relative_samples):
            raise InvalidInputError(
                f"relative samples: one batch size must not need more than {_MAX_RATIO:,.0f} times the samples of"
                f" another, not {self.relative_samples}: leave out batch sizes that hardly train"
            )

    @classmethod
    def of(cls, relative_samples: Mapping[int, float]) -> BatchOptions:
        """Create the options from the relative samples of each batch size, in any order.

        Raises:
            InvalidInputError: as for the class.
        """
        batches = tuple(sorted(relative_samples))
        return cls(batches, tuple(relative_samples[batch] for batch in batches))

    def __contains__(self, batch: int) -> bool:
        return batch in self.batches

    def relative_to(self, base: int, batch: int) -> float:
        """Samples needed for the same progress with a batch size, relative to those with another; both are options."""
        return self._of(batch) / self._of(base)

    def scaled_minibatches(self, minibatches: float, base: int, batch: int) -> float:
        """Convert the minibatches of an epoch from one batch size to another. Both must be options.

        Args:
            minibatches: number of minibatches of an epoch with `base`.
            base: batch size that they are known for.
            batch: batch size to convert them to.
        """
        return minibatches * self.relative_to(base, batch) * base / batch

    def _of(self, batch: int) -> float:
        return self.relative_samples[self.batches.index(batch)]
