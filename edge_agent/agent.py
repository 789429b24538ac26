"""The agent daemon: from the reference predictor to a front, and then from round to round."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from edge_agent.devices.device import SoftDevice
from edge_agent.journal import Journal, JournalHeader
from edge_agent.learning import OnlineLearner, most_modes
from edge_agent.link import Link
from edge_agent.local_socket import LocalAgentServicer, require_own_socket, serve_socket
from edge_agent.profiler import Profiler
from edge_agent.profiling_plan import Progress, StoppedError, profile_device
from edge_agent.references import reference_of_digest
from edge_agent.training import TrainingWatch
from wattfleet.artefact import Artefact, pack, restore, write_directory
from wattfleet.boards import BOARDS
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, as_modes
from wattfleet.predictor import Predictor
from wattfleet.workload import Workload
from wattfleet_proto.convert import evidence_to_message, front_to_message
from wattfleet_proto.v1 import session_pb2, session_pb2_grpc

_log = logging.getLogger(__name__)

IDLE_S = 20.0
"""How long idling is measured, device-clock seconds."""

PREDICTOR_DIRECTORY = "predictor"
"""Below the state directory: the device's own fitted predictor."""


@dataclass(frozen=True)
class AgentConfig:
    """How an agent runs.

    Attributes:
        device_id: the device's name, unlike any other in the fleet.
        coordinator: host:port of the coordinator.
        state_directory: where profile, reference and predictor are kept.
        socket: the unix socket for the ClientApp.
        minibatches_per_epoch: minibatches of one pass over the device's data.
        seed: of the choice of modes to profile.
        modes_first: modes to measure before the first round; the others are measured by apps that train by
            `edge_agent.flower.profiled`. None measures all of them first.
    """

    device_id: str
    coordinator: str
    state_directory: Path
    socket: Path
    minibatches_per_epoch: int
    seed: int
    modes_first: int | None = None

    def __post_init__(self) -> None:
        if not self.device_id or self.minibatches_per_epoch < 1:
            raise InvalidInputError("an agent needs a device id and at least one minibatch per epoch")
        if self.modes_first is not None and self.modes_first < 1:
            raise InvalidInputError(f"an agent measures at least 1 mode before the first round, not {self.modes_first}")


@dataclass(frozen=True)
class Readiness:
    """What an agent has once its device is ready to train.

    Attributes:
        learner: knows the device's front, and goes on learning.
        idle_w: watts of the device while parked.
        parked: the mode between trainings.
        reference_digest: of the predictor that was transferred.
    """

    learner: OnlineLearner
    idle_w: float
    parked: PowerMode
    reference_digest: str

    def front_report(self) -> session_pb2.FrontReport:
        """The front by what is known now, as it travels."""
        return session_pb2.FrontReport(
            front=front_to_message(self.learner.front),
            idle_w=self.idle_w,
            profiled_modes=self.learner.profiled_modes,
            reference_digest=self.reference_digest,
        )


async def run_agent(config: AgentConfig, device: SoftDevice, stop: asyncio.Event) -> None:
    """Serve one device until `stop` is set.

    Raises:
        InvalidInputError: the coordinator refused the device, or the socket cannot be served.
        CorruptReferenceError: the reference that came is not the one that was promised.
    """
    require_own_socket(config.socket)
    async with grpc.aio.insecure_channel(config.coordinator) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        welcomed: asyncio.Future[session_pb2.Welcome] = asyncio.get_running_loop().create_future()

        async def on_welcome(welcome: session_pb2.Welcome) -> None:
            if not welcomed.done():
                welcomed.set_result(welcome)

        hello = session_pb2.Hello(
            device_id=config.device_id,
            board=device.board_kind,
            evidence=evidence_to_message(device.evidence),
            mode_count=len(device.modes),
        )
        link = Link(stub, hello, on_welcome)
        tasks = [
            asyncio.create_task(link.run()),
            asyncio.create_task(_serve_device(config, device, link, welcomed, stub)),
            asyncio.create_task(stop.wait()),
        ]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        for task in pending:
            with suppress(asyncio.CancelledError):
                await task
        for task in done:
            task.result()


async def _serve_device(
    config: AgentConfig,
    device: SoftDevice,
    link: Link,
    welcomed: asyncio.Future[session_pb2.Welcome],
    stub: session_pb2_grpc.SessionServiceAsyncStub,
) -> None:
    """Make the device ready, then serve its trainings until cancelled."""
    welcome = await welcomed
    reference = await reference_of_digest(welcome.reference_digest, config.state_directory / "references", stub)
    loop = asyncio.get_running_loop()

    stopping = threading.Event()

    def report(progress: Progress) -> None:
        if stopping.is_set():
            raise StoppedError
        loop.call_soon_threadsafe(
            link.report_state,
            session_pb2.StateReport(
                state=session_pb2.DEVICE_STATE_PROFILING, profiled_modes=progress.done, detail=progress.detail
            ),
        )

    original = device.current_mode()
    try:
        work = asyncio.create_task(
            asyncio.to_thread(make_ready, config, device, reference, welcome.profile_modes, report)
        )
        try:
            ready = await asyncio.shield(work)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: it stops after the mode that it measures, and only then is the board ours.
            stopping.set()
            with suppress(StoppedError):
                await work
            raise
        with closing(ready.learner):
            report_of_front = ready.front_report()
            link.report_front(report_of_front)
            watch = TrainingWatch(device, ready.parked, config.minibatches_per_epoch, ready.learner.productive)
            servicer = LocalAgentServicer(config.device_id, watch, link, ready.learner, ready.front_report)
            async with serve_socket(config.socket, servicer):
                servicer.report(session_pb2.DEVICE_STATE_READY, "parked")
                _log.info("%s is ready: a front of %d modes", config.device_id, len(report_of_front.front.points))
                await asyncio.Event().wait()
    finally:
        device.apply(original)


def make_ready(
    config: AgentConfig,
    device: SoftDevice,
    reference: Artefact,
    profile_modes: int,
    report: Callable[[Progress], None],
) -> Readiness:
    """Measure idling and some modes, transfer the reference to the device, and predict its front.

    The device is left parked in its lowest mode. The profile is journalled, so a restart goes on where it stopped;
    the fitted predictor is kept in the state directory.

    Args:
        config: whose device it is.
        device: the board.
        reference: the predictor to transfer from.
        profile_modes: modes to measure at most.
        report: told of every step.
    """
    trained = reference.details.workload
    workload = Workload(trained.name, trained.minibatch, config.minibatches_per_epoch)
    config.state_directory.mkdir(parents=True, exist_ok=True)
    header = JournalHeader(config.device_id, device.board_kind, device.evidence, workload.name, workload.minibatch)
    provenance = {"reference": reference.digest, "device": config.device_id, "evidence": device.evidence}

    def keep(predictor: Predictor, profiled_modes: int) -> None:
        artefact = pack(predictor, workload, device.board_kind, provenance, {"profiled_modes": profiled_modes})
        write_directory(artefact, config.state_directory / PREDICTOR_DIRECTORY)

    journal = Journal.open(config.state_directory / "profile.jsonl", header)
    try:
        prior, most = restore(reference, BOARDS.get(device.board_kind)), most_modes(journal, profile_modes)
        first = most if config.modes_first is None else min(config.modes_first, most)
        profile_device(device, journal, prior, first, config.seed, report)
        learner = OnlineLearner(device, journal, prior, profile_modes, config.minibatches_per_epoch, config.seed, keep)
        parked = parked_mode(device)
        idle_w = Profiler(device).measure_idle(parked, IDLE_S) / 1e3
    except BaseException:
        journal.close()
        raise
    return Readiness(learner, idle_w, parked, reference.digest)


def parked_mode(device: SoftDevice) -> PowerMode:
    """The mode between trainings: the lowest frequencies, then the fewest cores, where idling takes least."""
    return min(as_modes(device.modes), key=lambda mode: (mode.cpu_khz, mode.gpu_hz, mode.mem_hz, mode.cores))
