"""Several references on one command line: they are weighted by how well they explain the measured modes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import reference_models
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile, WorkloadFacts, board_named, write_profile
from wattfleet.prediction import Predictor, RooflinePredictor, fit_from, restore_predictor
from wattfleet_evaluation.cli.commands import app

SHIPPED = "agx_orin_resnet18"
SPACE = board_named("agx-orin").space.array()


def like_the_shipped(count: int) -> Profile:
    modes = SPACE[np.random.default_rng(1).choice(len(SPACE), count, replace=False)]
    truth = restore_predictor(reference_models.load(SHIPPED)).predict(modes)
    return Profile(modes, 1.7 * truth.minibatch_ms, truth.power_mw)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    write_profile(like_the_shipped(120), tmp_path / "target.csv")
    return tmp_path / "target.csv"


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A corpus of an unusual workload: it only loads data, on a board whose GPU draws no power."""
    modes = SPACE[np.random.default_rng(0).choice(len(SPACE), 420, replace=False)]
    cores, cpu, _, _ = (modes / [1.0, 1e6, 1e9, 1e9]).T
    write_profile(Profile(modes, 900 / (cpu * cores), 2e3 + 3e2 * cpu * cores), tmp_path / "odd.csv")
    return tmp_path / "odd.csv"


def figures(command: str, target: Path, *references: object, runs: int = 2) -> dict[str, float]:
    given = [command, "--target", target, "--modes", 6, "--runs", runs, "--json"]
    given += [word for reference in references for word in ("--reference", reference)]
    result = CliRunner().invoke(app, [str(word) for word in given])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    return {
        name: found[name]["median"] for name in ("time_mape", "power_mape", "time_penalty_pct") if name in found
    } | {name: found[name] for name in ("over_budget_1w_pct",) if name in found}


def test_a_mixture_is_about_as_good_as_its_best_reference(target: Path, odd: Path) -> None:
    best, worst = figures("transfer", target, SHIPPED), figures("transfer", target, odd)
    assert worst["time_mape"] > 2 * best["time_mape"]
    for order in ((odd, SHIPPED), (SHIPPED, odd)):
        mixed = figures("transfer", target, *order)
        assert mixed["time_mape"] < 1.2 * best["time_mape"] + 0.2
        assert mixed["power_mape"] < 1.2 * best["power_mape"] + 0.2


def test_a_choice_from_a_mixture_is_that_of_the_best_reference(target: Path, odd: Path) -> None:
    best, mixed = figures("choice", target, SHIPPED), figures("choice", target, odd, SHIPPED)
    assert mixed["time_penalty_pct"] <= best["time_penalty_pct"] + 1
    assert mixed["over_budget_1w_pct"] <= best["over_budget_1w_pct"] + 1


@pytest.mark.parametrize("command", ["transfer", "choice"])
def test_a_reference_that_is_named_twice_counts_once(target: Path, command: str) -> None:
    assert figures(command, target, SHIPPED, SHIPPED, runs=1) == figures(command, target, SHIPPED, runs=1)


class OneReference(RooflinePredictor):
    """A kind of predictor that can only transfer from one reference."""

    name = "single"
    fit_mixed = None  # type: ignore[assignment]


def test_a_kind_that_cannot_mix_refuses_several_references() -> None:
    known: list[Predictor] = [restore_predictor(reference_models.load(SHIPPED))] * 2
    with pytest.raises(InvalidInputError, match="'single' transfers from one reference, not 2: give one, or use 'roof"):
        fit_from(OneReference, like_the_shipped(5), known, WorkloadFacts())  # type: ignore[type-var]
