"""The number of samples that each training run needs to its target accuracy, from training or from `runs.json`."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.joint.tasks import TASKS, BenchmarkTask
from wattfleet.core.choosing import BatchEfficiency
from wattfleet.core.errors import InvalidInputError

if TYPE_CHECKING:
    from reference_models.proxy.proxy_runs import ProxyRun, ReportSamples, RunEnd

BATCHES = (8, 16, 32, 64, 128)
SEEDS = 5
COMMITTED = Path(__file__).with_name("runs.json")
"""The committed runs, which the benchmark uses unless it trains its own."""


@dataclass(frozen=True)
class TaskRuns:
    """All runs of a task.

    Attributes:
        name: the task's name.
        samples: samples to the target accuracy by batch size, one number for each seed.
    """

    name: str
    samples: Mapping[int, Sequence[int]]

    @property
    def efficiency(self) -> BatchEfficiency:
        """The relative number of samples with each batch size, by the median of the runs."""
        return BatchEfficiency.from_runs(self.name, self.samples, f"{SEEDS} runs of {self.name}")


def read_runs(path: Path = COMMITTED) -> dict[str, TaskRuns]:
    """Return the runs of all tasks by name.

    Raises:
        InvalidInputError: a run is missing or did not reach the target.
    """
    tasks: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["tasks"]
    found = {}
    for name, entry in tasks.items():
        samples = {int(batch): runs for batch, runs in entry["samples"].items()}
        if tuple(samples) != BATCHES or any(len(runs) != SEEDS or None in runs for runs in samples.values()):
            raise InvalidInputError(
                f"{path}: {name} lacks a run that reached the target: lower its target_accuracy or"
                " raise its max_samples in benchmarks/joint/tasks.py, and train again with --train"
            )
        found[name] = TaskRuns(name, samples)
    return found


def train_all(data: Path, out: Path, report: Callable[[str], None]) -> Path:
    """Train every run that is missing in a folder's journals, and write all results to `runs.json` there.

    Args:
        data: the folder of the images.
        out: the folder of the journals.
        report: called with a line of text for each finished run, and for each task that cannot be trained.

    Returns:
        The written file.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = {}
    for task in TASKS:
        try:
            results[task.name] = _train(task, data, out / f"{task.name}.jsonl", report)
        except InvalidInputError as error:
            report(f"{task.name} is skipped: {error}")
    written = out / COMMITTED.name
    written.write_text(_document(results), encoding="utf-8")
    return written


def _train(task: BenchmarkTask, data: Path, journal_file: Path, report: Callable[[str], None]) -> dict[str, Any]:
    import torch

    from reference_models.proxy.proxy_runs import ProxyPlan, RunLimits, RunsJournal, samples_to_target, train_runs
    from reference_models.proxy.proxy_task import TorchLearner

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    trained = task.proxy_task(data)
    limits = RunLimits(task.target_accuracy, task.evaluate_every, task.max_samples)
    plan = ProxyPlan(trained, BATCHES, SEEDS, limits)

    def train(batch: int, seed: int, progress: ReportSamples) -> RunEnd:
        return samples_to_target(TorchLearner(trained, batch, seed, device=cpu), batch, limits, progress)

    def begun(batch: int, seed: int) -> ReportSamples:
        return lambda samples, accuracy: None

    def finished(run: ProxyRun) -> None:
        reached = "target not reached" if run.samples is None else f"{run.samples:,} samples"
        report(f"{task.name}, batch {run.batch}, seed {run.seed}: {reached}, {run.seconds:.1f} s")

    with RunsJournal(journal_file, plan.header) as journal:
        train_runs(plan, journal, train, cpu.type, begun, finished)
        samples = journal.samples_by_batch(BATCHES, SEEDS)
        seconds = sum(run.seconds for run in journal.runs)
    return {
        "target_accuracy": task.target_accuracy,
        "base_lr": task.base_lr,
        "data_sha256": plan.header.data_sha256,
        "model_sha256": plan.header.model_sha256,
        "training_s": round(seconds),
        "samples": samples,
    }


def _document(results: Mapping[str, Any]) -> str:
    """Return JSON with the runs of a batch size on one line."""
    document = {
        "made_by": "python -m benchmarks.joint --train",
        "python": platform.python_version(),
        "torch": version("torch"),
        "tasks": results,
    }
    text = json.dumps(document, indent=1)
    return re.sub(r"\[[^\[\]]*\]", lambda numbers: f"[{' '.join(numbers[0][1:-1].split())}]", text) + "\n"
