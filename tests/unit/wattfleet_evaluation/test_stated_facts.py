"""Workload facts stated on command lines, and contradictions between them and a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile, Task, WorkloadFacts, board_named, stated_facts, write_profile
from wattfleet_evaluation.cli.commands import app
from wattfleet_evaluation.judging.sources import find_reference

SPACE = board_named("agx-orin").space.array()


def rows(task: Task = Task.TRAINING, batch: int | None = None, count: int = 20, seed: int = 0) -> Profile:
    modes = SPACE[np.random.default_rng(seed).choice(len(SPACE), count, replace=False)]
    cores, cpu, gpu, mem = (modes / [1.0, 1e6, 1e9, 1e9]).T
    time, power = 80 / (cpu * np.minimum(cores, 4)) + 60 / gpu + 9 / mem, 6e3 + 9e3 * gpu + 2e3 * cpu
    return Profile(modes, time, power, None if batch is None else np.full(count, batch), task)


def test_the_file_tells_task_and_batch_and_a_person_the_rest() -> None:
    assert stated_facts("a.csv", rows(Task.INFERENCE, 4), loader_workers=0) == WorkloadFacts(Task.INFERENCE, 4, 0)
    assert stated_facts("a.csv", rows(), batch=16) == WorkloadFacts(batch=16)
    several = rows(batch=1)
    both = Profile(several.modes, several.minibatch_ms, several.power_mw, np.arange(20) % 2 + 1)
    assert stated_facts("a.csv", both) == WorkloadFacts()


def test_contradictions_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="a.csv: has rows of the batch 4, not of 16: give 4, or other rows"):
        stated_facts("a.csv", rows(batch=4), batch=16)
    several = rows(batch=1)
    both = Profile(several.modes, several.minibatch_ms, several.power_mw, np.arange(20) % 2 + 1)
    with pytest.raises(InvalidInputError, match="a.csv: has rows of the batches 1, 2, not only of 2: leave the batch"):
        stated_facts("a.csv", both, batch=2)
    with pytest.raises(InvalidInputError, match=r"a.csv: has times of inference \(batch_ms\), not of training: give"):
        stated_facts("a.csv", rows(Task.INFERENCE), Task.TRAINING)


def transfer(target: Path, *arguments: object) -> Result:
    common = ("transfer", "--reference", "agx_orin_resnet18", "--target", target, "--modes", 6, "--runs", 1, "--json")
    return CliRunner().invoke(app, [*map(str, common), *map(str, arguments)])


def test_transfer_takes_the_facts(tmp_path: Path) -> None:
    write_profile(rows(), tmp_path / "target.csv")
    result = transfer(tmp_path / "target.csv", "--task", "training", "--batch", 16, "--loader-workers", 4)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--task", "training"), "has times of inference (batch_ms), not of training"),
        (("--batch", 0), "batch must be a whole number of samples, from 1 to 1,000,000, not 0"),
        (("--loader-workers", -1), "loader_workers must be a whole number of processes"),
    ],
)
def test_transfer_refuses_what_cannot_be(tmp_path: Path, arguments: tuple[object, ...], problem: str) -> None:
    write_profile(rows(Task.INFERENCE), tmp_path / "target.csv")
    result = transfer(tmp_path / "target.csv", *arguments)
    assert isinstance(result.exception, InvalidInputError)
    assert problem in str(result.exception)


def test_a_corpus_of_training_is_no_reference_for_inference(tmp_path: Path) -> None:
    write_profile(rows(count=40, seed=1), tmp_path / "corpus.csv")
    find_reference(str(tmp_path / "corpus.csv"), rows())
    with pytest.raises(InvalidInputError, match="the target: has times of inference .* is of training: give rows of"):
        find_reference(str(tmp_path / "corpus.csv"), rows(Task.INFERENCE))
