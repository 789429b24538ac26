"""Devices' predicted fronts by workload, and the assumed epoch lengths of devices that do not know their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from wattfleet.core.choosing import Front
from wattfleet.core.errors import ImplausibleError
from wattfleet.core.modes import ASSUMED_MINIBATCHES_PER_EPOCH, Workload

UNNAMED = Workload("unnamed")
"""The workload of a run, or of a front, that states none."""


@lru_cache(maxsize=1024)
def _shared(workload: Workload) -> Workload:
    """Return the same object for equal workloads, because ten thousand devices train few of them."""
    return workload


@dataclass(frozen=True, slots=True)
class WorkloadFront:
    """A device's front for one workload.

    Attributes:
        front: as the device reported it.
        workload: what the device knows about the workload.
        minibatches_per_epoch: in one pass over the device's data; None if it is unknown. The front then assumes
            `ASSUMED_MINIBATCHES_PER_EPOCH`.
        profiled_modes: the number of measured modes; 0 for a front from the reference predictor alone.
        reference_digest: digest of the reference predictor behind the front.
    """

    front: Front
    workload: Workload = UNNAMED
    minibatches_per_epoch: int | None = None
    profiled_modes: int = 0
    reference_digest: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "workload", _shared(self.workload))

    @property
    def name(self) -> str:
        """The workload's name."""
        return self.workload.name

    @property
    def has_choice(self) -> bool:
        """Whether a plan may choose the device's batch."""
        return self.workload.choice is not None

    @property
    def is_length_assumed(self) -> bool:
        """Whether the front assumes a number of minibatches per epoch."""
        return self.minibatches_per_epoch is None


def front_for(fronts: Iterable[WorkloadFront], workload: str) -> WorkloadFront | None:
    """The front for a workload; None if there is none."""
    return next((each for each in fronts if each.name == workload), None)


class UsualLengths:
    """The assumed number of minibatches per epoch of devices that do not know theirs: the median of the known ones."""

    def __init__(self, fronts: Iterable[Sequence[WorkloadFront]]) -> None:
        """Derive the numbers from the current fronts.

        Args:
            fronts: the fronts of each device.
        """
        self._fronts = list(fronts)
        self._known: dict[tuple[str, bool], float] = {}

    def of(self, workload: str, has_choice: bool = False) -> float:
        """The minibatches per epoch of a workload; `ASSUMED_MINIBATCHES_PER_EPOCH` if no device knows the number.

        Args:
            workload: its name.
            has_choice: whether a plan may choose the device's batch; the number is then that of the largest batch.
        """
        key = workload, has_choice
        if key not in self._known:
            known = [
                each.minibatches_per_epoch
                for fronts in self._fronts
                for each in fronts
                if each.minibatches_per_epoch is not None and each.name == workload and each.has_choice == has_choice
            ]
            self._known[key] = float(median(known)) if known else float(ASSUMED_MINIBATCHES_PER_EPOCH)
        return self._known[key]

    def planned(self, known: WorkloadFront) -> Front:
        """The front to plan a device with; a front with an assumed epoch length is scaled to the usual length."""
        if not known.is_length_assumed:
            return known.front
        factor = self.of(known.name, known.has_choice) / ASSUMED_MINIBATCHES_PER_EPOCH
        if factor == 1.0:
            return known.front
        try:
            return known.front.scaled(factor)
        except ImplausibleError:  # the lengths of other devices are not possible for this one
            return known.front
