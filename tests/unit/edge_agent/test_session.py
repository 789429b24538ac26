"""The agent's session with its coordinator: grants, waiting reports, its status, and revoked viewers."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from pathlib import Path

import pytest

from edge_agent.paths import SESSION_FILE
from edge_agent.session.certificate_keeper import RevokedCertificates
from edge_agent.session.grants import GrantKeeper, NoGrantError
from edge_agent.session.outbox import Outbox, OutboxFile
from edge_agent.session.status import LatestWelcome, SessionNews, WelcomeFile, read_session_status
from tests.fakes.fleets import front
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.limits import MAX_PLAN_ID_CHARACTERS
from wattfleet_proto.v1 import power_pb2, session_pb2

# --- Grants -----------------------------------------------------------------------------------------------------------
# How an agent handles a coordinator's grants.


MODE = power_pb2.PowerMode(cores=6, cpu_khz=1_510_400, gpu_hz=624_750_000, mem_hz=2_133_000_000)


async def test_a_grant_of_an_endless_plan_id_allows_nothing_and_keeps_leases_short() -> None:
    grants = GrantKeeper()
    grants.greeting()
    await grants.welcomed(120.0)
    message = session_pb2.Grant(id=1, plan_id="x" * 100_000, mode=MODE, power_limit_w=25.0, longest_s=600.0)
    await grants.receive(message)
    lease = grants.lease()
    assert lease.grant_id == 1 and lease.phase == session_pb2.GRANT_PHASE_OVER
    assert len(lease.plan_id) <= MAX_PLAN_ID_CHARACTERS


class SetClock:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_training_is_awaited_from_its_grant_until_it_begins_or_the_grant_lapses() -> None:
    clock = SetClock()
    grants = GrantKeeper(clock)
    seen = [grants.awaits_training]
    grants.greeting()
    await grants.welcomed(120.0)
    for plan in ("7/1", "7/2"):
        await grants.receive(session_pb2.Grant(id=1, plan_id=plan, mode=MODE, power_limit_w=25.0, longest_s=60.0))
        seen.append(grants.awaits_training)
        if plan == "7/1":
            grants.begin(plan)
            seen.append(grants.awaits_training)
            grants.ended()
    clock.now_s = 121.0
    seen.append(grants.awaits_training)
    assert seen == [False, True, False, True, False]


async def test_a_session_that_delivers_no_newer_grant_does_not_renew_the_old_one() -> None:
    clock = SetClock()
    grants = GrantKeeper(clock)
    grants.greeting()
    await grants.welcomed(120.0)
    await grants.receive(session_pb2.Grant(id=1, plan_id="7/1", mode=MODE, power_limit_w=25.0, longest_s=6000.0))
    grants.begin("7/1")
    for clock.now_s in (50.0, 100.0):  # the sessions break off after the Welcome, or before the newest grant
        grants.greeting()
        await grants.welcomed(120.0)
        await grants.acknowledged(grants.lease().number, 120.0, is_renewed=False)
    clock.now_s = 120.0
    assert await grants.next_change() == "the agent could not reach the coordinator for too long"


async def test_a_lease_that_names_the_newest_grant_renews_it_from_when_it_was_sent() -> None:
    clock = SetClock()
    grants = GrantKeeper(clock)
    grants.greeting()
    await grants.welcomed(120.0)
    await grants.receive(session_pb2.Grant(id=1, plan_id="7/1", mode=MODE, power_limit_w=25.0, longest_s=6000.0))
    grants.begin("7/1")
    clock.now_s = 60.0
    lease = grants.lease()
    clock.now_s = 90.0
    await grants.acknowledged(lease.number, 120.0, is_renewed=True)
    clock.now_s = 180.0
    assert await grants.next_change() == "the agent could not reach the coordinator for too long"


async def test_a_training_that_the_device_itself_stops_says_why_and_the_next_one_may_run() -> None:
    grants = GrantKeeper(SetClock())
    grants.greeting()
    await grants.welcomed(120.0)
    for plan_id in ("7/1", "7/2"):
        await grants.receive(session_pb2.Grant(id=1, plan_id=plan_id, mode=MODE, power_limit_w=25.0, longest_s=60.0))
        grants.begin(plan_id)
        assert not await stops(grants)
        await grants.stop("no mode keeps within the watts")
        assert await grants.next_change() == "no mode keeps within the watts"
        grants.ended()


@pytest.mark.parametrize("ends", ["trained", "stopped", "lapsed"])
async def test_a_plan_that_is_over_stays_over_when_granted_again_after_other_plans(ends: str) -> None:
    clock = SetClock()
    grants = GrantKeeper(clock)
    grants.greeting()
    await grants.welcomed(120.0)
    grant = session_pb2.Grant(id=1, plan_id="7/1", mode=MODE, power_limit_w=25.0, longest_s=60.0)
    await grants.receive(grant)
    if ends == "trained":
        grants.begin("7/1")
        grants.ended()
    elif ends == "stopped":
        await grants.receive(session_pb2.Grant(id=2, plan_id="7/1"))
    else:
        clock.now_s = 121.0
    assert grants.lease().phase == session_pb2.GRANT_PHASE_OVER
    grants.greeting()
    await grants.welcomed(120.0)
    for number, other in enumerate(("7/measuring-3", "8/1"), start=3):
        await grants.receive(session_pb2.Grant(id=number, plan_id=other, mode=MODE, power_limit_w=5.0, longest_s=60.0))
        grants.begin(other)
        grants.ended()
    grant.id = 9
    await grants.receive(grant)
    lease = grants.lease()
    assert (lease.grant_id, lease.plan_id, lease.phase) == (9, "7/1", session_pb2.GRANT_PHASE_OVER)
    assert not grants.awaits_training
    with pytest.raises(NoGrantError):
        grants.begin("7/1")


@pytest.mark.parametrize("ends", ["stopped", "lapsed", "begun", "replaced", "waits", "uncounted"])
async def test_a_counted_training_that_ends_before_it_began_is_told_once(ends: str) -> None:
    clock, told = SetClock(), list[str]()
    grants = GrantKeeper(clock)
    grants.on_never_began = told.append
    grants.greeting()
    await grants.welcomed(120.0)
    grant = session_pb2.Grant(id=1, plan_id="7/1", mode=MODE, power_limit_w=25.0, longest_s=60.0)
    grant.counts_energy = ends != "uncounted"
    await grants.receive(grant)
    if ends == "begun":
        grants.begin("7/1")
    if ends == "replaced":
        grant.id, grant.power_limit_w = 2, 20.0
        await grants.receive(grant)
    elif ends == "lapsed":
        clock.now_s = 121.0
    elif ends != "waits":
        await grants.receive(session_pb2.Grant(id=2, plan_id="7/1", counts_energy=grant.counts_energy))
    grants.lease()
    if ends == "begun":
        grants.ended()
    grants.lease()
    assert told == (["7/1"] if ends in ("stopped", "lapsed") else [])


async def stops(grants: GrantKeeper) -> bool:
    change = asyncio.ensure_future(grants.next_change())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return change.done() or not change.cancel()


# --- Outbox -----------------------------------------------------------------------------------------------------------
# Reports wait for the coordinator through restarts, power cuts, full disks and damage, and never block the agent.


def observation(plan_id, epoch_s=10.1):
    seen = session_pb2.Observation(plan_id=str(plan_id), epoch_s=epoch_s, power_w=12.3)
    return session_pb2.SessionRequest(observation=seen)


def state(detail):
    report = session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY, detail=detail)
    return session_pb2.SessionRequest(state=report)


def front_of(idle_w, warmup_s=0.0):
    known = front((50, 20), (90, 12), warmup_s=warmup_s)
    report = session_pb2.FrontReport(front=front_to_message(known), idle_w=idle_w)
    return session_pb2.SessionRequest(front=report)


def waiting(outbox):
    return [request.observation.plan_id for request in outbox.after(0) if request.HasField("observation")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "outbox.jsonl"


def opened(path, **more):
    return Outbox(OutboxFile(path), **more)


def test_what_was_not_acknowledged_waits_for_the_next_process_exactly_as_it_was(path):
    outbox = opened(path)
    unplanned = session_pb2.SessionRequest(unplanned=session_pb2.UnplannedTraining(run_id="4711", is_refused=True))
    for request in (front_of(3.1), observation("run/1", 1 / 3), state("ready"), observation("run/2"), unplanned):
        outbox.add(request)
    again = opened(path)
    bodies = [request.WhichOneof("body") for request in again.after(0)]
    assert bodies == ["front", "observation", "observation", "unplanned"], "an old state is not sent again"
    assert [request.sequence for request in again.after(0)] == [1, 2, 3, 4]
    assert again.after(0)[0].front == front_of(3.1).front
    assert again.after(0)[1].observation.epoch_s == 1 / 3
    assert waiting(again) == ["run/1", "run/2"]


def test_whether_unplanned_trainings_are_refused_is_known_after_a_restart_alone(tmp_path):
    file = WelcomeFile(tmp_path / "welcome.json")
    file.store(session_pb2.Welcome(reference_digest="0" * 64, profile_modes=6, lease_s=5.0, reconnect_s=1.0))
    told = session_pb2.Welcome(profile_modes=9, lease_s=5.0, reconnect_s=1.0, refuses_unplanned=True)
    assert not LatestWelcome(file).refuses_unplanned
    asyncio.run(LatestWelcome(file).receive(told))
    again = LatestWelcome(file)
    assert again.refuses_unplanned
    assert file.load().profile_modes == 6, "the new number is stored once it is met"


def test_what_was_acknowledged_is_not_delivered_by_the_next_process(path):
    outbox = opened(path)
    outbox.add(observation(1))
    outbox.add(observation(2))
    outbox.add(state("ready"))
    outbox.acknowledge(1)
    outbox.acknowledge(0)  # the acknowledgement of a lease
    outbox.acknowledge(99)
    assert outbox.has_any_up_to(2) and not outbox.has_any_up_to(1)
    outbox.add(observation(3))
    assert waiting(opened(path)) == ["2", "3"]
    outbox.acknowledge(2)
    outbox.acknowledge(4)
    assert waiting(opened(path)) == []


def test_what_waited_long_is_delivered_without_a_write_for_each(path):
    kept = opened(path)
    for number in range(100):
        kept.add(observation(number))
    writes = []

    def write(descriptor, data):
        writes.append(len(data))
        return os.write(descriptor, data)

    outbox = Outbox(OutboxFile(path, write))
    for request in outbox.after(0):
        outbox.acknowledge(request.sequence)
    assert len(writes) <= 1
    assert waiting(opened(path)) == []


def test_only_the_newest_front_waits_an_earlier_processs_included(path):
    outbox = opened(path)
    outbox.add(front_of(1))
    outbox.add(front_of(2))
    again = opened(path)
    assert [request.front.idle_w for request in again.after(0)] == [2]
    again.add(front_of(3))
    assert [request.front.idle_w for request in opened(path).after(0)] == [3]


def test_beyond_the_bound_the_oldest_observations_are_forgotten_and_counted(path, caplog, monkeypatch):
    monkeypatch.setattr("edge_agent.session.outbox.MAX_OBSERVATIONS", 3)
    outbox = opened(path)
    outbox.add(front_of(1))
    for number in range(5):
        outbox.add(observation(number))
    assert waiting(outbox) == waiting(opened(path)) == ["2", "3", "4"]
    assert outbox.dropped == 2
    assert "the observation of 1 is dropped, 2 so far" in caplog.text
    assert outbox.after(0)[0].HasField("front")


def test_a_dropped_energy_is_named_as_such(path, caplog, monkeypatch):
    monkeypatch.setattr("edge_agent.session.outbox.MAX_OBSERVATIONS", 1)
    outbox = opened(path)
    for plan_id in ("7/1", "7/2"):
        energy = session_pb2.TrainingEnergy(plan_id=plan_id, energy_j=9.0, lasted_s=1.0)
        outbox.add(session_pb2.SessionRequest(energy=energy))
    assert "the energy of 7/1 is dropped, 1 so far" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe\x00",
        b'{"observation": {"plan_id": "run/1", "epo',
        b'{"observation": {"plan_id": "run/1"}}',
        b'{"observation": {"plan_id": "run/1", "epoch_s": "NaN", "power_w": 3}}',
        b'{"front": {"idle_w": 3, "front": {"epoch_s": [1.0]}}}',
        b'{"rumour": {}}',
        b'{"lease": {}}',
        b"[]",
    ],
)
def test_damage_is_kept_aside_and_the_sound_reports_are_delivered(path, caplog, damage):
    opened(path).add(observation("run/0"))
    path.write_bytes(damage + b"\n" + path.read_bytes())
    outbox = opened(path)
    assert waiting(outbox) == ["run/0"]
    assert waiting(opened(path)) == ["run/0"], "a restart before anything is added"
    aside = path.with_name("outbox.jsonl.damaged")
    assert "skipped damaged lines: 1" in caplog.text and str(aside) in caplog.text
    assert aside.read_bytes().startswith(damage)
    outbox.add(observation("run/2"))
    assert waiting(opened(path)) == ["run/0", "run/2"]


def test_a_file_that_cannot_be_read_is_said_and_the_agent_goes_on(path, caplog):
    path.mkdir(parents=True)
    outbox = opened(path)
    outbox.add(observation(1))
    assert waiting(outbox) == ["1"]
    assert "cannot be read" in caplog.text and "kept in memory" in caplog.text


def test_on_a_full_disk_the_agent_goes_on_in_memory_and_says_so_once(path, caplog):
    caplog.set_level(logging.INFO)
    full = False

    def write(descriptor, data):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)

    outbox = Outbox(OutboxFile(path, write))
    outbox.add(observation(1))
    full = True
    outbox.add(observation(2))
    outbox.add(observation(3))
    assert waiting(outbox) == ["1", "2", "3"]
    assert waiting(opened(path)) == ["1"], "the earlier content is intact"
    assert caplog.text.count("No space left on device; reports are kept in memory") == 1
    full = False
    outbox.add(observation(4))
    assert waiting(opened(path)) == ["1", "2", "3", "4"]
    assert "can be written again" in caplog.text


class PowerCut(BaseException):
    """Raised at the moment of a power cut; as a BaseException, it is not handled."""


@pytest.mark.parametrize("written", [0, 1, 40, 100])
def test_a_power_cut_in_the_middle_of_a_write_loses_at_most_what_was_being_added(path, written):
    opened(path).add(observation("run/1"))

    def write(descriptor, data):
        os.write(descriptor, data[:written])
        raise PowerCut

    with pytest.raises(PowerCut):
        Outbox(OutboxFile(path, write)).add(observation("run/2"))
    assert waiting(opened(path)) == ["run/1"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


# --- Session status ---------------------------------------------------------------------------------------------------
# An agent's log and status of its session: every change is reported, but not every attempt.


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def news(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> SessionNews:
    caplog.set_level(logging.INFO, logger="edge_agent")
    return SessionNews("fleet:7070", tmp_path / SESSION_FILE, clock)


def test_an_outage_is_one_line_an_hour_whatever_the_attempts_say_and_its_end_is_one(
    news: SessionNews, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for k in range(599):
        news.failed(f"the coordinator is away (attempt {k})", "away")
        clock.now_s += 1
    assert caplog.messages == ["the coordinator is away (attempt 0)"]
    news.connected()
    assert caplog.messages[1:] == ["the coordinator at fleet:7070 can be reached again after 599.0 s"]
    news.failed("the coordinator is away (again)", "away")
    assert caplog.messages[2:] == ["the coordinator is away (again)"]


def test_a_refusal_during_an_outage_is_told(news: SessionNews, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    news.failed("the coordinator is away", "away")
    clock.now_s += 10
    news.failed("the coordinator refused this device")
    assert caplog.messages == ["the coordinator is away", "the coordinator refused this device"]


def test_a_problem_that_stays_is_logged_again_after_an_hour(
    news: SessionNews, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(7201):
        news.failed("the coordinator is away")
        clock.now_s += 1
    assert len(caplog.messages) == 3


def test_problems_that_keep_changing_are_logged_six_times_a_minute(
    news: SessionNews, clock: Clock, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for k in range(600):
        news.failed(f"problem {k}")
        clock.now_s += 0.1
    assert len(caplog.messages) == 6
    clock.now_s += 60
    news.failed("the last one")
    status = read_session_status(tmp_path)
    assert status is not None and status.problem == "the last one"


def test_the_file_follows_the_session(news: SessionNews, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_session_status(tmp_path) is None
    news.failed("the coordinator is away")
    away = read_session_status(tmp_path)
    news.connected()
    connected = read_session_status(tmp_path)
    assert away is not None and connected is not None
    assert (away.address, away.problem) == ("fleet:7070", "the coordinator is away")
    assert (connected.address, connected.problem) == ("fleet:7070", None)
    assert caplog.messages[-1] == "the coordinator at fleet:7070 can be reached again after 0.0 s"


# --- Revoked certificates ---------------------------------------------------------------------------------------------
# What an agent keeps of the viewers who were revoked.


def test_they_are_known_after_a_restart_until_the_coordinator_names_others(tmp_path: Path) -> None:
    file = tmp_path / "state" / "revoked.json"
    RevokedCertificates(file).receive(["1f", "a0"])
    after = RevokedCertificates(file)
    assert [each for each in ("1f", "a0", "b1") if after.is_revoked(each)] == ["1f", "a0"]
    after.receive(["b1"])
    assert [each for each in ("1f", "a0", "b1") if RevokedCertificates(file).is_revoked(each)] == ["b1"]


def test_a_damaged_file_is_reported_and_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "revoked.json"
    file.write_text("{")
    found = RevokedCertificates(file)
    assert not found.is_revoked("1f") and f"{file}: cannot be read" in caplog.text
    found.receive(["1f"])
    assert RevokedCertificates(file).is_revoked("1f")


def test_they_count_even_if_they_cannot_be_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("not a folder")
    found = RevokedCertificates(tmp_path / "state" / "revoked.json")
    found.receive(["1f"])
    assert found.is_revoked("1f") and "revoked viewers may read until the coordinator is reached" in caplog.text
