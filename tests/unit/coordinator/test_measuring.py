"""Devices that measure outside of rounds, how their watts count, and the measured modes that devices share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from coordinator.display.words import RunNames, granted
from coordinator.errors import RunEndedError, StillInUseError, StoreUnavailableError, UnknownRecordError
from coordinator.repository.repository import FleetRepository
from coordinator.repository.writer import Writer
from coordinator.services.orders import Orders, ResponseStream, grant_to_message
from coordinator.services.planning import PlanningServicer, RoundPlanning
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Leases
from coordinator.state.measuring import SURVEYED_OF_KIND, LearningKind, SharedModes
from coordinator.state.preview import RoundPreview
from coordinator.state.records import GivenUpTraining, StoredGrants, StoredRecord
from tests.fakes.small_fleet import (
    NANO_NODE,
    NODES,
    ORIN_FRONT,
    ORIN_NODE,
    RUN,
    PlaintextContext,
    confirm_all,
    end_training,
    restarted,
    small_fleet,
    train,
)
from tests.fakes.stored_records import RecordingStore
from wattfleet.core.budgets import InForce
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import MeasuredUnit, Measurement, PowerMode, Workload
from wattfleet.core.planning import Allowance
from wattfleet.core.planning.policies import AllDevices, FastestK
from wattfleet_proto.convert import measured_from_messages
from wattfleet_proto.device_state import DeviceState, GrantPhase
from wattfleet_proto.limits import SURVEY_MODES
from wattfleet_proto.v1 import planning_pb2, session_pb2

# --- Measuring --------------------------------------------------------------------------------------------------------
# Devices that measure outside of rounds: which do, how their watts count, and that any round comes first.


APP = Workload("digits")
SITE_W = 100.0


def fleet_of_app(site_budget_w: float = SITE_W, modes: int = 0, length: int | None = None) -> Fleet:
    """A fleet whose devices have measured some modes of the run's workload."""
    fleet = small_fleet(site_budget_w, FastestK(1))
    fleet.flower.start_run(RUN, "FedAvg", 3, workload=APP)
    for device_id, idle_w in (("orin", 5.0), ("nano", 3.0)):
        front = fleet.agents.get(device_id).fronts[0].front
        fleet.agents.report_front(device_id, front, idle_w, modes, "", APP, length)
    return fleet


def measure(fleet: Fleet, node_ids: Sequence[int] = NODES, survey_s: float | None = 20.0, modes: int = 50) -> list[str]:
    """Let devices measure as the service does; returns their ids."""
    plan = fleet.flower.request_measuring(RUN, node_ids, 1.0, modes, survey_s).planned()
    if plan.assignments:
        fleet.flower.accept_measuring(RUN, plan)
    return [each.device_id for each in plan.assignments]


def reserved_w(fleet: Fleet) -> float:
    return fleet.draw.reserved_w()["site"]


def falls(fleet: Fleet, watts: float) -> None:
    fleet.set_budget("site", InForce(watts, "override", False, "the operator"))


# --- which devices measure ----------------------------------------------------------------------------------------


def test_a_survey_takes_the_devices_that_do_not_know_the_workload() -> None:
    fleet = fleet_of_app()
    request = fleet.flower.request_measuring(RUN, NODES, 1.0, 50, 20.0)
    assert {each.modes for each in request.measuring.values()} == {SURVEY_MODES}
    assert {each.longest_s for each in request.measuring.values()} == {20.0}
    assert measure(fleet) == ["nano", "orin"]


def test_a_device_that_knows_the_workload_is_not_surveyed() -> None:
    assert measure(fleet_of_app(modes=5, length=80)) == []


def test_a_device_that_only_lacks_the_length_reports_its_loader() -> None:
    fleet = fleet_of_app(modes=5)
    request = fleet.flower.request_measuring(RUN, NODES, 1.0, 50, 20.0)
    assert [each.modes for each in request.measuring.values()] == [0, 0]


def test_of_many_devices_of_a_kind_only_some_measure() -> None:
    fleet = fleet_of_app(site_budget_w=10_000.0)
    for k in range(30):
        fleet.agents.connect(f"more-{k}", "agx-orin", "simulated", 18_096)
        fleet.agents.report_front(f"more-{k}", ORIN_FRONT, 5.0, 0, "", APP)
        fleet.agents.report_state(f"more-{k}", DeviceState.READY, 0, "")
        fleet.flower.bind_node(100 + k, f"more-{k}")
    request = fleet.flower.request_measuring(RUN, [*NODES, *range(100, 130)], 1.0, 50, 20.0)
    modes = [each.modes for each in request.measuring.values()]
    assert len(modes) == 32 and sum(each > 0 for each in modes) == SURVEYED_OF_KIND


def test_drained_devices_do_not_measure() -> None:
    fleet = fleet_of_app()
    fleet.operator.drain(["orin"])
    assert measure(fleet) == ["nano"]


def test_devices_that_may_soon_be_ready_are_counted() -> None:
    fleet = fleet_of_app()
    fleet.agents.report_state("orin", DeviceState.ENROLLED, 0, "")
    assert fleet.flower.request_measuring(RUN, NODES, 1.0, 50, 20.0).not_ready == 1
    fleet.operator.drain(["orin"])
    assert fleet.flower.request_measuring(RUN, NODES, 1.0, 50, 20.0).not_ready == 0


def test_devices_that_only_lack_their_prediction_are_counted() -> None:
    fleet = small_fleet(SITE_W, FastestK(1))
    fleet.flower.start_run(RUN, "FedAvg", 3, workload=APP)
    predicting = lambda: fleet.flower.request_measuring(RUN, NODES, 1.0, 50, 20.0).predicting  # noqa: E731
    assert predicting() == 2
    fleet.agents.report_front("orin", fleet.agents.get("orin").fronts[0].front, 5.0, 0, "", APP, None)
    assert predicting() == 1
    fleet.agents.disconnect("nano")
    assert predicting() == 0, "it may be away for long"


@pytest.mark.parametrize("survey_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_survey_has_a_usable_length(survey_s: float) -> None:
    with pytest.raises(InvalidInputError, match="finite number of seconds above 0"):
        measure(fleet_of_app(), survey_s=survey_s)


def test_left_out_devices_measure_until_they_have_their_modes() -> None:
    fleet = fleet_of_app(modes=49, length=80)
    request = fleet.flower.request_measuring(RUN, NODES, 1.0, 50, None)
    assert {each.modes for each in request.measuring.values()} == {1}
    assert {each.longest_s for each in request.measuring.values()} == {24 * 3600.0}
    assert measure(fleet_of_app(modes=50, length=80), survey_s=None) == []


def test_left_out_devices_begin_no_measurement_after_the_planned_end_of_the_round() -> None:
    fleet = fleet_of_app(modes=5, length=80)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    request = fleet.flower.request_measuring(RUN, NODES, 1.0, 50, None)
    [left_out] = {"orin", "nano"} - record.nodes.keys()
    assert {each: limits.longest_s for each, limits in request.measuring.items()} == {left_out: record.plan.duration_s}


def test_devices_of_a_kind_that_measure_or_have_measured_count_unrequested_too() -> None:
    # An app requests only nodes that it has not asked in this survey yet.
    fleet = fleet_of_app(site_budget_w=10_000.0)
    for k in range(30):
        fleet.agents.connect(f"more-{k}", "agx-orin", "simulated", 18_096)
        fleet.agents.report_front(f"more-{k}", ORIN_FRONT, 5.0, 5 if k < 4 else 0, "", APP)
        fleet.agents.report_state(f"more-{k}", DeviceState.READY, 0, "")
        fleet.flower.bind_node(100 + k, f"more-{k}")
    assert len(measure(fleet, range(104, 107))) == 3
    request = fleet.flower.request_measuring(RUN, range(107, 130), 1.0, 50, 20.0)
    assert sum(each.modes > 0 for each in request.measuring.values()) == SURVEYED_OF_KIND - 4 - 3


def test_a_device_that_measures_no_mode_in_its_survey_is_planned_like_any_other() -> None:
    # For example because its duty leaves no time.
    fleet = fleet_of_app()
    assert measure(fleet, [ORIN_NODE]) == ["orin"]
    train(fleet, "orin")
    fleet.flower.stop_measuring(RUN, NODES)
    confirm_all(fleet)
    end_training(fleet, "orin")
    assert reserved_w(fleet) == pytest.approx(5.0 + 3.0)
    assert "orin" in fleet.flower.plan(RUN, 1, NODES, 1.0).nodes


# --- their watts --------------------------------------------------------------------------------------------------


def test_watts_of_measuring_devices_count_until_they_are_parked() -> None:
    fleet = fleet_of_app()
    measure(fleet)
    assert reserved_w(fleet) == pytest.approx(50.0 + 15.0), "from the moment of the plan"
    for device_id in ("orin", "nano"):
        train(fleet, device_id)
    assert reserved_w(fleet) == pytest.approx(50.0 + 15.0)
    end_training(fleet, "orin")
    assert reserved_w(fleet) == pytest.approx(5.0 + 15.0)


def test_measuring_devices_and_a_round_share_the_budget() -> None:
    fleet = fleet_of_app(70.0, modes=5, length=80)
    planned = fleet.flower.plan(RUN, 1, NODES, 1.0)
    [chosen] = planned.nodes
    [left_out] = {"orin", "nano"} - {chosen}
    assert measure(fleet, survey_s=None) == [left_out]
    assert reserved_w(fleet) <= 70.0


def test_when_a_budget_falls_measuring_ends_first() -> None:
    fleet = fleet_of_app(80.0, modes=5, length=80)
    [chosen] = fleet.flower.plan(RUN, 1, NODES, 1.0).nodes
    [left_out] = measure(fleet, survey_s=None)
    for device_id in (chosen, left_out):
        train(fleet, device_id)
    limits = {device_id: fleet.rounds.grants.of(device_id).granted_w for device_id in (chosen, left_out)}  # type: ignore[union-attr]
    falls(fleet, reserved_w(fleet) - 1.0)
    orders = dict(fleet.take_orders())
    assert orders.keys() == {left_out} and orders[left_out].assignment is None, "the round goes on as it is"
    assert fleet.rounds.grants.of(chosen).granted_w == limits[chosen]  # type: ignore[union-attr]


def test_a_round_takes_the_devices_and_watts_of_those_that_measure() -> None:
    fleet = fleet_of_app()
    measure(fleet)
    for device_id in ("orin", "nano"):
        train(fleet, device_id)
    assert fleet.flower.stop_measuring(RUN, NODES) == {"orin", "nano"}
    assert all(grant.assignment is None for grant in confirm_all(fleet).values())
    assert fleet.flower.stop_measuring(RUN, NODES) == {"orin", "nano"}, "their apps have not ended yet"
    for device_id in ("orin", "nano"):
        end_training(fleet, device_id)
    assert fleet.flower.stop_measuring(RUN, NODES) == set()
    assert len(fleet.flower.plan(RUN, 1, NODES, 1.0).nodes) == 1


def test_a_node_that_its_run_does_not_request_measures_on() -> None:
    fleet = fleet_of_app()
    measure(fleet)
    train(fleet, "nano")
    fleet.flower.stop_measuring(RUN, [ORIN_NODE])
    confirm_all(fleet)
    assert fleet.rounds.grants.of("nano").granted_w > 0  # type: ignore[union-attr]
    fleet.flower.start_run("other", "FedAvg", 1, workload=APP)
    assert fleet.flower.stop_measuring("other", []) == {"nano"}, "other runs need the watts"


def test_a_grant_that_no_device_has_received_is_over_at_once() -> None:
    fleet = fleet_of_app()
    measure(fleet)
    fleet.flower.stop_measuring(RUN, NODES)
    assert reserved_w(fleet) == pytest.approx(5.0 + 3.0)


def test_a_lease_from_before_the_grant_is_sent_does_not_end_it() -> None:
    fleet = fleet_of_app()
    measure(fleet)
    fleet.rounds.grants.confirm("orin", 0, "", GrantPhase.OVER)
    assert {device_id for device_id, _ in fleet.take_orders()} == {"orin", "nano"}
    fleet.rounds.grants.session_began("orin", 0.0)
    fleet.rounds.grants.confirm("orin", 0, "", GrantPhase.OVER)
    assert reserved_w(fleet) == pytest.approx(5.0 + 15.0), "it was sent, and has been lost"


def test_nobody_measures_for_a_run_that_has_ended() -> None:
    fleet = fleet_of_app()
    plan = fleet.flower.request_measuring(RUN, NODES, 1.0, 50, 20.0).planned()
    fleet.flower.finish_run(RUN, "")  # while it was planned
    with pytest.raises(RunEndedError):
        fleet.flower.accept_measuring(RUN, plan)
    with pytest.raises(RunEndedError):
        measure(fleet)


def test_no_round_begins_for_a_run_that_has_ended() -> None:
    fleet = fleet_of_app()
    request = fleet.flower.request_round(RUN, 1, NODES, 1.0)
    record = request.planned()
    fleet.flower.finish_run(RUN, "")  # while it was planned
    with pytest.raises(RunEndedError):
        fleet.flower.accept_plan(request, record)


@pytest.mark.parametrize("how", ["round", "run"])
def test_measuring_ends_with_its_round_and_its_run(how: str) -> None:
    fleet = fleet_of_app()
    measure(fleet)
    train(fleet, "orin")
    if how == "round":
        fleet.flower.end_measuring(RUN)
    else:
        fleet.flower.finish_run(RUN, "")
    assert fleet.take_orders()[0][1].assignment is None


def test_no_round_waits_for_a_device_that_measures() -> None:
    fleet = fleet_of_app()
    measure(fleet)
    train(fleet, "orin")
    assert (fleet.rounds.in_flight(), fleet.rounds.grants.plans_in_flight()) == ([], set())


def test_after_a_restart_the_watts_count_and_the_device_is_stopped() -> None:
    fleet = fleet_of_app()
    measure(fleet)
    train(fleet, "orin")
    records = [each for each in fleet.rounds.grants.unstored.take() if isinstance(each, GivenUpTraining)]
    assert {each.device_id: each.limit_w for each in records} == {"orin": 50.0, "nano": 15.0}
    stored = StoredGrants(120.0, {each.device_id: each for each in records})
    again = restarted(fleet, stored=stored)
    assert reserved_w(again) == pytest.approx(50.0 + 15.0)
    grant = fleet.rounds.grants.of("orin")
    assert grant is not None
    again.agents.connect("orin", "agx-orin", "simulated", 18_096)
    again.rounds.grants.session_began("orin", 0.0)
    again.rounds.grants.confirm("orin", grant.grant.grant_id, grant.plan_id, GrantPhase.TRAINING)
    assert reserved_w(again) == pytest.approx(50.0 + 15.0)
    again.trim()
    assert [(each, order.assignment) for each, order in again.take_orders()] == [("orin", None)]
    again.rounds.grants.confirm("orin", again.rounds.grants.of("orin").grant.grant_id, grant.plan_id, GrantPhase.OVER)  # type: ignore[union-attr]
    assert reserved_w(again) == pytest.approx(5.0 + 15.0)
    again.check_grants()
    assert GivenUpTraining("orin", None) in again.rounds.grants.unstored.take()


def test_after_a_restart_a_round_counts_that_follows_a_measuring() -> None:
    fleet = fleet_of_app()
    measure(fleet, [ORIN_NODE])
    stored = fleet.rounds.grants.unstored.take()
    train(fleet, "orin")
    end_training(fleet, "orin")
    planned = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    stored += fleet.rounds.grants.unstored.take()  # with the round
    newest = {each.device_id: each for each in stored if isinstance(each, GivenUpTraining)}
    given_up = {device_id: each for device_id, each in newest.items() if each.plan_id is not None}
    again = restarted(fleet, stored=StoredGrants(120.0, given_up))
    known = again.rounds.grants.of("orin")
    assert known is not None and known.plan_id == planned.plan_id and known.granted_w > 0


def test_the_grant_states_its_limits() -> None:
    fleet = fleet_of_app()
    measure(fleet)
    [order] = [grant for device_id, grant in fleet.take_orders() if device_id == "orin"]
    message = grant_to_message(order, APP.name)
    assert (message.measuring.modes, message.measuring.longest_s) == (SURVEY_MODES, 20.0)
    assert not grant_to_message(replace(order, measuring=None)).HasField("measuring")


# --- the service --------------------------------------------------------------------------------------------------


async def test_nothing_is_sent_before_it_is_stored() -> None:
    fleet, store = fleet_of_app(), RecordingStore()
    writer = Writer(store)
    repository, orders = FleetRepository(fleet, writer), Orders(fleet)
    planning = RoundPlanning(repository, Leases(0.0), orders, lambda: 0.0)
    service = PlanningServicer(repository, planning, orders)
    request = planning_pb2.PlanMeasuringRequest(run_id=RUN, node_ids=NODES, epochs=1.0, survey_s=20.0)
    answer = await service.PlanMeasuring(request, PlaintextContext())
    assert {each.node_id for each in answer.assignments} == {ORIN_NODE, NANO_NODE}
    assert answer.plan_id.startswith(f"{RUN}/measuring-") and (answer.waiting, answer.not_ready) == (0, 0)
    stored = [each for saved in store.transactions for each in saved if isinstance(each, GivenUpTraining)]
    assert {each.device_id for each in stored} == {"orin", "nano"}
    for device_id in ("orin", "nano"):
        train(fleet, device_id)
    again = await service.PlanMeasuring(request, PlaintextContext())
    assert (again.plan_id, again.not_ready) == ("", 2), "they measure already"
    await writer.close()


class Stored:
    """A repository whose store may fail."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.fails_with: BaseException | None = None
        self.at_save: Callable[[], None] = lambda: None

    async def save(self, *records: StoredRecord) -> None:
        self.at_save()
        if self.fails_with is not None:
            raise self.fails_with

    async def load_round(self, plan_id: str) -> None: ...

    async def load_history(self, run_id: str) -> None: ...


def planning_of(fleet: Fleet) -> tuple[RoundPlanning, Stored]:
    stored = Stored(fleet)
    return RoundPlanning(cast(FleetRepository, stored), Leases(0.0), Orders(fleet), lambda: 0.0), stored


@pytest.mark.parametrize("survey_s", [20.0, None])
async def test_a_run_that_has_ended_measures_nothing(survey_s: float | None) -> None:
    fleet = fleet_of_app()
    planning, _ = planning_of(fleet)
    fleet.flower.finish_run(RUN, "stopped by an operator, who ended it")
    with pytest.raises(RunEndedError, match="has ended"):
        await planning.measure(RUN, NODES, 1.0, survey_s)
    assert reserved_w(fleet) == pytest.approx(8.0)


async def test_a_run_that_ends_while_its_measuring_is_planned_measures_nothing() -> None:
    fleet = fleet_of_app()
    planning, _ = planning_of(fleet)
    is_outdated = fleet.is_outdated

    def ends(*args: Any) -> bool:
        fleet.flower.finish_run(RUN, "stopped by an operator, who ended it")
        return is_outdated(*args)

    fleet.is_outdated = ends  # type: ignore[method-assign]
    with pytest.raises(RunEndedError, match="has ended"):
        await planning.measure(RUN, NODES, 1.0, 20.0)
    assert reserved_w(fleet) == pytest.approx(8.0)


async def test_a_run_that_is_being_deleted_measures_nothing() -> None:
    fleet = fleet_of_app()
    planning, stored = planning_of(fleet)
    refused: list[Exception | str] = []

    async def delete_run(run_id: str) -> None:
        fleet.flower.runs[RUN] = replace(fleet.flower.run(RUN), finished=False)  # its app starts it again
        try:
            refused.append((await planning.measure(RUN, NODES, 1.0, 20.0))[0])
        except UnknownRecordError as error:
            refused.append(error)

    stored.delete_run = delete_run  # type: ignore[attr-defined]
    fleet.flower.finish_run(RUN, "")
    await planning.delete_runs([RUN], False, lambda _: None)
    assert "it is being deleted" in str(refused[0]) and reserved_w(fleet) == pytest.approx(8.0)


@pytest.mark.parametrize("error", [StoreUnavailableError("full"), asyncio.CancelledError()])
async def test_measuring_that_cannot_be_stored_holds_no_watts(error: BaseException) -> None:
    fleet = fleet_of_app()
    planning, stored = planning_of(fleet)
    stored.fails_with = error
    with pytest.raises(type(error)):
        await planning.measure(RUN, NODES, 1.0, 20.0)
    assert reserved_w(fleet) == pytest.approx(8.0)
    stored.fails_with = None
    plan_id, plan, _ = await planning.measure(RUN, NODES, 1.0, 20.0)
    assert plan_id and {each.device_id for each in plan.assignments} == {"nano", "orin"}
    assert fleet.take_orders(), "nothing is held back"


@pytest.mark.parametrize("received", [False, True])
async def test_a_repeated_request_gets_the_devices_of_one_whose_answer_was_lost(received: bool) -> None:
    fleet = fleet_of_app(70.0)
    planning, _ = planning_of(fleet)
    first, _, _ = await planning.measure(RUN, NODES, 1.0, 20.0)
    if received:
        confirm_all(fleet)
        confirming = asyncio.create_task(_confirm_soon(fleet))
    again, plan, _ = await planning.measure(RUN, NODES, 1.0, 20.0)
    if received:
        await confirming
    assert again not in ("", first) and {each.device_id for each in plan.assignments} == {"nano", "orin"}
    assert reserved_w(fleet) <= 70.0


async def _confirm_soon(fleet: Fleet) -> None:
    await asyncio.sleep(0.05)
    confirm_all(fleet)


async def test_a_repeated_request_leaves_a_training_that_has_begun() -> None:
    fleet = fleet_of_app()
    planning, _ = planning_of(fleet)
    await planning.measure(RUN, NODES, 1.0, 20.0)
    train(fleet, "orin")
    _, plan, _ = await planning.measure(RUN, [ORIN_NODE], 1.0, 20.0)
    assert (plan.assignments, plan.not_ready) == ([], 1)
    assert fleet.rounds.grants.of("orin").granted_w > 0  # type: ignore[union-attr]


async def test_runs_that_are_ended_to_be_deleted_are_stopped_before_this_is_stored() -> None:
    fleet = fleet_of_app()
    planning, stored = planning_of(fleet)
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    [chosen] = fleet.rounds.get(f"{RUN}/1").nodes
    train(fleet, chosen)
    stored.fails_with = StoreUnavailableError("full")
    with pytest.raises(StoreUnavailableError):
        await planning.delete_runs([RUN], True, lambda _: None)
    assert fleet.rounds.grants.of(chosen).assignment is None  # type: ignore[union-attr]


# --- in words -----------------------------------------------------------------------------------------------------


def test_measuring_is_named_in_words() -> None:
    fleet = fleet_of_app()
    measure(fleet)
    confirm_all(fleet)
    plan_id = fleet.draw.plan_holding("orin")
    assert plan_id is not None
    name = fleet.flower.name_of(RUN)
    assert fleet.flower.round_text(plan_id) == f"measurements of run {name}"
    assert fleet.flower.round_text(f"{RUN}/3") == f"round 3 of run {name}"
    names = RunNames([{"run_id": RUN, "name": "night"}])
    assert (names.round_of(plan_id), names.round_of(f"{RUN}/3")) == (
        "measurements of run night",
        "round 3 of run night",
    )
    device = {"granted_w": 50.0, "granted_plan_id": plan_id, "confirmed_w": 50.0, "state": "training"}
    assert granted(device, names) == "50.0 W for measurements of run night, confirmed"
    stopped = {**device, "granted_w": 0.0}
    assert granted(stopped, names) == "nothing any more: it stops its measurements of run night"
    fleet.agents.disconnect("orin")
    with pytest.raises(StillInUseError, match=f"^watts are still held for orin by measurements of run {name}: repeat"):
        fleet.forget(["orin"])


def test_a_preview_names_no_measuring_among_the_rounds_in_flight() -> None:
    fleet = fleet_of_app()
    measure(fleet)
    train(fleet, "orin")
    preview = RoundPreview(fleet, RUN).plan(1.0)
    assert preview.assumed_ended == [] and preview.record.nodes


# --- Shared modes -----------------------------------------------------------------------------------------------------
# Measured modes that devices share: the coordinator keeps them and forwards them in time.

ORIN, NANO = LearningKind("agx-orin", "simulated"), LearningKind("orin-nano", "simulated")
DIGITS = Workload("digits")


def rows(count: int, minibatch_ms: float = 80.0) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(PowerMode(4, 10**6, 10**8 + number, 2 * 10**9), minibatch_ms, 9e3, 16) for number in range(count)
    )


def test_a_device_learns_from_others_of_its_kind_and_never_from_itself() -> None:
    shared = SharedModes(16)
    for device_id, kind, workload in [("a", ORIN, "digits"), ("b", ORIN, "text"), ("c", NANO, "digits")]:
        assert shared.report(device_id, kind, workload, rows(3))
    assert shared.of_others("d", ORIN, "digits") == [unit(3), MeasuredUnit("orin-nano", rows(3))]
    assert shared.of_others("a", ORIN, "digits") == [MeasuredUnit("orin-nano", rows(3))]
    assert shared.of_others("d", ORIN._replace(provenance="hardware"), "digits") == []


def test_a_device_learns_from_the_most_experienced_device_of_a_few_other_kinds() -> None:
    shared = SharedModes(16)
    for board, counts in {"orin-nano": (2, 7), "orin-nx": (5,), "xavier-agx": (1,)}.items():
        for number, count in enumerate(counts):
            shared.report(f"{board}-{number}", LearningKind(board, "simulated"), "digits", rows(count))
    told = shared.of_others("orin", ORIN, "digits")
    assert [(each.board, len(each.measured)) for each in told] == [("orin-nano", 7), ("orin-nx", 5)]


def test_those_who_have_measured_most_are_kept() -> None:
    shared = SharedModes(8)
    counts = [1, 5, 2, 8, 3, 7, 4, 20]
    for number, count in enumerate(counts):
        shared.report(f"orin-{number}", ORIN, "digits", rows(count))
    assert [len(each.measured) for each in shared.of_others("new", ORIN, "digits")] == [8, 8, 7, 5]
    assert [len(each.measured) for each in shared.of_others("orin-3", ORIN, "digits")] == [8, 7, 5, 4]


def test_what_changes_nothing_for_others_is_not_passed_on() -> None:
    shared = SharedModes(4)
    assert shared.report("a", ORIN, "digits", rows(4))
    assert not shared.report("a", ORIN, "digits", rows(6)), "the first four are the same"
    for number in range(4):
        assert shared.report(f"orin-{number}", ORIN, "digits", rows(4))
    assert not shared.report("b", ORIN, "digits", rows(4)), "five others have as many"
    assert not shared.report("a", ORIN, "digits", ()), "it is profiled again"
    assert len(shared.of_others("new", ORIN, "digits")) == 4
    assert not shared.report("a", ORIN, "text", rows(0))
    assert shared.report("a", ORIN, "text", rows(2))
    assert not shared.report("a", ORIN, "text", rows(2, minibatch_ms=90.0)), "other values, but no more modes"
    assert shared.of_others("new", ORIN, "text") == [MeasuredUnit("", rows(2, minibatch_ms=90.0))]
    assert not SharedModes(0).report("a", ORIN, "digits", rows(4))


def test_only_so_many_workloads_are_kept_and_those_without_runs_go() -> None:
    shared = SharedModes(16)
    for number in range(256):
        assert shared.report("a", ORIN, f"workload-{number}", rows(1))
    assert not shared.report("a", ORIN, "one more", rows(1))
    shared.keep({"workload-3"})
    assert shared.report("a", ORIN, "one more", rows(1))
    assert shared.of_others("b", ORIN, "workload-3") == [unit(1)]
    assert shared.of_others("b", ORIN, "workload-4") == []


def unit(count: int) -> MeasuredUnit:
    """What another device of the same kind has measured."""
    return MeasuredUnit("", rows(count))


class Sharing:
    """Devices with sessions; `told` lists, in order, the measured units that each was sent."""

    def __init__(self, share_modes: int = 16) -> None:
        self.fleet = Fleet(Allowance.of_site(100.0), AllDevices())
        self.orders = Orders(self.fleet, shared=SharedModes(share_modes), share_after_s=0.0)
        self.told: dict[str, list[list[MeasuredUnit]]] = {}
        self.fleet.flower.start_run(RUN, "FedAvg", 3, workload=DIGITS)

    def connect(self, device_id: str, board: str = "agx-orin") -> None:
        self.fleet.agents.connect(device_id, board, "simulated", 7)
        self.told[device_id] = []
        self.orders.begin(device_id, ResponseStream(partial(self._write, device_id)))

    def measured(self, device_id: str, count: int) -> None:
        record = self.fleet.agents.report_front(device_id, ORIN_FRONT, 5.0, count, "", DIGITS, 100)
        self.orders.modes_measured(record, DIGITS.name, rows(count))

    async def until_told(self, device_id: str, units: list[MeasuredUnit]) -> None:
        async with asyncio.timeout(10.0):
            while units not in self.told[device_id]:
                await asyncio.sleep(0.001)

    async def _write(self, device_id: str, response: session_pb2.SessionResponse) -> None:
        if response.HasField("announced"):
            units = [
                MeasuredUnit(each.board, measured_from_messages(each.modes)) for each in response.announced.measured
            ]
            self.told[device_id].append(units)


async def test_devices_are_told_what_others_measured_while_they_have_less() -> None:
    sharing = Sharing()
    for device_id in ("a", "b", "experienced"):
        sharing.connect(device_id)
    sharing.connect("nano", "orin-nano")
    sharing.measured("experienced", 20)
    await sharing.until_told("a", [unit(16)])
    await sharing.until_told("nano", [MeasuredUnit("agx-orin", rows(16))])
    sharing.measured("a", 3)
    await sharing.until_told("b", [unit(16), unit(3)])
    assert sharing.told["experienced"] == [[]]
    sharing.connect("late")
    await sharing.until_told("late", [unit(16), unit(3)])
    assert len(sharing.told["late"]) == 1, "with the announcement of the workload"
    await sharing.orders.close()


async def test_a_device_that_is_left_out_for_its_claims_teaches_nobody() -> None:
    sharing = Sharing()
    sharing.connect("a")
    sharing.measured("a", 3)
    sharing.fleet.agents.refuse_front("a", "no board of its kind draws so many watts", DIGITS.name)
    sharing.orders.modes_measured(sharing.fleet.agents.get("a"), DIGITS.name, rows(4))
    sharing.connect("late")
    await sharing.until_told("late", [])
    await sharing.orders.close()


async def test_modes_of_a_workload_without_a_run_are_not_kept() -> None:
    sharing = Sharing()
    sharing.connect("a")
    record = sharing.fleet.agents.report_front("a", ORIN_FRONT, 5.0, 3, "", Workload("ahead"), 100)
    sharing.orders.modes_measured(record, "ahead", rows(3))
    sharing.fleet.flower.start_run(RUN + "1", "FedAvg", 3, workload=Workload("ahead"))
    sharing.connect("late")
    await sharing.until_told("late", [])
    await sharing.orders.close()


async def test_nothing_is_shared_where_it_is_switched_off() -> None:
    sharing = Sharing(share_modes=0)
    sharing.connect("a")
    sharing.connect("b")
    sharing.measured("a", 10)
    sharing.connect("c")
    await sharing.until_told("c", [])
    assert sharing.told["b"] == [[]]
    await sharing.orders.close()
