"""Trains a task with every batch and seed, and skips the runs that the journal has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reference_models.proxy.proxy_task import ProxyTask
from reference_models.proxy.runs_journal import ProxyRun, RunsHeader, RunsJournal
from reference_models.proxy.samples_to_target import RunEnd, RunLimits
from wattfleet.choosing import BatchEfficiency
from wattfleet.errors import InvalidInputError

ReportSamples = Callable[[int, float], None]
"""Called with the number of samples that a run has trained, and the mean of its last accuracies."""

TrainRun = Callable[[int, int, ReportSamples], RunEnd]
"""Trains one run of a batch and a seed."""


@dataclass(frozen=True)
class ProxyPlan:
    """The runs to train.

    Attributes:
        task: what is trained.
        batches: samples in a minibatch, each once.
        seeds: each batch is trained with the seeds 0 to `seeds - 1`.
        limits: when runs are evaluated and end.
        lr_scaling: whether the learning rate is scaled with the batch.

    Raises:
        InvalidInputError: no batch or seed is given, a batch is repeated, exceeds the training data or the samples
            between two evaluations, or is not positive.
    """

    task: ProxyTask
    batches: Sequence[int]
    seeds: int
    limits: RunLimits
    lr_scaling: bool = True

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise InvalidInputError(f"--seeds must be at least 1, not {self.seeds}")
        require_batches(self.batches, len(self.task.train[0]))
        if max(self.batches) > self.limits.evaluate_every:
            raise InvalidInputError(
                f"--evaluate-every {self.limits.evaluate_every} is smaller than the batch {max(self.batches)}: give at"
                " least the largest batch, so that all batches are evaluated equally often"
            )

    @property
    def header(self) -> RunsHeader:
        """The first line of the plan's journal."""
        return RunsHeader(
            task=self.task.name,
            data_sha256=self.task.data_sha256(),
            model_sha256=self.task.model_sha256(),
            optimizer=self.task.optimizer,
            base_lr=self.task.base_lr,
            base_batch=self.task.base_batch,
            lr_scaling=self.lr_scaling,
            target_accuracy=self.limits.target_accuracy,
            evaluate_every=self.limits.evaluate_every,
            max_samples=self.limits.max_samples,
        )

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Batch and seed of all runs: every batch once before any is repeated, so that partial results cover all."""
        return [(batch, seed) for seed in range(self.seeds) for batch in self.batches]


def require_batches(batches: Sequence[int], samples: int) -> None:
    """Check batches against the training data.

    Raises:
        InvalidInputError: there is none, one is repeated, not positive, or larger than the number of samples.
    """
    if not batches:
        raise InvalidInputError("no batch is given: give --batches such as 8,16,32")
    for batch in batches:
        if batch < 1:
            raise InvalidInputError(f"a batch must be at least 1, not {batch}")
        if batch > samples:
            raise InvalidInputError(
                f"the batch {batch} is larger than the training data, which has {samples} samples: leave it out"
            )
    if len(set(batches)) < len(batches):
        raise InvalidInputError(f"a batch is repeated in {','.join(map(str, batches))}: give each batch once")


def default_evaluate_every(batches: Sequence[int], samples: int) -> int:
    """Samples between two evaluations: a tenth of the training data, rounded up to a multiple of the largest batch."""
    largest = max(batches)
    return largest * -(-samples // (10 * largest))


def train_runs(
    plan: ProxyPlan,
    journal: RunsJournal,
    train: TrainRun,
    device: str,
    begun: Callable[[int, int], ReportSamples],
    finished: Callable[[ProxyRun], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train the runs that the journal lacks, and add each to it.

    Args:
        plan: the runs.
        journal: the journal of the plan.
        train: trains one run.
        device: where it trains, for the journal.
        begun: called with batch and seed when a run begins; returns the function that receives the run's progress.
        finished: called with each run that was trained.
        clock: returns seconds since a fixed moment.

    Raises:
        RunsJournalError: a run could not be written.
    """
    known = {(run.batch, run.seed) for run in journal.runs}
    for batch, seed in plan.runs:
        if (batch, seed) in known:
            continue
        start_s = clock()
        end = train(batch, seed, begun(batch, seed))
        run = ProxyRun(batch, seed, end.samples, end.accuracy, round(clock() - start_s, 3), device)
        journal.append(run)
        finished(run)


def efficiency_of(plan: ProxyPlan, samples_by_batch: Mapping[int, Sequence[int | None]]) -> BatchEfficiency:
    """The batch efficiency: samples with each batch, relative to those of the largest batch that reached the target.

    Args:
        plan: what was trained.
        samples_by_batch: samples to the target of each run, by batch; None for a run that never reached it.

    Raises:
        InvalidInputError: no batch reached the target in most of its runs.
    """
    task, target = plan.task, plan.limits.target_accuracy
    origin = f"{plan.seeds} runs of {task.name} to an accuracy of {target:g} with {task.optimizer}"
    return BatchEfficiency.from_runs(task.name, samples_by_batch, origin)
