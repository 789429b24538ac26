"""The command `wattfleet reference proxy`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import reference_models.proxy.proxy_task as learner_module
from reference_models.commands import app
from wattfleet.choosing import BatchEfficiency
from wattfleet.errors import InvalidInputError

BLOBS = "tests.fakes.proxy_tasks:blobs"


def command(out: Path, *arguments: str, task: str = BLOBS, target: str = "0.9", batches: str = "8,16") -> Result:
    options = ["--task", task, "--batches", batches, "--target-accuracy", target, "--out", str(out)]
    return CliRunner().invoke(app, ["proxy", *options, "--seeds", "2", "--max-samples", "3200", *arguments])


def test_the_command_stores_and_shows_the_samples_of_every_batch(tmp_path: Path) -> None:
    result = command(tmp_path / "new" / "proxy")
    assert result.exit_code == 0, result.output
    stored = BatchEfficiency.from_json((tmp_path / "new" / "proxy" / "batch-efficiency.json").read_text())
    assert (stored.model, stored.batches) == ("blobs", (8, 16))
    runs = [json.loads(line) for line in (tmp_path / "new" / "proxy" / "runs.jsonl").read_text().splitlines()[1:]]
    samples = {batch: [run["samples"] for run in runs if run["batch"] == batch] for batch in (8, 16)}
    for counts in samples.values():
        assert len(counts) == 2 and all(count % 16 == 0 for count in counts)
        assert f"{min(counts):,}" in result.stdout
    relative = sum(samples[8]) / sum(samples[16])  # the median of two runs is their mean
    assert stored.of(8) == pytest.approx(relative)
    assert f"batch 8: {relative:.3f}" in result.stdout
    assert "2 of 2" in result.stdout
    assert "batch 16, seed 1: " in result.stderr


def test_the_command_continues_an_interrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[int, int]] = []
    real = learner_module.TorchLearner

    def interrupted_at_the_third(task, batch, seed, *others):  # type: ignore[no-untyped-def]
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append((batch, seed))
        return real(task, batch, seed, *others)

    monkeypatch.setattr(learner_module, "TorchLearner", interrupted_at_the_third)
    interrupted = command(tmp_path / "resumed")
    assert interrupted.exit_code == 130
    assert "run the same command to continue" in interrupted.stderr
    assert not (tmp_path / "resumed" / "batch-efficiency.json").exists()
    monkeypatch.undo()

    resumed = command(tmp_path / "resumed")
    assert resumed.exit_code == 0, resumed.output
    assert "2 runs of 4 already finished" in resumed.stderr
    command(tmp_path / "whole")
    assert (tmp_path / "resumed" / "batch-efficiency.json").read_text() == (
        tmp_path / "whole" / "batch-efficiency.json"
    ).read_text()


def test_a_batch_that_never_reaches_the_accuracy_is_shown_as_never(tmp_path: Path) -> None:
    result = command(tmp_path, task="tests.fakes.proxy_tasks:shuffled_labels")
    assert isinstance(result.exception, InvalidInputError)
    assert "no batch size reached the target accuracy in most of its runs: lower the accuracy" in str(result.exception)
    assert result.stdout.count(" never ") == 2
    assert "0 of 2" in result.stdout
    assert not (tmp_path / "batch-efficiency.json").exists()


def test_without_scaling_all_batches_are_trained_with_one_learning_rate(tmp_path: Path) -> None:
    assert command(tmp_path / "scaled", batches="8,32").stdout.count("0.02 ") == 1
    result = command(tmp_path / "same", "--no-lr-scaling", batches="8,32")
    assert result.stdout.count("0.01 ") == 2
    assert "0.02 " not in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "digitz"}, "unknown task"),
        ({"batches": "8,many"}, "not a list of whole numbers"),
        ({"batches": "8,97"}, "larger than the training data"),
        ({"target": "85"}, "above 0 and at most 1"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    result = command(tmp_path / "out", **options)
    assert isinstance(result.exception, InvalidInputError)
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_batch_beyond_the_memory_is_named_and_finished_runs_are_kept(tmp_path: Path) -> None:
    task = "tests.fakes.proxy_tasks:beyond_memory"
    result = command(tmp_path, task=task, batches="8,32")
    assert isinstance(result.exception, InvalidInputError)
    assert "the batch 32 does not fit into the GPU's memory: leave it out of --batches" in str(result.exception)
    # The interval between tests, derived from the largest batch size, stays the same without that batch size.
    without = command(tmp_path, task=task, batches="8")
    assert without.exit_code == 0, without.output
    assert "1 run of 2 already finished" in without.stderr


def test_a_batch_above_the_interval_of_the_journal_is_refused(tmp_path: Path) -> None:
    command(tmp_path)
    result = command(tmp_path, batches="8,64")
    assert isinstance(result.exception, InvalidInputError)
    assert "--evaluate-every 16 is smaller than the batch 64" in str(result.exception)
