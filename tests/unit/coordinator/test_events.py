"""Events of devices, runs and budgets, and how long devices have been in their states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from coordinator.budgets.budget_watch import BudgetChange
from coordinator.errors import SourceFailedError
from coordinator.services.event_log import EventLog, StateTimes
from coordinator.state.fleet import Fleet
from coordinator.state.names import default_run_name, distinct_run_name
from coordinator.state.power_draw import LiveSamples
from coordinator.state.records import DeviceRecord, EventRecord
from tests.fakes.small_fleet import NODES, ORIN_FRONT, ORIN_NODE, RUN, make_ready, restarted, small_fleet
from tests.fakes.watched_budgets import METER, NOON, Watched, run
from wattfleet.common.clock import VirtualClock
from wattfleet.core.budgets import ConstantBudget, DailySchedule, InForce, Override
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.convert import provenance_from_message
from wattfleet_proto.device_state import BoardSample, DeviceState
from wattfleet_proto.names import label_of, require_labels, require_run_name
from wattfleet_proto.v1 import power_pb2

# --- Events -----------------------------------------------------------------------------------------------------------
# Events of devices, runs and budgets: what is an event, what is none, and what it is about.


class Events:
    """The events of a fleet, in virtual time."""

    def __init__(self, fleet: Fleet, stored: Iterable[DeviceRecord] = ()) -> None:
        self.fleet = fleet
        self.found: list[EventRecord] = []
        self.now = NOON
        self.log = EventLog(
            fleet, self.found.append, stored=stored, now=lambda: self.now, now_s=lambda: self.now.timestamp()
        )
        for device in fleet.agents.devices.values():
            if fleet.agents.is_connected(device.device_id):
                self.log.connected(device)

    def pass_s(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        self.log.check()

    def report(self, device_id: str, state: DeviceState, detail: str = "", modes: int = 50) -> None:
        before = self.fleet.agents.get(device_id)
        self.log.reported(before, self.fleet.agents.report_state(device_id, state, modes, detail))

    def disconnect(self, device_id: str, is_expected_back: bool = False) -> None:
        self.log.disconnected(self.fleet.agents.disconnect(device_id), is_expected_back)

    def connect(self, device_id: str) -> None:
        self.log.connected(self.fleet.agents.connect(device_id, "agx-orin", "simulated", 18_096))

    def taken(self) -> list[str]:
        """The events since the last call."""
        texts = [f"{each.device_id or each.run_id or each.supply} {each.text}" for each in self.found]
        self.found.clear()
        return texts


@pytest.fixture
def events() -> Events:
    found = Events(small_fleet())
    assert found.taken() == [f"{each} connected for the first time: agx-orin" for each in ("orin", "nano")]
    return found


def test_trainings_and_short_absences_are_no_events(events: Events) -> None:
    for state in (DeviceState.TRAINING, DeviceState.READY):
        events.report("orin", state)
    events.disconnect("orin")
    events.pass_s(9)
    events.connect("orin")
    events.pass_s(60)
    events.disconnect("nano", is_expected_back=True)
    events.pass_s(60)
    assert events.taken() == []


def test_a_run_without_plans_is_an_event_once(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    for device_id in ("orin", "nano"):
        events.log.unplanned_training(device_id, "4711", is_refused=False)
    events.log.unplanned_training("nano", "4712", is_refused=True)
    first, second = events.taken()
    assert first.startswith("orin trains, outside of the budget, for Flower's run 4711") and "PowerAware" in first
    assert second.startswith("nano refuses to train for Flower's run 4712")
    assert len([each for each in caplog.records if "has no plan" in each.getMessage()]) == 2


def test_a_device_that_stays_away_is_offline_since_its_session_ended(events: Events) -> None:
    events.disconnect("orin")
    events.pass_s(11)
    [offline] = events.found
    assert (offline.text, offline.at, offline.needs_attention, offline.supply) == ("offline", NOON, True, "site")
    events.pass_s(709)
    events.connect("orin")
    assert events.taken()[1:] == ["orin connected again after 12 min"]
    events.log.missing(["nano"])
    assert events.taken() == ["nano offline"]


def test_states_that_keep_a_device_out_of_rounds_are_events_with_their_reason(events: Events) -> None:
    events.report("orin", DeviceState.DEGRADED, "no sensor answers")
    events.disconnect("orin")
    events.connect("orin")  # in its first moment it has reported no state
    events.report("orin", DeviceState.DEGRADED, "no sensor answers")
    events.report("orin", DeviceState.READY)
    events.report("orin", DeviceState.PROFILING, "measured 1 of 20")
    events.report("orin", DeviceState.PROFILING, "measured 2 of 20")
    events.report("orin", DeviceState.READY, modes=20)
    assert events.taken() == [
        "orin degraded: no sensor answers",
        "orin no longer degraded",
        "orin measures power modes: measured 1 of 20",
        "orin has measured 20 power modes",
    ]
    events.fleet.agents.refuse_front("orin", "999 W are implausible")
    events.log.device_changed("orin")
    assert events.taken() == ["orin left out of rounds: 999 W are implausible"]


def test_a_training_over_its_watts_and_a_hot_board_are_events_once(events: Events) -> None:
    fleet = events.fleet
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    planned = record.plan.assignment_of("orin")
    assert planned is not None
    fleet.observe("orin", record.plan_id, 1.58 * planned.epoch_s, planned.power_limit_w + 1)
    fleet.samples.report("orin", BoardSample(temperature_c=88.4))
    for _ in range(3):
        events.log.device_changed("orin")
    texts = events.taken()
    assert texts[0] == "orin hot: 88 °C"
    assert texts[1].startswith("orin over budget: drew ") and texts[1].endswith(f"allowed, in round 1 of run {RUN}")
    assert texts[2].startswith("orin off prediction: took 58% more time, and drew") and len(texts) == 3
    events.disconnect("orin")
    fleet.samples.forget(["orin"])
    events.connect("orin")
    assert events.taken() == ["orin no longer hot"]


def test_a_board_at_the_threshold_is_hot_until_it_has_cooled_down(events: Events) -> None:
    def at(*celsius: float) -> list[str]:
        for each in celsius:
            events.fleet.samples.report("orin", BoardSample(temperature_c=each))
            events.log.device_changed("orin")
        return events.taken()

    assert at(84.9) == []
    assert at(*(100 * [85.1, 84.9])) == ["orin hot: 85 °C"]
    assert at(82.0) == []
    assert at(81.9) == ["orin no longer hot"]
    assert at(84.9) == []


def hot_and_cool(events: Events, is_bad: bool) -> None:
    events.fleet.samples.report("orin", BoardSample(temperature_c=95.0 if is_bad else 40.0))
    events.log.device_changed("orin")


def degraded_and_ready(events: Events, is_bad: bool) -> None:
    events.report("orin", DeviceState.DEGRADED if is_bad else DeviceState.READY)


def left_out_and_not(events: Events, is_bad: bool) -> None:
    if is_bad:
        events.fleet.agents.refuse_front("orin", "999 W are implausible")
    else:
        make_ready(events.fleet, "orin", ORIN_FRONT, 5.0, ORIN_NODE)
    events.log.device_changed("orin")


def offline_and_online(events: Events, is_bad: bool) -> None:
    if is_bad:
        events.disconnect("orin")
    else:
        events.connect("orin")


def expected_and_missing(events: Events, is_bad: bool) -> None:
    if is_bad:
        events.disconnect("orin", is_expected_back=True)
        events.log.missing(["orin"])
    else:
        events.connect("orin")


@pytest.mark.parametrize(
    ("flap", "bad", "good"),
    [
        (hot_and_cool, "hot: 95 °C", "no longer hot"),
        (degraded_and_ready, "degraded", "no longer degraded"),
        (left_out_and_not, "left out of rounds: 999 W are implausible", "no longer left out of rounds"),
        (offline_and_online, "offline", "connected again"),
        (expected_and_missing, "offline", "connected again"),
    ],
)
@pytest.mark.parametrize("ends_bad", [True, False])
def test_a_device_that_flaps_writes_few_events_and_its_last_state_is_told(
    events: Events, flap: Callable[[Events, bool], None], bad: str, good: str, ends_bad: bool
) -> None:
    events.found.clear()
    for _ in range(1_000):  # over six hours
        for is_bad in (True, False):
            flap(events, is_bad)
            events.pass_s(11)
    if ends_bad:
        flap(events, True)
    written = [each for each in events.found if each.device_id == "orin"]
    times = [each.at for each in written]
    assert max(sum(0 <= (at - begin).total_seconds() < 3600 for at in times) for begin in times) <= 20
    assert len(written) > 40, "it is quiet for an hour only"
    notices = [each for each in written if each.text == "changes too often: its events are left out for an hour"]
    assert len(notices) >= 3 and all(each.needs_attention for each in notices)
    for _ in range(2 * 360):
        events.pass_s(10)
        if events.fleet.agents.is_connected("orin"):
            events.log.device_changed("orin")
    told = [each.text for each in events.found if each.device_id == "orin" and each not in notices]
    assert told[-1].startswith(bad if ends_bad else good)
    assert [each.partition(" after ")[0] for each in told[:4]] == [bad, good, bad, good]
    assert all((one == bad) != (two == bad) for one, two in zip(told, told[1:], strict=False)), "none twice"
    if not ends_bad and good == "connected again":
        events.disconnect("orin")
        events.pass_s(11)
        events.connect("orin")
        assert events.taken()[-1] == "orin connected again after 11 s"


def test_one_device_that_flaps_hides_no_other(events: Events) -> None:
    for _ in range(50):
        hot_and_cool(events, True)
        hot_and_cool(events, False)
    events.taken()
    events.report("nano", DeviceState.DEGRADED, "no sensor answers")
    assert events.taken() == ["nano degraded: no sensor answers"]
    events.log.forgotten(["orin"], "operator anna")
    assert events.taken() == ["orin forgotten"]


def test_a_run_that_cannot_plan_and_a_meter_that_comes_and_goes_write_few_events(events: Events) -> None:
    events.found.clear()
    silent, answers = InForce(20.0, "query", True, "the meter is silent"), InForce(80.0, "query", False, "the meter")
    for _ in range(1_000):  # over two hours
        events.log.cannot_plan(RUN, 1, "no watts are left")
        events.log.budget_changed(BudgetChange("rack", answers, silent))
        events.log.budget_changed(BudgetChange("rack", silent, answers))
        events.pass_s(10)
    for kind, most, text in (("round", 60, "this run's rounds"), ("budget", 20, "its events")):
        times = [each.at for each in events.found if each.kind == kind]
        assert max(sum(0 <= (at - begin).total_seconds() < 3600 for at in times) for begin in times) <= most
        assert sum(f"{text} are left out for an hour" in each.text for each in events.found if each.kind == kind) >= 2
    events.taken()
    events.log.budget_changed(BudgetChange("rack", answers, InForce(60.0, "operator", False, ""), None, "anna"))
    events.log.run_finished(events.fleet.flower.runs[RUN])
    assert [text.split()[0] for text in events.taken()] == ["rack", RUN], "what people do is told"


def test_after_a_restart_devices_that_return_are_no_events_and_those_missing_are() -> None:
    before = small_fleet()
    before.agents.report_state("nano", DeviceState.PROFILING, 3, "")
    events = Events(restarted(before), before.agents.devices.values())
    for device_id, state in (("orin", DeviceState.READY), ("nano", DeviceState.PROFILING)):
        events.connect(device_id)
        events.report(device_id, state)
    assert events.taken() == []
    events.report("nano", DeviceState.READY)
    assert events.taken() == ["nano has measured 50 power modes"]


def test_a_change_of_a_budget_says_who_from_what_and_to_what() -> None:
    night = DailySchedule.of(ZoneInfo("UTC"), {"06:00-18:00": 200, "18:00-06:00": 80})
    watched = Watched({"site": ConstantBudget(300), "rack": METER, "night": night})
    events = Events(small_fleet())
    events.found.clear()
    watched.watch._on_event = events.log.budget_changed  # noqa: SLF001 - the fake builds the watch

    async def scenario(w: Watched) -> None:
        assert events.taken() == [], "what is in force at the start is no change"
        w.watch.override("site", Override(120.0, NOON + timedelta(hours=2)), "operator anna")
        set_ = events.found[-1]
        assert (set_.supply, set_.kind, set_.caller, set_.needs_attention) == ("site", "budget", "operator anna", False)
        assert set_.text.startswith("from 300 W to 120 W, set by the operator until 2026-06-01 ")
        w.watch.override("site", None, "operator bob")
        assert events.found[-1].caller == "operator bob"
        assert events.taken()[1:] == ["site from 120 W to 300 W: the override was cleared (constant)"]
        w.watch.override("site", Override(120.0, w.clock.now() + timedelta(seconds=30)), "operator anna")
        await w.clock.advance(60)
        assert events.taken()[1:] == ["site from 120 W to 300 W: the override has ended (constant)"]
        w.meter.answer = 90.0
        await w.clock.advance(600)
        assert events.taken() == [], "readings of a query are no events"
        w.meter.answer = SourceFailedError("no route")
        await w.clock.advance(600)
        w.meter.answer = 95.0
        await w.clock.advance(30)
        fallback, back = events.found
        assert fallback.text.startswith("from 90 W to 40 W: the fallback of its query, the newest reading may be from")
        assert (fallback.needs_attention, fallback.caller, back.needs_attention) == (True, "", False)
        assert back.text == "from 40 W to 95 W: its query has a value again"
        events.found.clear()
        await w.clock.advance(6 * 3600)
        assert events.taken() == ["night from 200 W to 80 W: schedule, 18:00-06:00 UTC"]

    run(scenario, watched)


def test_a_fallback_at_the_start_is_an_event() -> None:
    watched = Watched({"rack": METER}, SourceFailedError("no route"))
    events = Events(small_fleet())
    events.found.clear()
    watched.watch._on_event = events.log.budget_changed  # noqa: SLF001 - the fake builds the watch

    async def scenario(w: Watched) -> None:
        assert events.taken() == ["rack 40 W in force: the fallback of its query, no reading yet: no route"]

    run(scenario, watched)


def test_assumed_budgets_and_runs_leave_no_event(events: Events) -> None:
    events.fleet.copy().set_budget("site", InForce(20.0, "operator", False, "assumed"))
    assert events.taken() == []


# --- names of runs ------------------------------------------------------------------------------------------------


def test_a_run_without_a_name_gets_that_of_its_app_and_its_time() -> None:
    at = datetime(2026, 7, 14, 15, 32, tzinfo=timezone.utc)
    when = f"{at.astimezone():%m%d-%H%M}"
    for app, begin in (
        ("acme/digits", "digits"),
        ("digits", "digits"),
        ("", "run"),
        ("acme/", "run"),
        ("acme/my app\x1b", "my-app-"),
    ):
        name = default_run_name(app, at)
        assert name == f"{begin}-{when}"
        require_run_name(name)
    require_run_name(default_run_name("a/" + 300 * "x", at))


def test_two_runs_never_have_the_same_name() -> None:
    fleet = small_fleet()
    names = [fleet.flower.start_run(f"r{k}", "FedAvg", 1, name="night").name for k in range(3)]
    assert names == ["night", "night-2", "night-3"]
    assert fleet.flower.start_run("r1", "FedAvg", 1, name="day", labels={"lr": "1"}).name == "night-2", (
        "it keeps its own"
    )
    longest = 60 * "x"
    assert distinct_run_name(longest, {longest}) == 58 * "x" + "-2"


@pytest.mark.parametrize("name", ["", " ", "two words", "4711", 61 * "x", "bell\a", "line\nbreak"])
def test_a_name_that_cannot_be_shown_or_looks_like_an_id_is_refused(name: str) -> None:
    with pytest.raises(
        InvalidInputError, match="a run's name must have 1 to 60 printable characters, no spaces and not"
    ):
        require_run_name(name)


@pytest.mark.parametrize(
    "labels",
    [{"": "x"}, {"a b": "x"}, {"a=b": "x"}, {"a": ""}, {"a": "\x1b[31m"}, {41 * "k": "v"}, {"k": 101 * "v"}]
    + [{str(k): "v" for k in range(17)}],
)
def test_labels_that_cannot_be_shown_are_refused(labels: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match="label"):
        require_labels(labels)


def test_a_label_is_written_with_an_equals_sign() -> None:
    assert label_of("lr=0.1") == ("lr", "0.1")
    assert label_of("path=a=b") == ("path", "a=b")
    with pytest.raises(InvalidInputError, match="a label is written as KEY=VALUE, such as site=lab, not 'lr'"):
        label_of("lr")


# --- State times ------------------------------------------------------------------------------------------------------
# How long devices have been in their states, and how long profiling takes, in virtual time.

SIMULATED = provenance_from_message(power_pb2.PROVENANCE_SIMULATED)
ENROLLED = DeviceRecord("orin", "agx-orin", SIMULATED, 1000, state=DeviceState.ENROLLED)
PROFILING = replace(ENROLLED, state=DeviceState.PROFILING, profiled_modes=10)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(5000.0)


@pytest.fixture
def times(clock: VirtualClock) -> StateTimes:
    return StateTimes({"orin"}, 50, clock.now_s)


def test_a_state_lasts_until_another_is_reported(times: StateTimes, clock: VirtualClock) -> None:
    assert times.since_unix_s(ENROLLED) is None
    times.note(ENROLLED)
    clock.sleep_s(60)
    times.note(replace(ENROLLED, detail="another detail"))
    assert times.since_unix_s(ENROLLED) == 5000
    times.note(PROFILING)
    assert times.since_unix_s(PROFILING) == 5060


def test_what_is_left_follows_from_the_pace_since_profiling_began(times: StateTimes, clock: VirtualClock) -> None:
    times.note(PROFILING)
    clock.sleep_s(5)
    assert times.profiling_left_s(PROFILING) is None, "no mode yet"
    clock.sleep_s(5)
    halfway = replace(PROFILING, profiled_modes=12)  # 2 modes in 10 s are 5 s each, and 38 of 50 modes are left
    times.note(halfway)
    assert times.profiling_left_s(halfway) == 38 * 5
    clock.sleep_s(30)
    assert times.profiling_left_s(halfway) == 38 * 5 - 30
    clock.sleep_s(3600)
    assert times.profiling_left_s(halfway) == 0
    ready = replace(halfway, state=DeviceState.READY)
    times.note(ready)
    assert times.profiling_left_s(ready) is None


def test_a_board_with_few_modes_measures_no_more_than_it_has(times: StateTimes) -> None:
    assert (times.target_modes(ENROLLED), times.target_modes(replace(ENROLLED, mode_count=7))) == (50, 7)


def test_devices_that_were_forgotten_are_let_go(clock: VirtualClock) -> None:
    known = {"orin"}
    times = StateTimes(known, 50, clock.now_s)
    times.note(ENROLLED)
    known.clear()
    other = replace(ENROLLED, device_id="nano")
    known.add("nano")
    times.note(other)
    assert times.since_unix_s(ENROLLED) is None and times.since_unix_s(other) == 5000


def test_throttling_is_known_from_when_it_was_reported(times: StateTimes, clock: VirtualClock) -> None:
    samples = LiveSamples()
    assert times.throttled_unix_s("orin") is None
    for count, has_throttled in ((3, False), (3, False), (4, True), (1, False), (None, False), (9, False), (11, True)):
        assert samples.report("orin", BoardSample(throttle_events=count)) is has_throttled, count
    times.note_throttling("orin")
    clock.sleep_s(60)
    assert times.throttled_unix_s("orin") == 5000
