"""An agent that starts while its coordinator is away, and what it does when another one comes up."""

import threading
from dataclasses import replace

import pytest

from edge_agent.paths import REFERENCES_DIRECTORY, WELCOME_FILE
from tests.fakes.coordinator_in_process import CoordinatorInProcess
from tests.fakes.fitting_here import fitting_here
from tests.fakes.polling import until
from tests.fakes.running_agent import agent, new_board, ready_agent, serves_trainings
from wattfleet.modes import array_to_modes
from wattfleet.prediction import pack_artefact, restore_predictor
from wattfleet_flower import AgentUnreachableError
from wattfleet_proto.v1 import session_pb2

MODES = 6
PROFILING = session_pb2.DEVICE_STATE_PROFILING


@pytest.fixture(autouse=True)
def fits_here(monkeypatch):
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)


@pytest.fixture
def coordinator(tmp_path, fits_here):
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


def test_a_granted_round_while_the_coordinator_is_away_is_reported_when_it_is_back(tmp_path, coordinator):
    board = new_board()
    with agent(coordinator, tmp_path, board) as running:
        with coordinator.running():
            until(coordinator.is_ready)
            coordinator.grant("7/1", array_to_modes(board.modes)[1234])
        coordinator.reports.clear()
        assert running.round("7/1", array_to_modes(board.modes)[1234])
        with coordinator.running():
            until(lambda: coordinator.is_ready() and coordinator.observed)
            assert coordinator.observed == ["7/1"]
            assert coordinator.fronts[-1].profiled_modes == MODES
            assert PROFILING not in coordinator.states, "its request is unchanged, so nothing is profiled again"
    assert running.error is None


def test_an_agent_that_starts_while_the_coordinator_is_away_trains_nothing(tmp_path, coordinator):
    board = new_board()
    with agent(coordinator, tmp_path, board, grant_timeout_s=0.1) as running:
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
    [
        b"",
        b"\xff{",
        b"[]",
        b'{"reference_digest": "../../../etc", "profile_modes": 6}',
        b'{"reference_digest": "%s"}' % (b"0" * 64),
    ],
)
def test_with_a_damaged_welcome_the_agent_waits_for_the_coordinator(tmp_path, coordinator, caplog, content):
    (tmp_path / "state" / WELCOME_FILE).write_bytes(content)
    with agent(coordinator, tmp_path, new_board()) as running:
        until(lambda: "the agent waits for the coordinator" in caplog.text)
        assert f"{WELCOME_FILE}: is damaged" in caplog.text
        assert not serves(running)
        with coordinator.running():
            until(lambda: coordinator.is_ready() or running.has_ended)
    assert running.error is None
    with agent(coordinator, tmp_path, new_board()) as running:
        until(lambda: serves(running))
    assert running.error is None, "the file is valid again"


def test_a_reference_that_was_lost_is_waited_for(tmp_path, coordinator, caplog):
    (manifest,) = (tmp_path / "state" / REFERENCES_DIRECTORY).glob("*/manifest.json")
    manifest.write_bytes(b"{}")
    with agent(coordinator, tmp_path, new_board()) as running:
        until(lambda: "fetching it again" in caplog.text)
        with coordinator.running():
            until(lambda: coordinator.is_ready() or running.has_ended)
    assert running.error is None


def test_a_changed_request_of_a_returning_coordinator_is_met_and_stored(tmp_path, coordinator):
    coordinator.reference = other_reference(coordinator.reference)
    coordinator.profile_modes = MODES + 3
    board = new_board()
    with agent(coordinator, tmp_path, board) as running:
        until(lambda: serves(running))
        with coordinator.running():
            until(lambda: coordinator.fronts and coordinator.fronts[-1].profiled_modes > MODES or running.has_ended)
            until(coordinator.is_ready)
            assert coordinator.fronts[-1].reference_digest == coordinator.reference.digest
            assert PROFILING in coordinator.states, "no round includes it while it is prepared again"
            assert running.round("7/1", array_to_modes(board.modes)[1234])
    assert running.error is None
    with agent(coordinator, tmp_path, new_board()) as running:
        until(lambda: serves(running))
        coordinator.reports.clear()
        with coordinator.running():
            until(coordinator.is_ready)
            assert PROFILING not in coordinator.states


def test_the_current_round_ends_before_a_changed_request_is_met(tmp_path, coordinator):
    board = new_board()
    trains, request_changed = threading.Event(), threading.Event()

    def until_request_changes():
        trains.set()
        assert request_changed.wait(60)

    with agent(coordinator, tmp_path, board) as running:
        went_well = []
        mode = array_to_modes(board.modes)[1234]
        with coordinator.running():
            until(coordinator.is_ready)
            coordinator.grant("7/1", mode)
        coordinator.reports.clear()
        app = threading.Thread(target=lambda: went_well.append(running.round("7/1", mode, until_request_changes)))
        app.start()
        assert trains.wait(60)
        coordinator.profile_modes = MODES + 3
        with coordinator.running():
            until(lambda: coordinator.states)
            assert board.current_mode() == mode
            request_changed.set()
            app.join(60)
            assert went_well == [True]
            until(lambda: coordinator.fronts[-1].profiled_modes > MODES or running.has_ended)
        assert serves_trainings(running.settings.device.socket)
    assert running.error is None
