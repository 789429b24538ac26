"""Every strategy that ships with Flower, in PowerAware and bare, with the same replies.

Strategies of later versions of Flower are found automatically; the test reports those that it cannot construct.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Result, Strategy, dp_adaptive_clipping

from tests.fakes.flower_in_process import GridOfNodes, Node, PlannerStub, trained
from wattfleet.errors import InvalidInputError
from wattfleet.planning import EpochChoice
from wattfleet_flower import PowerAware, Quorum
from wattfleet_flower.server.replies import METRIC_PREFIX
from wattfleet_proto.assignment import RECORD_KEY, RoundAssignment

ROUNDS = 2
NODES = {2**63 - 1 + k: Node(f"device-{k}") for k in range(6)}
CHOSEN = ["device-1", "device-3", "device-4", "device-5"]
CHOSEN_NODES = {node_id: node for node_id, node in NODES.items() if node.device_id in CHOSEN}

NOT_WRAPPABLE: dict[str, str] = {}
"""Name of a strategy -> why no wrapper can plan its rounds."""

# It trains on one node after another, so three of the four selected nodes receive nothing.
TRAINED_IN_A_ROUND = {"FedXgbCyclic": 1}

STRATEGIES = sorted(
    name
    for name in flower.__all__
    if inspect.isclass(kind := getattr(flower, name)) and issubclass(kind, Strategy) and not inspect.isabstract(kind)
)

# Constructor arguments that have no default.
REQUIRED: dict[str, Callable[[], Any]] = {
    "strategy": lambda: FedAvg(fraction_evaluate=0.0),
    "noise_multiplier": lambda: 0.0,
    "clipping_norm": lambda: 0.5,
    "num_sampled_clients": lambda: len(CHOSEN),
    "client_learning_rate": lambda: 0.1,
}


def built(name: str) -> Strategy:
    kind = getattr(flower, name)
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    # Evaluation on all nodes would draw from the same random numbers as the next training.
    arguments = {"fraction_evaluate": 0.0} if any(one.name == "fraction_evaluate" for one in parameters) else {}
    for parameter in parameters:
        if parameter.default is not inspect.Parameter.empty:
            continue
        if parameter.name not in REQUIRED:
            pytest.fail(f"{name} is new: say in REQUIRED what its {parameter.name!r} may be, or why in NOT_WRAPPABLE")
        arguments[parameter.name] = REQUIRED[parameter.name]()
    return kind(**arguments)


def trees(model: bytes) -> ArrayRecord:
    return ArrayRecord([np.frombuffer(model, dtype=np.uint8)])


def one_tree(number: int) -> bytes:
    """The part of an XGBoost model that Flower's bagging reads."""
    model = {
        "gbtree_model_param": {"num_trees": "1", "num_parallel_tree": "1"},
        "trees": [{"id": 0, "leaf": number}],
        "tree_info": [0],
        "iteration_indptr": [0, 1],
    }
    return json.dumps({"learner": {"gradient_booster": {"model": model}}}).encode()


def boosted(message: Message) -> Message:
    content = {
        "arrays": trees(one_tree(message.metadata.dst_node_id % 7)),
        "metrics": MetricRecord({"num-examples": 10, "train_loss": 1.0}),
    }
    return Message(RecordDict(content), reply_to=message)


def clipped(message: Message) -> Message:
    """Adds the metric that the mod for adaptive clipping reports."""
    return trained(message, **{dp_adaptive_clipping.KEY_NORM_BIT: message.metadata.dst_node_id % 2})


def initial(name: str) -> ArrayRecord:
    if name.startswith("FedXgb"):
        return trees(b"")
    return ArrayRecord({"0": Array(np.linspace(-1, 1, 6).reshape(2, 3)), "1": Array(np.ones(2))})


def grid_of(name: str, nodes: dict[int, Node]) -> GridOfNodes:
    training = boosted if name.startswith("FedXgb") else clipped
    return GridOfNodes({node_id: Node(node.device_id, training) for node_id, node in nodes.items()})


def started(name: str, strategy: Strategy, grid: GridOfNodes) -> Result:
    random.seed(0)
    np.random.seed(0)
    return strategy.start(grid, initial(name), num_rounds=ROUNDS)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in NOT_WRAPPABLE])
def test_only_the_chosen_train_and_what_is_aggregated_is_the_strategys_own(name: str) -> None:
    planner = PlannerStub(chosen=CHOSEN, nodes={node_id: str(node.device_id) for node_id, node in NODES.items()})
    grid = grid_of(name, NODES)
    result = started(name, PowerAware(built(name), planner, clock=grid.clock), grid)
    bare = started(name, built(name), grid_of(name, CHOSEN_NODES))

    trainings = grid.trainings()
    assert len(trainings) == ROUNDS * TRAINED_IN_A_ROUND.get(name, len(CHOSEN))
    for number, message in enumerate(trainings):
        assignment = RoundAssignment.from_record(message.content[RECORD_KEY])
        assert NODES[message.metadata.dst_node_id].device_id == assignment.device_id
        assert assignment.device_id in CHOSEN
        assert assignment.plan_id.split("/")[1] == str(1 + number * ROUNDS // len(trainings))
    assert grid.clock.slept == [], "there was no waiting"

    # Exactly those of the bare strategy: it drew the same nodes in the same order.
    assert list(result.arrays) == list(bare.arrays)
    for key in bare.arrays:
        np.testing.assert_array_equal(result.arrays[key].numpy(), bare.arrays[key].numpy())
    added = {f"{METRIC_PREFIX}predicted-{quantity}" for quantity in ("epoch-s", "power-w", "epoch-kj")}
    for server_round, metrics in result.train_metrics_clientapp.items():
        assert {key for key in metrics if key.startswith(METRIC_PREFIX)} == added
        own = {key: value for key, value in metrics.items() if key not in added}
        assert own == dict(bare.train_metrics_clientapp[server_round])
    assert list(result.train_metrics_clientapp) == list(bare.train_metrics_clientapp)
    for told in planner.results():
        assert all(not one.failure and one.share == 1 for one in told.values())


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name.startswith("DifferentialPrivacy")])
def test_differential_privacy_takes_no_quorum(name: str) -> None:
    with pytest.raises(InvalidInputError, match="leave the quorum out"):
        PowerAware(built(name), PlannerStub(), quorum=Quorum())


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name.startswith("DifferentialPrivacy")])
def test_updates_that_devices_have_clipped_are_not_scaled(name: str) -> None:
    own = EpochChoice.of([1, 2], is_per_device=True)
    if "ServerSide" in name:
        PowerAware(built(name), PlannerStub(), local_epochs=own)
        return
    with pytest.raises(InvalidInputError, match="leave is_per_device out"):
        PowerAware(built(name), PlannerStub(), local_epochs=own)


@pytest.mark.parametrize(
    "name", [n for n in STRATEGIES if n not in NOT_WRAPPABLE and not n.startswith("DifferentialPrivacy")]
)
def test_every_strategy_goes_on_with_late_updates(name: str) -> None:
    planner = PlannerStub(chosen=CHOSEN, nodes={node_id: str(node.device_id) for node_id, node in NODES.items()})
    grid = grid_of(name, NODES)
    [slow] = [node for node in grid.nodes.values() if node.device_id == CHOSEN[-1]]
    slow.takes_s = 8.0  # a round takes 5 s
    strategy = PowerAware(built(name), planner, clock=grid.clock, quorum=Quorum(replies=3))
    result = started(name, strategy, grid)
    assert list(result.arrays) == list(initial(name))
    assert len(result.train_metrics_clientapp) == ROUNDS
    late = [[one.device_id for one in told.values() if one.late] for told in planner.results()]
    assert late == ([[], []] if name in TRAINED_IN_A_ROUND else [[CHOSEN[-1]], []])
    assert not [one.failure for told in planner.results() for one in told.values() if one.failure]


def test_the_strategies_are_found() -> None:
    assert {"FedAvg", "FedAdam", "FedMedian", "Bulyan", "FedXgbCyclic"} < set(STRATEGIES)
    assert len(STRATEGIES) >= 16
    assert set(NOT_WRAPPABLE) <= set(STRATEGIES), "an exception names no existing strategy"
