"""An interleaving session: the measurements of training and of inference that a method may make and has made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing import KnownModes, PairedModes, Proposal
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchArray, Profile, Task
from wattfleet.prediction import Prediction

Rows = NDArray[np.intp]

_TASKS = (Task.TRAINING, Task.INFERENCE)


@dataclass(frozen=True)
class PairCorpora:
    """Measurements of training and inference on one board in the same modes.

    Attributes:
        training: `n` modes.
        inference: `m` rows of these modes, with their batches.
        training_rows: `[n]` row of each in the file of training.
        inference_rows: `[m]` row of each in the file of inference.
    """

    training: Profile
    inference: Profile
    training_rows: Rows
    inference_rows: Rows

    @classmethod
    def of(cls, training: Profile, inference: Profile) -> PairCorpora:
        """Keep the modes that training and inference have in common.

        Raises:
            InvalidInputError: the training has several batch sizes, the inference states no batches, or they have no
                mode in common.
        """
        if len(training.batches) > 1:
            raise InvalidInputError(
                "--training: the file has several batch sizes: keep the rows of the one that will be trained"
            )
        if inference.batch is None:
            raise InvalidInputError("--inference: the file has no column 'batch': state the batch of each row")
        pair = PairedModes.of(KnownModes.only_measured(training), KnownModes.only_measured(inference))
        used = np.unique(pair.mode_of)
        known = {tuple(mode) for mode in training.modes[used].tolist()}
        kept = np.flatnonzero([tuple(mode) in known for mode in inference.modes.tolist()])
        return cls(training.rows(used), inference.rows(kept), used, kept)

    @cached_property
    def batch(self) -> BatchArray:
        """`[m]` samples in the batch of each row of inference."""
        assert self.inference.batch is not None, "checked when the corpora were paired"
        return self.inference.batch

    @cached_property
    def measured(self) -> PairedModes:
        """All rows, with their measured values."""
        return PairedModes.of(KnownModes.only_measured(self.training), KnownModes.only_measured(self.inference))

    def of_task(self, task: Task) -> Profile:
        """The rows of a task."""
        return self.training if task is Task.TRAINING else self.inference

    def known(self, predicted: Mapping[Task, Prediction], rows: Mapping[Task, Sequence[int]]) -> PairedModes:
        """All rows: those of `rows` with their measured values, and the others as predicted."""
        training, inference = (_known(self.of_task(task), predicted[task], rows[task]) for task in _TASKS)
        return PairedModes(training, inference, self.measured.mode_of)


class InterleavingSession:
    """Measures modes of training, and modes with batches of inference, each at most once, up to a limit for both.

    Args:
        corpora: all that can be measured.
        limit: maximum number of measurements.

    Attributes:
        corpora: all that can be measured.
        limit: maximum number of measurements.
        rows: the measured rows of each task, in the order of measuring.

    Raises:
        InvalidInputError: the limit is below 2: a choice needs one measurement of each.
    """

    def __init__(self, corpora: PairCorpora, limit: int) -> None:
        if limit < 2:
            raise InvalidInputError(
                f"a choice needs a measurement of training and one of inference: allow 2 or more, not {limit}"
            )
        self.corpora = corpora
        self.limit = limit
        self.rows: dict[Task, list[int]] = {task: [] for task in _TASKS}

    @property
    def measured(self) -> int:
        """Number of measurements so far."""
        return sum(len(rows) for rows in self.rows.values())

    @property
    def remaining(self) -> int:
        """Number of measurements that may still be made."""
        return self.limit - self.measured

    def measure(self, proposal: Proposal) -> None:
        """Measure a row; one that was measured before does not count again.

        Raises:
            InvalidInputError: the limit is reached.
        """
        rows = self.rows[proposal.task]
        if proposal.row in rows:
            return
        if not self.remaining:
            raise InvalidInputError(f"the limit of {self.limit} measurements is reached")
        rows.append(proposal.row)

    def measure_pair(self, row: int) -> bool:
        """Measure a row of inference and the training in its mode; False if the limit does not allow both."""
        mode = int(self.corpora.measured.mode_of[row])
        proposals = [Proposal(Task.TRAINING, mode), Proposal(Task.INFERENCE, row)]
        if sum(each.row not in self.rows[each.task] for each in proposals) > self.remaining:
            return False
        for each in proposals:
            self.measure(each)
        return True

    def measure_everything(self) -> None:
        """Measure all rows regardless of the limit."""
        self.rows = {task: list(range(len(self.corpora.of_task(task)))) for task in _TASKS}

    def is_measured(self) -> NDArray[np.bool_]:
        """`[m]` whether both the inference and the training of its mode were measured."""
        trained, answered = (np.isin(np.arange(len(self.corpora.of_task(task))), self.rows[task]) for task in _TASKS)
        return np.asarray(answered & trained[self.corpora.measured.mode_of])


def _known(corpus: Profile, prediction: Prediction, rows: Sequence[int]) -> KnownModes:
    at = np.array(rows, dtype=np.intp)
    ms, mw = prediction.minibatch_ms.copy(), prediction.power_mw.copy()
    time_sd, power_sd = prediction.time_log_sd.copy(), prediction.power_log_sd.copy()
    measured = np.zeros(len(corpus), dtype=bool)
    ms[at], mw[at], time_sd[at], power_sd[at], measured[at] = corpus.minibatch_ms[at], corpus.power_mw[at], 0, 0, True
    return KnownModes(corpus.modes, ms, mw, time_sd, power_sd, measured, corpus.batch)
