"""Predicts inference on a device from the same references as its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from edge_agent.learning.fitting import Fitting
from edge_agent.learning.transfer import Transfer
from edge_agent.profiling.journal import JournalHeader
from wattfleet.modes import Profile, Task, WorkloadFacts
from wattfleet.prediction import Artefact, Prediction


@dataclass(frozen=True)
class InferenceFitting:
    """Fits predictors of inference from one set of references.

    Attributes:
        references: the predictors to transfer from, the most important first.
        header: describes the device; its workload and batch size are replaced.
        others_of: returns the stored predictors of the device's other workloads, given the workload to predict.
        open_fitting: opens a fitting for a transfer.
    """

    references: Sequence[Artefact]
    header: JournalHeader
    others_of: Callable[[str], tuple[Artefact, ...]]
    open_fitting: Callable[[Transfer], AbstractContextManager[Fitting]]

    def __call__(self, workload: str, batches: tuple[int, ...], rows: Profile) -> Mapping[int, Prediction]:
        """Return predictions for all modes of the device, by batch size.

        Args:
            workload: name of the inference workload.
            batches: the batch sizes to predict.
            rows: measured rows of the workload; may be empty.

        Raises:
            WattfleetError: no predictor can be fitted.
        """
        described = self.header
        transfer = Transfer(
            tuple(self.references),
            JournalHeader(described.device_id, described.board_kind, described.provenance, workload, max(batches)),
            1,
            WorkloadFacts(Task.INFERENCE),
            self.others_of(workload),
            (),
            batches,
        )
        with self.open_fitting(transfer) as fitting:
            return fitting.fit(rows, len(rows)).by_batch
