"""Plans that choose the local epochs of each device: records, observations, trims and the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.repository.repository import FleetRepository
from coordinator.repository.writer import Writer
from coordinator.services.orders import Orders
from coordinator.services.planning import PlanningServicer, RoundPlanning
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Leases
from coordinator.state.records import ObservedTraining, RoundRecord
from coordinator.store.store import Store
from tests.fakes.obedient_devices import confirm_all
from tests.fakes.plaintext_context import PlaintextContext
from tests.fakes.recording_store import RecordingStore
from tests.fakes.records_to_store import rounds_of
from tests.fakes.small_fleet import NODES, RUN, small_fleet
from wattfleet.budgets import InForce
from wattfleet.errors import InvalidInputError
from wattfleet.planning import EpochChoice
from wattfleet.planning.policies import AllDevices, Policy, Progress
from wattfleet_proto.convert import epoch_choice_to_message
from wattfleet_proto.v1 import planning_pb2

# An epoch takes 10 s on the Orin and 35 s on the Nano, and the overhead is 50 s. A round in which the Orin trains 3
# epochs and the Nano 1 makes progress (1.6 + 1) / 4 in 35 + 50 s. That is more per second than 2 / 4 in 35 + 50 s (one
# epoch each), 3.2 / 4 in 105 + 50 s (three each) or 1.6 / 3 in 30 + 50 s (three of the Orin alone).
POLICY = Progress(half_devices=2.0, overhead_s=50.0)
CHOICE = EpochChoice.of({1: 1.0, 3: 1.6}, is_per_device=True)
CHOSEN = {"nano": 1.0, "orin": 3.0}


def planned(policy: Policy = POLICY) -> tuple[Fleet, RoundRecord]:
    fleet = small_fleet(policy=policy)
    return fleet, fleet.flower.plan(RUN, 1, NODES, CHOICE)


def epochs_of(record: RoundRecord) -> dict[str, float]:
    return {assignment.device_id: assignment.epochs for assignment in record.plan.assignments}


def test_a_round_has_the_epochs_of_each_device_and_is_recorded_with_the_most() -> None:
    _, record = planned()
    assert epochs_of(record) == CHOSEN
    assert (record.epochs, record.plan.duration_s) == (3.0, 35.0)


def test_a_policy_that_chooses_none_plans_the_fewest() -> None:
    _, record = planned(AllDevices())
    assert (epochs_of(record), record.epochs) == ({"nano": 1.0, "orin": 1.0}, 1.0)


@pytest.mark.parametrize(("orin_epoch_s", "nano_epoch_s", "lasted_s"), [(11.0, 32.0, 33.0), (11.0, 34.0, 34.0)])
def test_the_observed_duration_is_of_each_devices_own_epochs(
    orin_epoch_s: float, nano_epoch_s: float, lasted_s: float
) -> None:
    fleet, record = planned()
    fleet.rounds.observe(record.plan_id, ObservedTraining("orin", orin_epoch_s, 48.0))
    assert fleet.rounds.records[record.plan_id].observed_duration_s is None, "the Nano is not observed yet"
    fleet.rounds.observe(record.plan_id, ObservedTraining("nano", nano_epoch_s, 14.0))
    assert fleet.rounds.records[record.plan_id].observed_duration_s == lasted_s


@pytest.mark.parametrize(
    ("budget_w", "duration_s", "left"),
    [(50.0, 60.0, CHOSEN), (31.0, 120.0, CHOSEN), (25.0, 35.0, {"nano": 1.0}), (14.0, 35.0, {})],
)
def test_a_trim_keeps_the_epochs(budget_w: float, duration_s: float, left: dict[str, float]) -> None:
    """Three epochs of the Orin take 30, 60 or 120 s at 50, 30 or 20 W; one of the Nano, 35 or 60 s at 15 or 10 W."""
    fleet, before = planned()
    confirm_all(fleet)
    fleet.set_budget("site", InForce(budget_w, "query", False, "the meter"))
    confirm_all(fleet)
    fleet.trim()
    after = fleet.rounds.records[before.plan_id]
    assert epochs_of(after) == left
    assert after.plan.duration_s == duration_s
    assert {each.device_id: each.epochs for each in after.plan.original.assignments} == CHOSEN
    assert after.epochs == 3.0


# --- the store ------------------------------------------------------------------------------------------------------


def test_the_epochs_of_each_device_are_stored(tmp_path: Path) -> None:
    fleet, record = planned()
    confirm_all(fleet)
    fleet.set_budget("site", InForce(50.0, "query", False, "the meter"))
    confirm_all(fleet)
    trimmed = fleet.rounds.records[record.plan_id]
    assert trimmed.plan.first_planned is not None
    for each in (record, trimmed):
        store = Store(tmp_path / "coordinator.db")
        store.save(fleet.flower.run(RUN), each)
        store.close()
        store = Store(tmp_path / "coordinator.db")
        assert rounds_of(store, RUN) == [each]
        store.close()


def test_a_plan_from_before_is_read_with_the_epochs_of_its_round(tmp_path: Path) -> None:
    fleet = small_fleet()
    record = fleet.flower.plan(RUN, 1, NODES, 2.5)
    # Stored by a version whose assignments did not state epochs: a 0 is not written.
    plan = replace(record.plan, assignments=tuple(replace(each, epochs=0.0) for each in record.plan.assignments))
    store = Store(tmp_path / "coordinator.db")
    store.save(fleet.flower.run(RUN), replace(record, plan=replace(plan, first_planned=plan)))
    store.close()
    store = Store(tmp_path / "coordinator.db")
    [read] = rounds_of(store, RUN)
    store.close()
    assert read.plan.assignments == record.plan.assignments
    assert read.plan.first_planned is not None
    assert read.plan.first_planned.assignments == record.plan.assignments


# --- the service ----------------------------------------------------------------------------------------------------


def service_of(fleet: Fleet, writer: Writer) -> PlanningServicer:
    repository, orders = FleetRepository(fleet, writer), Orders(fleet)
    return PlanningServicer(repository, RoundPlanning(repository, Leases(0.0), orders, lambda: 0.0), orders)


def asked(choice: planning_pb2.EpochChoice | None, epochs: float = 1.0) -> planning_pb2.PlanRoundRequest:
    return planning_pb2.PlanRoundRequest(run_id=RUN, round=1, node_ids=NODES, epochs=epochs, epoch_choice=choice)


def of(*options: tuple[int, float]) -> planning_pb2.EpochChoice:
    return planning_pb2.EpochChoice(
        options=[planning_pb2.EpochOption(epochs=epochs, progress=progress) for epochs, progress in options]
    )


def told(plan: planning_pb2.PlanRoundResponse) -> dict[str, float]:
    return {each.device_id: each.epochs for each in plan.assignments}


async def test_a_requested_choice_is_answered_with_the_epochs_of_each_device() -> None:
    fleet, writer = small_fleet(policy=POLICY), Writer(RecordingStore())
    service = service_of(fleet, writer)
    plan = await service.PlanRound(asked(epoch_choice_to_message(CHOICE)), PlaintextContext())
    assert told(plan) == CHOSEN
    again = await service.PlanRound(asked(of((1, 1.0), (9, 2.0))), PlaintextContext())
    assert again == plan, "a round is planned once"
    await writer.close()
    assert fleet.rounds.records[plan.plan_id].epochs == 3.0


async def test_a_request_without_a_choice_is_answered_with_its_number() -> None:
    fleet, writer = small_fleet(policy=POLICY), Writer(RecordingStore())
    plan = await service_of(fleet, writer).PlanRound(asked(None, 2.5), PlaintextContext())
    assert set(told(plan).values()) == {2.5}
    await writer.close()


@pytest.mark.parametrize(
    "choice", [of(), of((0, 1.0)), of((0, 1.0), (1, 2.0)), of((1, 2.0), (2, 1.0)), of((2, 1.0), (1, 2.0))]
)
async def test_a_choice_that_cannot_be_is_refused_and_nothing_is_planned(choice: planning_pb2.EpochChoice) -> None:
    fleet, store = small_fleet(policy=POLICY), RecordingStore()
    writer = Writer(store)
    service = service_of(fleet, writer)
    with pytest.raises(InvalidInputError):
        await service.PlanRound(asked(choice), PlaintextContext())
    assert not fleet.rounds.records and not fleet.rounds.in_flight()
    plan = await service.PlanRound(asked(epoch_choice_to_message(CHOICE)), PlaintextContext())
    assert told(plan) == CHOSEN, "the round can still be planned"
    await writer.close()
    assert len(store.transactions) == 1
