"""Trains a task with every batch and seed, and skips the runs that the journal has."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from reference_models.proxy.proxy_task import ProxyTask
from wattfleet.common.atomic_files import open_regular_file, read_regular_file, sync_folder
from wattfleet.common.console import plain_text
from wattfleet.common.parsing import parse_json_object
from wattfleet.core.choosing import BatchEfficiency
from wattfleet.core.errors import InvalidInputError, WattfleetError

# --- Samples to target ------------------------------------------------------------------------------------------------
# Counts the samples that one training run needs to a target accuracy.


ACCURACY_WINDOW = 3
"""A run has reached the target once the mean of this many consecutive accuracies has; a single one is too noisy."""


class Learner(Protocol):
    """A model in training with a fixed batch size."""

    def train_minibatch(self) -> None:
        """Train one minibatch."""

    def accuracy(self) -> float:
        """The share of correct answers on the test data; NaN if the model's output is not finite."""


@dataclass(frozen=True)
class RunLimits:
    """The limits of a run: when it is evaluated, and when it ends.

    Attributes:
        target_accuracy: the accuracy to be reached, a share above 0 and up to 1.
        evaluate_every: trained samples between two evaluations, for all batches alike. A batch that does not divide it
            is evaluated after the first minibatch that reaches the count.
        max_samples: a run ends without the target before it would train more samples.

    Raises:
        InvalidInputError: a value is out of range, or the limit ends a run before it can reach the target.
    """

    target_accuracy: float
    evaluate_every: int
    max_samples: int

    def __post_init__(self) -> None:
        if not 0 < self.target_accuracy <= 1:
            raise InvalidInputError(
                f"the target accuracy must be above 0 and at most 1, not {self.target_accuracy:g}: give 85 % as 0.85"
            )
        if self.evaluate_every < 1:
            raise InvalidInputError(f"--evaluate-every must be at least 1, not {self.evaluate_every}")
        if self.max_samples < ACCURACY_WINDOW * self.evaluate_every:
            raise InvalidInputError(
                f"with --max-samples {self.max_samples}, a run ends before its first {ACCURACY_WINDOW} evaluations, one"
                f" every {self.evaluate_every} samples: give --max-samples at least"
                f" {ACCURACY_WINDOW * self.evaluate_every}, or a smaller --evaluate-every"
            )


@dataclass(frozen=True)
class RunEnd:
    """The outcome of a run.

    Attributes:
        samples: samples trained until the target was reached; None if it was not.
        accuracy: mean of the last accuracies; None if the model's output was no longer finite, or nothing was
            evaluated.
    """

    samples: int | None
    accuracy: float | None


def samples_to_target(
    learner: Learner, batch: int, limits: RunLimits, report: Callable[[int, float], None] = lambda samples, mean: None
) -> RunEnd:
    """Train until the mean of the last `ACCURACY_WINDOW` accuracies reaches the target.

    The count includes the samples of these last evaluations.

    Args:
        learner: the model to train.
        batch: samples in a minibatch of the learner.
        limits: when to evaluate and when to end.
        report: called after each evaluation with the trained samples and the mean of the last accuracies.
    """
    latest: deque[float] = deque(maxlen=ACCURACY_WINDOW)
    samples = 0
    next_evaluation = limits.evaluate_every
    while samples + batch <= limits.max_samples:
        learner.train_minibatch()
        samples += batch
        if samples < next_evaluation:
            continue
        next_evaluation += limits.evaluate_every
        accuracy = learner.accuracy()
        if math.isnan(accuracy):
            return RunEnd(None, None)
        latest.append(accuracy)
        mean = math.fsum(latest) / len(latest)
        report(samples, mean)
        if len(latest) == ACCURACY_WINDOW and mean >= limits.target_accuracy:
            return RunEnd(samples, mean)
    return RunEnd(None, math.fsum(latest) / len(latest) if latest else None)


# --- Runs journal -----------------------------------------------------------------------------------------------------
# The journal of training runs: every finished run is on disk before the next one begins.
#
# The first line describes the task and the limits. Each further line is one finished run.

_FORMAT = 1
_MAX_SHOWN = 100


class RunsJournalError(WattfleetError):
    """The journal of runs cannot be read or written; its existing lines are safe."""


@dataclass(frozen=True)
class RunsHeader:
    """Everything except batch and seed that affects the number of samples to the target.

    Attributes:
        task: the task's name.
        data_sha256: digest of the training and the test data.
        model_sha256: digest of the shapes of the model's parameters.
        optimizer: its name.
        base_lr: learning rate for `base_batch`.
        base_batch: the batch that `base_lr` was chosen for.
        lr_scaling: whether the learning rate is scaled with the batch.
        target_accuracy: the accuracy to be reached.
        evaluate_every: trained samples between two evaluations.
        max_samples: the most samples that a run trains.
    """

    task: str
    data_sha256: str
    model_sha256: str
    optimizer: str
    base_lr: float
    base_batch: int
    lr_scaling: bool
    target_accuracy: float
    evaluate_every: int
    max_samples: int


def stored_evaluate_every(path: Path) -> int | None:
    """The interval of an existing journal; None if there is no journal, or its first line does not state it.

    Errors in the journal are reported when it is opened.
    """
    try:
        interval = parse_json_object(read_regular_file(path).partition(b"\n")[0]).get("evaluate_every")
    except (OSError, ValueError):
        return None
    return interval if isinstance(interval, int) and interval >= 1 else None


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class ProxyRun:
    """A finished run.

    Attributes:
        batch: samples in a minibatch.
        seed: of the initial model and the order of samples.
        samples: samples trained until the target was reached; None if it was not.
        accuracy: mean of the last accuracies; None if the training diverged.
        seconds: how long the run took.
        device: where it was trained, `cpu` or `cuda`.
    """

    batch: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0)]
    samples: Annotated[int, Field(ge=1)] | None
    accuracy: Annotated[float, Field(ge=0, le=1)] | None
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    device: str


class RunsJournal:
    """An open journal, which no other process can open; a context manager that closes it.

    Args:
        path: the file; its folder exists.
        header: what is trained.

    Attributes:
        runs: the finished runs, in order.

    Raises:
        InvalidInputError: the file belongs to another task, target or setting.
        RunsJournalError: the file cannot be opened or written, is in use, or is damaged before its last line.
    """

    _run: ClassVar[TypeAdapter[ProxyRun]] = TypeAdapter(ProxyRun)

    def __init__(self, path: Path, header: RunsHeader) -> None:
        self._path = path
        self.runs: list[ProxyRun] = []
        try:
            self._file = os.fdopen(open_regular_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+b", buffering=0)
        except OSError as error:
            raise RunsJournalError(f"{path}: cannot be opened: {error.strerror}") from None
        try:
            self._lock()
            held = self._file.read()
            # A run that was interrupted while it wrote leaves an incomplete last line.
            complete = held[: held.rfind(b"\n") + 1]
            first, *others = complete.splitlines() or [b""]
            if first:
                self._require_same(first, header)
                self.runs += [self._parsed(number, line) for number, line in enumerate(others, start=2)]
            self._file.truncate(len(complete))
            if not first:
                self._append({"journal": _FORMAT, **asdict(header)})
                sync_folder(path.parent)
        except BaseException:
            self._file.close()
            raise

    def append(self, run: ProxyRun) -> None:
        """Write a finished run; it is on disk when this returns.

        Raises:
            RunsJournalError: it could not be written.
        """
        self._append(self._run.dump_python(run))
        self.runs.append(run)

    def samples_by_batch(self, batches: Sequence[int], seeds: int) -> dict[int, list[int | None]]:
        """The samples to the target by batch, one for each seed in order; None where it was not reached.

        Runs of other batches and further seeds, which an earlier command may have trained, are left out.
        """
        samples = {(run.batch, run.seed): run.samples for run in self.runs}
        return {batch: [samples[batch, seed] for seed in range(seeds) if (batch, seed) in samples] for batch in batches}

    def __enter__(self) -> RunsJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunsJournalError(
                f"{self._path}: another command is writing to it: wait until it ends, or give another --out"
            ) from None

    def _append(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunsJournalError(
                f"{self._path}: cannot be written: {error.strerror}; its {len(self.runs)} finished runs are safe"
            ) from None

    def _require_same(self, first: bytes, header: RunsHeader) -> None:
        stored = self._json(1, first)
        expected = {"journal": _FORMAT, **asdict(header)}
        differing = [
            f"{name} {plain_text(repr(stored.get(name)), _MAX_SHOWN)}, not {value!r}"
            for name, value in expected.items()
            if stored.get(name) != value
        ]
        if differing:
            raise InvalidInputError(
                f"{self._path} has runs of another training: {'; '.join(differing)}. Give the same task and options to"
                " continue it, or another --out"
            )

    def _parsed(self, number: int, line: bytes) -> ProxyRun:
        self._json(number, line)
        try:
            return self._run.validate_json(line)
        except ValidationError:
            raise self._damaged(number) from None

    def _json(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            return parse_json_object(line)
        except ValueError:
            raise self._damaged(number) from None

    def _damaged(self, number: int) -> RunsJournalError:
        return RunsJournalError(f"{self._path}, line {number}: is damaged; move the file away to train again")


# --- Proxy runs -------------------------------------------------------------------------------------------------------

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
