"""The fleet's state machine: what changes, what is refused, and what a plan is made from."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from coordinator.errors import NoDevicesError, UnknownRecordError
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceResult, ObservedTraining, RoundObservation, RoundRecord
from tests.fakes.fronts import front
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN, small_fleet
from tests.fakes.small_fleet import make_ready as make_ready_in
from wattfleet.choosing import Front
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.planning import Allowance
from wattfleet.planning.policies import AllDevices, FastestK
from wattfleet_proto.device_state import DeviceState


def chosen(record: RoundRecord) -> set[str]:
    return {assignment.device_id for assignment in record.plan.assignments}


def offered(record: RoundRecord) -> set[str]:
    return {decision.device_id for decision in record.plan.decisions}


# --- sessions -----------------------------------------------------------------------------------------------------


def test_a_device_that_connects_is_enrolled() -> None:
    fleet = Fleet(Allowance.of_site(100.0), AllDevices())
    record = fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)
    assert (record.device_id, record.board, record.provenance) == ("orin", "agx-orin", "simulated")
    assert (record.state, record.mode_count, record.front) == (DeviceState.ENROLLED, 18_096, None)
    assert fleet.agents.get("orin") == record


def test_a_session_that_takes_the_place_of_another_begins_anew() -> None:
    fleet = small_fleet()
    assert fleet.agents.get("orin").state is DeviceState.READY
    assert fleet.agents.connect("orin", "agx-orin", "simulated", 18_096).state is DeviceState.ENROLLED


@pytest.mark.parametrize(("board", "provenance"), [("orin-nano", "simulated"), ("agx-orin", "hardware")])
def test_an_id_stays_with_the_board_it_was_enrolled_as(board: str, provenance: str) -> None:
    fleet = small_fleet()
    fleet.agents.disconnect("orin")
    with pytest.raises(InvalidInputError, match=f"enrolled as simulated agx-orin, not as {provenance} {board}"):
        fleet.agents.connect("orin", board, provenance, 18_096)
    fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)  # the refusal left no session behind


@pytest.mark.parametrize(("device_id", "board", "modes"), [("", "agx-orin", 1), ("a", "", 1), ("a", "agx-orin", 0)])
def test_a_device_without_id_board_or_modes_is_refused(device_id: str, board: str, modes: int) -> None:
    fleet = Fleet(Allowance.of_site(100.0), AllDevices())
    with pytest.raises(InvalidInputError, match="must have an id, a kind of board and at least one power mode"):
        fleet.agents.connect(device_id, board, "simulated", modes)
    assert not fleet.agents.devices


def test_a_device_that_is_gone_is_offline_and_not_forgotten() -> None:
    fleet = small_fleet()
    record = fleet.agents.disconnect("orin")
    assert (record.state, record.detail) == (DeviceState.OFFLINE, "")
    assert (record.front, record.idle_w, record.profiled_modes) == (ORIN_FRONT, 5.0, 50)
    back = fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)
    assert (back.front, back.idle_w, back.state) == (ORIN_FRONT, 5.0, DeviceState.ENROLLED)


def test_a_device_says_what_it_is_doing() -> None:
    fleet = small_fleet()
    record = fleet.agents.report_state("orin", DeviceState.PROFILING, 7, "12c 2.20/1.30/3.20")
    assert (record.state, record.profiled_modes, record.detail) == (DeviceState.PROFILING, 7, "12c 2.20/1.30/3.20")
    assert record.front is ORIN_FRONT


def test_a_front_comes_with_what_it_was_made_from() -> None:
    fleet = small_fleet()
    record = fleet.agents.report_front("orin", NANO_FRONT, 4.5, 20, "a" * 64)
    assert (record.front, record.idle_w, record.profiled_modes) == (NANO_FRONT, 4.5, 20)
    assert (record.reference_digest, record.state) == ("a" * 64, DeviceState.READY)


@pytest.mark.parametrize(("device_front", "idle_w"), [(NANO_FRONT, 5_000.0), (front((10, 50_000), (20, 30_000)), 5.0)])
def test_watts_that_no_board_draws_stop_nobody(device_front: Front, idle_w: float) -> None:
    fleet = small_fleet()
    fleet.agents.connect("newcomer", "agx-orin", "simulated", 18_096)
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    implausible = "^newcomer reports .*,000 W as its .*, more than any board draws.*agent doctor"
    with pytest.raises(InvalidInputError, match=implausible):
        fleet.agents.report_front("newcomer", device_front, idle_w, 50, "")
    fleet.agents.report_state("newcomer", DeviceState.PROFILING, 50, "")
    assert fleet.trim() == ([], []), "the trainings in flight go on"


@pytest.mark.parametrize("digest", ["d" * 63, "d" * 1_000_000, "g" * 64, "D" * 64, "d" * 64 + "\n"])
def test_a_digest_that_is_none_is_refused(digest: str) -> None:
    fleet = small_fleet()
    with pytest.raises(InvalidInputError, match="64 hexadecimal digits") as refused:
        fleet.agents.report_front("orin", NANO_FRONT, 5.0, 50, digest)
    assert len(str(refused.value)) < 500
    assert fleet.agents.get("orin").reference_digest == "d" * 64


@pytest.mark.parametrize("idle_w", [-1.0, math.nan, math.inf])
def test_a_front_with_impossible_idle_watts_changes_nothing(idle_w: float) -> None:
    fleet = small_fleet()
    with pytest.raises(InvalidInputError, match="^orin: idle watts"):
        fleet.agents.report_front("orin", NANO_FRONT, idle_w, 50, "")
    assert (fleet.agents.get("orin").front, fleet.agents.get("orin").idle_w) == (ORIN_FRONT, 5.0)


def test_a_device_that_never_connected_has_nothing_to_report() -> None:
    fleet = small_fleet()
    for report in (
        lambda: fleet.agents.report_state("ghost", DeviceState.READY, 0, ""),
        lambda: fleet.agents.report_front("ghost", ORIN_FRONT, 5.0, 50, ""),
        lambda: fleet.agents.disconnect("ghost"),
    ):
        with pytest.raises(UnknownRecordError, match="unknown device 'ghost': it never connected"):
            report()
    assert set(fleet.agents.devices) == {"orin", "nano"}


def test_a_node_may_be_tied_before_its_agent_connects_and_is_left_out_until_then() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(99, "ghost")
    record = fleet.flower.plan(RUN, 1, [*NODES, 99], 1.0)
    assert {decision.device_id for decision in record.plan.decisions} == {"orin", "nano"}


def test_two_nodes_that_say_they_are_one_device_are_refused() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(99, "orin")
    with pytest.raises(InvalidInputError, match="several connected nodes claim to be orin"):
        fleet.flower.plan(RUN, 1, [*NODES, 99], 1.0)
    # A node that is gone, as an older SuperNode of the device, is no trouble.
    assert fleet.flower.plan(RUN, 1, [99], 1.0).nodes == {"orin": 99}


@pytest.mark.parametrize("site_budget_w", [-20.0, math.nan, math.inf])
def test_a_site_without_watts_is_refused(site_budget_w: float) -> None:
    with pytest.raises(InvalidInputError, match="needs a budget of 0 or more finite watts"):
        Fleet(Allowance.of_site(site_budget_w), AllDevices())


# --- who is planned with ------------------------------------------------------------------------------------------


def test_a_round_is_planned_over_the_ready_devices() -> None:
    record = small_fleet().flower.plan(RUN, 1, NODES, 2.0)
    assert (record.run_id, record.number, record.epochs) == (RUN, 1, 2.0)
    assert chosen(record) == offered(record) == {"orin", "nano"}
    assert record.nodes == {"orin": ORIN_NODE, "nano": NANO_NODE}
    assert record.plan.duration_s == 2 * 35
    assert record.plan.site_budget_w == 100
    # At 35 s the Nano takes 15 W and the Orin, which is quicker, its 30 W mode.
    assert record.plan.planned_w == 45


@pytest.mark.parametrize("state", [state for state in DeviceState if state is not DeviceState.READY])
def test_a_device_that_is_not_ready_is_not_offered(state: DeviceState) -> None:
    fleet = small_fleet()
    fleet.agents.report_state("orin", state, 50, "")
    assert offered(fleet.flower.plan(RUN, 1, NODES, 1.0)) == {"nano"}


def test_a_device_that_is_gone_is_not_offered_until_it_is_ready_again() -> None:
    fleet = small_fleet()
    fleet.agents.disconnect("orin")
    assert offered(fleet.flower.plan(RUN, 1, NODES, 1.0)) == {"nano"}
    fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)
    assert offered(fleet.flower.plan(RUN, 2, NODES, 1.0)) == {"nano"}
    fleet.agents.report_state("orin", DeviceState.READY, 50, "parked")
    assert offered(fleet.flower.plan(RUN, 3, NODES, 1.0)) == {"nano", "orin"}


def test_a_device_without_a_node_or_a_front_is_not_offered() -> None:
    fleet = small_fleet()
    make_ready_in(fleet, "unbound", ORIN_FRONT, 1.0, 99)
    fleet.agents.connect("blank", "orin-nx", "simulated", 5_824)
    fleet.agents.report_state("blank", DeviceState.READY, 50, "")
    fleet.flower.bind_node(77, "blank")
    record = fleet.flower.plan(RUN, 1, [*NODES, 77, 12345], 1.0)  # 99 is not connected to Flower, 12345 is no device's
    assert offered(record) == {"orin", "nano"}


def test_a_device_that_comes_back_as_another_node_is_reached_there() -> None:
    fleet = small_fleet()
    fleet.flower.bind_node(6, "orin")
    assert fleet.flower.plan(RUN, 1, [6, NANO_NODE], 1.0).nodes == {"orin": 6, "nano": NANO_NODE}


def test_with_nobody_ready_every_device_is_said_to_be_what_it_is() -> None:
    fleet = small_fleet()
    fleet.agents.report_state("orin", DeviceState.PROFILING, 3, "")
    fleet.agents.disconnect("nano")
    with pytest.raises(NoDevicesError, match="no device is ready to train: orin is profiling, nano is offline"):
        fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert not fleet.rounds.records
    fleet.agents.report_state("orin", DeviceState.READY, 50, "")
    assert chosen(fleet.flower.plan(RUN, 1, NODES, 1.0)) == {"orin"}, "the same round can be planned once somebody is"


def test_of_a_large_fleet_the_states_are_counted_and_a_few_devices_named() -> None:
    fleet = small_fleet()
    fleet.agents.disconnect("orin")
    fleet.agents.disconnect("nano")
    for k in range(3_000):
        fleet.agents.connect(f"device-{k:04}", "agx-orin", "simulated", 18_096)
    with pytest.raises(NoDevicesError) as refused:
        fleet.flower.plan(RUN, 1, NODES, 1.0)
    said = str(refused.value)
    assert said.startswith("no device is ready to train: 3,000 are enrolled, 2 are offline: orin is offline, nano is")
    assert said.endswith("device-0007 is enrolled, and 2,992 more")


def test_a_fleet_that_nobody_joined_says_so() -> None:
    fleet = Fleet(Allowance.of_site(100.0), AllDevices())
    fleet.flower.start_run(RUN, "FedAvg", 1)
    with pytest.raises(NoDevicesError, match="none ever connected"):
        fleet.flower.plan(RUN, 1, [], 1.0)


def test_a_run_that_never_started_has_no_rounds() -> None:
    fleet = small_fleet()
    with pytest.raises(UnknownRecordError, match="unknown run '9': it never started"):
        fleet.flower.plan("9", 1, NODES, 1.0)
    assert fleet.rounds.cache.of_run("9") == []


@pytest.mark.parametrize("epochs", [0.0, -1.0, math.nan])
def test_a_round_without_epochs_is_refused(epochs: float) -> None:
    fleet = small_fleet()
    with pytest.raises(InvalidInputError, match="needs a number of epochs above 0"):
        fleet.flower.plan(RUN, 1, NODES, epochs)
    assert not fleet.rounds.records


# --- watts --------------------------------------------------------------------------------------------------------


def with_a_third(idle_w: float, site_budget_w: float) -> Fleet:
    """The small fleet and a device that is connected and idles, but is not well."""
    fleet = small_fleet(site_budget_w)
    make_ready_in(fleet, "third", front((50, 60)), idle_w, 3)
    fleet.agents.report_state("third", DeviceState.DEGRADED, 50, "")
    return fleet


def test_a_connected_device_that_is_not_ready_idles_on_the_sites_watts() -> None:
    # Both can train from 30 W on, at 60 s; the third one idles at 4 W beside them.
    assert with_a_third(4.0, 34.0).flower.plan(RUN, 1, NODES, 1.0).plan.planned_w == 34
    record = with_a_third(4.0, 33.0).flower.plan(RUN, 1, NODES, 1.0)
    assert chosen(record) == {"nano"}
    # The Nano at 15 W beside the Orin's 5 W and the third one's 4 W.
    assert (record.plan.planned_w, record.plan.site_budget_w, record.idle_w) == (24, 33, 9)


def test_a_device_that_is_gone_draws_nothing_that_is_known() -> None:
    fleet = with_a_third(4.0, 33.0)
    fleet.agents.disconnect("third")
    assert chosen(fleet.flower.plan(RUN, 1, NODES, 1.0)) == {"orin", "nano"}


@pytest.mark.parametrize("site_budget_w", [1.0, 11.9, 18.9])
def test_too_few_watts_are_refused_with_the_watts_that_suffice(site_budget_w: float) -> None:
    # 12 W of idling, of which the Nano's 3 W turn into 10.
    with pytest.raises(InfeasibleBudgetError) as refusal:
        with_a_third(4.0, site_budget_w).flower.plan(RUN, 1, NODES, 1.0)
    text = str(refusal.value)
    assert text.startswith(f"{site_budget_w:g} W is not enough to train one device on top of 12.0 W of idle power")
    [least_w] = re.findall(r"at least ([\d.]+) W", text)
    assert float(least_w) == 19
    assert chosen(with_a_third(4.0, float(least_w)).flower.plan(RUN, 1, NODES, 1.0)) == {"nano"}


# --- rounds -------------------------------------------------------------------------------------------------------


def test_the_same_round_asked_for_again_is_the_same_plan() -> None:
    fleet = small_fleet()
    first = fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.agents.disconnect("orin")
    assert fleet.flower.plan(RUN, 1, [NANO_NODE], 5.0) is first
    assert fleet.rounds.cache.of_run(RUN) == [first]


def test_each_round_of_each_run_is_planned_by_itself() -> None:
    fleet = small_fleet()
    fleet.flower.start_run("4712", "FedAdam", 1)
    records = []
    for run_id, number in ((RUN, 1), ("4712", 1), (RUN, 2)):
        records.append(fleet.flower.plan(run_id, number, NODES, 1.0))
        fleet.rounds.finish(records[-1].plan_id, [], 50.0)
    assert len({record.plan_id for record in records}) == 3
    assert [record.number for record in fleet.rounds.cache.of_run(RUN)] == [1, 2]
    assert [record.plan_id for record in fleet.rounds.cache.of_run("4712")] == [records[1].plan_id]


def test_the_site_was_observed_once_all_chosen_devices_were() -> None:
    fleet = small_fleet(policy=FastestK(2))
    make_ready_in(fleet, "slow", front((90, 12)), 2.5, 3)
    planned = fleet.flower.plan(RUN, 1, [*NODES, 3], 2.0)
    assert chosen(planned) == {"orin", "nano"}
    assert (planned.observed_site_w, planned.observed_duration_s) == (None, None)
    fleet.rounds.observe(planned.plan_id, ObservedTraining("orin", 21.0, 31.0))
    one = fleet.rounds.records[planned.plan_id]
    assert (one.observed_site_w, one.observed_duration_s) == (None, None)
    fleet.rounds.observe(planned.plan_id, ObservedTraining("nano", 34.0, 14.5))
    both = fleet.rounds.records[planned.plan_id]
    assert (both.observed_site_w, both.observed_duration_s) == (31 + 14.5 + 2.5, 2 * 34)


def test_an_observed_round_lasts_as_long_as_its_starts_were_predicted_and_its_epochs_observed() -> None:
    fleet = small_fleet(policy=FastestK(2))
    fleet.agents.report_front("orin", front((10, 50), warmup_s=60), 5.0, 50, "d" * 64)
    planned = fleet.flower.plan(RUN, 1, NODES, 2.0)
    assert planned.plan.duration_s == 60 + 2 * 10
    fleet.rounds.observe(planned.plan_id, ObservedTraining("orin", 11.0, 31.0))
    fleet.rounds.observe(planned.plan_id, ObservedTraining("nano", 34.0, 14.5))
    assert fleet.rounds.records[planned.plan_id].observed_duration_s == 60 + 2 * 11


def test_an_observation_counts_once() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    first = fleet.rounds.observe(plan_id, ObservedTraining("orin", 21.0, 31.0))
    assert fleet.rounds.observe(plan_id, ObservedTraining("orin", 99.0, 99.0)) == first
    assert first == RoundObservation(plan_id, ObservedTraining("orin", 21.0, 31.0))
    assert fleet.rounds.records[plan_id].observations == {"orin": first.observed}


def test_a_stranger_to_a_round_observed_nothing_of_it() -> None:
    fleet = small_fleet(policy=FastestK(1))
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert chosen(record) == {"orin"}
    for stranger in ("nano", "ghost"):
        with pytest.raises(UnknownRecordError, match=f"{stranger} is not part of plan {RUN}/1"):
            fleet.rounds.observe(record.plan_id, ObservedTraining(stranger, 1.0, 1.0))
    with pytest.raises(UnknownRecordError, match="unknown plan '4711/2'"):
        fleet.rounds.observe("4711/2", ObservedTraining("orin", 1.0, 1.0))
    assert fleet.rounds.cache.of_run(RUN) == [record]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_an_observation_must_be_of_seconds_and_watts(bad: float) -> None:
    for seconds, watts in ((bad, 10.0), (10.0, bad)):
        with pytest.raises(InvalidInputError, match="^orin: observed seconds and watts"):
            ObservedTraining("orin", seconds, watts)


def test_a_finished_round_knows_who_failed_and_how_long_it_took() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    assert (fleet.rounds.records[plan_id].failed, fleet.rounds.records[plan_id].wall_s) == ((), None)
    results = [
        DeviceResult("orin", num_examples=48.0, loss=0.5, share=0.75),
        DeviceResult("nano", "the node is gone", share=0.0),
    ]
    finished = fleet.rounds.finish(plan_id, results, 12.5)
    assert finished.results == tuple(results)
    assert (finished.failed, finished.wall_s) == (("nano",), 12.5)
    fleet.rounds.observe(plan_id, ObservedTraining("orin", 21.0, 31.0))
    late = fleet.rounds.records[plan_id]
    assert (late.failed, late.wall_s, set(late.observations)) == (("nano",), 12.5, {"orin"})
    with pytest.raises(UnknownRecordError):
        fleet.rounds.finish("4711/2", [], 1.0)
    with pytest.raises(UnknownRecordError, match="ghost is not part of plan"):
        fleet.rounds.finish(plan_id, [DeviceResult("ghost")], 1.0)
    assert fleet.rounds.records[plan_id].results == tuple(results), "nothing of it was taken"


@pytest.mark.parametrize("wall_s", [-1.0, math.nan, math.inf])
def test_a_round_cannot_have_taken_any_time(wall_s: float) -> None:
    fleet = small_fleet()
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    with pytest.raises(InvalidInputError, match="a round's duration must be 0 s or more"):
        fleet.rounds.finish(record.plan_id, [], wall_s)
    assert fleet.rounds.cache.of_run(RUN) == [record]


@pytest.mark.parametrize(
    "wrong",
    [{"num_examples": -1.0}, {"num_examples": math.nan}, {"loss": math.inf}, {"share": 1.1}, {"share": math.nan}],
)
def test_a_result_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError, match="^orin: "):
        DeviceResult("orin", **wrong)


def test_metrics_belong_to_their_round_and_those_before_the_first_to_the_run() -> None:
    fleet = small_fleet()
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.flower.report_metrics(RUN, 0, {"accuracy": 0.1})
    fleet.flower.report_metrics(RUN, 1, {"accuracy": 0.5})
    fleet.flower.report_metrics(RUN, 1, {"loss": 1.5})
    assert fleet.flower.run(RUN).initial_metrics == {"accuracy": 0.1}
    assert fleet.rounds.cache.of_run(RUN)[0].metrics == {"accuracy": 0.5, "loss": 1.5}
    for run_id, number in ((RUN, 2), ("9", 0), ("9", 1)):
        with pytest.raises(UnknownRecordError):
            fleet.flower.report_metrics(run_id, number, {"accuracy": 1.0})


def test_a_run_ends_well_or_with_its_error() -> None:
    fleet = small_fleet()
    fleet.flower.start_run("4712", "FedAdam", 5)
    assert not fleet.flower.run(RUN).finished
    assert fleet.flower.finish_run(RUN, "").finished
    failed = fleet.flower.finish_run("4712", "ValueError: no replies")
    assert (failed.finished, failed.error, failed.strategy, failed.rounds) == (
        True,
        "ValueError: no replies",
        "FedAdam",
        5,
    )
    with pytest.raises(UnknownRecordError, match="unknown run '9': it never started"):
        fleet.flower.finish_run("9", "")


# --- after a restart ----------------------------------------------------------------------------------------------


def test_what_is_forgotten_is_as_if_it_had_never_been() -> None:
    fleet, untouched = small_fleet(), small_fleet()
    fleet.flower.start_run("old", "FedAvg", 1)
    fleet.flower.plan("old", 1, NODES, 1.0)
    fleet.flower.finish_run("old", "")
    fleet.flower.remove_runs(["old", "unknown"])
    assert (fleet.flower.runs, fleet.rounds.records) == (untouched.flower.runs, untouched.rounds.records)
    assert fleet.flower.plan(RUN, 1, NODES, 1.0) == untouched.flower.plan(RUN, 1, NODES, 1.0)
    with pytest.raises(UnknownRecordError):
        fleet.flower.run("old")


def test_a_restart_forgets_no_round_and_takes_nobody_for_connected() -> None:
    before = small_fleet()
    planned = before.flower.plan(RUN, 1, NODES, 1.0)
    before.rounds.observe(planned.plan_id, ObservedTraining("orin", 21.0, 31.0))
    before.flower.report_metrics(RUN, 1, {"accuracy": 0.5})

    after = Fleet(
        Allowance.of_site(100.0),
        AllDevices(),
        list(before.agents.devices.values()),
        before.flower.nodes,
        list(before.flower.runs.values()),
        list(before.rounds.records.values()),
    )
    assert after.rounds.records == before.rounds.records
    assert after.flower.runs == before.flower.runs and after.flower.nodes == before.flower.nodes
    assert {record.state for record in after.agents.devices.values()} == {DeviceState.OFFLINE}
    assert after.agents.devices["orin"] == replace(before.agents.devices["orin"], state=DeviceState.OFFLINE)

    again = after.flower.plan(RUN, 1, NODES, 1.0)
    assert again == before.rounds.records[planned.plan_id], "a repeated request returns the same plan"
    with pytest.raises(NoDevicesError, match="orin is offline, nano is offline"):
        after.flower.plan(RUN, 2, NODES, 1.0)
    after.agents.connect("orin", "agx-orin", "simulated", 18_096)
    after.agents.report_state("orin", DeviceState.READY, 50, "parked")
    assert after.flower.plan(RUN, 2, NODES, 1.0).nodes == {"orin": ORIN_NODE}, "front and node are known still"
    after.rounds.observe(planned.plan_id, ObservedTraining("nano", 34.0, 14.0))
    assert after.rounds.records[planned.plan_id].observed_site_w == 31 + 14
