"""The journal of training runs: every finished run is on disk before the next one begins.

The first line describes the task and the limits. Each further line is one finished run.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_io.atomic_files import open_regular_file, read_regular_file, sync_folder
from wattfleet_io.console import plain_text
from wattfleet_io.parsing import parse_json_object

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
