"""The ten-line example of the core: from a CSV file to a mode under a budget."""

from __future__ import annotations

import ast
import re
import runpy
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import wattfleet
from edge_agent.devices.virtual.simulated import SimulatedDevice
from wattfleet.modes import modes_to_array

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "choose_a_mode.py"
BUDGET_MW = 15_000


@cache
def results() -> dict[str, Any]:
    """The variables of the example after it has run."""
    return runpy.run_path(str(EXAMPLE))


def test_the_example_has_ten_lines_besides_its_imports() -> None:
    statements = ast.parse(EXAMPLE.read_text()).body
    assert len([node for node in statements[1:] if not isinstance(node, (ast.Import, ast.ImportFrom))]) == 10


def test_the_example_prints_the_front_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))
    front, choice = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"front: \d{2} modes, \d+ to \d+ s per epoch", front)
    assert re.fullmatch(r"under 15 W: \dc \d\.\d\d/0\.\d\d/\d\.\d\d, \d{3} ms per minibatch, 1[34]\.\d W", choice)


def test_the_chosen_mode_keeps_the_budget_and_is_nearly_the_fastest() -> None:
    # The file was measured on this simulated board, whose noiseless values are known.
    board, modes, choice = SimulatedDevice("orin-nano", 0), results()["modes"], results()["choice"]
    (chosen_ms,), (chosen_mw,) = board.truth(modes_to_array([choice.mode]))
    assert chosen_mw <= BUDGET_MW
    minibatch_ms, power_mw = board.truth(modes)
    best_ms = minibatch_ms[power_mw <= BUDGET_MW].min()
    assert best_ms <= chosen_ms <= 1.25 * best_ms


def test_the_file_holds_what_the_simulated_board_does() -> None:
    measured = results()["measured"]
    minibatch_ms, power_mw = SimulatedDevice("orin-nano", 0).truth(measured.modes)
    assert len(measured) == 12
    assert measured.minibatch_ms == pytest.approx(minibatch_ms, rel=0.15)
    assert measured.power_mw == pytest.approx(power_mw, rel=0.05)


def test_the_package_shows_the_same_lines() -> None:
    source = EXAMPLE.read_text()
    shown = dedent((wattfleet.__doc__ or "").partition("::\n\n")[2]).strip().splitlines()
    lines = [line for line in shown if line and not line.startswith("...")]
    assert len(lines) >= 10
    for line in lines:
        assert line in source.splitlines() or "measured.csv" in line
