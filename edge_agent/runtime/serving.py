"""One device served as the coordinator asks: made ready, then from round to round, until it asks for something else."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from contextlib import aclosing, closing, suppress
from typing import Any, TypeVar

from edge_agent.devices.device import Device
from edge_agent.paths import REFERENCES_DIRECTORY
from edge_agent.profiling.profiled_workload import ProfiledWorkload
from edge_agent.profiling.profiling_plan import Progress, StoppedError
from edge_agent.runtime.config import AgentConfig
from edge_agent.runtime.readiness import Readiness, make_ready
from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.runtime.state_reporter import StateReporter
from edge_agent.runtime.states import ModeMeasured
from edge_agent.session.connection import Connect
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.references import reference_of_digest
from edge_agent.session.welcomes import Welcomes
from edge_agent.training.local_socket import LocalAgentServicer
from edge_agent.training.training import TrainingWatch
from edge_agent.training.unix_socket import serve_socket
from wattfleet.errors import WattfleetError
from wattfleet_io.tasks import run_uncancelled
from wattfleet_proto.v1 import session_pb2

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_BEGUN_ANEW = "begun anew: the coordinator asks for another reference or another number of modes"


class DeviceServing:
    """Makes a device ready and serves its trainings, by one Welcome after the other.

    Args:
        config: how to run.
        device: the board, its knobs backed up.
        profiled: what is trained while modes are measured.
        link: where everything is reported.
        welcomes: what the coordinator asks for.
        connect: opens connections to the coordinator.
    """

    def __init__(
        self,
        config: AgentConfig,
        device: Device,
        profiled: ProfiledWorkload,
        link: CoordinatorSession,
        welcomes: Welcomes,
        connect: Connect,
    ) -> None:
        self._config = config
        self._device = device
        self._profiled = profiled
        self._link = link
        self._welcomes = welcomes
        self._connect = connect
        self._standing = StateReporter(link)

    async def run(self) -> None:
        """Serve until cancelled; nothing touches the device after that."""
        welcome = await self._welcomes.first(self._link.away)
        while True:
            other = asyncio.create_task(self._welcomes.other_than(welcome))
            stopping = threading.Event()
            try:
                ready = await _unless(other, self._made_ready(welcome, stopping))
                if ready is not None:
                    await self._serve(ready, other, stopping)
                welcome = await other
            finally:
                other.cancel()
            _log.info("%s is %s", self._config.device_id, _BEGUN_ANEW)

    async def _made_ready(self, welcome: session_pb2.Welcome, stopping: threading.Event) -> Readiness:
        """Make the device ready as a Welcome asks. Once this has ended, be it cancelled, nothing touches the device."""
        kept = self._config.state_directory / REFERENCES_DIRECTORY
        reference = await reference_of_digest(welcome.reference_digest, kept, self._connect)
        # Not before: without the coordinator, a Welcome whose reference is not here would be of no use.
        self._welcomes.keep(welcome)
        loop = asyncio.get_running_loop()

        def show(progress: Progress) -> None:
            self._standing.report(self._standing.decide(ModeMeasured(progress.detail)), progress.done)

        def report(progress: Progress) -> None:
            if stopping.is_set():
                raise StoppedError
            loop.call_soon_threadsafe(show, progress)

        config, device, profile_modes = self._config, self._device, welcome.profile_modes
        making = asyncio.to_thread(
            make_ready, config, device, self._profiled, reference, profile_modes, report, stopping
        )
        work = asyncio.create_task(making)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: it stops after the minibatch in hand, and only then is the board ours.
            stopping.set()
            await run_uncancelled(_given_up(work))
            raise

    async def _serve(
        self, ready: Readiness, other: asyncio.Task[session_pb2.Welcome], stopping: threading.Event
    ) -> None:
        """Serve a ready device's trainings until `other` is done, and then to the end of the one in hand."""
        with closing(ready.learner):
            learner = ready.learner
            watch = TrainingWatch(
                self._device,
                ready.parked,
                self._config.minibatches_per_epoch,
                learner.productive,
                lambda: learner.first_gcycles,
            )
            care = RecoverySupervisor(watch, self._link, self._standing, ready.learner, ready.front_report)
            servicer = LocalAgentServicer(self._config.device_id, watch, self._link, ready.learner, care)
            async with aclosing(care), serve_socket(self._config.socket, servicer):
                try:
                    await care.begin()
                    _log.info("%s is ready: %d modes measured", self._config.device_id, ready.learner.profiled_modes)
                    await asyncio.wait([other])
                finally:
                    stopping.set()
                await care.retire(_BEGUN_ANEW)


async def _given_up(work: asyncio.Task[Readiness]) -> None:
    try:
        (await work).learner.close()
    except StoppedError:
        pass
    except WattfleetError as error:
        # A workload that is stopped beside the agent fails; nobody is left to whom that would matter.
        _log.warning("failed while it was stopped: %s", error)


async def _unless(other: asyncio.Task[Any], work: Coroutine[Any, Any, Result]) -> Result | None:
    """What `work` returns; None where `other` is done first, and `work` was cancelled and has ended."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait([working, other], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await run_uncancelled(_cancelled(working))
        raise
    if not working.done():
        await run_uncancelled(_cancelled(working))
    return None if working.cancelled() else working.result()


async def _cancelled(working: asyncio.Task[Any]) -> None:
    """Cancel, and wait for the end."""
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working
