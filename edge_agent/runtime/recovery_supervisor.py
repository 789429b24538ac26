"""Carries out the decisions of `edge_agent.runtime.states`: reports, repeated profiles and recovery."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from edge_agent.learning.profiling_plan import ProfilingProgress
from edge_agent.learning.workloads import Workloads
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.runtime.states import (
    Action,
    Consequences,
    DeviceFailed,
    DeviceRecovered,
    Event,
    ModeMeasured,
    PreparationRestarted,
    ProfileEnded,
    StateReporter,
)
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.training.training import TrainingRunner
from wattfleet.common.tasks import background_task, run_uncancelled, shield_until_done, stop_tasks
from wattfleet.core.errors import WattfleetError
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)

RETRY_S = 30.0
"""Time between two attempts to recover the device after a knob or a sensor has failed, s."""

# If a device recovers but cannot be profiled, the time between attempts grows to about an hour.
_MAX_DOUBLINGS = 7


class RecoverySupervisor:
    """Keeps a device healthy between its trainings; close it after the last training.

    Args:
        watch: runs the trainings.
        session: reports fronts to the coordinator.
        reporter: holds and reports the device's state.
        workloads: the device's workloads, whose profiles may be repeated.
        due_fronts: returns the reports of the fronts that have changed.

    Attributes:
        device_lock: held by whoever sets the device's modes.
    """

    def __init__(
        self,
        watch: TrainingRunner,
        session: CoordinatorSession,
        reporter: StateReporter,
        workloads: Workloads,
        due_fronts: Callable[[], Sequence[session_pb2.FrontReport]],
    ) -> None:
        self._watch = watch
        self._session = session
        self._reporter = reporter
        self._workloads = workloads
        self._due_fronts = due_fronts
        self._closing = False
        self._failed_profiles = 0
        self.device_lock = asyncio.Lock()
        self._changes_rest = False
        self._recovery: asyncio.Task[None] | None = None
        self._profile: asyncio.Task[None] | None = None

    @property
    def state(self) -> DeviceState:
        """The device's state."""
        return self._reporter.state

    @property
    def is_busy(self) -> bool:
        """Whether a training has to be refused.

        Changing the mode between trainings does not count: it takes a moment.
        """
        return self.device_lock.locked() and not self._changes_rest

    async def start(self) -> None:
        """Report the front of the profiled and parked device, then that it is ready."""
        # Without the lock, a training that begins meanwhile would be reported first.
        async with self.device_lock:
            self._session.grants.ended()
            await self.handle_with_front(ProfileEnded(repeated=False))

    async def handle_with_front(self, event: Event) -> None:
        """Enter the state that follows from an event; if the front has changed, report it first."""
        decision = self._reporter.decide(event)
        if Action.REPORT_FRONT in decision.actions:
            await self.report_fronts()
        self._follow(decision)

    async def report_fronts(self) -> None:
        """Report the fronts that have changed."""
        for report in await shield_until_done(self._due_fronts):
            self._session.report_front(report)

    async def profile_ahead(self, reason: str, profile: Callable[[Callable[[ProfilingProgress], None]], None]) -> None:
        """Measure modes without an app, once the device is free.

        Args:
            reason: the reason, for people.
            profile: measures, and calls its argument after every mode; it ends if that call raises an exception.
        """
        async with self.device_lock:
            if not self._closing and self.state in (DeviceState.READY, DeviceState.PROFILING):
                self.handle(PreparationRestarted(reason))
                await self._profile_within_lock(profile)

    async def rest(self) -> None:
        """Apply the mode between trainings again, once the device is free; a failure degrades the device."""
        async with self.device_lock:
            if self._closing or self.state is not DeviceState.READY:
                return
            self._changes_rest = True
            try:
                await shield_until_done(self._watch.park)
            except WattfleetError as error:
                self.handle(DeviceFailed(str(error)))
            finally:
                self._changes_rest = False

    def handle(self, event: Event) -> None:
        """Enter the state that follows from an event."""
        self._follow(self._reporter.decide(event))

    async def retire(self, reason: str) -> None:
        """Stop accepting trainings for a reason, and wait for the end of the current one."""
        self._closing = True
        async with self.device_lock:
            self.handle(PreparationRestarted(reason))

    async def aclose(self) -> None:
        """Stop recovery and profiling; nothing touches the device after this."""
        self._closing = True
        await run_uncancelled(self._closed())

    async def _closed(self) -> None:
        await stop_tasks(self._recovery)
        if self._profile:
            await asyncio.wait([self._profile])
        # Wait for the stopping training: until it has stopped, one of its threads may be setting the device.
        async with self.device_lock:
            pass

    def _follow(self, decision: Consequences) -> None:
        self._reporter.report(decision, self._workloads.profiled_modes)
        if self._closing:
            # Drop actions that follow the last training: they would change the device after its knobs were restored.
            return
        if Action.REPROFILE in decision.actions:
            self._profile = background_task("profile again", self._reprofile())
        if Action.RECOVER in decision.actions and (self._recovery is None or self._recovery.done()):
            self._recovery = background_task("recovery", self._recover())

    async def _reprofile(self) -> None:
        learner = self._workloads.latest
        assert learner is not None, "drift shown by a training"
        async with self.device_lock:
            await self._profile_within_lock(learner.reprofile)

    async def _profile_within_lock(self, profile: Callable[[Callable[[ProfilingProgress], None]], None]) -> None:
        loop = asyncio.get_running_loop()

        def report(progress: ProfilingProgress) -> None:
            if self._closing:
                raise StoppedError
            loop.call_soon_threadsafe(self.handle, ModeMeasured(progress.detail, progress.total))

        try:
            await shield_until_done(profile, report)
            await shield_until_done(self._watch.park)
            self._session.grants.ended()
        except StoppedError:
            return
        except WattfleetError as error:
            self._failed_profiles += 1
            self.handle(DeviceFailed(str(error)))
            return
        self._failed_profiles = 0
        await self.handle_with_front(ProfileEnded(repeated=True))

    async def _recover(self) -> None:
        """Try to park the device and to read its power until both succeed."""
        while self._reporter.state is DeviceState.DEGRADED:
            doublings = min(max(0, self._failed_profiles - 1), _MAX_DOUBLINGS)
            await asyncio.sleep(RETRY_S * 2**doublings)
            async with self.device_lock:
                try:
                    await shield_until_done(self._watch.recover)
                    self._session.grants.ended()
                except WattfleetError:
                    continue
                except Exception:
                    # An unexpected error must not end the recovery.
                    _log.exception("an attempt to recover the device failed unexpectedly")
                    continue
                self.handle(DeviceRecovered())
            # Its fronts are without a value that a knob has not reached.
            await self.report_fronts()
