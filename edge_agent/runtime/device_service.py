"""Serves one device: prepares it as the coordinator requests, runs rounds, and repeats this on a changed request."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from contextlib import aclosing, closing, suppress
from functools import partial
from typing import Any, TypeVar

from edge_agent.devices.device import Device
from edge_agent.learning.profiling_plan import ProfilingProgress
from edge_agent.learning.workloads import Workloads
from edge_agent.paths import REFERENCES_DIRECTORY, TRUST_DIRECTORY
from edge_agent.profiling.profiled_workload import ProfiledWorkload, StoppedError
from edge_agent.runtime.app_trainings import AppTrainings, RequestedWork
from edge_agent.runtime.device_trainings import DeviceTrainings
from edge_agent.runtime.readiness import Readiness, prepare_device
from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.runtime.states import ModeMeasured, PreparationRestarted, StateReporter
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_planning import DutyPlanning, InferenceMeasuring
from edge_agent.session.certificate_keeper import Connect
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.references import (
    REQUEST_TIMEOUT_S,
    AcceptedReferences,
    ReferenceRefusedError,
    ReferenceTrust,
    remove_old_references,
)
from edge_agent.session.status import LatestWelcome, references_of
from edge_agent.settings import AgentSettings
from edge_agent.training.training import TrainingRunner
from wattfleet.common.console import plain_text
from wattfleet.common.tasks import Backoff, background_task, run_uncancelled, stop_tasks
from wattfleet.core.errors import CorruptReferenceError, WattfleetError
from wattfleet.core.modes import PowerMode
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.limits import MAX_REASON_LENGTH
from wattfleet_proto.v1 import session_pb2

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_REST_INTERVAL_S = 1.0
"""Shortest time between two changes of the mode in which a device with a duty rests, s."""

_FRONT_INTERVAL_S = 2.0
"""Time between two checks whether the duty has changed, s."""

_MEASURE_INTERVAL_S = 5.0
"""Time between two checks whether there is inference to measure, s."""

_REQUEST_CHANGED = "preparing again: the coordinator requests another reference, number of modes or protocol"


class DeviceService:
    """Prepares a device and serves its trainings as the latest Welcome requests.

    Args:
        settings: the agent's settings.
        device: the board, whose knobs are backed up.
        profiled: the workload that is trained while modes are measured without an app.
        session: reports to the coordinator.
        welcome: the coordinator's latest Welcome.
        connect: opens connections to the coordinator.
        trainings: apps' trainings, run once the device is ready.
        turns: shares the device between requests and training.
        duty: plans trainings beside the device's duty.
        measuring: measures the duty's inference.

    Attributes:
        reporter: holds the device's state.
    """

    def __init__(
        self,
        settings: AgentSettings,
        device: Device,
        profiled: ProfiledWorkload,
        session: CoordinatorSession,
        welcome: LatestWelcome,
        connect: Connect,
        trainings: AppTrainings,
        turns: DeviceTurns,
        duty: DutyPlanning,
        measuring: InferenceMeasuring,
    ) -> None:
        self._settings = settings
        self._device = device
        self._profiled = profiled
        self._session = session
        self._welcome = welcome
        self._trainings = trainings
        self._turns = turns
        self._duty = duty
        self._measuring = measuring
        self.reporter = StateReporter(session)
        self._supervisor: RecoverySupervisor | None = None
        self._cache = settings.device.state_dir / REFERENCES_DIRECTORY
        trust = ReferenceTrust(settings.device.state_dir / TRUST_DIRECTORY)
        retry_s = settings.session.reference_retry_s
        self._references = AcceptedReferences(self._cache, trust, connect, REQUEST_TIMEOUT_S, retry_s)

    @property
    def is_resting(self) -> bool:
        """Whether the device is ready and unused. Valid only until the event loop runs something else."""
        supervisor = self._supervisor
        return supervisor is not None and supervisor.state is DeviceState.READY and not supervisor.device_lock.locked()

    async def run(self) -> None:
        """Serve until cancelled; nothing touches the device after that."""
        welcome = await self._welcome.first(self._session.attempted)
        while True:
            changed = asyncio.create_task(self._changed_from(welcome), name="changed welcome")
            stopping = self._turns.begin_measuring()
            try:
                ready = await _run_unless_done(changed, self._prepare_with_retries(welcome, stopping))
                if ready is not None:
                    await self._serve(ready, changed, stopping)
                welcome = await changed
            finally:
                changed.cancel()
            _log.info("%s: %s", self._settings.device.id, _REQUEST_CHANGED)

    async def _changed_from(self, welcome: session_pb2.Welcome) -> session_pb2.Welcome:
        """Wait for another Welcome, or until this one's refused references are accepted; return the Welcome to use."""
        other = asyncio.create_task(self._welcome.changed_from(welcome))
        accepted = background_task(
            "check refused references again", self._references.wait_until_accepted(references_of(welcome))
        )
        try:
            await asyncio.wait([other, accepted], return_when=asyncio.FIRST_COMPLETED)
            return other.result() if other.done() else welcome
        finally:
            await stop_tasks(other, accepted)

    async def _prepare_with_retries(self, welcome: session_pb2.Welcome, stopping: threading.Event) -> Readiness:
        """Prepare the device as a Welcome requests; while its reference cannot be used, report that and try again."""
        backoff, reported = Backoff(), ""
        while True:
            try:
                return await self._prepare(welcome, stopping)
            except (CorruptReferenceError, ReferenceRefusedError) as error:
                reason = plain_text(str(error), MAX_REASON_LENGTH)
                problem = f"the coordinator's reference cannot be used: {reason}"
            if problem != reported:
                reported = problem
                _log.error("%s; trying again", problem)
                self.reporter.report(self.reporter.decide(PreparationRestarted(problem)), 0)
            await backoff.pause()

    async def _prepare(self, welcome: session_pb2.Welcome, stopping: threading.Event) -> Readiness:
        """Prepare the device as a Welcome requests. Once this returns or is cancelled, nothing touches the device."""
        settings, device, profile_modes = self._settings, self._device, welcome.profile_modes
        references = await self._references.of(references_of(welcome))
        self.reporter.remark = self._references.refused
        if not self._references.refused:
            # Store it only now: after a restart without the coordinator, a Welcome without its references would be
            # useless.
            self._welcome.store(welcome)
        remove_old_references(self._cache, [each.digest for each in references])
        loop = asyncio.get_running_loop()

        def show(progress: ProfilingProgress) -> None:
            self.reporter.report(self.reporter.decide(ModeMeasured(progress.detail, progress.total)), progress.done)

        def report(progress: ProfilingProgress) -> None:
            if stopping.is_set():
                raise StoppedError
            loop.call_soon_threadsafe(show, progress)

        def removed(workload: str) -> None:
            loop.call_soon_threadsafe(self._session.report_removed, workload)

        making = asyncio.to_thread(
            prepare_device,
            settings,
            device,
            self._profiled,
            references,
            profile_modes,
            report,
            stopping,
            welcome.share_modes,
            removed,
            self._resting,
            self._duty,
        )
        work = asyncio.create_task(making, name="make ready")
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # A thread cannot be cancelled. It stops after the current minibatch and uses the device until then.
            stopping.set()
            await run_uncancelled(_discard(work))
            raise

    async def _serve(
        self, ready: Readiness, changed: asyncio.Task[session_pb2.Welcome], stopping: threading.Event
    ) -> None:
        """Serve a ready device's trainings until `changed` is done and the current training has ended."""
        with closing(ready.workloads):
            workloads, device_id = ready.workloads, self._settings.device.id

            def granted(power_limit_w: float | None) -> None:
                learner = workloads.latest
                if power_limit_w is None or learner is None:
                    self._duty.trains(None)
                else:
                    self._duty.trains(learner.trained_alone, power_limit_w)

            watch = TrainingRunner(self._device, ready.parked, self._resting, lambda: self._turns.sharing, granted)
            supervisor = RecoverySupervisor(watch, self._session, self.reporter, workloads, ready.due_fronts)
            self._supervisor = supervisor
            trainings = DeviceTrainings(device_id, watch, self._session, workloads, supervisor, self._settings.session)
            requests = RequestedWork(
                self._device, self._settings.workload, ready, supervisor, self._session.requests, stopping, self._turns
            )
            async with aclosing(supervisor), self._trainings.served_by(trainings):
                resting: asyncio.Task[None] | None = None
                planning: asyncio.Task[None] | None = None
                measuring: asyncio.Task[None] | None = None
                try:
                    await supervisor.start()
                    resting = background_task(
                        "rest in a mode that keeps the duty", self._update_resting_mode(supervisor, ready.parked)
                    )
                    planning = background_task("fronts beside the duty", self._report_changed_fronts(supervisor))
                    measuring = background_task("inference of the duty", self._measure_inference(supervisor, workloads))
                    _log.info("%s is ready: %d modes measured", device_id, workloads.profiled_modes)
                    await requests.serve_until(changed)
                finally:
                    stopping.set()
                    self._supervisor = None
                    await run_uncancelled(stop_tasks(resting, planning, measuring))
                await supervisor.retire(_REQUEST_CHANGED)

    def _resting(self, parked: PowerMode) -> PowerMode:
        """Return the mode for when nothing is trained; `parked` without a duty."""
        return self._turns.resting_mode(parked, self._device.modes)

    async def _update_resting_mode(self, supervisor: RecoverySupervisor, parked: PowerMode) -> None:
        """Change the resting mode whenever the current one turns out not to keep the duty."""
        while True:
            await self._turns.changed.wait()
            self._turns.changed.clear()
            if supervisor.state is DeviceState.READY and not self._turns.is_rested(parked, self._device.modes):
                await supervisor.rest()
            await asyncio.sleep(_REST_INTERVAL_S)

    async def _report_changed_fronts(self, supervisor: RecoverySupervisor) -> None:
        """Report new fronts when the duty has changed, and end a training that cannot continue beside the duty."""
        while True:
            await asyncio.sleep(_FRONT_INTERVAL_S)
            try:
                if has_changed := self._duty.has_changed():
                    await supervisor.report_fronts()
                if supervisor.state is not DeviceState.TRAINING or self._session.grants.must_stop() is not None:
                    continue
                if (reason := self._why_training_ends(has_changed)) is not None:
                    await self._session.grants.stop(reason)
                    # The app learns of the stop after its next minibatch, which may be waiting for a turn.
                    self._turns.allow_trial()
            except Exception:
                # An unexpected error must not end all later reports.
                _log.exception("the fronts beside the duty could not be reported")

    def _why_training_ends(self, has_changed: bool) -> str | None:
        """Return why the training in progress cannot continue beside the duty; None if it can.

        Args:
            has_changed: whether the duty has changed since the last check.
        """
        mode = self._turns.mode
        if has_changed and mode is not None and not self._turns.keeps_duty(mode):
            return "its mode does not keep the device's duty, which has changed"
        return self._duty.why_no_training()

    async def _measure_inference(self, supervisor: RecoverySupervisor, workloads: Workloads) -> None:
        """Measure the inference of the duty between trainings, while there is anything left to measure."""
        while True:
            await asyncio.sleep(_MEASURE_INTERVAL_S)
            latest = workloads.latest
            profiled = [] if latest is None else [each.mode for each in latest.measurements]
            try:
                modes = await asyncio.to_thread(self._measuring.wanted, profiled)
                if modes and supervisor.state is DeviceState.READY and not self._session.grants.awaits_training:
                    reason = "measuring the inference of the requests that the device has to answer"
                    await supervisor.profile_ahead(reason, partial(self._measuring.measure, modes))
            except Exception:
                # An unexpected error must not end all later measurements.
                _log.exception("the inference of the duty could not be measured")


async def _discard(work: asyncio.Task[Readiness]) -> None:
    """Wait until a stopping preparation has ended, and close what it opened."""
    try:
        (await work).workloads.close()
    except StoppedError:
        pass
    except WattfleetError as error:
        # Expected: a workload that is stopped together with the agent fails.
        _log.warning("failed while stopping: %s", error)


async def _run_unless_done(other: asyncio.Task[Any], work: Coroutine[Any, Any, Result]) -> Result | None:
    """Return the result of `work`. If `other` is done first, cancel `work`, wait for its end and return None."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait([working, other], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await run_uncancelled(_cancel(working))
        raise
    if not working.done():
        await run_uncancelled(_cancel(working))
    return None if working.cancelled() else working.result()


async def _cancel(working: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; raise its error if it ends with one."""
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working
