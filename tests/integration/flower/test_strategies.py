"""Strategies in PowerAware: all that ship with Flower, predictions for custom ones, and different local epochs."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Result, Strategy, dp_adaptive_clipping

from tests.fakes.agent_socket import answered, assigned, context, recording_agent
from tests.fakes.flower_in_process import (
    ARRAYS,
    KNOWN,
    A,
    B,
    C,
    GridOfNodes,
    Node,
    PlannerStub,
    QuorumRun,
    SeesContents,
    WarningLog,
    adds,
    fleet,
    killed,
    raised,
    run,
    trained,
)
from tests.fakes.short_forms import first
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import EpochChoice
from wattfleet.flower import FedBuff, NodePrediction, PlanningError, PowerAware, Quorum, power_mode_mod
from wattfleet.flower.server.errors import CoordinatorRefusedError
from wattfleet.flower.server.replies import METRIC_PREFIX
from wattfleet_proto.assignment import PREDICTION_KEY, RECORD_KEY, RoundAssignment
from wattfleet_proto.v1 import local_pb2, planning_pb2

# --- Every strategy ---------------------------------------------------------------------------------------------------
# Every strategy that ships with Flower, in PowerAware and bare, with the same replies.
#
# Strategies of later versions of Flower are found automatically; the test reports those that it cannot construct.


ROUNDS = 2
NODES = {2**63 - 1 + k: Node(f"device-{k}") for k in range(6)}
CHOSEN = ["device-1", "device-3", "device-4", "device-5"]
CHOSEN_NODES = {node_id: node for node_id, node in NODES.items() if node.device_id in CHOSEN}

NOT_WRAPPABLE: dict[str, str] = {}
"""Name of a strategy -> why no wrapper can plan its rounds."""

TAKES_TURNS = "FedXgbCyclic"
"""It trains on one node after another. Its plans are for the node whose turn it is."""

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


def started(name: str, strategy: Strategy, grid: GridOfNodes, rounds: int = ROUNDS) -> Result:
    random.seed(0)
    np.random.seed(0)
    return strategy.start(grid, initial(name), num_rounds=rounds)


@pytest.mark.parametrize("name", first(9, [name for name in STRATEGIES if name not in (*NOT_WRAPPABLE, TAKES_TURNS)]))
def test_only_the_chosen_train_and_what_is_aggregated_is_the_strategys_own(name: str) -> None:
    planner = PlannerStub(chosen=CHOSEN, nodes={node_id: str(node.device_id) for node_id, node in NODES.items()})
    grid = grid_of(name, NODES)
    result = started(name, PowerAware(built(name), planner, clock=grid.clock), grid)
    bare = started(name, built(name), grid_of(name, CHOSEN_NODES))

    trainings = grid.trainings()
    assert len(trainings) == ROUNDS * len(CHOSEN)
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


def test_nodes_that_train_in_turn_are_planned_one_by_one_without_those_that_cannot() -> None:
    others = {each: "drained" for each in (str(node.device_id) for node in NODES.values()) if each not in CHOSEN}
    planner = PlannerStub(nodes={node_id: str(node.device_id) for node_id, node in NODES.items()}, excluded=others)
    grid = grid_of(TAKES_TURNS, NODES)
    strategy = PowerAware(built(TAKES_TURNS), planner, clock=grid.clock)
    result = started(TAKES_TURNS, strategy, grid, rounds=6)
    bare = started(TAKES_TURNS, built(TAKES_TURNS), grid_of(TAKES_TURNS, CHOSEN_NODES), rounds=6)
    turns = [str(NODES[message.metadata.dst_node_id].device_id) for message in grid.trainings()]
    assert sorted(turns[:4]) == CHOSEN and turns[4:] == turns[:2]
    assert [len(each.node_ids) for each in planner.asked("PlanRound")] == 6 * [1]
    np.testing.assert_array_equal(result.arrays["0"].numpy(), bare.arrays["0"].numpy())


def test_a_strategy_whose_trees_add_up_asks_for_every_device() -> None:
    asked = {}
    for name in ("FedXgbBagging", "FedAvg"):
        planner, grid = PlannerStub(nodes={n: str(node.device_id) for n, node in NODES.items()}), grid_of(name, NODES)
        started(name, PowerAware(built(name), planner, clock=grid.clock), grid)
        asked[name] = [each.needs_all for each in planner.asked("StartRun")]
    assert asked == {"FedXgbBagging": [True], "FedAvg": [False]}


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
    "name",
    first(5, [n for n in STRATEGIES if n not in (*NOT_WRAPPABLE, TAKES_TURNS) and not n.startswith("DifferentialP")]),
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
    assert late == [[CHOSEN[-1]], []]
    assert not [one.failure for told in planner.results() for one in told.values() if one.failure]


def test_the_strategies_are_found() -> None:
    assert {"FedAvg", "FedAdam", "FedMedian", "Bulyan", "FedXgbCyclic"} < set(STRATEGIES)
    assert len(STRATEGIES) >= 16
    assert set(NOT_WRAPPABLE) <= set(STRATEGIES), "an exception names no existing strategy"


# --- A start of its own -----------------------------------------------------------------------------------------------
# A strategy that overrides `start`, as people do to write checkpoints and results after each round.


class Checkpointing(FedAvg):
    """Runs its own rounds, halves the learning rate after the first, and writes a file for each round."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.best = -1.0

    def write_to(self, folder: Path) -> None:
        self.folder = folder

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        if server_round == 2:
            config["lr"] = config["lr"] * 0.5
        return super().configure_train(server_round, arrays, config, grid)

    def start(
        self,
        server: Any,
        first_arrays: ArrayRecord,
        num_rounds: int = 2,
        suffix: str = ".json",
        evaluate_fn: Any = None,
    ) -> Result:
        result, config = Result(), ConfigRecord({"lr": 0.1})
        result.arrays = first_arrays
        self.summary()
        for number in range(1, num_rounds + 1):
            replies = server.send_and_receive(self.configure_train(number, result.arrays, config, server), timeout=60)
            result.arrays, metrics = self.aggregate_train(number, replies)
            result.train_metrics_clientapp[number] = metrics
            score = evaluate_fn(number, result.arrays)["score"]
            self.best = max(self.best, score)
            (self.folder / f"{number}{suffix}").write_text(f"{config['lr']} {score}", encoding="utf-8")
        return result


def score(number: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"score": round(float(arrays["0"].numpy().sum()), 6)})


def test_a_strategy_keeps_its_own_start_and_methods(tmp_path: Path) -> None:
    written = {}
    for name in ("wrapped", "bare"):
        (tmp_path / name).mkdir()
        grid = grid_of("FedAvg", NODES if name == "wrapped" else CHOSEN_NODES)
        planner = PlannerStub(chosen=CHOSEN, nodes={node_id: str(node.device_id) for node_id, node in NODES.items()})
        own = Checkpointing()
        strategy: Any = PowerAware(own, planner, clock=grid.clock) if name == "wrapped" else own
        strategy.write_to(tmp_path / name)
        random.seed(0)
        strategy.start(grid, initial("FedAvg"), suffix=".txt", evaluate_fn=score)
        written[name] = {each.name: each.read_text() for each in (tmp_path / name).iterdir()}, strategy.best
        assert [message.content["config"]["lr"] for message in grid.trainings()] == [0.1] * 4 + [0.05] * 4
    assert written["wrapped"] == written["bare"]
    assert set(written["bare"][0]) == {"1.txt", "2.txt"}


def test_each_round_of_an_own_start_is_planned_and_reported(tmp_path: Path) -> None:
    grid = grid_of("FedAvg", NODES)
    planner = PlannerStub(chosen=CHOSEN, nodes={node_id: str(node.device_id) for node_id, node in NODES.items()})
    own = Checkpointing()
    strategy: Any = PowerAware(own, planner, clock=grid.clock)
    strategy.folder = tmp_path
    assert own.folder == tmp_path, "an attribute of the wrapped strategy is set there"
    strategy.start(grid, initial("FedAvg"), num_rounds=3, evaluate_fn=score)
    assert len(grid.trainings()) == 3 * len(CHOSEN)
    assert all(RECORD_KEY in message.content for message in grid.trainings())
    assert [set(told) for told in planner.results()] == [set(CHOSEN)] * 3
    assert "configure_train" not in vars(own), "after the run, its methods are its own again"


class TrainsAgain(FedAvg):
    """Sends each round's trainings a second time, by itself."""

    def start(self, grid: Any, initial_arrays: ArrayRecord) -> Result:
        messages = list(self.configure_train(1, initial_arrays, ConfigRecord(), grid))
        nodes = [message.metadata.dst_node_id for message in messages]
        self.aggregate_train(1, grid.send_and_receive(messages))
        content = RecordDict({"arrays": initial_arrays, "config": ConfigRecord()})
        grid.push_messages([Message(content, dst_node_id=node_id, message_type="train") for node_id in nodes])
        return Result()


class PassesOn(FedAvg):
    """Passes all arguments on to Flower's start."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.copies: list[Any] = []

    def start(self, *args: Any, **kwargs: Any) -> Result:
        return super().start(*args, **kwargs)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.copies += [copy.deepcopy(self), pickle.loads(pickle.dumps(self))]
        return super().aggregate_train(server_round, replies)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_start_that_passes_its_arguments_on_is_planned_and_reported(by_name: bool) -> None:
    grid = grid_of("FedAvg", NODES)
    planner = PlannerStub(chosen=CHOSEN, nodes={node_id: str(node.device_id) for node_id, node in NODES.items()})
    own = PassesOn()
    further = (2, 60.0, None, None, score)
    named = dict(zip(("num_rounds", "timeout", "train_config", "evaluate_config", "evaluate_fn"), further, strict=True))
    strategy = PowerAware(own, planner, clock=grid.clock)
    strategy.start(grid, initial("FedAvg"), *(() if by_name else further), **(named if by_name else {}))
    assert [request.rounds for request in planner.asked("StartRun")] == [2]
    assert len(grid.trainings()) == 2 * len(CHOSEN)
    reported = [dict(request.metrics) for request in planner.asked("ReportMetrics")]
    assert [set(each) for each in reported if "score" in each] == [{"score"}] * 3, (
        "before the first round, and after each"
    )
    assert {type(each) for each in own.copies} == {PassesOn}, "its checkpoints hold its own class"
    assert type(own) is PassesOn


class TrainsOneMore(FedAvg):
    """Adds a training of its own to each round's."""

    def start(self, grid: Any, initial_arrays: ArrayRecord) -> Result:
        messages = list(self.configure_train(1, initial_arrays, ConfigRecord(), grid))
        content = RecordDict({"arrays": initial_arrays, "config": ConfigRecord()})
        [other] = [node_id for node_id, node in NODES.items() if node.device_id == "device-0"]
        grid.send_and_receive([*messages, Message(content, dst_node_id=other, message_type="train")])
        return Result()


def test_a_training_beside_those_of_a_round_is_refused() -> None:
    grid = grid_of("FedAvg", NODES)
    planner = PlannerStub(chosen=CHOSEN, nodes={node_id: str(node.device_id) for node_id, node in NODES.items()})
    with pytest.raises(PlanningError, match="TrainsOneMore sends trainings"):
        PowerAware(TrainsOneMore(), planner, clock=grid.clock).start(grid, initial("FedAvg"))
    assert not grid.trainings(), "nothing is sent"


def test_attributes_of_a_derived_wrapper_are_its_own() -> None:
    class Counting(PowerAware):
        runs = 0

    strategy = Counting(FedAvg(), PlannerStub())
    strategy.runs = 5
    strategy.fraction_evaluate = 0.25
    assert (strategy.runs, strategy.strategy.fraction_evaluate) == (5, 0.25)
    assert not hasattr(strategy.strategy, "runs")


def test_a_start_of_its_own_around_fedbuff_is_refused() -> None:
    class Own(FedBuff):
        def start(self, *args: Any, **kwargs: Any) -> Result:
            raise AssertionError("not called")

    with pytest.raises(InvalidInputError, match="that of FedBuff plans each training: leave it out"):
        PowerAware(Own(buffer_size=2), PlannerStub())


def test_an_own_start_cannot_train_without_a_plan() -> None:
    grid = grid_of("FedAvg", NODES)
    planner = PlannerStub(chosen=CHOSEN, nodes={node_id: str(node.device_id) for node_id, node in NODES.items()})
    strategy = PowerAware(TrainsAgain(), planner, clock=grid.clock)
    with pytest.raises(PlanningError, match="TrainsAgain sends trainings .* have configure_train return them"):
        strategy.start(grid, initial("FedAvg"))
    assert len(grid.trainings()) == len(CHOSEN)


def test_an_argument_that_its_start_does_not_have_is_refused() -> None:
    strategy = PowerAware(FedAvg(), PlannerStub())
    with pytest.raises(TypeError, match="suffix"):
        strategy.start(grid_of("FedAvg", NODES), initial("FedAvg"), suffix=".txt")


def test_an_unknown_attribute_is_an_error_as_without_wrapper() -> None:
    with pytest.raises(AttributeError, match="'FedAvg' object has no attribute 'write_to'"):
        PowerAware(FedAvg(), PlannerStub()).write_to  # noqa: B018


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_strategy_of_the_former_api_is_refused_at_once() -> None:
    from flwr.server.strategy import FedAvg as FormerFedAvg
    from flwr.server.workflow import SecAggPlusWorkflow

    with pytest.raises(InvalidInputError, match=r"former API \(flwr.server\).*use the one in flwr.serverapp.strategy"):
        PowerAware(FormerFedAvg(), PlannerStub())
    with pytest.raises(InvalidInputError, match=r"secure aggregation needs the former API, so it cannot be planned"):
        PowerAware(FormerFedAvg(), PlannerStub())
    workflow: Any = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)
    with pytest.raises(InvalidInputError, match=r"SecAggPlusWorkflow is a workflow .* without secure aggregation"):
        PowerAware(workflow, PlannerStub())
    with pytest.raises(InvalidInputError, match="wrap an object of a class in flwr.serverapp.strategy"):
        PowerAware(FedAvg, PlannerStub())


# --- Predictions for strategies ---------------------------------------------------------------------------------------
# Predictions in messages, in metrics and before the selection, for custom strategies and selections.

PREDICTED = {"wattfleet-predicted-epoch-s", "wattfleet-predicted-power-w", "wattfleet-predicted-epoch-kj"}
OBSERVED = {"wattfleet-observed-epoch-s", "wattfleet-observed-power-w", "wattfleet-observed-epoch-kj"}


def observing(epoch_s: Any = 30.0, power_w: Any = 9.0) -> dict[str, Any]:
    """A training with an observation of the agent."""

    def train(message: Message) -> Message:
        reply = trained(message)
        reply.content[RECORD_KEY] = ConfigRecord({"observed-epoch-s": epoch_s, "observed-power-w": power_w})
        return reply

    return {"train": train}


class Looks(FedAvg):
    """Records the metrics of each reply."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.seen: list[dict[str, float]] = []

    def aggregate_train(self, server_round: int, replies: Any) -> tuple[Any, MetricRecord | None]:
        replies = list(replies)
        self.seen += [dict(reply.content["metrics"]) for reply in replies if not reply.has_error()]
        return super().aggregate_train(server_round, replies)  # type: ignore[no-any-return]


def ours(metrics: Any) -> set[str]:
    return {key for key in metrics if key.startswith("wattfleet-")}


def test_each_training_message_has_its_nodes_prediction() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b"], nodes=dict(KNOWN))
    run(grid, planner, local_epochs=2.0)
    [message] = grid.trainings()
    told = dict(message.content[PREDICTION_KEY])
    epoch_s = 20.0 + B % 7
    assert told["epoch-s"] == epoch_s
    assert told["training-s"] == 3.0 + 2 * epoch_s
    assert told["power-w"] == 8.0
    assert told["epoch-kj"] == pytest.approx(epoch_s * 8.0 / 1000)
    assert told["training-kj"] == pytest.approx((3.0 + 2 * epoch_s) * 8.0 / 1000)
    assert told["epoch-s-low"] < told["epoch-s"] < told["epoch-s-high"]
    assert told["power-w-high"] == pytest.approx(8.0 * 1.3896, rel=1e-4), "exp(1.645 * 0.2)"
    assert (told["cores"], told["cpu-khz"], told["gpu-hz"], told["mem-hz"]) == (4, 1510400, 624750000, 2133000000)
    assert (told["batch"], told["profiled-modes"], told["reason"]) == (16, 12, "the fastest")
    assert list(message.content) == ["arrays", "config", RECORD_KEY, PREDICTION_KEY], "the strategy's records first"


def test_the_app_sees_the_prediction_and_not_the_assignment(tmp_path: Path) -> None:
    request = assigned()
    request.content[PREDICTION_KEY] = ConfigRecord({"epoch-s": 20.0})
    seen: list[list[str]] = []

    def app(message: Message, _: Any) -> Message:
        seen.append(list(message.content))
        return answered(message, _)

    with recording_agent(tmp_path / "agent.sock") as agent:
        agent.observed = local_pb2.TrainingFinished(epoch_s=30.0, power_w=9.0)
        reply = power_mode_mod(request, context(**{"agent-socket": str(agent.socket)}), app)
    assert seen == [["config", PREDICTION_KEY]]
    record = dict(reply.content[RECORD_KEY])
    assert record.items() >= {"observed-epoch-s": 30.0, "observed-power-w": 9.0}.items()


def test_metrics_repeat_what_was_predicted_and_observed() -> None:
    strategy = Looks()
    grid = GridOfNodes(fleet(**{one: observing() for one in "abcd"}))
    result = run(grid, PlannerStub(nodes=dict(KNOWN)), strategy=strategy)
    assert all(ours(metrics) == PREDICTED | OBSERVED for metrics in strategy.seen)
    assert {metrics["wattfleet-predicted-epoch-s"] for metrics in strategy.seen} == {20.0 + n % 7 for n in KNOWN}
    aggregated = result.train_metrics_clientapp[1]
    assert aggregated["wattfleet-observed-epoch-s"] == pytest.approx(30.0)
    assert aggregated["wattfleet-observed-epoch-kj"] == pytest.approx(0.27)


@pytest.mark.parametrize(
    "unusual",
    [{}, observing(epoch_s=float("nan")), observing(power_w=0.0), observing(epoch_s="30")],
)
def test_replies_keep_the_same_metrics_if_one_was_not_observed(unusual: dict[str, Any]) -> None:
    strategy = Looks()
    grid = GridOfNodes(fleet(a=observing(), b=observing(), c=unusual, d={"train": raised}))
    result = run(grid, PlannerStub(nodes=dict(KNOWN)), strategy=strategy)
    assert len(strategy.seen) == 3
    assert all(ours(metrics) == PREDICTED for metrics in strategy.seen)
    assert ours(result.train_metrics_clientapp[1]) == PREDICTED


def test_fedbuff_keeps_its_metrics() -> None:
    grid = GridOfNodes(fleet(**{one: observing() for one in "abcd"}))
    result = run(grid, PlannerStub(nodes=dict(KNOWN)), strategy=FedBuff(2, clock=grid.clock))
    assert not ours(result.train_metrics_clientapp[1])


class Asks(PowerAware):
    """Requests predictions before each round."""

    table: list[NodePrediction] = []

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        type(self).table = self.predictions(grid)
        return super().configure_train(server_round, arrays, config, grid)


def test_predictions_are_a_table_before_the_choice() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(nodes=dict(KNOWN), excluded={"c": "drained by the operator"})
    Asks(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock).start(grid, ARRAYS, num_rounds=1)
    table = {each.device_id: each for each in Asks.table}
    assert list(table) == ["a", "b", "c", "d"]
    assert table["a"].node_id == A and table["a"].reason == ""
    assert table["a"].training is not None
    assert table["a"].training.epoch_s.median == 20.0 + A % 7
    assert table["a"].training.mode.cores == 4
    assert (table["c"].training, table["c"].reason) == (None, "drained by the operator")
    [asked] = planner.asked("PredictNodes")
    [started] = planner.asked("StartRun")
    assert (asked.epochs, asked.run_id, asked.run_token) == (1.0, started.run_id, started.run_token)


def test_predictions_before_the_run_has_started_are_refused_with_the_remedy() -> None:
    grid = GridOfNodes(fleet())
    with pytest.raises(PlanningError, match=r"before the run has started.*PowerAware\(select=...\)"):
        PowerAware(FedAvg(), PlannerStub(), clock=grid.clock).predictions(grid)


def fastest(count: int, server_round: int, predictions: Sequence[NodePrediction]) -> list[int]:
    ready = [each for each in predictions if each.training is not None and not each.reason]
    return [each.node_id for each in sorted(ready, key=lambda each: each.training.epoch_s.high)[:count]]  # type: ignore[union-attr]


def test_a_selection_of_ones_own_limits_the_plan() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(nodes=dict(KNOWN))
    run(grid, planner, rounds=2, select=partial(fastest, 2))
    expected = set(sorted(KNOWN, key=lambda node_id: node_id % 7)[:2])
    assert [set(request.node_ids) for request in planner.asked("PlanRound")] == [expected] * 2
    assert {message.metadata.dst_node_id for message in grid.trainings()} == expected


def test_a_selection_that_chooses_nobody_is_asked_again_and_then_ends_the_run(warnings: WarningLog) -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(nodes=dict(KNOWN), excluded=dict.fromkeys("abcd", "has no prediction yet"))
    with pytest.raises(
        CoordinatorRefusedError, match="select chose none of 4 nodes in round 1 .has no prediction yet."
    ):
        run(grid, planner, select=partial(fastest, 2), patience_s=30.0)
    assert len(planner.asked("PredictNodes")) > 10
    assert sum(grid.clock.slept) == pytest.approx(30.0, abs=2.0)


@pytest.mark.parametrize("chosen", [[12], ["b"], [None]])
def test_a_selection_of_a_node_that_there_is_not_is_refused(chosen: list[Any]) -> None:
    grid = GridOfNodes(fleet())
    with pytest.raises(InvalidInputError, match=f"select chose {chosen[0]!r} in round 1, which is not the id"):
        run(grid, PlannerStub(nodes=dict(KNOWN)), select=lambda number, predictions: chosen)


def test_a_node_that_is_selected_twice_is_planned_once() -> None:
    planner = PlannerStub(nodes=dict(KNOWN))
    run(GridOfNodes(fleet()), planner, select=lambda number, predictions: [C, C])
    assert list(planner.asked("PlanRound")[0].node_ids) == [C]


# --- Own epochs -------------------------------------------------------------------------------------------------------
# Rounds whose nodes train different numbers of local epochs: their updates count as if all had trained the mean.

NODE_OF = {device: node_id for node_id, device in KNOWN.items()}
OWN = EpochChoice.of([1, 2, 3, 6], is_per_device=True)
EPOCHS = {"a": 1, "b": 2, "c": 3, "d": 6}
MEAN = 3.0


class PlannerOfEpochs(PlannerStub):
    """Plans a number of epochs for each device, and other numbers in later rounds."""

    later: Mapping[str, int] = EPOCHS

    def _plan(self, request: planning_pb2.PlanRoundRequest) -> planning_pb2.PlanRoundResponse:
        plan = super()._plan(request)
        for each in plan.assignments:
            each.epochs = (EPOCHS if request.round == 1 else self.later)[each.device_id]
        return plan


def run_of(
    nodes: Mapping[str, Callable[[Message], Message]],
    rounds: int = 1,
    later: Mapping[str, int] = EPOCHS,
    **options: Any,
) -> QuorumRun:
    """A run whose nodes each run their own training, immediately; `takes_s` makes some slower."""
    takes_s: Mapping[str, float] = options.pop("takes_s", {})
    planner = PlannerOfEpochs(nodes=dict(KNOWN), duration_s=600.0)
    planner.later = later
    grid = GridOfNodes({NODE_OF[name]: Node(name, train, takes_s.get(name, 1.0)) for name, train in nodes.items()})
    made = QuorumRun(grid, planner)
    return made.start(options.pop("quorum", None), rounds, local_epochs=OWN, **options)


def follows(value: float) -> Callable[[Message], Message]:
    """A training that reads its epochs from the message and adds this value to every weight."""
    return adds(value, **{"took-epochs": True})


def test_updates_count_per_epoch() -> None:
    made = run_of({name: follows(10.0 * epochs) for name, epochs in EPOCHS.items()})
    assert made.weights[1] == pytest.approx(10.0 * MEAN), "all moved by 10 in each epoch"


def test_unequal_updates_by_hand() -> None:
    moved = {"a": 1.0, "b": 8.0, "c": -3.0, "d": 6.0}
    made = run_of({name: follows(value) for name, value in moved.items()})
    assert made.weights[1] == pytest.approx(MEAN * (1 / 1 + 8 / 2 - 3 / 3 + 6 / 6) / 4)


def test_a_failed_node_changes_no_other_update() -> None:
    made = run_of({**{name: follows(10.0 * epochs) for name, epochs in EPOCHS.items()}, "d": killed})
    assert made.weights[1] == pytest.approx(10.0 * MEAN)


@pytest.mark.parametrize("record", [{"took-epochs": False}, {}], ids=["does not ask", "cannot say"])
def test_updates_of_an_app_that_does_not_follow_are_not_scaled(record: dict[str, bool]) -> None:
    made = run_of({name: adds(1.0, **record) for name in EPOCHS})
    assert made.weights[1] == pytest.approx(1.0)


def test_one_node_that_does_not_follow_is_not_scaled() -> None:
    made = run_of({**{name: follows(2.0 * epochs) for name, epochs in EPOCHS.items()}, "a": adds(5.0)})
    assert made.weights[1] == pytest.approx((3 * 2.0 * MEAN + 5.0) / 4)


def test_a_late_update_counts_with_the_epochs_of_the_round_that_uses_it() -> None:
    later = dict.fromkeys(EPOCHS, 2)
    made = run_of(
        {name: follows(10.0) for name in EPOCHS},
        rounds=2,
        later=later,
        takes_s={"d": 1.5},
        quorum=Quorum(replies=3),
    )
    assert made.late == ["d", ""]
    first = 10.0 * MEAN * (1 / 1 + 1 / 2 + 1 / 3) / 3
    assert made.weights[1] == pytest.approx(first)
    weight = 1 / np.sqrt(2)  # the weight of an update that is one round old
    second = (3 * 10.0 + weight * 10.0 * 2 / 6) / (3 + weight)
    assert made.weights[2] == pytest.approx(first + second)


def test_replies_of_several_records_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    class TwoRecords(FedAvg):
        """Sends a second record of arrays, which the nodes ignore."""

        def configure_train(self, *args: Any) -> Any:
            for message in super().configure_train(*args):
                message.content["more"] = ArrayRecord({"x": Array(np.zeros(1))})
                yield message

    def trains(message: Message) -> Message:
        del message.content["more"]
        return follows(1.0)(message)

    made = run_of(dict.fromkeys(EPOCHS, trains), strategy=TwoRecords(fraction_evaluate=0.0))
    assert made.weights[1] == pytest.approx(1.0)
    assert "is not scaled to its epochs" in caplog.text


def test_late_updates_without_metrics_are_aggregated() -> None:
    class WithoutMetrics(FedAvg):
        """Averages arrays only."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            sums = [reply.content["arrays"]["w"].numpy() for reply in replies]
            return ArrayRecord({"w": Array(np.mean(sums, axis=0))}), None

    def trains(message: Message) -> Message:
        reply = follows(1.0)(message)
        del reply.content["metrics"]
        return reply

    made = run_of(
        dict.fromkeys(EPOCHS, trains),
        rounds=2,
        later=dict.fromkeys(EPOCHS, 2),
        strategy=WithoutMetrics(fraction_evaluate=0.0),
        takes_s={"d": 1.5},
        quorum=Quorum(replies=3),
    )
    assert len(made.weights) == 3


def test_fedbuff_takes_one_number_of_epochs() -> None:
    with pytest.raises(InvalidInputError, match="give it one number of local_epochs"):
        PowerAware(FedBuff(buffer_size=2), PlannerStub(), local_epochs=EpochChoice.of([1, 2]))
    PowerAware(FedBuff(buffer_size=2), PlannerStub(), local_epochs=EpochChoice.of([2]))


def test_the_record_of_epochs_is_not_left_in_replies() -> None:
    strategy = SeesContents()
    run_of({name: follows(1.0) for name in EPOCHS}, strategy=strategy)
    assert strategy.seen == [{"arrays", "metrics"}] * 4


def test_a_message_names_the_epochs_of_its_node() -> None:
    made = run_of({name: follows(1.0) for name in EPOCHS})
    told = {
        KNOWN[message.metadata.dst_node_id]: ConfigRecord(dict(message.content["wattfleet-work"]))["epochs"]
        for message in made.grid.trainings()
    }
    assert told == EPOCHS


def test_late_nodes_that_follow_keep_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    made = run_of(
        {**dict.fromkeys("bcd", follows(1.0)), "a": adds(1.0)},
        rounds=3,
        takes_s={"b": 1.5, "c": 1.5, "d": 1.5},
        quorum=Quorum(replies=1),
    )
    requests = made.planner.asked("PlanRound")
    assert all(request.HasField("epoch_choice") for request in requests)
    assert "not followed by a:" in caplog.text and "does not follow" not in caplog.text


def test_a_late_node_that_does_not_follow_is_named(caplog: pytest.LogCaptureFixture) -> None:
    run_of(
        {**dict.fromkeys("abc", follows(1.0)), "d": adds(1.0)},
        rounds=2,
        takes_s={"d": 1.5},
        quorum=Quorum(replies=3),
    )
    assert "not followed by d:" in caplog.text
