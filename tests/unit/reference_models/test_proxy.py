"""Proxy tasks: how they are trained, the samples to a target accuracy, runs for all batch sizes, and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor, nn
from typer.testing import CliRunner

import reference_models.proxy.proxy_task as learner_module
from reference_models.commands import app
from reference_models.proxy.proxy_runs import (
    ProxyPlan,
    ReportSamples,
    RunEnd,
    RunLimits,
    RunsJournal,
    RunsJournalError,
    TrainRun,
    default_evaluate_every,
    efficiency_of,
    samples_to_target,
    train_runs,
)
from reference_models.proxy.proxy_task import OptimizerName, ProxyTask, TorchLearner, load_task
from tests.fakes.proxy_tasks import ScriptedLearner, blobs, shuffled_labels
from wattfleet.core.choosing import BatchEfficiency
from wattfleet.core.errors import InvalidInputError

# --- Proxy task -------------------------------------------------------------------------------------------------------
# Proxy tasks: their checks, learning rates by batch size, digests, and user-defined tasks.


@pytest.mark.parametrize(
    ("optimizer", "batch", "rate"),
    [("sgd", 32, 0.04), ("sgd", 2, 0.0025), ("adam", 32, 0.02), ("adamw", 32, 0.02), ("adam", 2, 0.005)],
)
def test_the_learning_rate_grows_with_the_batch(optimizer: OptimizerName, batch: int, rate: float) -> None:
    # The task's rate is 0.01 for a batch size of 8. 32 is 4 times that, and 2 is a quarter of it.
    assert blobs(optimizer).learning_rate(batch, scaled=True) == pytest.approx(rate)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_without_scaling_every_batch_has_the_learning_rate_of_the_task(optimizer: OptimizerName) -> None:
    assert {blobs(optimizer).learning_rate(batch, scaled=False) for batch in (1, 8, 512)} == {0.01}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train": (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))}, "train has 3 samples and 2 labels"),
        ({"test": (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))}, "test has 0 samples"),
        ({"optimizer": "lamb"}, "unknown optimizer 'lamb': use one of sgd, adam, adamw"),
        ({"base_lr": 0.0}, "base_lr must be above 0"),
        ({"base_lr": float("inf")}, "base_lr must be above 0"),
        ({"base_batch": 0}, "base_batch must be at least 1"),
    ],
)
def test_a_task_that_cannot_be_trained_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        replace(blobs(), **changed)


def test_the_digest_of_the_data_changes_with_one_label() -> None:
    task = blobs()
    labels = task.test[1].clone()
    labels[5] = 1 - labels[5]
    assert blobs().data_sha256() == task.data_sha256()
    assert replace(task, test=(task.test[0], labels)).data_sha256() != task.data_sha256()


def test_the_digest_of_the_model_changes_with_a_layer_and_not_with_its_values() -> None:
    task = blobs()
    other_values = replace(task, make_model=lambda seed: task.make_model(seed + 1))
    other_layer = replace(task, make_model=lambda seed: nn.Sequential(nn.Linear(4, 3)))
    assert other_values.model_sha256() == task.model_sha256()
    assert other_layer.model_sha256() != task.model_sha256()


def test_the_shipped_task_is_loaded_by_its_name() -> None:
    task = load_task("digits")
    assert task.name == "digits-perceptron"
    assert (len(task.train[0]), len(task.test[0])) == (1437, 360)
    assert task.make_model(0)(task.test[0]).shape == (360, 10)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digitz", "unknown task 'digitz'; use one of digits, or your own package.module:function"),
        ("nowhere.tasks:digits", "no module nowhere.tasks; add its folder to PYTHONPATH"),
        ("tests.fakes.proxy_tasks:missing", "has no missing"),
        ("tests.fakes.proxy_tasks:__name__", "is a str, not a function"),
        ("tests.fakes.proxy_tasks:with_argument", "must take no arguments"),
        ("tests.fakes.proxy_tasks:no_task", "returned a str, not a reference_models.proxy.proxy_task.ProxyTask"),
    ],
)
def test_an_unusable_task_is_refused_by_its_name(spec: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        load_task(spec)


# --- Torch learner ----------------------------------------------------------------------------------------------------
# Training a proxy task with PyTorch.

CPU = torch.device("cpu")


def accuracies(task: ProxyTask, batch: int, seed: int, scaled: bool = True) -> list[float]:
    reported: list[float] = []
    learner = TorchLearner(task, batch, seed, scaled, CPU)
    samples_to_target(learner, batch, RunLimits(1.0, 32, 320), lambda samples, mean: reported.append(mean))
    return reported


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_training_reaches_an_accuracy_that_the_data_allows(optimizer: OptimizerName) -> None:
    end = samples_to_target(TorchLearner(blobs(optimizer), 8, 0, device=CPU), 8, RunLimits(0.9, 32, 9600))
    assert end.samples is not None
    assert end.accuracy is not None and end.accuracy >= 0.9


def test_the_same_seed_gives_the_same_training_whatever_ran_before() -> None:
    first = accuracies(blobs(), 8, seed=1)
    accuracies(blobs(), 16, seed=2)
    assert accuracies(blobs(), 8, seed=1) == first
    assert accuracies(blobs(), 8, seed=2) != first


def test_a_model_that_does_not_seed_itself_also_trains_the_same() -> None:
    unseeded = replace(blobs(), make_model=lambda seed: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.2)))
    assert accuracies(unseeded, 8, seed=1) == accuracies(unseeded, 8, seed=1)


def test_dropout_does_not_disturb_the_accuracy() -> None:
    learner = TorchLearner(replace(blobs(), make_model=lambda seed: Dropping()), 8, 0, device=CPU)
    learner.train_minibatch()
    assert learner.accuracy() == 1


class Dropping(nn.Module):
    """A model that classifies a point by the sum of its coordinates; dropout would often change the result."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Tensor:
        total = self.dropout(x).sum(1)
        return self.scale * torch.stack([-total, total], 1)


def test_scaling_changes_the_training_of_batches_other_than_the_base_batch() -> None:
    assert accuracies(blobs("sgd"), 8, 0, scaled=True) == accuracies(blobs("sgd"), 8, 0, scaled=False)
    assert accuracies(blobs("sgd"), 32, 0, scaled=True) != accuracies(blobs("sgd"), 32, 0, scaled=False)


class Recorder(nn.Module):
    """A model that returns constant logits and records its training inputs."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(x[:, 0].clone())
        return self.bias.expand(len(x), 2)


def samples_seen(batch: int, minibatches: int) -> list[float]:
    seen: list[Tensor] = []
    numbered = (torch.arange(12.0).unsqueeze(1), torch.arange(12) % 2)
    task = ProxyTask("numbered", lambda seed: Recorder(seen), numbered, numbered, "sgd", 0.1, 4)
    learner = TorchLearner(task, batch, 3, device=CPU)
    for _ in range(minibatches):
        learner.train_minibatch()
    assert {len(minibatch) for minibatch in seen} == {batch}
    return torch.cat(seen).tolist()


def test_all_batches_see_the_same_samples_in_the_same_order() -> None:
    by_twos = samples_seen(2, 20)
    # 8 does not divide the 12 samples of a pass, and all samples are used.
    assert samples_seen(8, 5) == by_twos
    assert sorted(by_twos[:12]) == sorted(by_twos[12:24]) == list(range(12))
    assert by_twos[:12] != by_twos[12:24]


def test_the_accuracy_is_the_share_of_right_labels_over_all_parts_of_the_test_data() -> None:
    # The model predicts class 0 for everything; the 2,500 samples are tested in three parts.
    labels = (torch.arange(2500) >= 1000).long()
    data = (torch.zeros(2500, 1), labels)
    task = ProxyTask("constant", lambda seed: Recorder([]), data, data, "sgd", 0.1, 4)
    assert TorchLearner(task, 4, 0, device=CPU).accuracy() == pytest.approx(0.4)


def test_a_sequence_is_scored_at_each_position() -> None:
    tokens = torch.tensor([[0, 1, 2], [2, 1, 0]])
    following = torch.tensor([[0, 1, 2], [2, 1, 1]])

    def echo(seed: int) -> nn.Module:
        return nn.Embedding.from_pretrained(10 * torch.eye(3), freeze=False)

    task = ProxyTask("echo", echo, (tokens, following), (tokens, following), "adam", 0.1, 2)
    learner = TorchLearner(task, 2, 0, device=CPU)
    learner.train_minibatch()
    assert learner.accuracy() == pytest.approx(5 / 6)


def test_a_training_that_diverges_is_noticed() -> None:
    # The product of two layers overflows once their weights are large.
    task = replace(blobs("sgd"), make_model=lambda seed: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), base_lr=1e30)
    learner = TorchLearner(task, 8, 0, device=CPU)
    assert samples_to_target(learner, 8, RunLimits(0.9, 8, 8000)) == RunEnd(None, None)


# --- Samples to target ------------------------------------------------------------------------------------------------
# The number of samples to a target accuracy, computed by hand for scripted accuracies.


def test_the_target_is_reached_by_the_mean_of_three_accuracies() -> None:
    # Means of three: 0.6, 0.8, 0.85. The outlier of 0.95 does not reach the target by itself.
    learner = ScriptedLearner([0.1, 0.75, 0.95, 0.7, 0.9])
    end = samples_to_target(learner, 8, RunLimits(0.85, evaluate_every=16, max_samples=800))
    assert end == RunEnd(80, pytest.approx(0.85))
    assert learner.tested_after == [2, 4, 6, 8, 10]


def test_two_high_accuracies_alone_do_not_reach_the_target() -> None:
    end = samples_to_target(ScriptedLearner([1.0, 1.0, 1.0]), 8, RunLimits(0.5, evaluate_every=8, max_samples=80))
    assert end.samples == 24


def test_all_batches_that_divide_the_interval_are_tested_after_the_same_samples() -> None:
    limits = RunLimits(1.0, evaluate_every=32, max_samples=128)
    for batch in (4, 8, 32):
        learner = ScriptedLearner([0.5] * 4)
        samples_to_target(learner, batch, limits)
        assert [count * batch for count in learner.tested_after] == [32, 64, 96, 128]


def test_a_batch_that_does_not_divide_the_interval_is_tested_once_it_is_reached() -> None:
    learner = ScriptedLearner([1.0, 1.0, 1.0])
    end = samples_to_target(learner, 12, RunLimits(0.9, evaluate_every=32, max_samples=200))
    assert learner.tested_after == [3, 6, 8]
    assert end.samples == 96


def test_a_run_ends_without_the_target_before_it_exceeds_the_limit() -> None:
    learner = ScriptedLearner([0.2, 0.4, 0.6, 0.6])
    end = samples_to_target(learner, 8, RunLimits(0.9, evaluate_every=8, max_samples=39))
    assert learner.minibatches == 4
    assert end == RunEnd(None, pytest.approx(1.6 / 3))


def test_a_run_that_diverges_ends_at_once() -> None:
    learner = ScriptedLearner([0.2, math.nan])
    assert samples_to_target(learner, 8, RunLimits(0.9, evaluate_every=8, max_samples=8000)) == RunEnd(None, None)
    assert learner.minibatches == 2


def test_each_test_is_reported_with_the_mean_accuracy() -> None:
    reported: list[tuple[int, float]] = []
    limits = RunLimits(1.0, evaluate_every=8, max_samples=32)
    samples_to_target(ScriptedLearner([0.0, 0.5, 1.0, 1.0]), 8, limits, lambda *each: reported.append(each))
    assert reported == [(8, 0.0), (16, 0.25), (24, 0.5), (32, pytest.approx(2.5 / 3))]


@pytest.mark.parametrize("target", [0.0, -0.1, 1.01, 85.0, math.nan])
def test_a_target_that_is_no_share_is_refused(target: float) -> None:
    with pytest.raises(InvalidInputError, match="above 0 and at most 1"):
        RunLimits(target, 8, 800)


def test_a_target_of_one_can_be_reached() -> None:
    learner = ScriptedLearner([1.0] * 3)
    assert samples_to_target(learner, 8, RunLimits(1.0, evaluate_every=8, max_samples=24)).samples == 24


def test_a_limit_before_the_third_test_is_refused_with_the_least_one() -> None:
    with pytest.raises(InvalidInputError, match="--max-samples at least 48"):
        RunLimits(0.9, evaluate_every=16, max_samples=47)


def test_an_interval_of_no_samples_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="--evaluate-every must be at least 1"):
        RunLimits(0.9, evaluate_every=0, max_samples=47)


# --- Proxy runs -------------------------------------------------------------------------------------------------------
# The runs for all batch sizes and seeds, their journal, and how it is continued.

LIMITS = RunLimits(0.9, evaluate_every=32, max_samples=3200)
PLAN = ProxyPlan(blobs(), (8, 16), 2, LIMITS)


class Calls:
    """A fake that trains nothing. A run needs 1000 * batch + seed samples; batch size 16 never reaches the target."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.trained: list[tuple[int, int]] = []
        self._fail_at = fail_at

    def __call__(self, batch: int, seed: int, report: ReportSamples) -> RunEnd:
        if len(self.trained) == self._fail_at:
            raise KeyboardInterrupt
        self.trained.append((batch, seed))
        return RunEnd(None, 0.5) if batch == 16 else RunEnd(1000 * batch + seed, 0.9)


def really_train(batch: int, seed: int, report: ReportSamples) -> RunEnd:
    return samples_to_target(TorchLearner(PLAN.task, batch, seed), batch, PLAN.limits, report)


def run(path: Path, train: TrainRun, plan: ProxyPlan = PLAN) -> dict[int, list[int | None]]:
    def begun(batch: int, seed: int) -> ReportSamples:
        return lambda samples, accuracy: None

    seconds: Iterator[float] = iter(range(100))
    with RunsJournal(path, plan.header) as journal:
        train_runs(plan, journal, train, "cpu", begun, lambda finished: None, lambda: next(seconds))
        return journal.samples_by_batch(plan.batches, plan.seeds)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.jsonl"


def test_every_batch_is_trained_with_every_seed(path: Path) -> None:
    calls = Calls()
    assert run(path, calls) == {8: [8000, 8001], 16: [None, None]}
    assert calls.trained == [(8, 0), (16, 0), (8, 1), (16, 1)]


def test_finished_runs_are_not_trained_again(path: Path) -> None:
    run(path, Calls())
    again = Calls()
    assert run(path, again) == {8: [8000, 8001], 16: [None, None]}
    assert again.trained == []


def test_more_batches_and_seeds_can_be_added_later(path: Path) -> None:
    run(path, Calls())
    more = Calls()
    assert run(path, more, replace(PLAN, batches=(4, 8), seeds=3)) == {4: [4000, 4001, 4002], 8: [8000, 8001, 8002]}
    assert more.trained == [(4, 0), (4, 1), (4, 2), (8, 2)]


def test_an_interrupted_training_ends_with_the_result_of_an_uninterrupted_one(path: Path, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole.jsonl", really_train)
    interrupting = Calls(fail_at=0)
    for _ in range(2):
        finished = 0

        def one_run(batch: int, seed: int, report: ReportSamples) -> RunEnd:
            nonlocal finished
            finished += 1
            return really_train(batch, seed, report) if finished == 1 else interrupting(batch, seed, report)

        with pytest.raises(KeyboardInterrupt):
            run(path, one_run)
    assert run(path, really_train) == whole
    assert all(samples is not None for each in whole.values() for samples in each)
    assert path.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_an_incomplete_last_line_is_dropped(path: Path) -> None:
    run(path, Calls())
    complete = path.read_bytes()
    path.write_bytes(complete[:-20])
    calls = Calls()
    run(path, calls)
    assert calls.trained == [(16, 1)]
    assert len(path.read_bytes().splitlines()) == 5


def test_a_journal_whose_first_line_is_incomplete_begins_anew(path: Path) -> None:
    path.write_text('{"journal": 1, "task"')
    run(path, Calls())
    assert json.loads(path.read_text().splitlines()[0])["task"] == "blobs"


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "[1]",
        '{"batch": 8}',
        '{"batch": 0, "seed": 0, "samples": 8, "accuracy": 0.9, "seconds": 1.0, "device": "cpu"}',
        '{"batch": 8, "seed": 0, "samples": "8", "accuracy": 0.9, "seconds": 1.0, "device": "cpu"}',
        '{"batch": 8, "seed": 0, "samples": 8, "accuracy": NaN, "seconds": 1.0, "device": "cpu"}',
    ],
)
def test_a_damaged_line_is_refused_and_the_file_kept(path: Path, line: str) -> None:
    run(path, Calls())
    lines = path.read_text().splitlines()
    lines[2] = line
    damaged = "\n".join(lines) + "\n"
    path.write_text(damaged)
    with pytest.raises(RunsJournalError, match=r"runs.jsonl, line 3: is damaged; move the file away"):
        run(path, Calls())
    assert path.read_text() == damaged


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, task=shuffled_labels()), "task 'blobs', not 'shuffled labels'"),
        (replace(PLAN, task=blobs("sgd")), "optimizer 'adam', not 'sgd'"),
        (replace(PLAN, limits=replace(LIMITS, target_accuracy=0.8)), "target_accuracy 0.9, not 0.8"),
        (replace(PLAN, limits=replace(LIMITS, max_samples=6400)), "max_samples 3200, not 6400"),
        (replace(PLAN, lr_scaling=False), "lr_scaling True, not False"),
        (replace(PLAN, task=replace(PLAN.task, test=PLAN.task.train)), "data_sha256"),
    ],
)
def test_a_journal_of_another_training_is_refused_and_kept(path: Path, plan: ProxyPlan, message: str) -> None:
    run(path, Calls())
    before = path.read_bytes()
    with pytest.raises(InvalidInputError, match=message) as refused:
        run(path, Calls(), plan)
    assert "or another --out" in str(refused.value)
    assert path.read_bytes() == before


def test_a_journal_in_use_is_refused(path: Path) -> None:
    with RunsJournal(path, PLAN.header), pytest.raises(RunsJournalError, match="another command is writing to it"):
        RunsJournal(path, PLAN.header)


@pytest.mark.parametrize(
    ("batches", "seeds", "message"),
    [
        ((), 2, "no batch is given"),
        ((8, 0), 2, "a batch must be at least 1, not 0"),
        ((8, 97), 2, "the batch 97 is larger than the training data, which has 96 samples"),
        ((8, 16, 8), 2, "a batch is repeated in 8,16,8"),
        ((8, 64), 2, "--evaluate-every 32 is smaller than the batch 64"),
        ((8,), 0, "--seeds must be at least 1, not 0"),
    ],
)
def test_an_impossible_plan_is_refused(batches: tuple[int, ...], seeds: int, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ProxyPlan(blobs(), batches, seeds, LIMITS)


def test_by_default_each_tenth_of_the_data_is_tested_in_whole_batches() -> None:
    assert default_evaluate_every((8, 64), 1437) == 192
    assert default_evaluate_every((8, 64), 640) == 64
    assert default_evaluate_every((50,), 96) == 50


def test_the_efficiency_is_relative_to_the_largest_batch_that_reached_the_target() -> None:
    found = efficiency_of(PLAN, {8: [640, 672], 16: [960, 960], 32: [None, 960, None]})
    assert (found.model, found.batches, found.unreached) == ("blobs", (8, 16), (32,))
    assert found.of(8) == pytest.approx(656 / 960)
    assert "accuracy of 0.9 with adam" in found.origin
    with pytest.raises(InvalidInputError, match="no batch size reached the target accuracy"):
        efficiency_of(PLAN, {8: [None, None], 16: [None, None]})


# --- Proxy command ----------------------------------------------------------------------------------------------------
# The command `wattfleet reference proxy`.

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
