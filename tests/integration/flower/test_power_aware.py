"""PowerAware around a strategy: the selected devices, replies, evaluation, the summary, and the run's owner."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedMedian,
    FedProx,
    FedXgbBagging,
    FedXgbCyclic,
)

from tests.fakes.flower_in_process import (
    ARRAYS,
    KNOWN,
    RUN_ID,
    A,
    B,
    C,
    D,
    GridOfNodes,
    PlannerStub,
    WarningLog,
    first_value,
    fleet,
    gone,
    killed,
    partly,
    raised,
    run,
    trained,
)
from wattfleet.flower import FedBuff, PowerAware, TwoStrategiesError
from wattfleet.flower.server.coordinator_run import ActiveRuns
from wattfleet.flower.server.errors import CoordinatorRefusedError
from wattfleet_proto.assignment import RECORD_KEY, RoundAssignment

# --- Power aware ------------------------------------------------------------------------------------------------------
# PowerAware sends trainings to the selected devices only, and leaves the wrapped strategy unchanged.


def test_only_selected_nodes_are_sent_a_training_with_their_assignment() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], deadline_s=40.0)
    result = run(grid, planner, rounds=2, local_epochs=3)
    assert sorted(m.metadata.dst_node_id for m in grid.trainings()) == [B, B, D, D]
    for message in grid.trainings():
        assignment = RoundAssignment.from_record(message.content[RECORD_KEY])
        assert assignment.device_id == {B: "b", D: "d"}[message.metadata.dst_node_id]
        assert (assignment.epochs, assignment.deadline_s) == (3.0, 40.0)
        assert "config" in message.content, "the strategy's own content is kept"
    assert sorted(grid.identifications()) == [A, B, C, D], "each node is asked who it is once"
    # 0.2 and 0.4 in each round, weighted by 20 and 40 examples.
    assert first_value(result) == pytest.approx(2 * (0.2 * 20 + 0.4 * 40) / 60)
    assert [method for method, _ in planner.calls][-1] == "FinishRun"


def test_a_strategy_that_trains_nothing_needs_no_plan() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    run(grid, planner, strategy=FedAvg(fraction_train=0.0))
    assert grid.trainings() == [] and planner.asked("PlanRound") == []


def test_the_wrapped_strategy_is_unchanged_afterwards() -> None:
    inner = FedAvg(fraction_train=0.5, min_train_nodes=3, min_available_nodes=4)
    strategy = DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 10.0, 2)
    grid = GridOfNodes(fleet())
    run(grid, PlannerStub(chosen=["b", "d"]), strategy=strategy)
    assert len(grid.trainings()) == 2, "also what a strategy wraps takes all that were chosen"
    assert (inner.fraction_train, inner.min_train_nodes, inner.min_available_nodes) == (0.5, 3, 4)


def test_messages_to_nodes_outside_the_plan_are_dropped(warnings: WarningLog) -> None:
    class OwnPick(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):  # type: ignore[no-untyped-def]
            messages = list(super().configure_train(server_round, arrays, config, grid))
            other = self._construct_messages(messages[0].content, [A], "train")
            return [*messages, *other]

    grid = GridOfNodes(fleet())
    run(grid, PlannerStub(chosen=["b", "d"]), strategy=OwnPick(fraction_evaluate=0.0))
    assert sorted(m.metadata.dst_node_id for m in grid.trainings()) == [B, D]
    assert warnings.about(f"the message to node {A} is dropped")


def test_a_round_that_is_never_aggregated_ends_with_the_next_one(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(nodes=dict(KNOWN))
    strategy = PowerAware(FedAvg(), planner, clock=grid.clock, survey_s=None, measures_left_out=False)
    first = list(strategy.configure_train(1, ARRAYS, ConfigRecord(), grid))
    grid.push_messages([message for message in first if message.metadata.dst_node_id == A])
    second = list(strategy.configure_train(2, ARRAYS, ConfigRecord(), grid))
    [given_up] = planner.asked("FinishRound")
    assert given_up.plan_id.endswith("/1")
    [result] = given_up.results
    assert (result.device_id, result.late, result.failure) == ("a", True, ""), "only it was sent a message"
    strategy.aggregate_train(2, grid.send_and_receive(second))
    assert set(planner.results()[1]) == {"a", "b", "c", "d"}
    assert warnings.about("round 1 ends without an aggregation")


def test_a_round_that_is_configured_again_keeps_its_plan() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(nodes=dict(KNOWN))
    strategy = PowerAware(FedAvg(), planner, clock=grid.clock, survey_s=None, measures_left_out=False)
    for _ in range(2):
        messages = list(strategy.configure_train(1, ARRAYS, ConfigRecord(), grid))
    strategy.aggregate_train(1, grid.send_and_receive(messages))
    [results] = planner.results()
    assert not any(each.late or each.failure for each in results.values())


def test_a_power_aware_strategy_around_another_is_refused() -> None:
    inner = PowerAware(FedAvg(), PlannerStub())
    with pytest.raises(TwoStrategiesError, match="use PowerAware only once"):
        PowerAware(inner, PlannerStub())
    with pytest.raises(TwoStrategiesError, match="use PowerAware only once"):
        PowerAware(DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 10.0, 2), PlannerStub())


def test_two_strategies_may_run_in_sequence_but_not_at_once() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    outer = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock)

    def meanwhile(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round == 1:
            with pytest.raises(TwoStrategiesError, match="two power-aware strategies are running in run 7"):
                run(grid, planner)
        return None

    outer.start(grid, ARRAYS, num_rounds=1, evaluate_fn=meanwhile)
    run(grid, planner)
    names = [request.run_id for request in planner.asked("StartRun")]
    assert len(set(names)) == 2, "each has rounds of its own"
    assert all(name.split("-")[0] == str(RUN_ID) for name in names)


def test_a_power_aware_strategy_inside_flowers_own_plans_too() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"])
    inner = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock)
    DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 10.0, 2).start(
        grid, ARRAYS, num_rounds=1, train_config=ConfigRecord()
    )
    assert len(grid.trainings()) == 2
    assert not any(told.failure for told in planner.results()[0].values())


# --- Replies ----------------------------------------------------------------------------------------------------------
# Replies to a round: results go to the coordinator, weights to the aggregation.


def test_each_failure_is_reported_in_words_and_the_round_continues(warnings: WarningLog) -> None:
    changes = {
        "a": {"train": gone, "takes_s": 50.0},
        "b": {"train": killed, "takes_s": 59.0},
        "c": {"train": raised},
        "d": {"takes_s": 10_000.0},
    }
    for device_id, change in changes.items():
        grid, planner = GridOfNodes(fleet(**{device_id: change})), PlannerStub(nodes=dict(KNOWN))
        result = run(grid, planner)
        [results] = planner.results()
        assert {one for one, told in results.items() if told.failure} == {device_id}
        changes[device_id] = {"told": results[device_id].failure}
        assert result.arrays, "the others' work is aggregated"
        assert (results[device_id].share, results[device_id].HasField("num_examples")) == (0.0, False)
    assert {one: change["told"] for one, change in changes.items()} == {
        "a": "the node is gone",
        "b": "the training process was killed",
        "c": "the app raised: out of memory",
        "d": "no reply within 130 s",
    }
    assert warnings.about("a failed: the node is gone")


def test_a_result_has_the_replys_weight_and_loss() -> None:
    planner = PlannerStub(chosen=["b"])
    run(GridOfNodes(fleet()), planner)
    [results] = planner.results()
    assert set(results) == {"b"}
    told = results["b"]
    assert (told.failure, told.share, told.num_examples, told.loss) == ("", 1.0, 20.0, pytest.approx(5.0))


@pytest.mark.parametrize(
    ("metrics", "loss"),
    [
        ({"loss": 3.0, "train-loss": 2.0}, 5.0),
        ({"train_loss": float("nan"), "loss": 1.0}, None),
        ({"train_loss": float("inf")}, None),
    ],
)
def test_the_loss_is_the_first_known_metric_if_finite(metrics: dict[str, float], loss: float | None) -> None:
    grid = GridOfNodes(fleet(b={"train": lambda message: trained(message, **metrics)}))
    planner = PlannerStub(chosen=["b"])
    run(grid, planner)
    told = planner.results()[0]["b"]
    assert (told.loss if told.HasField("loss") else None) == loss


def test_why_devices_never_measure_is_logged_once_in_a_run(warnings: WarningLog) -> None:
    why = "its minibatches come from no DataLoader: wrap the loader in `wattfleet.flower.profiled`"
    changes = {one: {"train": partly(1.0, unprofiled=why)} for one in ("a", "b", "c")}
    planner = PlannerStub(chosen=["a", "b", "c"], nodes=dict(KNOWN), measured={"a": 12, "b": 0, "c": 0})
    run(GridOfNodes(fleet(**changes)), planner, rounds=2)
    assert warnings.about("measured while the app trains") == [
        f"no power mode of b, c is measured while the app trains: {why}"
    ]


def test_partial_work_is_weighted_by_its_share() -> None:
    grid = GridOfNodes(fleet(d={"train": partly(0.25)}))
    planner = PlannerStub(chosen=["b", "d"])
    result = run(grid, planner)
    # 0.2 with 20 examples, and 0.4 with a quarter of 40.
    assert first_value(result) == pytest.approx((0.2 * 20 + 0.4 * 10) / 30)
    told = planner.results()[0]["d"]
    assert (told.share, told.num_examples, told.failure) == (0.25, 10.0, "")


def test_the_weight_of_an_app_that_weighs_itself_is_kept() -> None:
    grid = GridOfNodes(fleet(d={"train": partly(0.25, **{"app-weighs": True})}))
    planner = PlannerStub(chosen=["b", "d"])
    result = run(grid, planner)
    assert first_value(result) == pytest.approx((0.2 * 20 + 0.4 * 40) / 60)
    assert planner.results()[0]["d"].num_examples == 40.0


def test_the_weight_is_kept_if_the_share_is_unknown() -> None:
    def train(message: Any) -> Any:
        reply = trained(message)
        reply.content[RECORD_KEY] = ConfigRecord({"cut": True, "app-weighs": False})
        return reply

    planner = PlannerStub(chosen=["b"])
    run(GridOfNodes(fleet(b={"train": train})), planner)
    told = planner.results()[0]["b"]
    assert (told.share, told.num_examples, told.failure) == (1.0, 20.0, "")


def test_the_strategy_sees_no_wattfleet_record_in_a_reply() -> None:
    seen: list[set[str]] = []

    class Looks(FedAvg):
        def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
            replies = list(replies)
            seen.extend(set(reply.content) for reply in replies)
            return super().aggregate_train(server_round, replies)

    run(GridOfNodes(fleet(d={"train": partly(0.5)})), PlannerStub(), strategy=Looks(fraction_evaluate=0.0))
    assert seen == [{"arrays", "metrics"}] * 4


def test_the_weight_is_the_one_that_the_strategy_uses() -> None:
    def counts(message: Any) -> Any:
        return partly(0.5)(message) if message.metadata.dst_node_id == D else trained(message)

    def train(message: Any) -> Any:
        reply = counts(message)
        reply.content["metrics"]["samples"] = 100
        return reply

    grid = GridOfNodes(fleet(b={"train": train}, d={"train": train}))
    result = run(
        grid, PlannerStub(chosen=["b", "d"]), strategy=FedAvg(fraction_evaluate=0.0, weighted_by_key="samples")
    )
    assert first_value(result) == pytest.approx((0.2 * 100 + 0.4 * 50) / 150)


# --- Client evaluation ------------------------------------------------------------------------------------------------
# Clients' evaluation metrics are reported to the coordinator, also when the server evaluates as well.

EVALUATED = {A: (30, 0.9), B: (10, 0.5)}
WEIGHTED_MEAN = (30 * 0.9 + 10 * 0.5) / 40


class EvaluatingGrid(GridOfNodes):
    """Two nodes, each with its own accuracy and number of examples."""

    def __init__(self) -> None:
        nodes = fleet()
        super().__init__({A: nodes[A], B: nodes[B]})

    def _replied(self, node: Any, message: Message) -> Message:
        if message.metadata.message_type != "evaluate":
            return super()._replied(node, message)
        examples, accuracy = EVALUATED[message.metadata.dst_node_id]
        metrics = MetricRecord({"num-examples": examples, "accuracy": accuracy, "per-class": [accuracy, 1.0]})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)


def told(strategy: Any, evaluate_fn: Any = None, **options: Any) -> dict[int, dict[str, float]]:
    """Round -> the metrics that were reported to the coordinator."""
    grid, planner = EvaluatingGrid(), PlannerStub(**options)
    PowerAware(strategy, planner, clock=grid.clock).start(grid, ARRAYS, num_rounds=2, evaluate_fn=evaluate_fn)
    rounds: dict[int, dict[str, float]] = {}
    for request in planner.asked("ReportMetrics"):
        rounds.setdefault(request.round, {}).update(request.metrics)
    return rounds


@pytest.mark.parametrize("kind", [FedAvg, FedMedian])
def test_what_the_strategy_aggregates_of_the_clients_is_reported_for_each_round(kind: type[FedAvg]) -> None:
    # A list is not a number, so rounds cannot be compared by it.
    assert told(kind()) == dict.fromkeys((1, 2), {"accuracy": pytest.approx(WEIGHTED_MEAN)})


def test_beside_an_evaluation_on_the_server_the_clients_metrics_have_a_prefix() -> None:
    def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": 0.25})

    both = {"accuracy": 0.25, "clientapp_accuracy": pytest.approx(WEIGHTED_MEAN)}
    assert told(FedAvg(), evaluated) == {0: {"accuracy": 0.25}, 1: both, 2: both}


def test_a_strategys_own_aggregation_is_reported_as_it_is() -> None:
    best = FedAvg(
        evaluate_metrics_aggr_fn=lambda contents, _: MetricRecord(
            {"best": max(float(each["metrics"]["accuracy"]) for each in contents)}  # type: ignore[index, arg-type]
        )
    )
    assert told(best) == dict.fromkeys((1, 2), {"best": 0.9})


def test_without_evaluation_or_training_nothing_is_reported(warnings: WarningLog) -> None:
    assert told(FedAvg(fraction_evaluate=0.0)) == {}
    assert told(FedAvg(fraction_train=0.0)) == {}, "a round that was not planned has no place for metrics"


# --- Summary ----------------------------------------------------------------------------------------------------------
# At its start, a run logs the options of the wrapped strategy that have an effect, and no others.


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


def test_it_says_which_nodes_a_strategy_of_xgboost_needs(
    warnings: WarningLog, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, says in (
        (FedXgbBagging, "needs the trees of every node"),
        (FedXgbCyclic, "lets the nodes train in turn"),
    ):
        PowerAware(kind(), PlannerStub()).summary()
        assert f"{kind.__name__} {says}" in caplog.text


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


# --- Run owner --------------------------------------------------------------------------------------------------------
# A run belongs to the ServerApp that started it; a restarted ServerApp continues under an id of its own.

_CHANGES = ("StartRun", "PlanRound", "FinishRound", "ReportMetrics", "FinishRun")


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as if no other test had run a strategy for this run in this process."""
    monkeypatch.setattr("wattfleet.flower.server.rounds.ACTIVE_RUNS", ActiveRuns())


def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"accuracy": 0.1})


def test_every_change_of_a_run_carries_the_secret_of_its_app() -> None:
    tokens = []
    for _ in range(2):
        grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"])
        strategy = PowerAware(
            FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock, survey_s=None, measures_left_out=False
        )
        strategy.start(grid, ARRAYS, num_rounds=1, evaluate_fn=evaluated)
        sent = {method: {request.run_token for request in planner.asked(method)} for method in _CHANGES}
        [token] = set().union(*sent.values())
        assert all(sent.values()) and len(token) >= 32
        tokens.append(token)
    assert tokens[0] != tokens[1]


def test_a_process_that_comes_anew_to_a_run_goes_on_under_the_next_id(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], taken={f"{RUN_ID}", f"{RUN_ID}-2"})
    run(grid, planner)
    assert [request.run_id for request in planner.asked("StartRun")] == [f"{RUN_ID}-3"]
    assert [request.run_id for request in planner.asked("PlanRound")] == [f"{RUN_ID}-3"]
    assert [request.run_id for request in planner.asked("FinishRun")] == [f"{RUN_ID}-3"]
    assert len(grid.trainings()) == 2
    assert warnings.about(f"run {RUN_ID} was started by another process: this one continues as run {RUN_ID}-2")
    assert warnings.about(f"run {RUN_ID}-2 was started by another process: this one continues as run {RUN_ID}-3")


def test_a_start_that_was_kept_and_then_refused_goes_on_under_the_next_id(warnings: WarningLog) -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(chosen=["b", "d"], taken={f"{RUN_ID}"}, away=True)

    def back(number: int, arrays: ArrayRecord) -> MetricRecord:
        planner.away = number == 0
        return MetricRecord({"accuracy": 0.1})

    strategy = PowerAware(
        FedAvg(fraction_evaluate=0.0),
        planner,
        on_coordinator_away="unplanned",
        clock=grid.clock,
        survey_s=None,
        measures_left_out=False,
    )
    strategy.start(grid, ARRAYS, num_rounds=2, evaluate_fn=back)
    assert [request.run_id for request in planner.asked("PlanRound")] == [f"{RUN_ID}-2"]
    assert [request.run_id for request in planner.asked("FinishRun")] == [f"{RUN_ID}-2"]
    [kept] = planner.asked("ReportUnplannedRound")
    assert (kept.run_id, kept.round) == (f"{RUN_ID}-2", 1)
    assert [(each.run_id, each.round) for each in planner.asked("ReportMetrics")] == [
        (f"{RUN_ID}-2", number) for number in range(3)
    ]


def test_a_coordinator_that_lets_this_app_start_no_run_ends_it() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(taken={f"{RUN_ID}", *(f"{RUN_ID}-{k}" for k in range(2, 1000))})
    with pytest.raises(CoordinatorRefusedError) as refused:
        run(grid, planner)
    assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
