"""At its start, a run logs the options of the wrapped strategy that have an effect, and no others."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, FedProx

from tests.fakes.flower_in_process import GridOfNodes, PlannerStub
from tests.fakes.power_aware_runs import ARRAYS, fleet
from wattfleet_flower import FedBuff, PowerAware


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    """The lines that are logged when a strategy starts, without Flower's tree."""
    logging.getLogger("flwr").addHandler(caplog.handler)
    caplog.handler.setLevel(logging.INFO)

    def lines(strategy: Any, grid: GridOfNodes | None = None, **options: Any) -> list[str]:
        caplog.clear()
        grid = grid or GridOfNodes(fleet())
        PowerAware(strategy, PlannerStub(), clock=grid.clock, **options).start(grid, ARRAYS, num_rounds=1)
        return list(dict.fromkeys(record.getMessage().lstrip("\t│├└─> ") for record in caplog.records))

    yield lines
    logging.getLogger("flwr").removeHandler(caplog.handler)


def about(lines: list[str], text: str) -> str:
    [line] = [line for line in lines if text in line]
    return line


def test_it_says_what_counts_and_what_does_not(logged: Any) -> None:
    lines = logged(FedAvg(fraction_train=0.3, fraction_evaluate=0.5, min_train_nodes=7, min_available_nodes=3))
    about(lines, "The coordinator's policy chooses the nodes that train, and their power modes")
    used = about(lines, "Used of FedAvg's options")
    assert "min_available_nodes=3 (nodes to wait for" in used and "fraction_evaluate=0.5" in used
    assert about(lines, "Ignored:") == "Ignored: fraction_train=0.3, min_train_nodes=7"
    assert not [line for line in lines if line.startswith(("Sampling", "Fraction", "Minimum"))], "said once"
    about(lines, "Weighted by: 'num-examples'")


def test_a_run_that_may_go_on_without_plans_uses_them_then(logged: Any) -> None:
    lines = logged(FedAvg(), on_coordinator_away="unplanned")
    assert about(lines, "Ignored:").endswith("min_train_nodes=2; used while the coordinator is away")


def test_what_else_a_strategy_says_of_itself_stays(logged: Any) -> None:
    about(logged(FedProx(proximal_mu=0.125)), "0.125")
    private = DifferentialPrivacyServerSideFixedClipping(FedAvg(min_train_nodes=7), 0.0, 10.0, 2)
    lines = logged(private)
    about(lines, "Ignored: fraction_train=1, min_train_nodes=7")
    assert not [line for line in lines if line.startswith("Minimum")]


def test_the_options_of_fedbuff_count(logged: Any) -> None:
    grid = GridOfNodes(fleet())
    lines = logged(FedBuff(buffer_size=2, clock=grid.clock), grid)
    about(lines, "The options of FedBuff below are used")
    about(lines, "2 updates per step")
    assert not [line for line in lines if "Ignored" in line]


def test_a_strategy_that_trains_nothing_is_said_to_plan_nothing(logged: Any) -> None:
    about(logged(FedAvg(fraction_train=0.0)), "fraction_train=0: nothing is trained, so nothing is planned")


@pytest.mark.parametrize(("argument", "used"), [(None, "127.0.0.1:1"), ("127.0.0.1:2", "127.0.0.1:2")])
def test_the_coordinator_is_the_one_of_the_variable_unless_the_app_names_one(
    argument: str | None, used: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WATTFLEET_COORDINATOR", "127.0.0.1:1")
    flower = logging.getLogger("flwr")
    monkeypatch.setattr(flower, "handlers", [*flower.handlers, caplog.handler])
    PowerAware(FedAvg(), argument).summary()
    assert f"the coordinator at {used} plans each training" in caplog.text
