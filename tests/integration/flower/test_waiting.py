"""How long PowerAware waits for replies, nodes, ready devices and power, and for nodes that cannot train."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from flwr.app import ArrayRecord, Error, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import (
    ARRAYS,
    KNOWN,
    A,
    B,
    C,
    D,
    GridOfNodes,
    Node,
    PlannerStub,
    StatusError,
    WarningLog,
    fleet,
    gone,
    run,
    trained,
)
from tests.fakes.flower_in_process import trained as replied
from wattfleet.flower import PlanningError, PowerAware

# --- Waiting ----------------------------------------------------------------------------------------------------------
# How long PowerAware waits for replies, nodes, ready devices and power.


@pytest.mark.parametrize(
    ("plan", "options", "waited_s"),
    [
        ({"deadline_s": 40.0}, {}, 40 + 90),
        ({"duration_s": 20.0}, {}, 2 * 20 + 90),
        ({"deadline_s": 40.0}, {"allowance_s": 10.0}, 50),
        ({"deadline_s": 40.0}, {"allowance_s": None}, 3600),
        ({"deadline_s": 9_000.0}, {}, 3600),
        ({"deadline_s": 40.0, "of_assumed_length": ["b"]}, {}, 3600),
        ({"duration_s": 20.0, "of_assumed_length": ["b"]}, {}, 3600),
        ({"duration_s": 20.0, "of_assumed_length": ["a"]}, {}, 2 * 20 + 90),
    ],
)
def test_a_round_waits_as_planned_within_the_apps_timeout(
    plan: dict[str, Any], options: dict[str, Any], waited_s: float
) -> None:
    grid = GridOfNodes(fleet(d={"takes_s": 1e6}))
    run(grid, PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN), **plan), strategy=FedAvg(), **options)
    assert grid.waited_s == pytest.approx([waited_s, 3600]), "nodes train, then evaluate"


def test_nodes_have_two_minutes_to_identify() -> None:
    grid = GridOfNodes(fleet(d={"takes_s": 1e6}))
    run(grid, PlannerStub(chosen=["b", "c"]))
    assert grid.waited_s[0] == pytest.approx(120.0)


@pytest.mark.parametrize(
    ("takes_s", "trimmed_s", "timeout", "waited_s", "failure"),
    [
        (3_000, 3_000, 10_000, 3_000, ""),
        (6_000, 3_000, 10_000, 6_000, ""),
        (3_000, 3_000, 2_000, 2_000, "no reply within 2000 s"),
        (3_000, 600, 10_000, 1_290, "no reply within 1290 s"),
        (3_000, 800, 10_000, 1_690, "no reply within 1690 s"),
    ],
)
def test_a_trimmed_round_is_waited_for_longer_within_the_apps_timeout(
    takes_s: float, trimmed_s: float, timeout: float, waited_s: float, failure: str
) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN), duration_s=600.0)

    def train(message: Any) -> Any:
        planner.duration_s = trimmed_s
        return trained(message)

    vars(grid.nodes[D]).update(train=train, takes_s=takes_s)
    began_s = grid.clock.now_s()
    run(grid, planner, timeout=timeout)
    assert grid.clock.now_s() - began_s == pytest.approx(waited_s, abs=1.0)
    assert planner.results()[0]["d"].failure == failure
    [planned] = planner.asked("PlanRound")
    assert {one.plan_id for one in planner.asked("GetPlan")} == {f"{planned.run_id}/{planned.round}"}


def test_the_planned_timeout_stands_if_a_trim_cannot_be_looked_up(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN), duration_s=600.0)

    def train(message: Any) -> Any:
        planner.away = True
        return trained(message)

    vars(grid.nodes[D]).update(train=train, takes_s=3_000)
    began_s = grid.clock.now_s()
    result = run(grid, planner, timeout=10_000)
    assert grid.waited_s[-1] == pytest.approx(2 * 600 + 90) and result.arrays
    assert grid.clock.now_s() - began_s < 2 * 600 + 90 + 60
    assert warnings.about("not waiting any longer for replies")


def test_missing_nodes_are_waited_for_once(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    strategy = FedAvg(min_available_nodes=6, min_evaluate_nodes=6, min_train_nodes=6)
    result = run(grid, planner, rounds=3, strategy=strategy, patience_s=60.0)
    assert len(grid.trainings()) == 3 * 4
    assert sum(grid.clock.slept) == 60.0, "once, not in every round"
    assert len(result.evaluate_metrics_clientapp) == 3, "evaluation does not stall either"
    assert len(warnings.about("continuing with 4 nodes: the strategy wants 6")) == 1


def test_late_nodes_are_waited_for() -> None:
    nodes = fleet()
    grid = GridOfNodes({A: nodes[A]})
    sleep_s = grid.clock.sleep_s

    def meanwhile(seconds: float) -> None:
        sleep_s(seconds)
        if len(grid.clock.slept) == 3:
            grid.nodes.update(nodes)

    grid.clock.sleep_s = meanwhile  # type: ignore[method-assign]
    run(grid, PlannerStub(), strategy=FedAvg(fraction_evaluate=0.0, min_available_nodes=4))
    assert len(grid.trainings()) == 4
    assert sum(grid.clock.slept) == 3.0


def test_without_any_node_the_run_ends_with_advice() -> None:
    grid = GridOfNodes({})
    with pytest.raises(PlanningError, match="no node has connected within 120 s: start the SuperNodes"):
        run(grid, PlannerStub())


def test_a_node_without_an_identity_is_left_out_and_rarely_asked_again(warnings: WarningLog) -> None:
    grid = GridOfNodes(fleet(a={"takes_s": 1e6}, c={"device_id": None}))
    planner = PlannerStub()
    run(grid, planner, rounds=4, timeout=100.0)
    assert sorted(grid.identifications()) == [A, A, B, C, D]
    assert {m.metadata.dst_node_id for m in grid.trainings()} == {B, D}
    assert warnings.about(f"node {A} is left out until") and "no reply within 120 s" in warnings.about(f"node {A}")[0]
    assert "the app raised" in warnings.about(f"node {C} is excluded")[0]
    # Eleven minutes later, the node may run another app.
    grid.nodes[A] = Node("a")
    grid.clock.advance(660.0)
    run(grid, planner)
    assert {m.metadata.dst_node_id for m in grid.trainings()} == {A, B, D}


def test_a_restarted_supernode_is_trained_once() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock)

    def restarts(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round == 1:
            grid.nodes[A + 100] = Node("a")  # Flower still lists the former one
            grid.nodes[A].train = gone
        return None

    strategy.start(grid, ARRAYS, num_rounds=2, evaluate_fn=restarts)
    assert planner.asked("PlanRound")[-1].node_ids == [B, C, D, A + 100]
    assert not any(told.failure for told in planner.results()[-1].values())


LOW = StatusError(grpc.StatusCode.FAILED_PRECONDITION, "12 W is not enough to train one device: allow at least 15.0 W")
NOT_READY = StatusError(grpc.StatusCode.UNAVAILABLE, "no device is ready to train: a is profiling")


def test_an_invalid_request_ends_the_run_at_once() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(
        refusals=[StatusError(grpc.StatusCode.INVALID_ARGUMENT, "a round needs a number of epochs above 0")]
    )
    with pytest.raises(PlanningError, match="INVALID_ARGUMENT: a round needs a number of epochs above 0"):
        run(grid, planner)
    assert grid.clock.slept == []
    assert "epochs above 0" in planner.asked("FinishRun")[0].error


def test_devices_getting_ready_are_waited_for_with_a_limit() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(refusals=[NOT_READY] * 5)
    run(grid, planner)
    assert len(grid.trainings()) == 4 and sum(grid.clock.slept) == 5.0
    with pytest.raises(PlanningError, match="no device is ready to train: a is profiling"):
        run(GridOfNodes(fleet()), PlannerStub(refusals=[NOT_READY] * 500))


def test_a_budget_that_never_sufficed_ends_the_run() -> None:
    grid = GridOfNodes(fleet())
    with pytest.raises(PlanningError, match="allow at least"):
        run(grid, PlannerStub(nodes=dict(KNOWN), refusals=[LOW] * 10_000), patience_s=30.0)
    assert sum(grid.clock.slept) == 30.0


def test_a_budget_that_is_low_at_night_is_waited_out() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock)

    def night(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round == 1:
            planner.refusals = [LOW] * (8 * 360)
        return None

    strategy.start(grid, ARRAYS, num_rounds=2, evaluate_fn=night)
    assert len(grid.trainings()) == 8
    assert sum(grid.clock.slept) == pytest.approx(8 * 3600)


def test_devices_getting_ready_after_a_night_are_waited_for(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock, patience_s=60.0)
    nights = {1: [*[LOW] * 360, *[NOT_READY] * 59], 2: [*[LOW] * 360, *[NOT_READY] * 61]}

    def night(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        planner.refusals = nights.get(server_round, [])
        return None

    with pytest.raises(PlanningError, match="no device is ready"):
        strategy.start(grid, ARRAYS, num_rounds=3, evaluate_fn=night)
    assert len(grid.trainings()) == 8, "in the second night devices are away for longer than the wait"
    assert sum(grid.clock.slept) == 2 * 3600 + 59 + 60


# --- Pairing in rounds ------------------------------------------------------------------------------------------------
# Nodes that cannot train on their devices do not delay rounds, and train as soon as they are repaired.

AWAY = "no agent listens at /run/wattfleet/agent.sock: start it"


def trained_nodes(grid: GridOfNodes) -> list[int]:
    return [message.metadata.dst_node_id for message in grid.trainings()]


def test_rounds_wait_for_no_node_that_cannot_train() -> None:
    def took_s(grid: GridOfNodes, planner: PlannerStub) -> float:
        began_s = grid.clock.now_s()
        run(grid, planner, rounds=4)
        assert len(trained_nodes(grid)) == 12 and A not in trained_nodes(grid)
        return grid.clock.now_s() - began_s

    known = {"nodes": dict(KNOWN), "problems": dict.fromkeys(KNOWN, "")}
    without_s = took_s(GridOfNodes(fleet()), PlannerStub(chosen=["b", "c", "d"], **known))
    with_s = took_s(GridOfNodes(fleet(a={"problem": AWAY})), PlannerStub())
    # 5 s until all nodes have named their devices, before the first plan, and the rounding of polls for replies.
    assert with_s == pytest.approx(without_s + 5.0, abs=0.5)


def test_a_node_is_asked_again_each_round_and_trains_once_it_is_mended(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet(a={"problem": AWAY})), PlannerStub()

    def mends(message: Message) -> Message:
        if trained_nodes(grid).count(B) == 3:
            grid.nodes[A].problem = ""
        grid.clock.advance(20.0)
        return replied(message)

    grid.nodes[B].train = mends
    run(grid, planner, rounds=7)
    assert grid.identifications().count(A) == 5, "when it was unknown, and before the rounds until it is mended"
    assert grid.identifications().count(B) == 1
    assert A in trained_nodes(grid)[-4:], "without a restart"
    assert len(warnings.about("a is left out of rounds")) == 1, "a problem is logged once"


def test_a_new_run_asks_before_its_first_plan_whether_a_node_was_mended() -> None:
    grid = GridOfNodes(fleet(a={"problem": ""}))
    run(grid, PlannerStub(nodes=dict(KNOWN), problems={A: AWAY}), rounds=1)
    assert sorted(trained_nodes(grid)) == [A, B, C, D]


def test_a_node_whose_agent_refused_a_training_is_asked_before_the_next_plan() -> None:
    def refused(message: Message) -> Message:
        text = "\nException AgentUnreachableError occurred. Message: \na: the agent at /a answered UNAVAILABLE: gone"
        return Message(Error(2, text), reply_to=message)

    grid = GridOfNodes(fleet(a={"problem": AWAY, "train": refused}))
    run(grid, PlannerStub(nodes=dict(KNOWN), problems=dict.fromkeys(KNOWN, "")), rounds=3)
    assert trained_nodes(grid).count(A) == 1
    assert set(grid.identifications()) == {A}


def test_a_node_that_names_another_nodes_device_does_not_replace_it() -> None:
    grid = GridOfNodes(fleet(d={"device_id": "a", "problem": "it belongs to b"}))
    known = {A: "a", B: "b", C: "c"}
    # The wrong node is new: a new node without a problem would be the restarted SuperNode of its device.
    run(grid, PlannerStub(nodes=known, problems=dict.fromkeys(known, "")), rounds=2)
    assert sorted(trained_nodes(grid)) == [A, A, B, B, C, C]


def test_a_node_that_cannot_train_does_not_evaluate() -> None:
    grid = GridOfNodes(fleet(a={"problem": AWAY}))
    run(grid, PlannerStub(), rounds=1, strategy=FedAvg())
    evaluated = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "evaluate"]
    assert sorted(evaluated) == [B, C, D]


def test_a_node_that_cannot_train_does_not_train_without_a_plan_either() -> None:
    grid, planner = GridOfNodes(fleet(a={"problem": AWAY})), PlannerStub()

    def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        planner.away = server_round == 1
        return MetricRecord({"accuracy": 0.5})

    strategy = PowerAware(
        FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock, on_coordinator_away="unplanned", patience_s=5.0
    )
    strategy.start(grid, ARRAYS, num_rounds=2, evaluate_fn=evaluated)
    assert [request.round for request in planner.asked("PlanRound")] == [1], "the second round had no plan"
    assert sorted(trained_nodes(grid)) == [B, B, C, C, D, D]


def test_a_node_that_was_gone_when_it_was_asked_trains_once_it_is_back(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet(a={"train": gone, "takes_s": 50.0})), PlannerStub()

    def returns(message: Message) -> Message:
        if trained_nodes(grid).count(B) == 2:
            grid.nodes[A].train, grid.nodes[A].takes_s, grid.nodes[A].busy_until_s = replied, 5.0, 0.0
        grid.clock.advance(60.0)
        return replied(message)

    grid.nodes[B].train = returns
    run(grid, planner, rounds=6)
    assert A in trained_nodes(grid)[-4:], "without waiting for ten minutes"
    [warning] = warnings.about(f"node {A} is left out until it reports its device")
    assert "the node is gone" in warning


def test_a_restarted_supernode_that_was_busy_replaces_its_earlier_node() -> None:
    # A SuperNode without a key has got node D. It does not answer at first. Flower still lists its earlier node, A.
    nodes = fleet(d={"device_id": "a", "train": gone})
    grid, planner = GridOfNodes(nodes), PlannerStub(nodes={A: "a", B: "b", C: "c"})

    def returns(message: Message) -> Message:
        grid.nodes[D].train = replied
        grid.clock.advance(60.0)
        return replied(message)

    grid.nodes[B].train = returns
    run(grid, planner, rounds=4)
    assert set(trained_nodes(grid)[-3:]) == {B, C, D}


def test_a_run_whose_mods_fail_before_ours_ends_with_the_line_to_write(warnings: WarningLog) -> None:
    grid = GridOfNodes({A: Node(None)})
    planner = PlannerStub(refusals=[StatusError(grpc.StatusCode.UNAVAILABLE, "no device is ready")] * 200)
    with pytest.raises(PlanningError) as refused:
        run(grid, planner, patience_s=20.0)
    line = "list it as the first mod, ClientApp(mods=[power_mode_mod, ...])"
    for text in (str(refused.value), *warnings.about(f"node {A} is excluded")):
        assert "the app raised: KeyError: 'arrays'" in text
        assert line in text
    assert "no device is ready; the device of 1 node is unknown" in str(refused.value)
