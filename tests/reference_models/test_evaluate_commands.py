"""`wattfleet evaluate transfer`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from reference_models.evaluate_commands import app
from wattfleet.boards import board
from wattfleet.errors import InvalidInputError
from wattfleet.profile import Profile, write_csv


@pytest.fixture
def target(tmp_path: Path) -> Path:
    modes = board("agx-orin").space.array()
    modes = modes[np.random.default_rng(0).choice(len(modes), 60, replace=False)]
    cores, cpu, gpu, mem = (modes / [1.0, 1e6, 1e9, 1e9]).T
    path = tmp_path / "target.csv"
    write_csv(Profile(modes, 80 / (cpu * np.minimum(cores, 4)) + 60 / gpu + 9 / mem, 6e3 + 9e3 * gpu + 2e3 * cpu), path)
    return path


def run(*arguments: object):
    return CliRunner().invoke(app, ["transfer", *map(str, arguments)])


def test_json_has_the_promised_keys(target: Path) -> None:
    result = run("--reference", "agx_orin_resnet18", "--target", target, "--modes", 10, "--runs", 2, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["time_mape"]) == set(found["power_mape"]) == set(found["fit_seconds"]) == {"median", "q1", "q3"}
    assert set(found["coverage_90"]) == {"time", "power"}
    assert set(found["time_mape_passing"]) == set(found["power_mape_passing"]) == {"median", "q1", "q3"}
    assert 0 <= found["suspect_rows"] <= 3


def test_the_table_names_what_was_measured(target: Path) -> None:
    result = run("--reference", target, "--target", target, "--modes", 10, "--runs", 2)
    assert result.exit_code == 0, result.output
    assert "time, MAPE %" in result.stdout
    assert "pass the audit" in result.stdout
    assert "90 % interval" in result.stdout


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"--predictor": "oracle"}, "roofline, powertrain, scratch"),
        ({"--predictor": "powertrain"}, "give the CSV of its corpus"),
        ({"--reference": "nowhere"}, "agx_orin_resnet18"),
        ({"--modes": 60}, "from 0 to 59"),
        ({"--modes": 4, "--predictor": "scratch"}, "at least 5"),
        ({"--runs": 0}, "1 or more"),
        ({"--seed": -1}, "negative"),
    ],
)
def test_bad_input_says_what_to_do(target: Path, changed: dict[str, object], said: str) -> None:
    options = {"--reference": "agx_orin_resnet18", "--target": target, "--modes": 10, "--runs": 1} | changed
    result = run(*(part for option in options.items() for part in option))
    assert isinstance(result.exception, InvalidInputError)
    assert said in str(result.exception)
