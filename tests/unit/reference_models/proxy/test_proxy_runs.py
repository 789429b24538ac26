"""The runs for all batch sizes and seeds, their journal, and how it is continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

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
from reference_models.proxy.proxy_task import TorchLearner
from tests.fakes.proxy_tasks import blobs, shuffled_labels
from wattfleet.errors import InvalidInputError

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
