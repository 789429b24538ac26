"""The whole agent: it restores the device, works without the coordinator, and reports faults."""

import errno
import os
import threading

import grpc
import numpy as np
import pytest

from edge_agent.devices.device import ModeNotAppliedError, PowerTrace
from edge_agent.paths import OUTBOX_FILE, PROFILE_FILE
from edge_agent.profiling.journal import JournalError
from edge_agent.profiling.known_workload import BUILT_IN
from edge_agent.profiling.stored_profile import WorkloadFolders
from edge_agent.training.mode_change import BACKUP_FILE, DeviceBusyError
from edge_agent.workloads.process import WorkloadFailedError
from tests.fakes.coordinator_in_process import CoordinatorInProcess
from tests.fakes.fitting_here import fitting_here
from tests.fakes.polling import until
from tests.fakes.running_agent import (
    BoardThatBecomesSlower,
    agent,
    may_connect,
    new_board,
    ready_agent,
    serves_trainings,
)
from tests.fakes.stored_workloads import only_workload
from wattfleet.modes import array_to_modes
from wattfleet.prediction import DEFAULT_DRIFT_RULE
from wattfleet_flower import AgentUnreachableError
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc, session_pb2

MODES = 6
DEGRADED, PROFILING = session_pb2.DEVICE_STATE_DEGRADED, session_pb2.DEVICE_STATE_PROFILING


@pytest.fixture(autouse=True)
def fits_here(monkeypatch):
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)


@pytest.fixture
def coordinator(tmp_path):
    with CoordinatorInProcess(tmp_path, MODES).running() as running:
        yield running


@pytest.fixture
def board():
    return new_board()


def test_knobs_are_backed_up_before_the_first_change_and_restored_at_the_end(tmp_path, coordinator, board):
    before = board.current_mode()
    with ready_agent(coordinator, tmp_path, board):
        assert (tmp_path / "device" / BACKUP_FILE).exists()
        assert board.current_mode() != before
    assert board.current_mode() == before
    assert not (tmp_path / "device" / BACKUP_FILE).exists()
    assert coordinator.states[0] == session_pb2.DEVICE_STATE_PROFILING


def test_an_agent_stopped_while_profiling_ends_at_once_and_restores_the_device(tmp_path, coordinator, board):
    before = board.current_mode()
    steps, begun = 0, threading.Event()
    step = board.step

    def slow_step():
        nonlocal steps
        steps += 1
        begun.set()
        step()
        threading.Event().wait(0.02)

    board.step = slow_step
    with agent(coordinator, tmp_path, board) as running:
        assert begun.wait(60)
    assert running.error is None
    assert steps < 41, "not even one mode was finished"
    assert board.current_mode() == before


def test_the_socket_is_served_while_the_device_is_prepared(tmp_path, coordinator, board):
    begun, ending = threading.Event(), threading.Event()
    step = board.step

    def held_step():
        begun.set()
        assert ending.wait(60)
        step()

    board.step = held_step
    with agent(coordinator, tmp_path, board) as running:
        assert begun.wait(60)
        with grpc.insecure_channel(f"unix:{running.settings.device.socket}") as channel:
            requests = iter([local_pb2.TrainRequest(start=local_pb2.StartTraining(device_id="orin-nano-0"))])
            call = local_pb2_grpc.LocalAgentServiceStub(channel).Train(requests)
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "is being prepared and cannot train now" in call.details()
        ending.set()
        until(lambda: coordinator.is_ready() or running.has_ended)
        assert serves_trainings(running.settings.device.socket)
    assert running.error is None


def test_a_workload_that_fails_while_stopping_is_no_failure_of_the_agent(tmp_path, coordinator, board, caplog):
    before = board.current_mode()
    begun, ending = threading.Event(), threading.Event()

    def killed_beside_the_agent():
        begun.set()
        assert ending.wait(60)
        raise WorkloadFailedError("its process ended with exit code -15")

    board.step = killed_beside_the_agent
    with agent(coordinator, tmp_path, board) as running:
        assert begun.wait(60)
        # After the stop, which the agent's own loop has not handled yet.
        threading.Timer(0.5, ending.set).start()
    assert running.error is None
    assert "exit code -15" in caplog.text
    assert board.current_mode() == before


def test_two_agents_on_one_device_exclude_each_other(tmp_path, coordinator, board):
    with ready_agent(coordinator, tmp_path, board):
        parked = board.current_mode()
        with agent(coordinator, tmp_path, board, state="other") as second:
            assert second.error
        assert isinstance(second.error, DeviceBusyError)
        assert str(os.getpid()) in str(second.error)
        assert board.current_mode() == parked


def test_reports_of_rounds_without_the_coordinator_survive_a_restart(tmp_path, coordinator, board):
    modes = array_to_modes(board.modes)
    with ready_agent(coordinator, tmp_path, board) as running:
        coordinator.grant("7/1", modes[1234])
        coordinator.go()
        until(lambda: not may_connect(coordinator.address.removeprefix("unix:")))
        assert running.round("7/1", modes[1234])
        assert coordinator.observed == []
    assert '"7/1"' in (tmp_path / "state" / OUTBOX_FILE).read_text()
    coordinator.come()
    with ready_agent(coordinator, tmp_path, board):
        until(lambda: (tmp_path / "state" / OUTBOX_FILE).read_bytes() == b"")
        assert coordinator.observed == ["7/1"]
        assert len([report for report in coordinator.reports if report.HasField("front")]) <= 2


def test_a_full_disk_ends_a_profile_with_a_remedy_and_a_restored_device(tmp_path, coordinator, board, monkeypatch):
    before = board.current_mode()
    fsync, synced = os.fsync, []

    def full_after_three(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(PROFILE_FILE):
            synced.append(descriptor)
            if len(synced) > 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full_after_three)
    with agent(coordinator, tmp_path, board) as running:
        assert running.error
    assert isinstance(running.error, JournalError)
    assert "No space left on device; its 2 records are intact" in str(running.error)
    assert board.current_mode() == before
    monkeypatch.undo()
    with ready_agent(coordinator, tmp_path, board):
        assert len((only_workload(tmp_path / "state") / PROFILE_FILE).read_text().splitlines()) == 1 + MODES


def test_a_predictor_that_cannot_be_stored_is_kept_in_memory(tmp_path, coordinator, board, caplog):
    folder = WorkloadFolders(tmp_path / "state").folder(BUILT_IN)
    folder.mkdir(parents=True)
    (folder / "predictor").write_text("no folder")
    with ready_agent(coordinator, tmp_path, board) as running:
        assert "kept in memory only" in caplog.text
        assert running.round("7/1", array_to_modes(board.modes)[1234])
        until(coordinator.is_ready)


def test_a_knob_without_permission_degrades_the_device_until_it_is_granted(tmp_path, coordinator, board):
    apply = board.apply

    def denied(mode):
        raise ModeNotAppliedError("/sys/devices/system/cpu/cpu1/online: Permission denied")

    with ready_agent(coordinator, tmp_path, board, retry_s=0.02) as running:
        board.apply = denied
        with pytest.raises(AgentUnreachableError, match="ABORTED: .*Permission denied"):
            running.round("7/1", array_to_modes(board.modes)[1234])
        until(lambda: coordinator.states[-1] == DEGRADED)
        assert "Permission denied" in coordinator.reports[-1].state.detail
        board.apply = apply
        until(coordinator.is_ready)
        assert running.round("7/2", array_to_modes(board.modes)[1234])


def test_a_failed_power_sensor_degrades_the_device_until_it_works_again(tmp_path, coordinator, board):
    start_meter, listened = board.start_meter, []

    class GoneMeter:
        def read(self):
            return PowerTrace(np.array([board.clock.now_s()]), np.array([np.nan]))

        def stop(self):
            listened.append(board.clock.now_s())
            return self.read()

    with ready_agent(coordinator, tmp_path, board, retry_s=0.02) as running:
        board.start_meter = GoneMeter
        with pytest.raises(AgentUnreachableError, match="UNAVAILABLE: power was read only 0 of 1 times"):
            running.round("7/1", array_to_modes(board.modes)[1234])
        until(lambda: len(listened) > 3)
        assert coordinator.states[-1] == DEGRADED, "parking alone does not end the degraded state"
        assert coordinator.observed == []
        board.start_meter = start_meter
        until(coordinator.is_ready)
        assert running.round("7/2", array_to_modes(board.modes)[1234])
        assert coordinator.observed == ["7/2"]


def test_a_profile_interrupted_by_a_fault_continues_after_recovery(tmp_path, coordinator):
    board = new_board(BoardThatBecomesSlower)
    measuring, tried = board.measuring, []

    def denied():
        tried.append(board.clock.now_s())
        raise ModeNotAppliedError("/sys/class/hwmon/hwmon0/pwm1: Permission denied")

    with ready_agent(coordinator, tmp_path, board, retry_s=0.02) as running:
        # Six measured modes leave wide intervals, which only a much slower board contradicts.
        board.slowdown, board.measuring = 10.0, denied
        for k in range(DEFAULT_DRIFT_RULE.outside):
            assert running.round(f"7/{k}", array_to_modes(board.modes)[1234 + k])
        until(lambda: len(tried) > 1 and coordinator.states[-1] == DEGRADED)
        board.measuring = measuring
        until(lambda: "profiled again" in coordinator.reports[-1].state.detail and coordinator.is_ready())
        assert coordinator.fronts[-1].profiled_modes == MODES
        assert running.round("7/9", array_to_modes(board.modes)[1234])
    assert PROFILING in coordinator.states[coordinator.states.index(DEGRADED) :]
