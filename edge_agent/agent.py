"""The agent daemon: from the reference predictor to a front, and then from round to round."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import closing, suppress

import grpc

from edge_agent.config import AgentConfig
from edge_agent.devices.device import Device
from edge_agent.link import Link
from edge_agent.local_socket import LocalAgentServicer, require_own_socket, serve_socket
from edge_agent.outbox import Outbox, OutboxFile
from edge_agent.paths import OUTBOX_FILE, REFERENCES_DIRECTORY
from edge_agent.profiled_workload import ProfiledWorkload
from edge_agent.profiling_plan import Progress, StoppedError
from edge_agent.readiness import make_ready
from edge_agent.references import reference_of_digest
from edge_agent.safekeeping import safekept
from edge_agent.standing import Standing
from edge_agent.states import ModeMeasured
from edge_agent.training import TrainingWatch
from wattfleet.errors import WattfleetError
from wattfleet_proto.convert import evidence_to_message
from wattfleet_proto.v1 import session_pb2, session_pb2_grpc

_log = logging.getLogger(__name__)


async def run_agent(config: AgentConfig, device: Device, profiled: ProfiledWorkload, stop: asyncio.Event) -> None:
    """Serve one device until `stop` is set; it is left as it was found.

    Args:
        config: how to run.
        device: the board.
        profiled: what is trained while modes are measured.
        stop: ends it.

    Raises:
        InvalidInputError: the coordinator refused the device, or the socket cannot be served.
        CorruptReferenceError: the reference that came is not the one that was promised.
        DeviceBusyError: another agent has the device.
        SafekeepingError: what is in force on the device cannot be put on disk; it was not touched.
        WattfleetError: the device could not be profiled; what was measured is kept.
    """
    require_own_socket(config.socket)
    with safekept(device, config.device_folder):
        await _run_with_device(config, device, profiled, stop)


async def _run_with_device(
    config: AgentConfig, device: Device, profiled: ProfiledWorkload, stop: asyncio.Event
) -> None:
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
        link = Link(stub, hello, on_welcome, Outbox(OutboxFile(config.state_directory / OUTBOX_FILE)))
        tasks = [
            asyncio.create_task(link.run()),
            asyncio.create_task(_serve_device(config, device, profiled, link, welcomed, stub)),
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
    device: Device,
    profiled: ProfiledWorkload,
    link: Link,
    welcomed: asyncio.Future[session_pb2.Welcome],
    stub: session_pb2_grpc.SessionServiceAsyncStub,
) -> None:
    """Make the device ready, then serve its trainings until cancelled."""
    welcome = await welcomed
    reference = await reference_of_digest(welcome.reference_digest, config.state_directory / REFERENCES_DIRECTORY, stub)
    loop = asyncio.get_running_loop()
    standing = Standing(link)
    stopping = threading.Event()

    def show(progress: Progress) -> None:
        standing.report(standing.decide(ModeMeasured(progress.detail)), progress.done)

    def report(progress: Progress) -> None:
        if stopping.is_set():
            raise StoppedError
        loop.call_soon_threadsafe(show, progress)

    stoppable = profiled.stopped_by(stopping)
    work = asyncio.create_task(
        asyncio.to_thread(make_ready, config, device, stoppable, reference, welcome.profile_modes, report)
    )
    try:
        ready = await asyncio.shield(work)
    except asyncio.CancelledError:
        # A thread cannot be cancelled: it stops after the minibatch in hand, and only then is the board ours.
        stopping.set()
        try:
            (await work).learner.close()
        except StoppedError:
            pass
        except WattfleetError as error:
            # A workload that is stopped beside the agent fails; nobody is left to whom that would matter.
            _log.warning("failed while it was stopped: %s", error)
        raise
    with closing(ready.learner):
        watch = TrainingWatch(device, ready.parked, config.minibatches_per_epoch, ready.learner.productive)
        servicer = LocalAgentServicer(config.device_id, watch, link, standing, ready.learner, ready.front_report)
        async with serve_socket(config.socket, servicer):
            await servicer.begin()
            _log.info("%s is ready: %d modes measured", config.device_id, ready.learner.profiled_modes)
            try:
                await asyncio.Event().wait()
            finally:
                stopping.set()
