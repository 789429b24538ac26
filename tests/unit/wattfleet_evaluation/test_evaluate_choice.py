"""`wattfleet evaluate choice`: the methods that need a reference, and the error if it is missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile, board_named, write_profile
from wattfleet_evaluation.cli.commands import app


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
