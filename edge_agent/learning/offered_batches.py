"""Which batch sizes a plan may choose for a workload: those announced, unless its app takes no notice of a choice."""

from __future__ import annotations

import logging

from edge_agent.profiling.known_workload import KnownWorkload
from wattfleet.modes import BatchOptions

_log = logging.getLogger(__name__)


class OfferedBatches:
    """The batch sizes of one workload.

    Args:
        options: those that were announced; None for no choice.
    """

    def __init__(self, options: BatchOptions | None) -> None:
        self._announced = options
        self._are_ignored = False

    @property
    def offered(self) -> BatchOptions | None:
        """The batch sizes that a plan may choose; None if the app takes no notice of a choice."""
        return None if self._are_ignored else self._announced

    def announced(self, options: BatchOptions | None) -> None:
        """Take what the coordinator has announced. Other batch sizes than before are tried with the app once more."""
        if options != self._announced:
            self._announced, self._are_ignored = options, False

    def loader_seen(self, known: KnownWorkload, batch: int | None, takes_planned_batch: bool) -> None:
        """Note whether an app trains with the batch that its plan has chosen.

        Args:
            known: what is known of the workload, with the batch that was planned.
            batch: samples in a batch of the app; None if it does not say.
            takes_planned_batch: whether the app has asked which batch its plan has chosen, and trains with it.
        """
        planned = known.workload.facts.batch
        if takes_planned_batch:
            self._are_ignored = False
        elif known.workload.choice is not None and batch != planned:
            _log.warning(
                "the app trains with %s instead of batches of %d samples: no batch is chosen for it; use"
                " `wattfleet_flower.planned_loader` or `planned_work` in the app",
                "batches of unknown size" if batch is None else f"batches of {batch:,} samples",
                planned,
            )
            self._are_ignored = True
