"""Rounds whose nodes train different numbers of local epochs: their updates count as if all had trained the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import GridOfNodes, Node, PlannerStub, killed
from tests.fakes.power_aware_runs import KNOWN, SeesContents
from tests.fakes.quorum_runs import QuorumRun, adds
from wattfleet.errors import InvalidInputError
from wattfleet.planning import EpochChoice
from wattfleet_flower import FedBuff, PowerAware, Quorum
from wattfleet_proto.v1 import planning_pb2

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
