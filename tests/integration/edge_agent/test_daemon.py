"""The whole agent: it restores the device, works while its coordinator is away, and reports what is wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.references.metadata import utc_now
from edge_agent.devices.device import ModeNotAppliedError, PowerTrace
from edge_agent.paths import BACKUP_FILE, OUTBOX_FILE, PROFILE_FILE, REFERENCES_DIRECTORY, TRUST_DIRECTORY, WELCOME_FILE
from edge_agent.profiling.journal import JournalError
from edge_agent.profiling.known_workload import BUILT_IN
from edge_agent.profiling.stored_profile import WorkloadFolders
from edge_agent.session.references import trust_root
from edge_agent.training.mode_change import DeviceBusyError
from edge_agent.workloads.process import WorkloadFailedError
from tests.fakes.agent_settings import only_workload
from tests.fakes.coordinator_in_process import REFERENCE, CoordinatorInProcess
from tests.fakes.fittings import fitting_here
from tests.fakes.polling import until
from tests.fakes.running_agent import (
    BoardThatBecomesSlower,
    agent,
    may_connect,
    new_board,
    ready_agent,
    serves_trainings,
)
from tests.fakes.short_forms import first
from tests.fakes.signed_repository import SignedRepository, reference
from wattfleet.core.modes import array_to_modes
from wattfleet.core.prediction import DEFAULT_DRIFT_RULE, Artefact, pack_artefact, restore_predictor
from wattfleet.flower import AgentUnreachableError
from wattfleet_proto.convert import front_from_message
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc, session_pb2

# --- Daemon -----------------------------------------------------------------------------------------------------------
# The whole agent: it restores the device, works without the coordinator, and reports faults.


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


# --- Daemon offline ---------------------------------------------------------------------------------------------------
# An agent that starts while its coordinator is away, and what it does when another one comes up.


@pytest.fixture
def known_coordinator(tmp_path, fits_here):
    """A coordinator that knows the device already, and is away."""
    known = CoordinatorInProcess(tmp_path, MODES)
    with known.running(), ready_agent(known, tmp_path, new_board()):
        pass
    known.reports.clear()
    return known


def serves(running):
    return running.has_ended or serves_trainings(running.settings.device.socket)


def other_reference(artefact):
    """A reference with the same predictions and another digest."""
    details = replace(artefact.details, provenance={"trained": "anew"})
    return pack_artefact(
        restore_predictor(artefact), details.workload, details.board, details.provenance, details.figures
    )


def test_a_granted_round_while_the_coordinator_is_away_is_reported_when_it_is_back(tmp_path, known_coordinator):
    board = new_board()
    with agent(known_coordinator, tmp_path, board) as running:
        with known_coordinator.running():
            until(known_coordinator.is_ready)
            known_coordinator.grant("7/1", array_to_modes(board.modes)[1234])
        known_coordinator.reports.clear()
        assert running.round("7/1", array_to_modes(board.modes)[1234])
        with known_coordinator.running():
            until(lambda: known_coordinator.is_ready() and known_coordinator.observed)
            assert known_coordinator.observed == ["7/1"]
            assert known_coordinator.fronts[-1].profiled_modes == MODES
            assert PROFILING not in known_coordinator.states, "its request is unchanged, so nothing is profiled again"
    assert running.error is None


def test_an_agent_that_starts_while_the_coordinator_is_away_trains_nothing(tmp_path, known_coordinator):
    board = new_board()
    with agent(known_coordinator, tmp_path, board, grant_timeout_s=0.1) as running:
        until(lambda: serves(running))
        with pytest.raises(AgentUnreachableError, match="FAILED_PRECONDITION: the coordinator has granted no watts"):
            running.round("7/1", array_to_modes(board.modes)[1234])
    assert running.error is None


def test_an_agent_without_a_stored_welcome_waits_for_the_coordinator(tmp_path):
    coordinator, board = CoordinatorInProcess(tmp_path, MODES), new_board()
    with agent(coordinator, tmp_path, board) as running, coordinator.running():
        until(lambda: coordinator.is_ready() or running.has_ended)
    assert running.error is None


@pytest.mark.parametrize(
    "content",
    first(
        2,
        [
            b"\xff{",
            b'{"reference_digest": "../../../etc", "profile_modes": 6}',
            b"",
            b"[]",
            b'{"reference_digest": "%s"}' % (b"0" * 64),
        ],
    ),
)
def test_with_a_damaged_welcome_the_agent_waits_for_the_coordinator(tmp_path, known_coordinator, caplog, content):
    (tmp_path / "state" / WELCOME_FILE).write_bytes(content)
    with agent(known_coordinator, tmp_path, new_board()) as running:
        until(lambda: "the agent waits for the coordinator" in caplog.text)
        assert f"{WELCOME_FILE}: is damaged" in caplog.text
        assert not serves(running)
        with known_coordinator.running():
            until(lambda: known_coordinator.is_ready() or running.has_ended)
    assert running.error is None
    with agent(known_coordinator, tmp_path, new_board()) as running:
        until(lambda: serves(running))
    assert running.error is None, "the file is valid again"


def test_a_reference_that_was_lost_is_waited_for(tmp_path, known_coordinator, caplog):
    (manifest,) = (tmp_path / "state" / REFERENCES_DIRECTORY).glob("*/manifest.json")
    manifest.write_bytes(b"{}")
    with agent(known_coordinator, tmp_path, new_board()) as running:
        until(lambda: "fetching it again" in caplog.text)
        with known_coordinator.running():
            until(lambda: known_coordinator.is_ready() or running.has_ended)
    assert running.error is None


def test_a_changed_request_of_a_returning_coordinator_is_met_and_stored(tmp_path, known_coordinator):
    known_coordinator.reference = other_reference(known_coordinator.reference)
    known_coordinator.profile_modes = MODES + 3
    board = new_board()
    with agent(known_coordinator, tmp_path, board) as running:
        until(lambda: serves(running))
        with known_coordinator.running():
            until(
                lambda: (
                    known_coordinator.fronts
                    and known_coordinator.fronts[-1].profiled_modes > MODES
                    or running.has_ended
                )
            )
            until(known_coordinator.is_ready)
            assert known_coordinator.fronts[-1].reference_digest == known_coordinator.reference.digest
            assert PROFILING in known_coordinator.states, "no round includes it while it is prepared again"
            assert running.round("7/1", array_to_modes(board.modes)[1234])
    assert running.error is None
    with agent(known_coordinator, tmp_path, new_board()) as running:
        until(lambda: serves(running))
        known_coordinator.reports.clear()
        with known_coordinator.running():
            until(known_coordinator.is_ready)
            assert PROFILING not in known_coordinator.states


def test_the_current_round_ends_before_a_changed_request_is_met(tmp_path, known_coordinator):
    board = new_board()
    trains, request_changed = threading.Event(), threading.Event()

    def until_request_changes():
        trains.set()
        assert request_changed.wait(60)

    with agent(known_coordinator, tmp_path, board) as running:
        went_well = []
        mode = array_to_modes(board.modes)[1234]
        with known_coordinator.running():
            until(known_coordinator.is_ready)
            known_coordinator.grant("7/1", mode)
        known_coordinator.reports.clear()
        app = threading.Thread(target=lambda: went_well.append(running.round("7/1", mode, until_request_changes)))
        app.start()
        assert trains.wait(60)
        known_coordinator.profile_modes = MODES + 3
        with known_coordinator.running():
            until(lambda: known_coordinator.states)
            assert board.current_mode() == mode
            request_changed.set()
            app.join(60)
            assert went_well == [True]
            until(lambda: known_coordinator.fronts[-1].profiled_modes > MODES or running.has_ended)
        assert serves_trainings(running.settings.device.socket)
    assert running.error is None


# --- Daemon references ------------------------------------------------------------------------------------------------
# A whole agent whose coordinator names an unusable reference: it reports this, and waits for another one.


def damaged() -> Any:
    return SimpleNamespace(digest=REFERENCE.digest, manifest=REFERENCE.manifest, weights=REFERENCE.weights[:-1] + b"\0")


def of_an_unknown_kind() -> Artefact:
    return Artefact(REFERENCE.manifest.replace(b'"roofline"', b'"crystal-ball"'), REFERENCE.weights)


def of_another_format() -> Any:
    changed = REFERENCE.manifest.replace(b'"format_version": 1', b'"format_version": 99')
    digest = hashlib.sha256(changed).hexdigest()
    return SimpleNamespace(digest=digest, manifest=changed, weights=REFERENCE.weights)


def of_another_task() -> Artefact:
    changed = json.loads(REFERENCE.manifest)
    changed["facts"] = {**(changed.get("facts") or {}), "task": "inference", "batch": 1}
    return Artefact(json.dumps(changed).encode(), REFERENCE.weights)


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        (damaged, "has the SHA-256"),
        (of_an_unknown_kind, "unknown predictor 'crystal-ball'"),
        (of_another_format, "has format 99"),
        (of_another_task, "is for inference, but this device trains"),
    ],
)
def test_an_unusable_reference_does_not_end_the_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reference: Callable[[], Any], why: str
) -> None:
    coordinator = CoordinatorInProcess(tmp_path, 6)
    coordinator.reference = reference()
    with coordinator.running(), agent(coordinator, tmp_path, new_board()) as running:
        until(lambda: running.has_ended or bool(coordinator.details))
        assert not running.has_ended, running.error
        assert why in coordinator.details[-1] and why in caplog.text
        assert coordinator.states[-1] == session_pb2.DEVICE_STATE_PROFILING
        coordinator.go()
        coordinator.reference = REFERENCE
        coordinator.come()
        until(lambda: coordinator.is_ready() or running.has_ended)
    assert running.error is None


@pytest.mark.parametrize(
    ("unusable", "is_first"),
    [(of_an_unknown_kind, False), (of_another_format, False), (of_an_unknown_kind, True), (of_another_task, True)],
)
def test_an_unusable_reference_beside_a_usable_one_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, unusable: Callable[[], Any], is_first: bool
) -> None:
    coordinator = CoordinatorInProcess(tmp_path, 6)
    pinned = [unusable(), REFERENCE] if is_first else [REFERENCE, unusable()]
    coordinator.reference, *coordinator.further = pinned
    with coordinator.running(), ready_agent(coordinator, tmp_path, new_board(), modes_first=None) as running:
        coordinator.announce("vision")
        until(lambda: running.has_ended or coordinator.front_of("vision") is not None)
        assert not running.has_ended
        assert coordinator.fronts[-1].reference_digest == REFERENCE.digest
    assert f"the reference {unusable().digest[:12]} is not used" in caplog.text


@pytest.mark.parametrize("reference", first(1, [of_an_unknown_kind, of_another_format, of_another_task]))
def test_an_unusable_reference_that_is_pinned_between_rounds_strands_no_workload(
    tmp_path: Path, reference: Callable[[], Any]
) -> None:
    coordinator = CoordinatorInProcess(tmp_path, 6)
    with coordinator.running(), ready_agent(coordinator, tmp_path, new_board(), modes_first=None) as running:
        coordinator.announce("vision")
        until(lambda: coordinator.front_of("vision") is not None)
        mode = front_from_message(coordinator.fronts[-1].front).mode(0)
        assert running.round("a", mode, workload="vision")
        until(coordinator.is_ready)
        coordinator.go()
        coordinator.reference = reference()
        coordinator.reports.clear()
        coordinator.come()
        coordinator.announce("vision")
        until(lambda: any("preparing again" in detail for detail in coordinator.details))
        coordinator.go()
        coordinator.reference = REFERENCE
        coordinator.reports.clear()
        coordinator.come()
        coordinator.announce("vision")
        until(lambda: running.has_ended or coordinator.front_of("vision") is not None)
        until(lambda: running.has_ended or coordinator.is_ready())
        assert running.round("b", mode, workload="vision")


# --- Daemon signed references -----------------------------------------------------------------------------------------
# A whole agent that trusts an operator's root: an unsigned reference does not stop its trainings.

NEW = reference("new")


def test_a_refused_reference_is_told_of_and_the_old_one_goes_on_until_it_is_signed(tmp_path: Path, agent: Any) -> None:
    repository = SignedRepository(tmp_path / "operator", utc_now)
    repository.publish()
    trust_root(tmp_path / "state" / TRUST_DIRECTORY, repository.operator.roots[0], utc_now().timestamp())
    coordinator = CoordinatorInProcess(tmp_path, 6)
    coordinator.metadata = repository.metadata.file
    with (
        coordinator.running(),
        ready_agent(coordinator, tmp_path, new_board(), modes_first=None, reference_retry_s=0.2) as running,
    ):
        coordinator.go()
        coordinator.reference = NEW
        coordinator.reports.clear()
        coordinator.come()
        until(lambda: coordinator.is_ready() and "is refused: not named" in coordinator.details[-1])
        coordinator.announce("vision")
        until(lambda: coordinator.front_of("vision") is not None)
        assert coordinator.fronts[-1].reference_digest == REFERENCE.digest
        assert running.round("a", front_from_message(coordinator.fronts[-1].front).mode(0), workload="vision")
        shown = agent("status", "--device", "simulated:orin-nano", "--state-dir", tmp_path / "state", "--json")
        signed = shown.content["references"]
        assert signed["in_force"] == [REFERENCE.digest] and "not named" in signed["refused"]
        assert "refused" in agent("status", "--device", "simulated:orin-nano", "--state-dir", tmp_path / "state").out
        coordinator.reports.clear()
        repository.publish(NEW)
        until(lambda: any(each.reference_digest == NEW.digest for each in coordinator.fronts))
        until(lambda: coordinator.states[-1] == session_pb2.DEVICE_STATE_READY)
        assert "refused" not in coordinator.details[-1]
    status = json.loads((tmp_path / "state" / TRUST_DIRECTORY / "in-force.json").read_bytes())
    assert (status["digests"], status["refused"]) == ([NEW.digest], "")


def test_a_root_is_trusted_by_command(tmp_path: Path, agent: Any) -> None:
    repository = SignedRepository(tmp_path / "operator", utc_now)
    root = repository.operator.newest_root_file
    ended = agent("trust-references", root, "--state-dir", tmp_path / "state")
    assert ended.code == 0 and "restart the agent" in ended.out
    assert (tmp_path / "state" / TRUST_DIRECTORY / "root.json").read_bytes() == root.read_bytes()
    refused = agent("trust-references", root.with_name("targets.json"), "--state-dir", tmp_path / "other")
    assert refused.code == 2 and "not a root of signed references" in refused.err
    assert not (tmp_path / "other").exists()
    missing = agent("trust-references", tmp_path / "missing", "--state-dir", tmp_path / "other")
    assert missing.code == 2 and "missing: cannot be used" in missing.err
