"""Both sides of an agent's local socket: the agent of a virtual board, one that only records, and apps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

import reference_models
from edge_agent.devices.selection import open_virtual_board
from edge_agent.learning.fitting import FittingHere, OpenFittingTo
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.learning.profiling_plan import profile_device
from edge_agent.learning.transfer import Transfer
from edge_agent.learning.workloads import Workloads
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.known_workload import BUILT_IN, KnownWorkload
from edge_agent.profiling.stored_profile import WorkloadFolders
from edge_agent.runtime.app_trainings import AppTrainings
from edge_agent.runtime.device_trainings import DeviceTrainings
from edge_agent.runtime.readiness import parked_mode
from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.runtime.states import ProfileEnded, StateReporter
from edge_agent.runtime.unix_socket import serve_socket
from edge_agent.session.grants import GrantKeeper
from edge_agent.settings import ConnectionSettings, WorkloadSettings
from edge_agent.training.training import TrainingRunner
from tests.fakes.agent_settings import waiting_times
from tests.fakes.fittings import FittingOnce
from wattfleet.core.modes import JournalHeader, PowerMode, Profile, Workload, WorkloadFacts
from wattfleet.core.prediction import read_artefact
from wattfleet.simulation.flower_task import be_task
from wattfleet_proto.assignment import (
    RECORD_KEY,
    RoundAssignment,
)
from wattfleet_proto.convert import front_to_message, mode_to_message
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc, session_pb2

# --- Agent socket -----------------------------------------------------------------------------------------------------
# The agent's local socket for a virtual board, and messages for the mod.


REFERENCE = read_artefact(Path(reference_models.__file__).parent / "agx_orin_resnet18")
MEASURED, LIMIT = 6, 12
APP = "digits"
LIFETIME_S = 120.0
MODE = PowerMode(6, 1_510_400, 624_750_000, 2_133_000_000)


class Reports:
    """Stands in for the session with the coordinator."""

    connected = True

    def __init__(self) -> None:
        self.grants = GrantKeeper()
        self.states: list[session_pb2.StateReport] = []
        self.observations: list[session_pb2.Observation] = []
        self.fronts: list[session_pb2.FrontReport] = []
        self.energies: list[session_pb2.TrainingEnergy] = []

    def report_state(self, report: session_pb2.StateReport) -> None:
        self.states.append(report)

    def report_front(self, report: session_pb2.FrontReport) -> None:
        self.fronts.append(report)

    def report_observation(self, report: session_pb2.Observation) -> None:
        self.observations.append(report)

    def report_energy(self, report: session_pb2.TrainingEnergy) -> None:
        self.energies.append(report)

    async def flush(self, timeout_s: float) -> bool:
        return True


class Agent:
    grant: Callable[..., None]
    loop: asyncio.AbstractEventLoop
    device_trainings: DeviceTrainings
    trainings: AppTrainings

    def __init__(self, socket: Path, open_fitting: OpenFittingTo | None = None, fits_once: bool = False) -> None:
        self.socket = socket
        self.duty: str | None = None  # whose requests the board answers
        self.refuses_unplanned = False
        self.unplanned: list[tuple[str, bool]] = []  # what was reported of trainings without a plan
        self.board = open_virtual_board("simulated:orin-nano", 1)
        self.open_steps = lambda: nullcontext(self.board.step)
        header = JournalHeader("orin-nano-0", "orin-nano", "simulated", "resnet18-imagenet", 16)
        self.journal = Journal.open(socket.with_suffix(".jsonl"), header)
        if open_fitting is None:
            known = KnownWorkload(Workload(BUILT_IN, WorkloadFacts(batch=16)), 100)
            fitting_of = FittingOnce if fits_once else FittingHere
            here = fitting_of(Transfer((REFERENCE,), header, 100), self.board.modes)
            open_fitting, measured = lambda known: nullcontext(here), MEASURED
        else:  # an app's own workload, with no mode measured
            known, measured = KnownWorkload(Workload(APP, WorkloadFacts(batch=16)), 100), 0
        with open_fitting(known) as fitting:
            if measured:
                fitted = profile_device(
                    self.board, self.open_steps, self.journal, fitting, measured, 0, lambda progress: None
                )
            else:
                fitted = fitting.fit(Profile.of(()), 0)
        self.learner = OnlineLearner(
            self.board,
            self.open_steps,
            self.journal,
            open_fitting,
            fitted,
            LIMIT,
            known,
            0,
            lambda kept: None,
        )
        folders = WorkloadFolders(socket.with_suffix(".state"))
        self.workloads = Workloads(
            folders, known, lambda known, folder: self.learner, lambda name: None, WorkloadSettings()
        )
        self.workloads.learner("")
        self.board.apply(parked_mode(self.board))
        self.reports = Reports()
        self.reporter = StateReporter(self.reports)  # type: ignore[arg-type]
        self.reporter.decide(ProfileEnded(repeated=False))


@contextmanager
def agent_at(
    socket: Path,
    retry_s: float = 30.0,
    grant_timeout_s: float = 0.2,
    stop_timeout_s: float = 300.0,
    open_fitting: OpenFittingTo | None = None,
    fits_once: bool = False,
) -> Iterator[Agent]:
    """An agent with a grant for round 7/1; with a fitting of its own, it trains the workload `APP`."""
    agent = Agent(socket, open_fitting, fits_once)
    loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def receive(grant: session_pb2.Grant, lifetime_s: float) -> None:
        agent.reports.grants.greeting()
        await agent.reports.grants.welcomed(lifetime_s)
        await agent.reports.grants.receive(grant)

    def grant(grant: session_pb2.Grant, lifetime_s: float = LIFETIME_S) -> None:
        asyncio.run_coroutine_threadsafe(receive(grant, lifetime_s), loop).result(10)

    agent.grant, agent.loop = grant, loop

    async def serve() -> None:
        watch = TrainingRunner(agent.board, parked_mode(agent.board), sharing=lambda: agent.duty)
        reports: Any = agent.reports
        supervisor = RecoverySupervisor(
            watch,
            reports,
            agent.reporter,
            agent.workloads,
            lambda: [
                session_pb2.FrontReport(
                    front=front_to_message(agent.learner.predicted_front()[0]), minibatches_per_epoch=100
                )
            ],
        )
        settings = ConnectionSettings(stop_timeout_s=stop_timeout_s)
        agent.device_trainings = DeviceTrainings("orin-nano-0", watch, reports, agent.workloads, supervisor, settings)
        agent.trainings = trainings = AppTrainings(
            "orin-nano-0", lambda: agent.refuses_unplanned, lambda *told: agent.unplanned.append(told)
        )
        async with aclosing(supervisor), trainings.served_by(agent.device_trainings), serve_socket(socket, trainings):
            ready.set()
            await stop.wait()

    def run() -> None:
        # A runner cancels the calls that the server has left; with a closed loop, they would be logged in some later
        # test.
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    agent.grant(granted())
    try:
        with waiting_times(retry_s, grant_timeout_s):
            yield agent
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        agent.learner.close()


def granted(
    mode: PowerMode | None = MODE, power_limit_w: float = 25.0, plan_id: str = "7/1", grant_id: int = 1
) -> session_pb2.Grant:
    message = session_pb2.Grant(id=grant_id, plan_id=plan_id, power_limit_w=power_limit_w, longest_s=600)
    if mode is not None:
        message.mode.CopyFrom(mode_to_message(mode))
    return message


def message(content: RecordDict) -> Message:
    be_task(run_id=7, node_id=1)
    made = Message(content, dst_node_id=5, message_type="train")
    made.metadata.__dict__["_message_id"] = "1"
    return made


def context(**node_config: Any) -> Context:
    return Context(run_id=7, node_id=5, node_config=node_config, state=RecordDict(), run_config={})


def assigned(device_id: str = "orin-nano-0", plan_id: str = "7/1") -> Message:
    record = RoundAssignment(plan_id, device_id, epochs=1.0).to_record()
    return message(RecordDict({"config": ConfigRecord({"lr": 0.1}), RECORD_KEY: ConfigRecord(record)}))


def answered(request: Message, _: Context) -> Message:
    return Message(RecordDict(), reply_to=request)


# --- Streaming app ----------------------------------------------------------------------------------------------------
# A ClientApp on the agent's socket that sends what a test specifies, message by message.

FINISH = local_pb2.TrainRequest(finish=local_pb2.FinishTraining())


def started(plan_id: str, epochs: float = 1.0, device_id: str = "orin-nano-0") -> local_pb2.TrainRequest:
    return local_pb2.TrainRequest(start=local_pb2.StartTraining(plan_id=plan_id, device_id=device_id, epochs=epochs))


class App:
    """One stream of trainings, message by message."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self.call: Any = local_pb2_grpc.LocalAgentServiceStub(channel).Train(iter(self._requests.get, None))

    def send(self, *requests: Any) -> None:
        for request in requests:
            self._requests.put(request)

    def answer(self) -> Any:
        return next(self.call)

    def end(self) -> None:
        self._requests.put(None)

    def refusal(self) -> tuple[grpc.StatusCode, str]:
        """The error with which the agent ends the stream."""
        with pytest.raises(grpc.RpcError):
            while True:
                self.answer()
        return self.call.code(), self.call.details()


# --- Recording agent --------------------------------------------------------------------------------------------------
# An agent's local socket that records an app's messages and gives configured replies.


@dataclass
class RecordingAgent(local_pb2_grpc.LocalAgentServiceServicer):
    """An agent without a device.

    Attributes:
        socket: path of its socket.
        wants: minibatches that it requests in each training.
        observed: the observation that it returns at the end of each training.
        requests: the messages that it received, by training.
    """

    socket: Path
    wants: int = 1_000_000
    observed: local_pb2.TrainingFinished = field(default_factory=local_pb2.TrainingFinished)
    requests: list[list[local_pb2.TrainRequest]] = field(default_factory=list)

    def Train(  # noqa: N802 - named by the protocol
        self, request_iterator: Iterator[local_pb2.TrainRequest], context: Any
    ) -> Iterator[local_pb2.TrainResponse]:
        received: list[local_pb2.TrainRequest] = []
        self.requests.append(received)
        for request in request_iterator:
            received.append(request)
            match request.WhichOneof("body"):
                case "start":
                    yield local_pb2.TrainResponse(started=local_pb2.TrainingStarted())
                case "minibatches":
                    measuring = len(minibatches(received)) < self.wants
                    yield local_pb2.TrainResponse(noted=local_pb2.MinibatchesNoted(measuring=measuring))
                case "finish":
                    yield local_pb2.TrainResponse(finished=self.observed)

    def ShowTraining(  # noqa: N802 - named by the protocol
        self, request: local_pb2.ShowTrainingRequest, context: Any
    ) -> local_pb2.ShowTrainingResponse:
        return local_pb2.ShowTrainingResponse()

    def GetDevice(  # noqa: N802 - named by the protocol
        self, request: local_pb2.GetDeviceRequest, context: Any
    ) -> local_pb2.GetDeviceResponse:
        return local_pb2.GetDeviceResponse()

    def NoteUnplanned(  # noqa: N802 - named by the protocol
        self, request: local_pb2.NoteUnplannedRequest, context: Any
    ) -> local_pb2.NoteUnplannedResponse:
        return local_pb2.NoteUnplannedResponse()

    @property
    def loaders(self) -> list[local_pb2.LoaderSeen]:
        """The reported loaders."""
        return [request.loader for requests in self.requests for request in requests if request.HasField("loader")]

    @property
    def minibatches(self) -> int:
        """The number of minibatches that were reported."""
        return sum(len(minibatches(requests)) for requests in self.requests)

    @property
    def reports(self) -> list[local_pb2.MinibatchesTrained]:
        """The reports of minibatches, in order."""
        return [
            request.minibatches for requests in self.requests for request in requests if request.HasField("minibatches")
        ]


def minibatches(requests: list[local_pb2.TrainRequest]) -> list[local_pb2.MinibatchTimes]:
    """The minibatches that were reported."""
    return [times for request in requests for times in request.minibatches.minibatches]


@contextmanager
def recording_agent(socket: Path) -> Iterator[RecordingAgent]:
    """An agent that listens on a socket."""
    agent = RecordingAgent(socket)
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        local_pb2_grpc.add_LocalAgentServiceServicer_to_server(agent, server)
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        try:
            yield agent
        finally:
            server.stop(None).wait()
