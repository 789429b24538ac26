"""A fleet in virtual time: the product's coordinator and agents on simulated boards, in one process.

Sessions, grants, plans, surveys, measurements, fits and selection are the product's own code. Replaced are:

- the clock: an event loop skips to its next timer as soon as nothing is left to do, so computing takes no time.
- the boards: simulated, with the transients and the noise of `SimulatedDevice`. Each minibatch takes the board's time.
- gRPC: messages between the coordinator, the agents and the apps are passed on within the process.
- Flower's processes: a node trains as an app with `power_mode_mod` and `profiled` does, after a fixed time.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import grpc
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import Message as Protobuf

from coordinator.server import FleetInService, Preparation
from coordinator.services.planning import PlanningServicer, RoundPlanning
from coordinator.services.request_limits import STATUS
from coordinator.services.sessions import SessionServicer
from coordinator.settings import CoordinatorSettings, ServerSettings, SiteSettings, StoreSettings
from edge_agent.devices.device import AppTraining
from edge_agent.devices.host import PhysicalTraining
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.learning.fitting import FittingHere
from edge_agent.learning.transfer import Transfer
from edge_agent.paths import OUTBOX_FILE, WELCOME_FILE
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.runtime.app_trainings import AppTrainings
from edge_agent.runtime.device_service import DeviceService
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_figures import DutyFile
from edge_agent.serving.duty_planning import DutyPlanning, InferenceMeasuring
from edge_agent.serving.duty_service import DutyServicer
from edge_agent.serving.inference import InferenceRows
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.grants import GrantKeeper
from edge_agent.session.outbox import Outbox, OutboxFile
from edge_agent.session.status import LatestWelcome, WelcomeFile
from edge_agent.settings import AgentSettings, DeviceSettings
from wattfleet.common.clock import Clock
from wattfleet.common.tasks import background_task, stop_tasks
from wattfleet.core.errors import WattfleetError
from wattfleet.core.modes import ModeArray, Workload
from wattfleet.core.prediction import Predictor
from wattfleet.simulation.flower_task import be_task
from wattfleet_proto.assignment import (
    APP_WEIGHS_KEY,
    CUT_KEY,
    DEVICE_ID_KEY,
    IDENTIFY_KEY,
    MEASURED_KEY,
    PAIRING_PROBLEM_KEY,
    RECORD_KEY,
    SHARE_KEY,
    RoundAssignment,
)
from wattfleet_proto.convert import assignment_to_start, provenance_to_message
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.error_boundary import status_of
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import local_pb2, planning_pb2, session_pb2

Result = TypeVar("Result")
Answer = TypeVar("Answer", bound=Protobuf)

_REPORT_INTERVAL_S = 0.5
"""Seconds between an app's reports of minibatches, as in `wattfleet.flower.client.loaders`."""

_CHUNK_S = 1.0
"""Seconds of minibatches that are trained at once while nothing is measured; a stop takes effect after them."""

_PREPARED_WITHIN_S = 120.0
_SUPERLINK = 1
_STARTED_AT_S = 1_000.0
_PAST_S = 1e-6
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


# --- time -----------------------------------------------------------------------------------------------------------


class _SkippingSelector(selectors.DefaultSelector):
    """Lets virtual time pass instead of waiting."""

    now_s = _STARTED_AT_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits, and no timer is set: the virtual fleet is stuck")
            # Past the timer: it may fire a moment early, and code that compares times would set it again without end.
            self.now_s += timeout + _PAST_S
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. Threads' work runs at once, in the loop's own thread; it takes no virtual time."""

    def __init__(self) -> None:
        self._time = _SkippingSelector()
        super().__init__(self._time)

    def time(self) -> float:
        """Return the virtual time, seconds."""
        return self._time.now_s

    def run_in_executor(  # type: ignore[override]  # a future of this loop, and not a coroutine
        self, executor: Any, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Call a function at once."""
        future: asyncio.Future[Result] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class LoopClock:
    """The clock of code outside the loop, such as Flower's server: everything else goes on while it sleeps.

    Args:
        loop: the loop.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        """Return the virtual time, seconds."""
        return self._loop.time()

    def sleep_s(self, seconds: float) -> None:
        """Let virtual time pass, s."""
        self._loop.run_until_complete(asyncio.sleep(seconds))


class _BoardClock:
    """A board's clock, which is ahead of the loop while the board works; whoever makes it work waits that long."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop, self._ahead_s = loop, 0.0

    def now_s(self) -> float:
        return max(self._loop.time(), self._ahead_s)

    def sleep_s(self, seconds: float) -> None:
        self._ahead_s = self.now_s() + seconds


# --- boards ---------------------------------------------------------------------------------------------------------


class TimedBoard(SimulatedDevice):
    """A simulated board that an app makes work, as on hardware: it knows no workload by itself.

    Args:
        board_kind: kind of board.
        seed: random seed of the unit and its noise; the same unit as `SimulatedDevice(board_kind, seed)`.
        loop: the time.

    Attributes:
        drawn: each change of its settled power, as time in s and power in mW.
    """

    def __init__(self, board_kind: str, seed: int, loop: VirtualLoop) -> None:
        self._time_of_loop = loop
        self.drawn: list[tuple[float, float]] = []
        super().__init__(board_kind, seed)

    def _new_clock(self) -> Clock:
        return _BoardClock(self._time_of_loop)

    def built_in_workload(self, workload: Workload | None = None) -> None:  # type: ignore[override]  # no workload at all
        """Return None: only an app trains here."""
        return

    def begin_training(self, workload: Workload | None = None) -> AppTraining:
        """Begin an app's training, whose times and power are those of the app, whatever the agent knows of it."""
        return PhysicalTraining(self.clock)

    def train(self, workload: Workload, minibatches: int, is_first: bool) -> float:
        """Train minibatches in the mode in force; return how long they take, s.

        Args:
            workload: what the app trains.
            minibatches: how many.
            is_first: whether the app's process has just started, so that its first minibatch takes seconds.
        """
        self.pace(workload)
        if not is_first:
            self.stay_warm()
        begin_s = self.clock.now_s()
        self.run(minibatches)
        return self.clock.now_s() - begin_s

    def energy_j(self) -> float:
        """Return the energy drawn since it was switched on, J."""
        energy_mj = self.activity().energy_mj
        assert energy_mj is not None
        return energy_mj / 1e3

    def _draw(self, power_mw: float) -> None:
        super()._draw(power_mw)
        self.drawn.append((self.clock.now_s(), power_mw))


# --- sessions within the process --------------------------------------------------------------------------------------


def _copied(message: Answer) -> Answer:
    """Return a copy, as the network would deliver it."""
    return type(message).FromString(message.SerializeToString())


class _Stream:
    """One session: an agent's call, and the coordinator's context of it."""

    def __init__(self, sessions: SessionServicer, device_id: str) -> None:
        self._up: asyncio.Queue[Any] = asyncio.Queue()
        self._down: asyncio.Queue[Any] = asyncio.Queue()
        context = SimpleNamespace(
            read=self._up.get, write=self._written_down, peer=lambda: f"virtual:{device_id}", auth_context=dict
        )
        self._serving = background_task("session", sessions.Session(None, context))
        self._serving.add_done_callback(lambda _: self._down.put_nowait(_END))

    async def _written_down(self, message: session_pb2.SessionResponse) -> None:
        self._down.put_nowait(_copied(message))

    async def write(self, message: session_pb2.SessionRequest) -> None:
        self._up.put_nowait(_copied(message))

    async def read(self) -> Any:
        return await self._down.get()

    async def done_writing(self) -> None:
        self._up.put_nowait(_END)

    def cancel(self) -> None:
        self._serving.cancel()


@dataclass(frozen=True)
class Call:
    """A call of the planning service.

    Attributes:
        method: its name.
        began_s: when it began, virtual seconds.
        ended_s: when it was answered.
        request: the request.
        answer: the answer.
    """

    method: str
    began_s: float
    ended_s: float
    request: Any
    answer: Any


class Planner:
    """A stub of the coordinator's planning service for `PowerAware`, which records the answered calls.

    Args:
        loop: the time.
        servicer: the service.

    Attributes:
        calls: the answered calls, oldest first.
    """

    def __init__(self, loop: VirtualLoop, servicer: PlanningServicer) -> None:
        self._loop, self._servicer = loop, servicer
        self._context = SimpleNamespace(auth_context=dict)
        self.calls: list[Call] = []

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method not in planning_pb2.DESCRIPTOR.services_by_name["PlanningService"].methods_by_name:
            raise AttributeError(method)

        def call(request: Any, timeout: float, wait_for_ready: bool) -> Any:
            began_s = self._loop.time()
            try:
                serve = getattr(self._servicer, method)
                answer = self._loop.run_until_complete(serve(_copied(request), self._context))
            except WattfleetError as error:
                none = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(status_of(error, STATUS), none, none, str(error), "") from None
            self.calls.append(Call(method, began_s, self._loop.time(), request, answer))
            return _copied(answer)

        return call


# --- agents and nodes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Busy:
    """A training of one device.

    Attributes:
        device_id: the device.
        plan_id: the plan, or the id of its grant to measure.
        measures: whether it was run in order to measure.
        begin_s: when the agent had started it, virtual seconds.
        end_s: when the agent had parked the device.
    """

    device_id: str
    plan_id: str
    measures: bool
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class NodeWork:
    """What the nodes train.

    Attributes:
        workload: the workload with its true facts, for the boards' times and power.
        minibatches: minibatches of an epoch of each device's data, by device id.
        learn: trains a node's copy of the model; given the message and the device id, returns the reply's content.
    """

    workload: Workload
    minibatches: Mapping[str, int]
    learn: Callable[[Message, str], RecordDict]


class _MeasuredError(Exception):
    """The agent has nothing left to measure in a training that is run in order to measure."""


class _Agent:
    """The product's agent of one board, without its sockets and its duties."""

    def __init__(self, fleet: VirtualFleet, device_id: str, board: TimedBoard, seed: int, folder: Path) -> None:
        self.device_id, self.board = device_id, board
        settings = AgentSettings(
            device=DeviceSettings(
                spec=f"simulated:{board.board_kind}", id=device_id, state_dir=folder, socket=folder / "s", seed=seed
            )
        )

        @asynccontextmanager
        async def connect() -> AsyncIterator[Any]:
            yield SimpleNamespace(
                Session=lambda requests: _Stream(fleet.sessions, device_id),
                FetchReference=lambda request, timeout: fleet.sessions.FetchReference(request, None),
            )

        hello = session_pb2.Hello(
            device_id=device_id,
            board=board.board_kind,
            provenance=provenance_to_message(board.provenance),
            mode_count=len(board.modes),
            protocol=own_version(),
            installation=device_id,
        )
        welcome = LatestWelcome(WelcomeFile(folder / WELCOME_FILE))
        outbox = Outbox(OutboxFile(folder / OUTBOX_FILE))
        self._session = CoordinatorSession(connect, hello, welcome.receive, outbox, settings.session)
        report_change = self._session.grants.on_change
        self._session.grants = GrantKeeper(fleet.loop.time)
        self._session.grants.on_change = report_change
        self.trainings = AppTrainings(device_id)
        turns, rows = DeviceTurns(fleet.loop.time), InferenceRows(folder)
        planning = DutyPlanning(turns, rows, board.modes)
        servicer = DutyServicer(board, turns, DutyFile(folder), rows)
        self._service = DeviceService(
            settings,
            board,
            built_in_workload(board.step),
            self._session,
            welcome,
            connect,
            self.trainings,
            turns,
            planning,
            InferenceMeasuring(board, turns, planning, rows, servicer, 0),
        )

    async def run(self) -> None:
        """Serve the device until cancelled."""
        session = background_task(f"session of {self.device_id}", self._session.run())
        try:
            await self._service.run()
        finally:
            await stop_tasks(session)


class _App:
    """An app's training on its agent, as `power_mode_mod`, `until_deadline` and `profiled` run it."""

    def __init__(self, agent: _Agent, work: NodeWork, assignment: RoundAssignment) -> None:
        self._agent, self._work, self._assignment = agent, work, assignment
        self._requests: asyncio.Queue[local_pb2.TrainRequest | None] = asyncio.Queue()
        self._answers: asyncio.Queue[local_pb2.TrainResponse | Exception] = asyncio.Queue()
        self._is_stopped = False
        self._trained = 0
        self.begin_s = 0.0

    async def train(self) -> dict[str, Any]:
        """Train, and return what the mod adds to the reply.

        Raises:
            Exception: the agent refused or ended the training.
        """
        listening = background_task("an app's answers", self._listen())
        try:
            self._requests.put_nowait(local_pb2.TrainRequest(start=assignment_to_start(self._assignment)))
            await self._answer()
            self.begin_s = asyncio.get_running_loop().time()
            length = self._work.minibatches[self._agent.device_id]
            facts = self._work.workload.facts
            await self._train(1)
            # As with PyTorch, the loader is reported once a step has shown that it is trained on.
            loader = local_pb2.LoaderSeen(
                batch=facts.batch,
                loader_workers=facts.loader_workers,
                minibatches_per_epoch=length,
                after_minibatch=True,
            )
            self._requests.put_nowait(local_pb2.TrainRequest(loader=loader))
            has_measured = False
            try:
                for number in range(round(self._assignment.epochs)):
                    await self._pass(length - (not number))
            except _MeasuredError:
                has_measured = True
            is_cut = not has_measured and self._is_stopped
            done = min(self._assignment.epochs, self._trained / length)
            epochs_done = 0.0 if has_measured else done if is_cut else None
            self._requests.put_nowait(
                local_pb2.TrainRequest(finish=local_pb2.FinishTraining(failed=False, epochs_done=epochs_done))
            )
            self._requests.put_nowait(None)
            await self._answer()
        finally:
            await stop_tasks(listening)
        if has_measured:
            return {MEASURED_KEY: True}
        share = done / self._assignment.epochs if is_cut else 1.0
        return {CUT_KEY: is_cut, APP_WEIGHS_KEY: False, **({SHARE_KEY: share} if share else {})}

    async def _pass(self, length: int) -> None:
        """Train one pass over the data, or until a stop."""
        if self._is_stopped:
            return
        board, loop = self._agent.board, asyncio.get_running_loop()
        measuring = await self._report([])
        if not measuring and self._assignment.measures:
            raise _MeasuredError
        times: list[float] = []
        trained, reported_s = 0, loop.time()
        while trained < length and not self._is_stopped:
            chunk = 1 if measuring else max(1, int(_CHUNK_S / (board.load_in_force.minibatch_ms / 1e3)))
            took_s = await self._train(min(chunk, length - trained))
            trained += min(chunk, length - trained)
            if measuring:
                times.append(took_s)
                if loop.time() - reported_s >= _REPORT_INTERVAL_S:
                    measuring = await self._report(times)
                    times, reported_s = [], loop.time()
                    if self._assignment.measures and not measuring:
                        raise _MeasuredError
        if measuring:
            await self._report(times, paused=True, is_pass_over=trained == length)

    async def _train(self, minibatches: int) -> float:
        """Train minibatches on the board, and return the seconds that they took."""
        board = self._agent.board
        took_s = board.train(self._work.workload, minibatches, is_first=not self._trained)
        await asyncio.sleep(board.clock.now_s() - asyncio.get_running_loop().time())
        self._trained += minibatches
        return took_s

    async def _report(self, times: Sequence[float], paused: bool = False, is_pass_over: bool = False) -> bool:
        minibatches = [local_pb2.MinibatchTimes(fetch_stall_ms=0.0, compute_ms=each * 1e3) for each in times]
        report = local_pb2.MinibatchesTrained(minibatches=minibatches, paused=paused, is_pass_over=is_pass_over)
        self._requests.put_nowait(local_pb2.TrainRequest(minibatches=report))
        return (await self._answer()).noted.measuring

    async def _answer(self) -> local_pb2.TrainResponse:
        answer = await self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _listen(self) -> None:
        async def requests() -> AsyncIterator[local_pb2.TrainRequest]:
            while (request := await self._requests.get()) is not None:
                yield request

        try:
            async for answer in self._agent.trainings.Train(requests(), None):
                if answer.HasField("stop"):
                    self._is_stopped = True
                else:
                    self._answers.put_nowait(answer)
        except Exception as error:  # the boundary of the agent's service: the app gets every error
            self._answers.put_nowait(error)


class VirtualGrid(Grid):  # type: ignore[misc]  # Flower is not typed for strict checking
    """Flower's grid over the fleet's nodes. A node handles one message after another.

    Args:
        fleet: the fleet.
        run_id: id of the run.
        work: what the nodes train.
        overhead_s: seconds for a message and for starting the app's process, before it begins.

    Attributes:
        failures: the errors that nodes replied with.
    """

    def __init__(self, fleet: VirtualFleet, run_id: int, work: NodeWork, overhead_s: float) -> None:
        self._fleet, self._run_id, self._work, self._overhead_s = fleet, run_id, work, overhead_s
        self._devices = {k + 2: agent for k, agent in enumerate(fleet.agents)}
        self._free = {node_id: asyncio.Lock() for node_id in self._devices}
        self._replies: dict[str, asyncio.Task[Message]] = {}
        self._sent = 0
        self.failures: list[str] = []
        be_task(run_id, _SUPERLINK)

    @property
    def run(self) -> Any:
        """The run."""
        return SimpleNamespace(run_id=self._run_id, fab_id="", override_config={})

    def set_run(self, run: Any) -> None:
        """Do nothing, since the run is fixed."""

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Refuse, since it is deprecated in Flower."""
        raise NotImplementedError("create messages with flwr.app.Message")

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes, which are always connected."""
        return list(self._devices)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        ids = []
        for message in messages:
            self._sent += 1
            message_id = f"{self._run_id}-{self._sent}"
            message.metadata.__dict__["_message_id"] = message_id
            # As over the network, a node gets a copy of its own.
            self._replies[message_id] = self._fleet.loop.create_task(self._reply(message))
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived, each once."""
        arrived = [each for each in message_ids if each in self._replies and self._replies[each].done()]
        return [self._replies.pop(each).result() for each in arrived]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Refuse, since `PowerAware` sends and polls."""
        raise NotImplementedError("PowerAware wraps this grid in its own WaitingGrid")

    async def _reply(self, message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        agent = self._devices[node_id]
        async with self._free[node_id]:
            await asyncio.sleep(self._overhead_s)
            record = message.content[RECORD_KEY]
            if IDENTIFY_KEY in record:
                identity = ConfigRecord({DEVICE_ID_KEY: agent.device_id, PAIRING_PROBLEM_KEY: ""})
                return Message(RecordDict({RECORD_KEY: identity}), reply_to=message)
            assignment = RoundAssignment.from_record(record)
            app = _App(agent, self._work, assignment)
            try:
                done = await app.train()
            except WattfleetError as error:
                self.failures.append(f"{agent.device_id}: {error}")
                return Message(Error(2, str(error)), reply_to=message)
            now_s = self._fleet.loop.time()
            self._fleet.busy.append(Busy(agent.device_id, assignment.plan_id, assignment.measures, app.begin_s, now_s))
            content = RecordDict() if MEASURED_KEY in done else self._work.learn(message, agent.device_id)
            content[RECORD_KEY] = ConfigRecord(done)
            return Message(content, reply_to=message)


# --- the fleet --------------------------------------------------------------------------------------------------------


@dataclass
class VirtualFleet:
    """A coordinator and the agents of simulated boards, which are ready; see `virtual_fleet`.

    Attributes:
        loop: the time.
        boards: the boards by device id, in the order of their nodes and their data.
        planner: the planning service, for `PowerAware`.
        state: the coordinator's fleet.
        busy: all trainings that have ended.
    """

    loop: VirtualLoop
    boards: Mapping[str, TimedBoard]
    planner: Planner
    state: FleetInService
    sessions: SessionServicer
    agents: list[_Agent] = field(default_factory=list)
    busy: list[Busy] = field(default_factory=list)

    def energy_j(self) -> float:
        """Return the energy that all boards have drawn so far, J."""
        return sum(board.energy_j() for board in self.boards.values())

    def measured_modes(self, workload: str) -> dict[str, int]:
        """Return how many modes of a workload each device has measured, by device id."""
        records = self.state.fleet.agents.devices
        return {
            device_id: max(
                (front.profiled_modes for front in records[device_id].fronts if front.name == workload), default=0
            )
            for device_id in self.boards
        }


def _fitting_here(transfer: Transfer, modes: ModeArray, stopping: Any) -> Callable[[], nullcontext[FittingHere]]:
    """Fit in this process: starting a process for each fit takes a second."""
    fitting = FittingHere(_SharedTransfer(**vars(transfer)), modes)
    return lambda: nullcontext(fitting)


class _SharedTransfer(Transfer):
    """Adapts its references once for all fits that need the same: of several boards of a kind, or one after another."""

    def priors(self) -> Sequence[Predictor]:
        header = replace(self.header, device_id="", workload="", minibatch=1)
        return _priors(Transfer(self.references, header, 1, others=self.others, units=self.units))


_priors = lru_cache(maxsize=32)(Transfer.priors)


@contextmanager
def virtual_fleet(folder: Path, boards: Sequence[tuple[str, int]], site_budget_w: float) -> Iterator[VirtualFleet]:
    """Run a coordinator, and an agent for each board, that have measured nothing yet.

    While it runs, `time.monotonic` is the virtual time in the whole process.

    Args:
        folder: for the state of the coordinator and the agents.
        boards: kind and seed of each board.
        site_budget_w: the site's budget, W.
    """
    loop = VirtualLoop()
    random.seed(0)  # agents draw the times of their leases
    with ExitStack() as stack:
        stack.callback(loop.close)
        stack.enter_context(patch.object(time, "monotonic", loop.time))
        stack.enter_context(patch("edge_agent.runtime.readiness.fitting_process", _fitting_here))
        opened = AsyncExitStack()
        fleet = loop.run_until_complete(_opened(loop, folder, boards, site_budget_w, opened))
        stack.callback(lambda: loop.run_until_complete(_closed(opened)))
        yield fleet


async def _closed(opened: AsyncExitStack) -> None:
    others = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
    await opened.aclose()
    await stop_tasks(*others)


async def _opened(
    loop: VirtualLoop, folder: Path, kinds: Sequence[tuple[str, int]], site_budget_w: float, opened: AsyncExitStack
) -> VirtualFleet:
    settings = CoordinatorSettings(
        server=ServerSettings(address="127.0.0.1:0", http_address="127.0.0.1:0"),
        store=StoreSettings(location=str(folder / "coordinator.db")),
        site=SiteSettings(budget_w=site_budget_w),
    )
    state = await FleetInService.opened(Preparation.of(settings), opened)
    repository, leases, orders, events = state.repository, state.leases, state.orders, state.events
    sessions = SessionServicer(
        repository,
        leases,
        orders,
        state.references,
        settings.profiling.modes,
        state.state_times,
        loop.time,
        settings.sessions,
        settings.peers,
        events=events,
    )
    planning = RoundPlanning(
        repository, leases, orders, loop.time, settings.rounds, profile_modes=settings.profiling.modes, events=events
    )
    planner = Planner(loop, PlanningServicer(repository, planning, orders, settings=settings.rounds, events=events))
    boards = {f"{kind}-{seed:02}": TimedBoard(kind, seed, loop) for kind, seed in kinds}
    fleet = VirtualFleet(loop, boards, planner, state, sessions)
    works: list[Coroutine[Any, Any, Any]] = [sessions.sweep(), state.trimmer.watch()]
    for (device_id, board), (_, seed) in zip(boards.items(), kinds, strict=True):
        own = folder / device_id
        own.mkdir(mode=0o700)
        fleet.agents.append(_Agent(fleet, device_id, board, seed, own))
        works.append(fleet.agents[-1].run())
    tasks = [background_task("virtual fleet", work) for work in works]
    opened.push_async_callback(stop_tasks, *tasks)
    devices = state.fleet.agents.devices
    until_s = loop.time() + _PREPARED_WITHIN_S
    while not all(each in devices and devices[each].state is DeviceState.READY for each in boards):
        if loop.time() > until_s or any(task.done() for task in tasks):
            raise RuntimeError(f"the agents are not ready: {[devices.get(each) for each in boards]}")
        await asyncio.sleep(1.0)
    # A board's clock is ahead of the loop after its idle power was measured.
    await asyncio.sleep(max(0.0, *(board.clock.now_s() - loop.time() for board in boards.values())))
    return fleet
