"""`wattfleet advise`: the output and exit code of the comparison of profiling methods."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from edge_agent.cli.choose import app
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BOARDS

METHODS = {"transfer", "scratch", "binary-search", "brute-force"}


def advise(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "100"})


def content(*arguments: object):
    ended = advise(*arguments, "--json")
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


@pytest.mark.parametrize("kind", BOARDS)
def test_every_board_gets_a_comparison_of_all_methods(kind: str) -> None:
    found = content("--board", kind, "--training-hours", 24)
    assert {row["method"] for row in found["methods"]} == METHODS
    assert found["recommended"] in found["methods"]
    brute = next(row for row in found["methods"] if row["method"] == "brute-force")
    assert brute["modes"] == len(BOARDS[kind].space)


def test_the_table_labels_every_figure_with_its_source() -> None:
    ended = advise("--board", "agx-orin", "--training-hours", 72, "--workload-changes", "often")
    words = " ".join(ended.stdout.split())
    assert "predicted by the reference agx_orin_resnet18" in words
    assert "mean of four measured workloads (docs/choosing.md)" in words
    assert "measuring of 20 workloads (the workload changes often)" in words
    assert "Recommended: transfer with " in words
    assert "Measure with: wattfleet agent profile --method transfer --modes " in words


def test_a_slower_workload_takes_longer_to_measure() -> None:
    seconds = [
        content("--board", "orin-nano", "--training-hours", 24, "--minibatch-ms", ms)["methods"][-1]["measuring_s"]
        for ms in (300, 600)
    ]
    assert seconds[1] > 1.5 * seconds[0]


def test_only_binary_search_measures_more_for_more_budgets() -> None:
    one, five = (
        {(row["method"], index): row["modes"] for index, row in enumerate(found["methods"])}
        for found in (content("--board", "orin-nano", "--training-hours", 24, "--budgets", n) for n in (1, 5))
    )
    assert {method for method, index in one if one[method, index] != five[method, index]} == {"binary-search"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--board", "tx2", "--training-hours", 1), "unknown board kind 'tx2': choose one of agx-orin"),
        (("--board", "agx-orin", "--training-hours", 0), "hours of training must be finite and above 0, not 0"),
        (("--board", "agx-orin", "--training-hours", "nan"), "must be finite and above 0, not nan"),
        (("--board", "agx-orin", "--training-hours", 1, "--reference", "none"), "unknown reference 'none': choose"),
        (("--board", "agx-orin", "--training-hours", 1, "--minibatch-ms", -1), "--minibatch-ms must be finite"),
    ],
)
def test_bad_input_is_answered_with_what_to_do(arguments: tuple[object, ...], said: str) -> None:
    ended = advise(*arguments)
    assert isinstance(ended.exception, InvalidInputError) and said in str(ended.exception)


@pytest.mark.parametrize(
    "arguments", [("--board", "agx-orin"), ("--training-hours", 1), ("--board", "agx-orin", "--training-hours", "long")]
)
def test_what_is_missing_or_no_number_is_a_usage_error(arguments: tuple[object, ...]) -> None:
    assert advise(*arguments).exit_code == 2
