"""The mod in the ClientApp, against a real agent socket: trainings, their grants and epochs, and pairing."""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.learning.online_learner import Observed
from edge_agent.runtime.readiness import parked_mode
from edge_agent.runtime.unix_socket import require_own_socket
from edge_agent.training.training import TrainingRunner
from tests.fakes.agent_socket import (
    MODE,
    Agent,
    agent_at,
    answered,
    assigned,
    context,
    granted,
    message,
)
from tests.fakes.polling import until
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode, Renewal
from wattfleet.flower import AgentUnreachableError, planned_work, power_mode_mod, profiled, until_deadline
from wattfleet.flower.client.agent_training import CURRENT_TRAINING
from wattfleet.flower.client.mod import UnplannedTrainingError, pairing_problem
from wattfleet.flower.server.nodes import identify_request
from wattfleet_proto.assignment import (
    CUT_KEY,
    DEVICE_ID_KEY,
    IDENTIFY_KEY,
    PAIRING_PROBLEM_KEY,
    RECORD_KEY,
    SHARE_KEY,
    TOOK_EPOCHS_KEY,
    WORK_KEY,
    AssignedWork,
    RoundAssignment,
)
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc, session_pb2

# --- Flower mod -------------------------------------------------------------------------------------------------------
# The mod in the ClientApp, against a real agent socket.


def test_trains_in_the_assigned_mode_and_reports(agent: Agent) -> None:
    during: list[PowerMode] = []

    def train(request: Message, _: Context) -> Message:
        during.append(agent.board.current_mode())
        assert list(request.content) == ["config"], "the app sees what its strategy wrote"
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert not reply.has_error()
    assert during == [MODE]
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert [seen.plan_id for seen in agent.reports.observations] == ["7/1"]
    assert [report.state for report in agent.reports.states] == [
        session_pb2.DEVICE_STATE_TRAINING,
        session_pb2.DEVICE_STATE_TRAINING,  # parked, and learns from it
        session_pb2.DEVICE_STATE_READY,
    ]


def test_messages_without_an_assignment_pass_unchanged() -> None:
    request = message(RecordDict({"config": ConfigRecord()}))
    assert not power_mode_mod(request, context(), answered).has_error()


def test_the_agent_reports_once_in_a_run_that_an_app_trains_without_a_plan(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    request = message(RecordDict({"config": ConfigRecord()}))
    for _ in range(2):
        assert not power_mode_mod(request, context(**{"agent-socket": str(agent.socket)}), answered).has_error()
    assert agent.unplanned == [("7", False)]
    [warned] = [each.getMessage() for each in caplog.records if "without a plan" in each.getMessage()]
    assert "outside of the budget" in warned and "PowerAware" in warned


def test_a_site_may_refuse_a_training_without_a_plan_but_no_evaluation(agent: Agent) -> None:
    agent.refuses_unplanned = True
    request = message(RecordDict({"config": ConfigRecord()}))
    node = context(**{"agent-socket": str(agent.socket)})
    with pytest.raises(UnplannedTrainingError, match="trains only as its coordinator plans.*PowerAware"):
        power_mode_mod(request, node, answered)
    assert agent.unplanned == [("7", True)]
    request.metadata.message_type = "evaluate"
    assert not power_mode_mod(request, node, answered).has_error()


def test_identifies_without_calling_the_app() -> None:
    request = message(RecordDict({RECORD_KEY: ConfigRecord({IDENTIFY_KEY: True})}))

    def app(request: Message, _: Context) -> Message:
        raise AssertionError("not for the app")

    reply = power_mode_mod(request, context(**{"device-id": "orin-nano-0"}), app)
    assert reply.content[RECORD_KEY][DEVICE_ID_KEY] == "orin-nano-0"
    with pytest.raises(InvalidInputError, match="--node-config"):
        power_mode_mod(request, context(), app)


def test_a_mod_before_ours_that_reads_the_round_lets_a_node_be_identified() -> None:
    seen = []

    def logs_rounds(request: Message, own: Context, call_next: Any) -> Message:
        seen.append(request.content["config"]["server-round"])
        return call_next(request, own)  # type: ignore[no-any-return]

    def identified(request: Message, own: Context) -> Message:
        return power_mode_mod(request, own, answered)

    reply = logs_rounds(identify_request(1), context(**{"device-id": "orin-nano-0"}), identified)
    assert reply.content[RECORD_KEY][DEVICE_ID_KEY] == "orin-nano-0"
    assert seen == [0], "before the first round"


def test_an_app_that_raises_leaves_the_device_parked_and_nothing_observed(agent: Agent) -> None:
    def train(request: Message, _: Context) -> Message:
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.observations == []


def test_an_app_that_answers_with_an_error_is_not_observed(agent: Agent) -> None:
    def train(request: Message, _: Context) -> Message:
        return Message(Error(2, "no data"), reply_to=request)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert reply.has_error()
    assert agent.reports.observations == []


def other_device(agent: Agent) -> Message:
    return assigned(device_id="agx-orin-0")


def other_devices_mode(agent: Agent) -> Message:
    agent.grant(granted(MODE._replace(gpu_hz=1_300_500_000), plan_id="7/2", grant_id=2))
    return assigned(plan_id="7/2")


@pytest.mark.parametrize(
    ("request_", "reason"),
    [(other_device, "this is the agent of orin-nano-0"), (other_devices_mode, "INVALID_ARGUMENT")],
)
def test_the_agent_refuses_assignments_of_another_device(agent: Agent, request_: Any, reason: str) -> None:
    with pytest.raises(AgentUnreachableError, match=reason):
        power_mode_mod(request_(agent), context(**{"agent-socket": str(agent.socket)}), answered)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.states == [], "the device itself works"


def test_a_mode_that_does_not_apply_degrades_the_device(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(mode: PowerMode) -> None:
        raise ModeNotAppliedError("gpu_hz reads back 306000000")

    monkeypatch.setattr(agent.board, "apply", apply)
    with pytest.raises(AgentUnreachableError, match="ABORTED: gpu_hz reads back"):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), answered)
    assert agent.reports.states[-1].state == session_pb2.DEVICE_STATE_DEGRADED


def test_a_client_that_is_killed_leaves_the_device_parked_and_ready(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandon, on = TrainingRunner.abandon, set()

    def noted(watch: TrainingRunner) -> None:
        on.add(threading.current_thread().name)
        abandon(watch)

    monkeypatch.setattr(TrainingRunner, "abandon", noted)
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        start = local_pb2.StartTraining(plan_id="7/1", device_id="orin-nano-0", epochs=1.0)
        never_ends = threading.Event()

        def requests() -> Iterator[local_pb2.TrainRequest]:
            yield local_pb2.TrainRequest(start=start)
            never_ends.wait(30)

        call = local_pb2_grpc.LocalAgentServiceStub(channel).Train(requests())
        assert next(call).HasField("started")
        assert agent.board.current_mode() == MODE
        with pytest.raises(AgentUnreachableError, match="RESOURCE_EXHAUSTED: orin-nano-0 is training already"):
            power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), answered)
        call.cancel()  # as when its process ends
        never_ends.set()
    until(lambda: agent.board.current_mode() == parked_mode(agent.board))
    assert agent.reports.observations == []
    assert all(name.startswith("asyncio_") for name in on), "parking does not block the event loop"
    # The next round works again.
    agent.grant(granted(plan_id="7/2", grant_id=2))
    assert not power_mode_mod(
        assigned(plan_id="7/2"), context(**{"agent-socket": str(agent.socket)}), answered
    ).has_error()


def test_a_degraded_device_comes_back_once_it_can_be_parked(
    agent_that_retries_soon: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_that_retries_soon
    apply, broken = agent.board.apply, True

    def sometimes(mode: PowerMode) -> None:
        if broken:
            raise ModeNotAppliedError("gpu_hz reads back 306000000")
        apply(mode)

    monkeypatch.setattr(agent.board, "apply", sometimes)
    with pytest.raises(AgentUnreachableError):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), answered)
    time.sleep(0.1)
    assert [report.state for report in agent.reports.states] == [session_pb2.DEVICE_STATE_DEGRADED]
    broken = False
    until(lambda: agent.reports.states[-1].state == session_pb2.DEVICE_STATE_READY)


def test_no_agent_no_training(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachableError, match="orin-nano-0: the agent at .*absent.sock"):
        power_mode_mod(assigned(), context(**{"agent-socket": str(tmp_path / "absent.sock")}), answered)


def test_owner_and_group_may_connect_and_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))  # and never unlinked, as after an agent was killed
    with agent_at(path):
        assert stat.filemode(path.stat().st_mode) == "srw-rw----"


def test_neither_a_file_nor_a_living_agents_socket_is_taken(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("do not lose")
    with pytest.raises(InvalidInputError, match="is not a socket"):
        require_own_socket(precious)
    assert precious.read_text() == "do not lose"
    with agent_at(tmp_path / "agent.sock") as living:
        with pytest.raises(InvalidInputError, match="another agent serves"):
            require_own_socket(living.socket)
        assert not power_mode_mod(assigned(), context(**{"agent-socket": str(living.socket)}), answered).has_error()


def test_a_rounds_observation_joins_the_profile_and_updates_the_front(agent: Agent) -> None:
    power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), answered)
    assert MODE in [known.mode for known in agent.journal.measurements]
    assert len(agent.reports.fronts) == 1


def test_a_drifting_device_is_profiled_again_and_becomes_ready(agent: Agent) -> None:
    reasons = iter(["3 of the last 5 rounds took longer"])
    agent.learner.observe = lambda observed: next(reasons, None)  # type: ignore[method-assign]
    agent.journal.append(Renewal("3 of the last 5 rounds took longer", 5))
    power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), answered)
    until(lambda: agent.reports.states[-1].detail == "parked; profiled again")
    assert len(agent.journal.records) == 5
    assert session_pb2.DEVICE_STATE_PROFILING in [report.state for report in agent.reports.states]
    assert agent.board.current_mode() == parked_mode(agent.board)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"epochs": 1e-320}, "epochs must be 0.001 to 10000"), ({"plan_id": "7" * 231}, "at most 230 characters")],
)
def test_an_invalid_assignment_is_refused_before_any_change(agent: Agent, change: dict[str, Any], reason: str) -> None:
    before = list(agent.journal.measurements)
    assignment = replace(RoundAssignment("7/1", "orin-nano-0", epochs=1.0), **change)
    request = message(RecordDict({RECORD_KEY: ConfigRecord(assignment.to_record())}))
    with pytest.raises(AgentUnreachableError, match=f"INVALID_ARGUMENT: .*{reason}"):
        power_mode_mod(request, context(**{"agent-socket": str(agent.socket)}), answered)
    assert (agent.reports.states, agent.reports.observations) == ([], [])
    assert list(agent.journal.measurements) == before


def test_a_round_whose_observation_is_rejected_leaves_the_device_ready(agent: Agent) -> None:
    def observe(observed: Observed) -> str | None:
        raise InvalidInputError("minibatch_ms has to be finite")

    agent.learner.observe = observe  # type: ignore[method-assign]
    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), answered)
    assert not reply.has_error()
    assert agent.reporter.state is DeviceState.READY
    assert agent.reports.states[-1].detail == "parked; minibatch_ms has to be finite"


def test_a_refused_training_that_cannot_be_parked_degrades_the_device(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(mode: PowerMode) -> None:
        raise ModeNotAppliedError("gpu_hz reads back 306000000")

    def train(request: Message, _: Context) -> Message:
        monkeypatch.setattr(agent.board, "apply", apply)
        training = CURRENT_TRAINING.get()
        assert training is not None
        training.report([local_pb2.MinibatchTimes(fetch_stall_ms=-1.0, compute_ms=5.0)], paused=False)
        raise AssertionError("unreachable")

    with pytest.raises(AgentUnreachableError, match="INVALID_ARGUMENT"):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert agent.reporter.state is DeviceState.DEGRADED


# --- Reassignment -----------------------------------------------------------------------------------------------------
# A training whose grant the coordinator changes, or that has none.


def test_a_round_continues_in_the_new_mode_and_is_not_observed(agent: Agent) -> None:
    thriftier = MODE._replace(gpu_hz=306_000_000)

    def train(request: Message, _: Context) -> Message:
        agent.grant(granted(thriftier, power_limit_w=16.0, grant_id=2))
        until(lambda: agent.board.current_mode() == thriftier)
        assert list(until_deadline(profiled(range(6)))) == list(range(6)), "it goes on, and measures no more"
        assert agent.board.current_mode() == thriftier
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert not reply.has_error()
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.observations == []
    assert agent.reports.states[-1].state == session_pb2.DEVICE_STATE_READY


@pytest.mark.parametrize("plan_id", ["7/1", "another/1"])
def test_a_stopped_round_keeps_the_work_done(agent: Agent, plan_id: str) -> None:
    seen: list[int] = []

    def train(request: Message, _: Context) -> Message:
        for batch in until_deadline(range(1_000_000)):
            seen.append(batch)
            if batch == 3:
                agent.grant(granted(None, plan_id=plan_id, grant_id=2))
            time.sleep(0.001)
        assert agent.board.current_mode() == parked_mode(agent.board), "the watts are saved at once"
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert 3 < len(seen) < 1_000_000
    assert reply.content[RECORD_KEY][CUT_KEY] is True
    assert reply.content[RECORD_KEY][SHARE_KEY] == pytest.approx(len(seen) / 1_000_000)
    assert agent.reports.observations == []


def test_a_training_ends_after_its_longest_time(agent: Agent) -> None:
    grant = granted(plan_id="7/2", grant_id=2)
    grant.longest_s = 0.1
    agent.grant(grant)
    seen: list[int] = []

    def train(request: Message, _: Context) -> Message:
        for batch in until_deadline(range(1_000_000)):
            seen.append(batch)
            time.sleep(0.001)
        assert agent.board.current_mode() == parked_mode(agent.board)
        return answered(request, _)

    power_mode_mod(assigned(plan_id="7/2"), context(**{"agent-socket": str(agent.socket)}), train)
    assert 1 < len(seen) < 1_000_000


def test_a_training_stops_when_the_coordinator_is_lost_for_too_long(agent: Agent) -> None:
    agent.grant(granted(plan_id="7/2", grant_id=2), lifetime_s=1.0)
    seen: list[int] = []

    def train(request: Message, _: Context) -> Message:
        for batch in until_deadline(range(1_000_000)):
            seen.append(batch)
            time.sleep(0.001)
        assert agent.board.current_mode() == parked_mode(agent.board)
        return answered(request, _)

    power_mode_mod(assigned(plan_id="7/2"), context(**{"agent-socket": str(agent.socket)}), train)
    assert 1 < len(seen) < 1_000_000


def refused(agent: Agent, reason: str, plan_id: str = "7/1") -> None:
    with pytest.raises(AgentUnreachableError, match=reason):
        power_mode_mod(assigned(plan_id=plan_id), context(**{"agent-socket": str(agent.socket)}), answered)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.states == [], "it never trained"


@pytest.mark.parametrize("plan_id", ["7/2", "made up"])
def test_a_training_without_a_grant_is_refused(agent: Agent, plan_id: str) -> None:
    refused(agent, "FAILED_PRECONDITION: the coordinator has granted no watts", plan_id)


def test_a_training_that_was_called_off_is_refused(agent: Agent) -> None:
    agent.grant(granted(None, grant_id=2))
    refused(agent, "FAILED_PRECONDITION: the coordinator has granted no watts")


def test_a_message_that_arrives_after_its_plan_was_given_up_is_refused(agent: Agent) -> None:
    agent.grant(granted(plan_id="7/2", grant_id=2))
    refused(agent, "FAILED_PRECONDITION: the coordinator has granted no watts")


def test_a_grant_serves_one_training(agent: Agent) -> None:
    where = context(**{"agent-socket": str(agent.socket)})
    assert not power_mode_mod(assigned(), where, answered).has_error()
    agent.grant(granted(grant_id=2))  # as a restarted coordinator repeats it
    with pytest.raises(AgentUnreachableError, match="FAILED_PRECONDITION"):
        power_mode_mod(assigned(), where, answered)


def test_a_mode_that_draws_more_than_its_limit_is_refused(agent: Agent) -> None:
    agent.grant(granted(power_limit_w=1.0, plan_id="7/2", grant_id=2))
    refused(agent, "INVALID_ARGUMENT: .* is predicted to draw .* more than the limit of 1.0 W", "7/2")


# --- Pairing ----------------------------------------------------------------------------------------------------------
# A SuperNode reports whether it can reach its device's agent, over real sockets.

NOBODY = 65_534


def told(path: Path, device_id: str = "orin-nano-0") -> ConfigRecord:
    request = message(RecordDict({RECORD_KEY: ConfigRecord({IDENTIFY_KEY: True})}))
    reply = power_mode_mod(request, context(**{DEVICE_ID_KEY: device_id, "agent-socket": str(path)}), answered)
    assert not reply.has_error(), "Flower's server would exclude the node for ten minutes"
    record = reply.content[RECORD_KEY]
    assert record[DEVICE_ID_KEY] == device_id
    return record


def test_a_node_with_its_agent_has_no_problem(agent: Agent) -> None:
    assert told(agent.socket)[PAIRING_PROBLEM_KEY] == ""


def test_the_agent_of_another_device_is_named(agent: Agent) -> None:
    problem = told(agent.socket, "orin-nano-1")[PAIRING_PROBLEM_KEY]
    assert f"the socket {agent.socket} belongs to orin-nano-0, but the SuperNode names orin-nano-1" in problem
    assert "--node-config 'device-id=\"orin-nano-0\"'" in problem


def test_a_socket_that_does_not_exist_is_named(tmp_path: Path) -> None:
    problem = told(tmp_path / "absent.sock")[PAIRING_PROBLEM_KEY]
    assert problem.startswith(f"there is no socket {tmp_path / 'absent.sock'}")
    assert "systemctl start wattfleet-agent" in problem and 'agent-socket="..."' in problem


def test_an_agent_that_was_killed_is_away(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert str(told(path)[PAIRING_PROBLEM_KEY]).startswith(f"no agent listens at {path}: start it")


def test_a_path_that_no_socket_can_have_is_told(tmp_path: Path) -> None:
    assert "cannot be used" in str(told(tmp_path / ("long" * 40))[PAIRING_PROBLEM_KEY])


def test_an_agent_that_hangs_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattfleet.flower.client.mod._WITHIN_S", 0.2)
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / "agent.sock"))
        hanging.listen()
        assert "does not answer" in str(told(tmp_path / "agent.sock")[PAIRING_PROBLEM_KEY])


def _as_nobody(path: str, tell: Callable[[str | None], None]) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    tell(pairing_problem("orin-nano-0", path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_user_who_may_not_use_the_socket_is_told_the_group(agent: Agent) -> None:
    # The test's folders are accessible to root only.
    folder = agent.socket.parent
    while folder != folder.parent and not folder.stat().st_mode & 0o001:
        folder.chmod(folder.stat().st_mode | 0o011)
        folder = folder.parent
    processes = multiprocessing.get_context("spawn")
    answers: multiprocessing.SimpleQueue[str | None] = processes.SimpleQueue()
    process = processes.Process(target=_as_nobody, args=(str(agent.socket), answers.put))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    problem = answers.get()
    assert problem is not None and "may not use the socket" in problem and "usermod -aG" in problem


def test_a_device_that_is_being_prepared_tells_its_name(agent: Agent) -> None:
    trainings = agent.trainings
    is_away = threading.Event()
    agent.loop.call_soon_threadsafe(lambda: (setattr(trainings, "_ready", None), is_away.set()))
    assert is_away.wait(10)
    assert told(agent.socket)[PAIRING_PROBLEM_KEY] == ""


# --- Planned epochs ---------------------------------------------------------------------------------------------------
# A training with the number of epochs that the plan has chosen, from the message to the agent's observation.

MINIBATCHES = 100
"""Minibatches per epoch, as known to the agent."""


def observed_epoch_s(folder: Path, epochs: int) -> float:
    """Seconds per epoch, as the agent observes them in a training of this many planned epochs."""
    folder.mkdir()
    request = assigned()
    record = RoundAssignment("7/1", "orin-nano-0", epochs=float(epochs)).to_record()
    request.content[RECORD_KEY] = ConfigRecord(record)
    request.content[WORK_KEY] = ConfigRecord(AssignedWork(epochs=epochs).to_record())
    with agent_at(folder / "agent.sock") as agent:

        def app(message: Message, where: Context) -> Message:
            for _ in range(MINIBATCHES * planned_work(16, epochs=2).epochs):
                agent.board.step()
            return answered(message, where)

        reply = power_mode_mod(request, context(**{"agent-socket": str(agent.socket), "auto-profile": False}), app)
        [observation] = agent.reports.observations
    assert reply.content[RECORD_KEY][TOOK_EPOCHS_KEY] is True
    assert reply.content[RECORD_KEY]["observed-epoch-s"] == observation.epoch_s
    return observation.epoch_s


def test_an_epoch_is_observed_to_take_as_long_whatever_the_number_of_epochs(tmp_path: Path) -> None:
    few, many = (observed_epoch_s(tmp_path / str(epochs), epochs) for epochs in (1, 5))
    assert few == pytest.approx(many, rel=0.02)
