"""The agent's runtime: its states, its supervisor, samples of the board, its start, and the users of its socket."""

from __future__ import annotations

import asyncio
import math
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.runtime.agent import installation_name, restore_duty
from edge_agent.runtime.peer_credentials import PeerCredentials, PeerNotAllowedError, SocketUsers
from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.runtime.states import (
    MAY_TRAIN,
    Action,
    BoardSampler,
    Consequences,
    DeviceFailed,
    DeviceRecovered,
    ImpossibleEventError,
    ModeMeasured,
    PreparationRestarted,
    ProfileEnded,
    StateReporter,
    TrainingAborted,
    TrainingBegan,
    TrainingEnded,
    TrainingParked,
    TrainingRejected,
    decide,
)
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_figures import DutyFile
from edge_agent.session.grants import GrantKeeper
from tests.fakes.agent_socket import Reports
from tests.fakes.boards import MODE, OTHER_SCRIPTED_MODE, ScriptedDevice
from tests.fakes.duties import LiveBoard, duty
from wattfleet_proto.convert import board_sample_from_message, board_sample_to_message
from wattfleet_proto.device_state import BoardSample, DeviceState
from wattfleet_proto.v1 import session_pb2

# --- States -----------------------------------------------------------------------------------------------------------
# The agent's state machine, tested without a device, a network or a clock.


FRONT, AGAIN, RECOVER = (frozenset({action}) for action in (Action.REPORT_FRONT, Action.REPROFILE, Action.RECOVER))
NOTHING = frozenset()

TABLE = [
    (DeviceState.ENROLLED, ModeMeasured("measured 4c"), DeviceState.PROFILING, "measured 4c", NOTHING),
    (DeviceState.ENROLLED, ProfileEnded(repeated=False), DeviceState.READY, "parked", FRONT),
    (DeviceState.PROFILING, ProfileEnded(repeated=False), DeviceState.READY, "parked", FRONT),
    (DeviceState.PROFILING, ProfileEnded(repeated=True), DeviceState.READY, "parked; profiled again", FRONT),
    (DeviceState.READY, TrainingBegan("4c"), DeviceState.TRAINING, "training in 4c", NOTHING),
    (DeviceState.DEGRADED, TrainingBegan("4c"), DeviceState.TRAINING, "training in 4c", NOTHING),
    (DeviceState.TRAINING, TrainingParked("learns"), DeviceState.TRAINING, "parked; learns", NOTHING),
    (DeviceState.TRAINING, TrainingEnded(), DeviceState.READY, "parked", FRONT),
    (DeviceState.TRAINING, TrainingEnded(failed=True), DeviceState.READY, "parked", NOTHING),
    (DeviceState.TRAINING, TrainingEnded(drift="slower"), DeviceState.PROFILING, "profiling again: slower", AGAIN),
    (DeviceState.TRAINING, TrainingEnded(not_learned="disk full"), DeviceState.READY, "parked; disk full", NOTHING),
    (DeviceState.TRAINING, TrainingRejected("no epochs"), DeviceState.READY, "parked; no epochs", NOTHING),
    (DeviceState.TRAINING, TrainingAborted(), DeviceState.READY, "parked; the last training was aborted", NOTHING),
    (DeviceState.READY, TrainingAborted(), DeviceState.READY, "parked; the last training was aborted", NOTHING),
    (DeviceState.READY, DeviceFailed("no permission"), DeviceState.DEGRADED, "no permission", RECOVER),
    (DeviceState.TRAINING, DeviceFailed("no sensor"), DeviceState.DEGRADED, "no sensor", RECOVER),
    (DeviceState.PROFILING, DeviceFailed("too hot"), DeviceState.DEGRADED, "too hot", RECOVER),
    (DeviceState.DEGRADED, DeviceFailed("still"), DeviceState.DEGRADED, "still", RECOVER),
    (DeviceState.DEGRADED, DeviceRecovered(), DeviceState.READY, "parked; recovered", NOTHING),
    (DeviceState.READY, DeviceRecovered(), DeviceState.READY, None, NOTHING),
    (DeviceState.READY, PreparationRestarted("new reference"), DeviceState.PROFILING, "new reference", NOTHING),
    (
        DeviceState.DEGRADED,
        PreparationRestarted("new reference"),
        DeviceState.PROFILING,
        "new reference",
        NOTHING,
    ),
]

MEASURING_GOES_ON = [
    (DeviceState.DEGRADED, DeviceRecovered(), "parked; recovered; profiling continues"),
    (DeviceState.TRAINING, TrainingEnded(), "parked; profiling continues"),
    (DeviceState.TRAINING, TrainingAborted(), "parked; the last training was aborted; profiling continues"),
]

EVENTS = st.sampled_from([event for _, event, *_ in TABLE])


@pytest.mark.parametrize(("state", "event", "then", "detail", "actions"), TABLE)
def test_what_follows(state, event, then, detail, actions):
    assert decide(state, event) == Consequences(then, detail, actions)


@pytest.mark.parametrize(("state", "event", "detail"), MEASURING_GOES_ON)
def test_a_device_that_was_to_be_measured_is_not_ready_before_it_was(state, event, detail):
    assert decide(state, event, reprofiling=True) == Consequences(DeviceState.PROFILING, detail, AGAIN)
    ended = decide(DeviceState.PROFILING, ProfileEnded(repeated=True), reprofiling=True)
    assert ended == Consequences(DeviceState.READY, "parked; profiled again", FRONT)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (DeviceState.ENROLLED, TrainingBegan("4c")),
        (DeviceState.PROFILING, TrainingBegan("4c")),
        (DeviceState.TRAINING, TrainingBegan("4c")),
        (DeviceState.READY, TrainingEnded()),
        (DeviceState.READY, TrainingParked("learns")),
        (DeviceState.TRAINING, ModeMeasured("measured 4c")),
        (DeviceState.ENROLLED, DeviceFailed("no permission")),
        (DeviceState.TRAINING, PreparationRestarted("new reference")),
    ],
)
def test_what_cannot_happen_is_a_mistake_that_is_named(state, event):
    with pytest.raises(ImpossibleEventError, match=state.name.lower()):
        decide(state, event)


@given(st.lists(EVENTS, max_size=30))
def test_a_device_is_ready_only_if_parked_and_unavailable_only_during_recovery(events):
    state, reprofiling = DeviceState.ENROLLED, False
    for event in events:
        try:
            decision = decide(state, event, reprofiling)
        except ImpossibleEventError:
            continue
        assert decision.detail is None or decision.detail
        assert (decision.detail is None) <= (decision.state is state), "a new state is always reported"
        assert (Action.RECOVER in decision.actions) == isinstance(event, DeviceFailed)
        assert (Action.REPORT_FRONT in decision.actions) <= (decision.state is DeviceState.READY)
        if decision.state is DeviceState.READY and decision.detail is not None:
            assert decision.detail.startswith("parked")
        if decision.state is DeviceState.TRAINING:
            assert state in MAY_TRAIN or isinstance(event, DeviceRecovered | TrainingParked)
        if isinstance(event, DeviceFailed):
            assert decision.state is DeviceState.DEGRADED
        state = decision.state
        reprofiling = Action.REPROFILE in decision.actions or reprofiling and not isinstance(event, ProfileEnded)
        assert not (reprofiling and state is DeviceState.READY)


# --- State reporter ---------------------------------------------------------------------------------------------------
# The agent's reports of its state.


def test_of_a_long_detail_the_beginning_is_reported() -> None:
    reports = Reports()
    reporter = StateReporter(reports)  # type: ignore[arg-type]
    reporter.decide(ProfileEnded(repeated=False))
    reporter.report(reporter.decide(PreparationRestarted("x" * 100_000)), 50)
    [report] = reports.states
    assert report.detail == "x" * 2_000


# --- Recovery supervisor ----------------------------------------------------------------------------------------------
# The supervisor while the device starts or ends, when nothing may change the device.

READY, TRAINING = session_pb2.DEVICE_STATE_READY, session_pb2.DEVICE_STATE_TRAINING


class RecordedStates:
    """A link that records the reported states in order."""

    def __init__(self):
        self.states = []
        self.grants = GrantKeeper()

    def report_state(self, report):
        self.states.append(report.state)

    def report_front(self, report):
        pass


class Board:
    """A fake learner and training watch that record each change of the device."""

    profiled_modes = 6

    @property
    def latest(self):
        return self

    def __init__(self):
        self.touched = []

    def reprofile(self, report):
        self.touched.append("profiled again")

    def recover(self):
        self.touched.append("recovered")

    def park(self):
        self.touched.append("parked")


@pytest.fixture
def board():
    return Board()


@pytest.fixture
def reports():
    return RecordedStates()


def supervisor_of(board, reports, due_fronts=lambda: [session_pb2.FrontReport()]):
    return RecoverySupervisor(board, reports, StateReporter(reports), board, due_fronts)


@pytest.mark.parametrize("event", [TrainingEnded(drift="slower"), DeviceFailed("no permission")])
async def test_nothing_touches_the_device_once_its_supervisor_was_closed(board, reports, event):
    async def last_training_ends_while_the_agent_does():
        supervisor = supervisor_of(board, reports)
        await supervisor.start()
        async with supervisor.device_lock:
            supervisor.handle(TrainingBegan("4c"))
            closing = asyncio.create_task(supervisor.aclose())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await supervisor.handle_with_front(event)
        await closing
        closed_with = list(board.touched)
        for _ in range(20):
            await asyncio.sleep(0.001)
        return closed_with

    assert (await last_training_ends_while_the_agent_does()) == board.touched == []


async def test_a_supervisor_that_is_closed_twice_over_still_waits_for_the_last_training(board, reports):

    supervisor = supervisor_of(board, reports)
    await supervisor.device_lock.acquire()
    closing = asyncio.create_task(supervisor.aclose())
    for _ in range(3):
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0.001)
    assert not closing.done()
    supervisor.device_lock.release()
    with pytest.raises(asyncio.CancelledError):
        await closing


async def test_a_training_waits_while_the_resting_mode_changes_and_is_not_refused(board, reports):
    parking, go_on = threading.Event(), threading.Event()

    def park():
        parking.set()
        assert go_on.wait(10)

    board.park = park
    supervisor = supervisor_of(board, reports)
    await supervisor.start()
    resting = asyncio.create_task(supervisor.rest())
    await asyncio.to_thread(parking.wait, 10)
    assert supervisor.device_lock.locked() and not supervisor.is_busy
    go_on.set()
    await resting
    async with supervisor.device_lock:
        assert supervisor.is_busy


async def test_a_training_is_not_reported_before_the_readiness_that_it_follows(board, reports):
    computing, train = threading.Event(), threading.Event()

    def slow_front():
        computing.set()
        assert train.wait(10)
        return [session_pb2.FrontReport()]

    supervisor = supervisor_of(board, reports, slow_front)
    beginning = asyncio.create_task(supervisor.start())
    await asyncio.to_thread(computing.wait, 10)
    assert supervisor.device_lock.locked(), "a training cannot begin yet"
    train.set()
    await beginning
    async with supervisor.device_lock:
        supervisor.handle(TrainingBegan("4c"))
    assert reports.states == [READY, TRAINING]


# --- Board sampler ----------------------------------------------------------------------------------------------------
# The samples that an agent takes of its board between two leases, in virtual time.


def sampled(device: ScriptedDevice, sampler: BoardSampler, seconds: int) -> BoardSample:
    """Sample once a second."""
    sampler.sample()
    for _ in range(seconds):
        device.clock.sleep_s(1.0)
        sampler.sample()
    assert sampler.latest is not None
    return sampler.latest


def test_energy_is_the_area_below_the_power() -> None:
    device = ScriptedDevice(power_at=lambda at_s: 1_000.0 * at_s)
    device.conditions_at = lambda at_s: BoardSample(temperature_c=61.5, throttle_events=3)
    # The power rises by 1 W per second: 50 J after ten seconds.
    assert sampled(device, BoardSampler(device), 10) == BoardSample(10.0, 61.5, OTHER_SCRIPTED_MODE, 3, energy_j=50.0)


def test_a_power_that_cannot_be_read_is_missing_and_adds_no_energy() -> None:
    device = ScriptedDevice(power_at=lambda at_s: math.nan if 3 <= at_s <= 6 else 10_000.0)
    sampler = BoardSampler(device)
    missing = sampled(device, sampler, 5)
    assert (missing.power_w, missing.energy_j) == (None, 20.0)
    assert sampled(device, sampler, 4).energy_j == 40.0


def test_a_suspended_board_adds_no_energy_for_the_gap() -> None:
    device = ScriptedDevice(power_at=lambda at_s: 10_000.0)
    sampler = BoardSampler(device)
    sampled(device, sampler, 2)
    device.clock.sleep_s(3_600.0)
    assert sampled(device, sampler, 1).energy_j == 30.0


def test_a_simulated_board_counts_the_energy_of_its_own_time() -> None:
    device = SimulatedDevice("orin-nano", 1)
    sampler = BoardSampler(device)
    sampler.sample()
    began_s = device.clock.now_s()
    device.run(500)
    sampler.sample()
    took_s, load = device.clock.now_s() - began_s, device.load_in_force
    assert sampler.latest is not None and sampler.latest.energy_j is not None
    assert load.idle_mw / 1e3 * took_s < sampler.latest.energy_j <= load.power_mw / 1e3 * took_s
    assert sampler.latest.power_w == load.idle_mw / 1e3


async def test_a_board_that_cannot_be_read_is_tried_again() -> None:
    device, faults = ScriptedDevice(), [OSError("gone")]

    def conditions(at_s: float) -> BoardSample:
        if faults:
            raise faults.pop()
        return BoardSample(temperature_c=50.0)

    device.conditions_at = conditions
    seen: list[BoardSample | None] = []

    async def sleep(seconds: float) -> None:
        seen.append(sampler.latest)
        if len(seen) == 2:
            raise asyncio.CancelledError

    sampler = BoardSampler(device, sleep)
    with pytest.raises(asyncio.CancelledError):
        await sampler.run()
    assert seen[0] is None and seen[1] is not None and seen[1].temperature_c == 50.0


def test_a_sample_survives_the_wire_and_what_no_board_can_have_counts_as_missing() -> None:
    sample = BoardSample(12.5, -3.0, OTHER_SCRIPTED_MODE, 0, 0.0, 1.0, 99.5)
    assert board_sample_from_message(board_sample_to_message(sample)) == sample
    assert board_sample_from_message(board_sample_to_message(BoardSample())) == BoardSample()
    absurd = session_pb2.BoardSample(
        power_w=-1, temperature_c=math.inf, fan_share=1.5, energy_j=math.nan, gpu_use_share=0.5
    )
    assert board_sample_from_message(absurd) == BoardSample(gpu_use_share=0.5)


# --- Installation -----------------------------------------------------------------------------------------------------
# The name of an agent's installation: it survives restarts, and errors with its file do not stop the agent.


def test_the_name_is_made_once_and_differs_from_that_of_another_installation(tmp_path: Path) -> None:
    name = installation_name(tmp_path / "state" / "installation")
    assert installation_name(tmp_path / "state" / "installation") == name
    assert installation_name(tmp_path / "other" / "installation") != name


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff\xfe", b"../../etc/passwd\n"])
def test_a_damaged_name_is_made_anew_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "installation"
    path.write_bytes(content)
    name = installation_name(path)
    assert len(name) == 32
    assert installation_name(path) == name


def test_a_name_that_cannot_be_kept_serves_this_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    assert len(installation_name(tmp_path / "file" / "installation")) == 32
    assert "cannot be written" in caplog.text


def test_other_users_may_not_enter_a_new_state_directory(tmp_path: Path) -> None:
    installation_name(tmp_path / "new" / "installation")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o750


# --- Restoring a duty -------------------------------------------------------------------------------------------------
# An agent that starts with a damaged duty file.


def test_the_mode_in_force_is_noted_although_the_duty_file_is_damaged(tmp_path):
    DutyFile(tmp_path).write(duty())
    for each in tmp_path.iterdir():
        each.write_text("{")
    turns = DeviceTurns()
    board: Any = LiveBoard()
    restore_duty(turns, DutyFile(tmp_path), board)
    assert (turns.duty, turns.mode) == (None, MODE)


# --- Peer credentials -------------------------------------------------------------------------------------------------
# Which users may use the agent's socket.

OWNER, OTHER_USER, MEMBERS, GROUP = 1000, 1001, 50, 60


@pytest.mark.parametrize(
    ("gid", "peer", "admitted"),
    [
        (MEMBERS, PeerCredentials(1, 0, 0, frozenset()), True),
        (MEMBERS, PeerCredentials(1, OWNER, GROUP, frozenset()), True),
        (MEMBERS, PeerCredentials(1, OTHER_USER, MEMBERS, frozenset()), True),
        (MEMBERS, PeerCredentials(1, OTHER_USER, GROUP, frozenset({MEMBERS})), True),
        (MEMBERS, PeerCredentials(1, OTHER_USER, GROUP, frozenset({GROUP})), False),
        # The peer's groups are unknown: the kernel has compared them with the socket file's.
        (MEMBERS, PeerCredentials(1, OTHER_USER, GROUP, None), True),
        (None, PeerCredentials(1, OWNER, GROUP, frozenset()), True),
        (None, PeerCredentials(1, OTHER_USER, GROUP, frozenset({MEMBERS})), False),
        (None, PeerCredentials(1, OTHER_USER, GROUP, None), False),
    ],
)
def test_root_the_agents_user_and_members_are_admitted(gid: int | None, peer: PeerCredentials, admitted: bool) -> None:
    users = SocketUsers(gid, OWNER)
    assert users.admits(peer) is admitted
    if admitted:
        users.require(peer)
        return
    remedy = "--socket-group" if gid is None else "usermod -aG"
    with pytest.raises(PeerNotAllowedError, match=f"user {OTHER_USER} may not use the agent's socket, .*{remedy}"):
        users.require(peer)
