"""The mod on the device, against a real agent socket."""

from __future__ import annotations

import asyncio
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

import reference_models
from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.selection import open_device
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from edge_agent.learning.fitting import FittingHere
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.learning.transfer import Transfer
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.journal_records import Renewal
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.profiling.profiling_plan import profile_device
from edge_agent.runtime.readiness import parked_mode
from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.runtime.state_reporter import StateReporter
from edge_agent.runtime.states import ProfileEnded
from edge_agent.session.orders import Orders
from edge_agent.settings import RecoverySettings
from edge_agent.training.local_socket import LocalAgentServicer
from edge_agent.training.training import Observed, TrainingWatch
from edge_agent.training.unix_socket import require_own_socket, serve_socket
from tests.fakes.flower_task import be_task
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode
from wattfleet.prediction import read_artefact
from wattfleet_flower import AgentUnreachableError, power_mode_mod, profiled, until_deadline
from wattfleet_flower.client.agent_training import CURRENT_TRAINING
from wattfleet_proto.assignment import (
    APP_WEIGHS_KEY,
    CUT_KEY,
    DEVICE_ID_KEY,
    IDENTIFY_KEY,
    RECORD_KEY,
    SHARE_KEY,
    RoundAssignment,
)
from wattfleet_proto.convert import front_to_message, mode_to_message
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc, session_pb2

REFERENCE = read_artefact(Path(reference_models.__file__).parent / "agx_orin_resnet18")
MEASURED, LIMIT = 6, 12
MODE = PowerMode(6, 1_510_400, 624_750_000, 2_133_000_000)


class Reports:
    """Stands in for the link to the coordinator."""

    connected = True

    def __init__(self) -> None:
        self.orders = Orders()
        self.states: list[session_pb2.StateReport] = []
        self.observations: list[session_pb2.Observation] = []
        self.fronts: list[session_pb2.FrontReport] = []

    def report_state(self, report: session_pb2.StateReport) -> None:
        self.states.append(report)

    def report_front(self, report: session_pb2.FrontReport) -> None:
        self.fronts.append(report)

    def report_observation(self, report: session_pb2.Observation) -> None:
        self.observations.append(report)

    async def flush(self, timeout_s: float) -> bool:
        return True


class Agent:
    order: Callable[[session_pb2.Reassign], None]

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.board: VirtualBoard = open_device("simulated:orin-nano", 1)
        self.open_steps = built_in_workload(self.board.step).open_steps
        header = JournalHeader("orin-nano-0", "orin-nano", "simulated", "resnet18-imagenet", 16)
        self.journal = Journal.open(socket.with_suffix(".jsonl"), header)
        fitting = FittingHere(Transfer(REFERENCE, header, 100), self.board.modes)
        fitted = profile_device(self.board, self.open_steps, self.journal, fitting, MEASURED, 0, lambda progress: None)
        self.learner = OnlineLearner(
            self.board,
            self.open_steps,
            self.journal,
            lambda: nullcontext(fitting),
            fitted,
            LIMIT,
            100,
            0,
            lambda kept: None,
        )
        self.board.apply(parked_mode(self.board))
        self.reports = Reports()
        self.reporter = StateReporter(self.reports)  # type: ignore[arg-type]
        self.reporter.decide(ProfileEnded(repeated=False))


@contextmanager
def agent_at(socket: Path) -> Iterator[Agent]:
    agent = Agent(socket)
    loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    agent.order = lambda order: asyncio.run_coroutine_threadsafe(agent.reports.orders.receive(order), loop).result(10)

    async def serve() -> None:
        watch = TrainingWatch(agent.board, parked_mode(agent.board), 100, agent.learner.productive)
        reports: Any = agent.reports
        supervisor = RecoverySupervisor(
            watch,
            reports,
            agent.reporter,
            agent.learner,
            lambda: session_pb2.FrontReport(front=front_to_message(agent.learner.front)),
            RecoverySettings(retry_s=0.02),
        )
        servicer = LocalAgentServicer("orin-nano-0", watch, reports, agent.learner, supervisor)
        async with aclosing(supervisor), serve_socket(socket, servicer):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield agent
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
        agent.learner.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with agent_at(tmp_path / "agent.sock") as running:
        yield running


def message(content: RecordDict) -> Message:
    be_task(run_id=7, node_id=1)
    made = Message(content, dst_node_id=5, message_type="train")
    made.metadata.__dict__["_message_id"] = "1"
    return made


def context(**node_config: Any) -> Context:
    return Context(run_id=7, node_id=5, node_config=node_config, state=RecordDict(), run_config={})


def assigned(device_id: str = "orin-nano-0", mode: PowerMode = MODE) -> Message:
    record = RoundAssignment("7/1", device_id, mode, epochs=1.0, power_limit_w=20.0).to_record()
    return message(RecordDict({"config": ConfigRecord({"lr": 0.1}), RECORD_KEY: ConfigRecord(record)}))


def answered(request: Message, _: Context) -> Message:
    return Message(RecordDict(), reply_to=request)


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
        session_pb2.DEVICE_STATE_READY,
    ]


def test_messages_without_an_assignment_pass_untouched() -> None:
    request = message(RecordDict({"config": ConfigRecord()}))
    assert not power_mode_mod(request, context(), answered).has_error()


def test_identifies_without_calling_the_app() -> None:
    request = message(RecordDict({RECORD_KEY: ConfigRecord({IDENTIFY_KEY: True})}))

    def app(request: Message, _: Context) -> Message:
        raise AssertionError("not for the app")

    reply = power_mode_mod(request, context(**{"device-id": "orin-nano-0"}), app)
    assert reply.content[RECORD_KEY][DEVICE_ID_KEY] == "orin-nano-0"
    with pytest.raises(InvalidInputError, match="--node-config"):
        power_mode_mod(request, context(), app)


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


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (lambda: assigned(device_id="agx-orin-0"), "this is orin-nano-0's agent"),
        (lambda: assigned(mode=MODE._replace(gpu_hz=1_300_500_000)), "INVALID_ARGUMENT"),
    ],
)
def test_the_agent_refuses_what_is_not_its_own(agent: Agent, request_: Any, reason: str) -> None:
    with pytest.raises(AgentUnreachableError, match=reason):
        power_mode_mod(request_(), context(**{"agent-socket": str(agent.socket)}), answered)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.states == [], "the device itself is well"


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
    abandon, on = TrainingWatch.abandon, set()

    def noted(watch: TrainingWatch) -> None:
        on.add(threading.current_thread().name)
        abandon(watch)

    monkeypatch.setattr(TrainingWatch, "abandon", noted)
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        start = local_pb2.StartTraining(plan_id="7/1", device_id="orin-nano-0", mode=mode_to_message(MODE), epochs=1.0)
        never_ends = threading.Event()

        def requests() -> Iterator[local_pb2.TrainRequest]:
            yield local_pb2.TrainRequest(start=start)
            never_ends.wait(30)

        call = local_pb2_grpc.LocalAgentServiceStub(channel).Train(requests())
        assert next(call).HasField("started")
        assert agent.board.current_mode() == MODE
        with pytest.raises(AgentUnreachableError, match="RESOURCE_EXHAUSTED: orin-nano-0 is training already"):
            power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), answered)
        call.cancel()  # as the end of its process does
        never_ends.set()
    give_up_s = time.monotonic() + 10
    while agent.board.current_mode() != parked_mode(agent.board):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    assert agent.reports.observations == []
    assert all(name.startswith("asyncio_") for name in on), "parking takes its time, and the loop has more to do"
    # The next round finds it well.
    assert not power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), answered).has_error()


def test_a_degraded_device_comes_back_once_it_can_be_parked(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
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
    give_up_s = time.monotonic() + 10
    while agent.reports.states[-1].state != session_pb2.DEVICE_STATE_READY:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_no_agent_no_training(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachableError, match="orin-nano-0: the agent at .*absent.sock"):
        power_mode_mod(assigned(), context(**{"agent-socket": str(tmp_path / "absent.sock")}), answered)


def test_owner_and_group_may_connect_and_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))  # and never unlinked, as a killed agent leaves it
    with agent_at(path):
        assert stat.filemode(path.stat().st_mode) == "srw-rw----"


def test_neither_a_file_nor_a_living_agents_socket_is_taken(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("do not lose")
    with pytest.raises(InvalidInputError, match="no socket"):
        require_own_socket(precious)
    assert precious.read_text() == "do not lose"
    with agent_at(tmp_path / "agent.sock") as living:
        with pytest.raises(InvalidInputError, match="another agent serves"):
            require_own_socket(living.socket)
        assert not power_mode_mod(assigned(), context(**{"agent-socket": str(living.socket)}), answered).has_error()


def trains_on(batches: Any, seen: list[int], modes: list[PowerMode], agent: Agent) -> Any:
    def train(request: Message, _: Context) -> Message:
        for batch in profiled(batches):
            seen.append(batch)
            modes.append(agent.board.current_mode())
        modes.append(agent.board.current_mode())
        return answered(request, _)

    return train


def test_modes_are_measured_while_the_app_trains_and_no_batch_is_lost(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every minibatch is reported: here they take no time, so the usual half second would never be over.
    monkeypatch.setattr("wattfleet_flower.client.loaders._REPORT_INTERVAL_S", 0.0)
    seen: list[int] = []
    modes: list[PowerMode] = []
    before = len(agent.journal.records)
    train = trains_on(range(800), seen, modes, agent)
    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert not reply.has_error()
    assert seen == list(range(800))
    measured = [record.mode for record in agent.journal.records[before:]]
    assert measured and set(measured) < set(modes)
    assert modes[-1] == MODE, "after the loader the assigned mode is in force again"
    assert agent.board.current_mode() == parked_mode(agent.board)
    # What the round needed says nothing of the assigned mode, so it is no observation; the front is newer.
    assert agent.reports.observations == []
    assert len(agent.reports.fronts) == 1


def test_no_mode_is_measured_that_may_draw_more_than_the_round_was_given(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wattfleet_flower.client.loaders._REPORT_INTERVAL_S", 0.0)
    prediction = agent.learner.front
    least_w = float(np.min(prediction.power_w))
    record = RoundAssignment("7/1", "orin-nano-0", MODE, epochs=1.0, power_limit_w=0.5 * least_w).to_record()
    request = message(RecordDict({RECORD_KEY: ConfigRecord(record)}))
    modes: list[PowerMode] = []
    train = trains_on(range(10), [], modes, agent)
    power_mode_mod(request, context(**{"agent-socket": str(agent.socket)}), train)
    assert set(modes) == {MODE}
    assert len(agent.reports.observations) == 1, "such a round is observed as any other"


def test_outside_of_a_watched_training_a_profiled_loader_is_the_loader() -> None:
    assert list(profiled(range(3))) == [0, 1, 2]


def test_an_app_that_dies_while_modes_are_measured_leaves_the_device_parked(agent: Agent) -> None:
    def train(request: Message, _: Context) -> Message:
        for batch in profiled(range(100)):
            if batch == 3:
                assert agent.board.current_mode() != MODE
                raise MemoryError("out of memory")
        raise AssertionError("unreachable")

    with pytest.raises(MemoryError):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert not power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), answered).has_error()


def assigned_until(deadline_s: float | None, epochs: float = 1.0) -> Message:
    record = RoundAssignment("7/1", "orin-nano-0", MODE, epochs, power_limit_w=20.0, deadline_s=deadline_s).to_record()
    return message(RecordDict({RECORD_KEY: ConfigRecord(record)}))


def test_a_training_that_its_deadline_ends_is_kept_told_and_observed_for_what_was_done(agent: Agent) -> None:
    seen: list[int] = []

    def train(request: Message, _: Context) -> Message:
        for _epoch in range(2):
            seen.extend(until_deadline(range(10)))
        return answered(request, _)

    where = context(**{"agent-socket": str(agent.socket)})
    whole = power_mode_mod(assigned_until(None, epochs=2.0), where, train)
    assert dict(whole.content[RECORD_KEY]) == {CUT_KEY: False, APP_WEIGHS_KEY: False, SHARE_KEY: 1.0}
    assert seen == [*range(10), *range(10)]

    seen.clear()
    cut = power_mode_mod(assigned_until(1e-9, epochs=2.0), where, train)
    assert not cut.has_error()
    assert dict(cut.content[RECORD_KEY]) == {CUT_KEY: True, APP_WEIGHS_KEY: False, SHARE_KEY: 0.05}
    assert seen == [0]
    # The simulated board trained a tenth of an epoch: its seconds are told per epoch all the same.
    first, second = agent.reports.observations
    assert second.epoch_s == pytest.approx(first.epoch_s, rel=0.3)


def test_a_deadline_in_the_midst_of_measuring_puts_the_rounds_own_mode_back(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wattfleet_flower.client.loaders._REPORT_INTERVAL_S", 0.0)
    modes: list[PowerMode] = []

    def train(request: Message, _: Context) -> Message:
        for _batch in until_deadline(profiled(range(800)), app_weighs=True):
            modes.append(agent.board.current_mode())
        modes.append(agent.board.current_mode())
        return answered(request, _)

    reply = power_mode_mod(assigned_until(1e-9), context(**{"agent-socket": str(agent.socket)}), train)
    assert len(modes) == 2 and modes[0] != MODE and modes[1] == MODE
    assert reply.content[RECORD_KEY][APP_WEIGHS_KEY] is True
    assert reply.content[RECORD_KEY][SHARE_KEY] == pytest.approx(1 / 800)
    assert agent.reports.observations == []


def test_of_a_loader_without_a_length_the_time_of_an_epoch_is_not_learnt(agent: Agent) -> None:
    def train(request: Message, _: Context) -> Message:
        assert list(until_deadline(iter(range(10)))) == [0]
        return answered(request, _)

    reply = power_mode_mod(assigned_until(1e-9), context(**{"agent-socket": str(agent.socket)}), train)
    assert dict(reply.content[RECORD_KEY]) == {CUT_KEY: True, APP_WEIGHS_KEY: False}
    assert agent.reports.observations == []
    assert agent.board.current_mode() == parked_mode(agent.board)


@pytest.mark.parametrize("epochs_done", [1.5, -0.1, float("nan")])
def test_more_work_than_was_assigned_is_refused(agent: Agent, epochs_done: float) -> None:
    def train(request: Message, _: Context) -> Message:
        training = CURRENT_TRAINING.get()
        assert training is not None
        with pytest.raises(grpc.RpcError):
            training.finish(False, epochs_done)
        raise MemoryError("to leave the mod")

    with pytest.raises((MemoryError, AgentUnreachableError)):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.observations == []


# --- watts that fall during a round -------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_s, "it did not come about"
        time.sleep(0.005)


def test_a_round_goes_on_in_the_mode_that_is_ordered_and_nothing_is_observed_of_either(agent: Agent) -> None:
    thriftier = MODE._replace(gpu_hz=306_000_000)

    def train(request: Message, _: Context) -> Message:
        agent.order(session_pb2.Reassign(plan_id="another/1", power_limit_w=1.0))
        agent.order(session_pb2.Reassign(plan_id="7/1", mode=mode_to_message(thriftier), power_limit_w=8.0))
        until(lambda: agent.board.current_mode() == thriftier)
        assert list(until_deadline(profiled(range(6)))) == list(range(6)), "it goes on, and measures no more"
        assert agent.board.current_mode() == thriftier
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert not reply.has_error()
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.observations == []
    assert agent.reports.states[-1].state == session_pb2.DEVICE_STATE_READY


def test_a_round_that_is_ordered_to_stop_keeps_what_it_has_done(agent: Agent) -> None:
    seen: list[int] = []

    def train(request: Message, _: Context) -> Message:
        for batch in until_deadline(range(1_000_000)):
            seen.append(batch)
            if batch == 3:
                agent.order(session_pb2.Reassign(plan_id="7/1"))
            time.sleep(0.001)
        assert agent.board.current_mode() == parked_mode(agent.board), "the watts are saved at once"
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert 3 < len(seen) < 1_000_000
    assert reply.content[RECORD_KEY][CUT_KEY] is True
    assert reply.content[RECORD_KEY][SHARE_KEY] == pytest.approx(len(seen) / 1_000_000)
    assert agent.reports.observations == []


def test_an_order_that_comes_before_its_training_holds_from_the_start(agent: Agent) -> None:
    agent.order(session_pb2.Reassign(plan_id="7/1"))

    def train(request: Message, _: Context) -> Message:
        until(lambda: agent.board.current_mode() == parked_mode(agent.board))
        time.sleep(0.05)
        assert list(until_deadline(range(50))) == [0], "one minibatch is always done"
        return answered(request, _)

    power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)


def test_what_rounds_show_joins_the_profile_and_the_front_follows(agent: Agent) -> None:
    power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), answered)
    assert MODE in [known.mode for known in agent.journal.measurements]
    assert len(agent.reports.fronts) == 1


def test_a_device_that_contradicts_its_predictor_is_measured_anew_and_comes_back(agent: Agent) -> None:
    reasons = iter(["3 of the last 5 rounds took longer"])
    agent.learner.observe = lambda observed: next(reasons, None)  # type: ignore[method-assign]
    agent.journal.append(Renewal("3 of the last 5 rounds took longer", 5))
    power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), answered)
    give_up_s = time.monotonic() + 20
    while agent.reports.states[-1].detail != "parked; profiled again":
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    assert len(agent.journal.records) == 5
    assert session_pb2.DEVICE_STATE_PROFILING in [report.state for report in agent.reports.states]
    assert agent.board.current_mode() == parked_mode(agent.board)


@pytest.mark.parametrize(
    ("fetch_stall_ms", "reason"),
    [
        (-1.0, "a minibatch has to wait"),
        (float("inf"), "a minibatch has to wait"),
        (float("nan"), "a minibatch has to wait"),
        (1e12, "1e.09 s of minibatches"),
        (5_000.0, "5.005 s of minibatches"),
    ],
)
def test_a_minibatch_of_impossible_times_is_refused(agent: Agent, fetch_stall_ms: float, reason: str) -> None:
    def train(request: Message, _: Context) -> Message:
        training = CURRENT_TRAINING.get()
        assert training is not None
        training.report([local_pb2.MinibatchTimes(fetch_stall_ms=fetch_stall_ms, compute_ms=5.0)], paused=False)
        raise AssertionError("unreachable")

    with pytest.raises(AgentUnreachableError, match=f"INVALID_ARGUMENT: {reason}"):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reporter.state is DeviceState.READY


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"epochs": 1e-320}, "epochs must be 0.001 to 10000"), ({"plan_id": "7" * 201}, "at most 200 characters")],
)
def test_an_assignment_that_cannot_be_is_refused_before_anything_is_done(
    agent: Agent, change: dict[str, Any], reason: str
) -> None:
    before = list(agent.journal.measurements)
    assignment = replace(RoundAssignment("7/1", "orin-nano-0", MODE, epochs=1.0, power_limit_w=20.0), **change)
    request = message(RecordDict({RECORD_KEY: ConfigRecord(assignment.to_record())}))
    with pytest.raises(AgentUnreachableError, match=f"INVALID_ARGUMENT: .*{reason}"):
        power_mode_mod(request, context(**{"agent-socket": str(agent.socket)}), answered)
    assert (agent.reports.states, agent.reports.observations) == ([], [])
    assert list(agent.journal.measurements) == before


def test_a_round_that_cannot_be_learnt_from_leaves_the_device_ready(agent: Agent) -> None:
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
