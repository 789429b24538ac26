"""The name and the labels that a run gets at the coordinator."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import APP, GridOfNodes, PlannerStub
from wattfleet.errors import InvalidInputError
from wattfleet_flower import PowerAware
from wattfleet_proto.v1 import planning_pb2

NETWORK = ArrayRecord([np.zeros((4, 2), np.float32)])


def started(config: Any = None, **options: Any) -> planning_pb2.StartRunRequest:
    """The request with which a run starts."""
    planner, grid = PlannerStub(), GridOfNodes({})
    grid.run_config = config or {}
    PowerAware(FedAvg(), planner, clock=grid.clock, **options).start(grid, NETWORK, num_rounds=0)
    [request] = planner.asked("StartRun")
    asked: planning_pb2.StartRunRequest = request
    return asked


def test_without_a_name_the_coordinator_gets_the_app_to_name_the_run_after() -> None:
    request = started()
    assert (request.name, request.app, dict(request.labels)) == ("", APP, {})


def test_a_run_has_the_name_and_labels_of_its_author() -> None:
    request = started(run_name="night", labels={"site": "lab", "lr": 0.1, "warm": True})
    assert (request.name, dict(request.labels)) == ("night", {"site": "lab", "lr": "0.1", "warm": "True"})


def test_what_flwr_run_states_counts_more_than_the_app() -> None:
    config = {"run-name": "day", "run-labels": "site=roof gpu=1"}
    request = started(config, run_name="night", labels={"site": "lab", "lr": 0.1})
    assert (request.name, dict(request.labels)) == ("day", {"site": "roof", "gpu": "1", "lr": "0.1"})
    assert started({"run-name": "", "run-labels": ""}, run_name="night").name == "night"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run_name": "two words"}, "a run's name must have 1 to 60 printable characters"),
        ({"run_name": "17351"}, "not only digits, not '17351'"),
        ({"run_name": 7}, "run_name must be a text, not 7: leave it out"),
        ({"labels": {"a b": "c"}}, "the key of a label must have 1 to 40 printable characters"),
        ({"labels": {"a": None}}, "the label 'a' must have a text of 1 to 100 printable characters, not None"),
        ({"labels": ["site=lab"]}, "labels must be a dictionary such as"),
        ({"labels": {str(k): "v" for k in range(17)}}, "a run has at most 16 labels, not 17"),
    ],
)
def test_a_wrong_name_or_label_is_refused_where_the_app_states_it(options: Any, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        PowerAware(FedAvg(), PlannerStub(), **options)


@pytest.mark.parametrize("config", [{"run-name": "two words"}, {"run-labels": "lab"}, {"run-name": 7}])
def test_a_wrong_run_config_ends_the_app_before_the_run_starts(config: Any) -> None:
    with pytest.raises(InvalidInputError, match="a run's name must|a label is written as"):
        started(config)


def test_the_app_logs_what_its_run_is_called(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(self: PlannerStub, request: Any, **_: Any) -> planning_pb2.StartRunResponse:
        return planning_pb2.StartRunResponse(name="digits-0714-1532")

    monkeypatch.setattr(PlannerStub, "StartRun", named, raising=False)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    planner, grid = PlannerStub(), GridOfNodes({})
    with caplog.at_level(logging.INFO, "flwr"):
        PowerAware(FedAvg(), planner, clock=grid.clock).start(grid, NETWORK, num_rounds=0)
    assert "is called digits-0714-1532 at the coordinator" in caplog.text
