"""Determines which batch sizes a plan may choose for a workload: those announced, unless its app ignores the choice."""

from __future__ import annotations

import logging

from edge_agent.profiling.known_workload import KnownWorkload
from wattfleet.modes import BatchOptions

_log = logging.getLogger(__name__)


class OfferedBatches:
    """The batch sizes of one workload.

    Args:
        options: the announced batch sizes; None for no choice.
    """

    def __init__(self, options: BatchOptions | None) -> None:
        self._announced = options
        self._are_ignored = False

    @property
    def offered(self) -> BatchOptions | None:
        """The batch sizes that a plan may choose; None if the app ignores the choice."""
        return None if self._are_ignored else self._announced

    def announced(self, options: BatchOptions | None) -> None:
        """Store the batch sizes that the coordinator announced.

        If they have changed, they are tried with the app again.
        """
        if options != self._announced:
            self._announced, self._are_ignored = options, False

    def loader_seen(self, known: KnownWorkload, batch: int | None, takes_planned_batch: bool) -> None:
        """Note whether an app trains with the batch size chosen by its plan.

        Args:
            known: what is known of the workload, with the planned batch size.
            batch: the app's batch size, samples; None if the app does not report it.
            takes_planned_batch: whether the app has queried the batch size chosen by its plan, and trains with it.
        """
        planned = known.workload.facts.batch
        if takes_planned_batch:
            self._are_ignored = False
        elif known.workload.choice is not None and batch != planned:
            _log.warning(
                "the app trains with %s instead of batches of %d samples: its plans will not choose a batch size; to "
                "let them, use"
                " `wattfleet_flower.planned_loader` or `planned_work` in the app",
                "batches of unknown size" if batch is None else f"batches of {batch:,} samples",
                planned,
            )
            self._are_ignored = True
