"""The commands of `wattfleet evaluate`: methods, ranges, stated facts, references, and the top of the report."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import reference_models
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Profile, Task, WorkloadFacts, board_named, stated_facts, write_profile
from wattfleet.core.prediction import Predictor, RooflinePredictor, fit_from, restore_predictor
from wattfleet.evaluation.cli.commands import app
from wattfleet.evaluation.cli.options import parse_range
from wattfleet.evaluation.judging.sources import find_reference
from wattfleet.evaluation.reports.cases import Published
from wattfleet.evaluation.reports.page import overview_of

# --- Evaluate choice --------------------------------------------------------------------------------------------------
# `wattfleet evaluate choice`: the methods that need a reference, and the error if it is missing.


@pytest.fixture
def target(tmp_path: Path) -> Path:
    modes = board_named("agx-orin").space.array()
    modes = modes[np.random.default_rng(0).choice(len(modes), 60, replace=False)]
    cores, cpu, gpu, mem = (modes / [1.0, 1e6, 1e9, 1e9]).T
    path = tmp_path / "target.csv"
    write_profile(
        Profile(modes, 80 / (cpu * np.minimum(cores, 4)) + 60 / gpu + 9 / mem, 6e3 + 9e3 * gpu + 2e3 * cpu), path
    )
    return path


def run(target: Path, *arguments: object) -> Result:
    common = ("choice", "--target", target, "--budgets", "12:16", "--runs", 1)
    return CliRunner().invoke(app, [*map(str, common), *map(str, arguments)])


@pytest.mark.parametrize("method", ["maxn", "random", "binary-search", "brute-force", "presets"])
def test_baselines_need_no_reference(target: Path, method: str) -> None:
    result = run(target, "--method", method, "--modes", 60, "--json")
    assert result.exit_code == 0, result.output
    assert "time_penalty_pct" in json.loads(result.stdout)


@pytest.mark.parametrize("method", ["wattfleet", "roofline", "powertrain"])
def test_methods_that_transfer_require_a_reference(target: Path, method: str) -> None:
    result = run(target, "--method", method)
    assert isinstance(result.exception, InvalidInputError)
    assert "give --reference, the CSV of a corpus or one of agx_orin_resnet18" in str(result.exception)


@pytest.mark.parametrize("method", ["wattfleet", "maxn", "scratch"])
def test_a_reference_is_checked_even_if_it_is_not_needed(target: Path, method: str) -> None:
    result = run(target, "--method", method, "--reference", "nonsense")
    assert isinstance(result.exception, InvalidInputError)
    assert "'nonsense' is neither a file nor a shipped reference" in str(result.exception)


def test_the_default_method_transfers_from_a_shipped_reference(target: Path) -> None:
    result = run(target, "--reference", "agx_orin_resnet18", "--modes", 5)
    assert result.exit_code == 0, result.output
    assert "Choices of the method wattfleet" in result.stdout


def test_the_default_method_refuses_zero_modes(target: Path) -> None:
    result = run(target, "--reference", "agx_orin_resnet18", "--modes", 0)
    assert isinstance(result.exception, InvalidInputError)
    assert str(result.exception) == "the choice method 'wattfleet' needs measurements: give --modes 1 or more"


# --- Ranges -----------------------------------------------------------------------------------------------------------
# Ranges of numbers in command-line options, compared with exact fractions.


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 500), st.sampled_from([1, 10, 100]))
def test_both_ends_are_included_without_rounding_errors(first: int, more: int, step: int, parts: int) -> None:
    expected = [Fraction(number, parts) for number in range(first, first + more + 1, step)]
    text = ":".join(str(number / parts) for number in (first, first + more, step))
    assert parse_range("--x", text, 7) == [float(number) for number in expected]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("10:13", [10, 11, 12, 13]), ("7", [7]), ("2:3.5", [2, 3]), ("5:5:9", [5]), ("0.5:0.7:0.1", [0.5, 0.6, 0.7])],
)
def test_forms_of_a_range(text: str, numbers: list[float]) -> None:
    assert parse_range("--x", text, 1) == numbers


@pytest.mark.parametrize("text", ["", ":", "1:", "1:2:3:4", "a:b", "0:5", "-1:5", "1:inf", "nan", "1:5:0", "1:5:-1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="^--x: invalid range .* give FIRST:LAST:STEP, such as 30:120:10$"):
        parse_range("--x", text, 1)


def test_descending_and_endless_ranges_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="'9:3' ends below its start: give the lower number first"):
        parse_range("--x", "9:3", 1)
    assert len(parse_range("--x", "1:10000", 1)) == 10_000
    with pytest.raises(InvalidInputError, match="has too many numbers: give at most 10,000"):
        parse_range("--x", "1:10001", 1)
    with pytest.raises(InvalidInputError, match="give at most 10,000"):
        parse_range("--x", "1:1e300:1e-9", 1)


# --- Stated facts -----------------------------------------------------------------------------------------------------
# Workload facts stated on command lines, and contradictions between them and a file.

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


# --- Several references -----------------------------------------------------------------------------------------------
# Several references on one command line: they are weighted by how well they explain the measured modes.

SHIPPED = "agx_orin_resnet18"


def like_the_shipped(count: int) -> Profile:
    modes = SPACE[np.random.default_rng(1).choice(len(SPACE), count, replace=False)]
    truth = restore_predictor(reference_models.load(SHIPPED)).predict(modes)
    return Profile(modes, 1.7 * truth.minibatch_ms, truth.power_mw)


@pytest.fixture
def target_like_the_shipped(tmp_path: Path) -> Path:
    write_profile(like_the_shipped(120), tmp_path / "target.csv")
    return tmp_path / "target.csv"


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A corpus of an unusual workload: it only loads data, on a board whose GPU draws no power."""
    modes = SPACE[np.random.default_rng(0).choice(len(SPACE), 420, replace=False)]
    cores, cpu, _, _ = (modes / [1.0, 1e6, 1e9, 1e9]).T
    write_profile(Profile(modes, 900 / (cpu * cores), 2e3 + 3e2 * cpu * cores), tmp_path / "odd.csv")
    return tmp_path / "odd.csv"


def figures(command: str, target_like_the_shipped: Path, *references: object, runs: int = 2) -> dict[str, float]:
    given = [command, "--target", target_like_the_shipped, "--modes", 6, "--runs", runs, "--json"]
    given += [word for reference in references for word in ("--reference", reference)]
    result = CliRunner().invoke(app, [str(word) for word in given])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    return {
        name: found[name]["median"] for name in ("time_mape", "power_mape", "time_penalty_pct") if name in found
    } | {name: found[name] for name in ("over_budget_1w_pct",) if name in found}


@pytest.mark.slow
def test_a_mixture_is_about_as_good_as_its_best_reference(target_like_the_shipped: Path, odd: Path) -> None:
    best, worst = (
        figures("transfer", target_like_the_shipped, SHIPPED),
        figures("transfer", target_like_the_shipped, odd),
    )
    assert worst["time_mape"] > 2 * best["time_mape"]
    for order in ((odd, SHIPPED), (SHIPPED, odd)):
        mixed = figures("transfer", target_like_the_shipped, *order)
        assert mixed["time_mape"] < 1.2 * best["time_mape"] + 0.2
        assert mixed["power_mape"] < 1.2 * best["power_mape"] + 0.2


def test_a_choice_from_a_mixture_is_that_of_the_best_reference(target_like_the_shipped: Path, odd: Path) -> None:
    best, mixed = (
        figures("choice", target_like_the_shipped, SHIPPED),
        figures("choice", target_like_the_shipped, odd, SHIPPED),
    )
    assert mixed["time_penalty_pct"] <= best["time_penalty_pct"] + 1
    assert mixed["over_budget_1w_pct"] <= best["over_budget_1w_pct"] + 1


@pytest.mark.parametrize("command", ["transfer", "choice"])
def test_a_reference_that_is_named_twice_counts_once(target_like_the_shipped: Path, command: str) -> None:
    assert figures(command, target_like_the_shipped, SHIPPED, SHIPPED, runs=1) == figures(
        command, target_like_the_shipped, SHIPPED, runs=1
    )


class OneReference(RooflinePredictor):
    """A kind of predictor that can only transfer from one reference."""

    name = "single"
    fit_mixed = None  # type: ignore[assignment]


def test_a_kind_that_cannot_mix_refuses_several_references() -> None:
    known: list[Predictor] = [restore_predictor(reference_models.load(SHIPPED))] * 2
    with pytest.raises(InvalidInputError, match="'single' transfers from one reference, not 2: give one, or use 'roof"):
        fit_from(OneReference, like_the_shipped(5), known, WorkloadFacts())  # type: ignore[type-var]


# --- Report overview --------------------------------------------------------------------------------------------------
# The tables at the top of an evaluation report: which evaluation fills which cell.


def pair(
    reference: str, target: str, predictors: list[str], methods: list[str], published: list[Published]
) -> dict[str, Any]:
    return {
        "reference": reference,
        "target": target,
        "intervals": [{"name": name, "from": reference} for name in predictors],
        "choices": [{"name": name, "from": reference} for name in methods],
        "published": published,
    }


def test_each_target_has_one_column_with_its_first_reference() -> None:
    pairs = [
        pair("resnet", "mobilenet", ["roofline"], ["wattfleet"], []),
        pair("resnet", "yolo", ["roofline"], ["wattfleet"], []),
        pair("mobilenet", "resnet", ["roofline"], ["wattfleet"], []),
        pair("mobilenet", "yolo", ["roofline"], ["wattfleet"], []),
    ]
    found = overview_of(pairs)
    assert found.columns == [("mobilenet", "resnet"), ("yolo", "resnet"), ("resnet", "mobilenet")]
    assert [row and row["from"] for row in found.errors["roofline"]] == ["resnet", "resnet", "mobilenet"]


def test_a_method_that_was_not_evaluated_on_a_target_leaves_its_place_empty() -> None:
    pairs = [
        pair("resnet", "mobilenet", ["roofline"], ["maxn"], []),
        pair("resnet", "nano", ["roofline", "tree"], ["maxn", "presets"], []),
    ]
    found = overview_of(pairs)
    assert found.errors["tree"] == [None, {"name": "tree", "from": "resnet"}]
    assert found.choices["presets"] == [None, {"name": "presets", "from": "resnet"}]


def test_published_errors_are_those_from_fifty_modes() -> None:
    of_ten, of_fifty = (Published("nano", "powertrain", modes, 20.0, 6.0, "4.2") for modes in (10, 50))
    found = overview_of([pair("resnet", "nano", ["roofline"], [], [of_ten, of_fifty])])
    assert found.published == {"powertrain": [of_fifty]}
