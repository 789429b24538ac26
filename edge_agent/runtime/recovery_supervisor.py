"""Carries out the decisions of `edge_agent.runtime.states`: sends reports, measures a device again, lets it recover."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.profiling.profiling_plan import Progress, StoppedError
from edge_agent.runtime.state_reporter import StateReporter
from edge_agent.runtime.states import (
    Action,
    BegunAnew,
    Decision,
    DeviceFailed,
    DeviceRecovered,
    Event,
    ModeMeasured,
    ProfileEnded,
)
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.training.training import TrainingWatch
from wattfleet.errors import WattfleetError
from wattfleet_io.tasks import background_task, run_uncancelled, shield_until_done, stop_tasks
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)

_CHECKED_EVERY_S = 30.0
# Where a device recovers but cannot be measured, it is tried less and less often, at last about once an hour.
_MOST_DOUBLINGS = 7


class RecoverySupervisor:
    """Looks after a device between and around its trainings; close it once nobody trains any more.

    Args:
        watch: what runs its trainings.
        link: where fronts are reported.
        standing: what the device is doing.
        learner: measures it anew.
        front_report: the report of the front by what the learner knows now.

    Attributes:
        training: held by whoever sets the device's modes.
    """

    def __init__(
        self,
        watch: TrainingWatch,
        link: CoordinatorSession,
        standing: StateReporter,
        learner: OnlineLearner,
        front_report: Callable[[], session_pb2.FrontReport],
    ) -> None:
        self._watch = watch
        self._link = link
        self._standing = standing
        self._learner = learner
        self._front_report = front_report
        self._closing = False
        self._failed_renewals = 0
        self.training = asyncio.Lock()
        self._recovery: asyncio.Task[None] | None = None
        self._renewal: asyncio.Task[None] | None = None

    @property
    def state(self) -> DeviceState:
        """What the device is doing."""
        return self._standing.state

    async def begin(self) -> None:
        """The device is profiled and parked: report its front, and that it is ready."""
        # A training that began meanwhile would be reported before this.
        async with self.training:
            await self.settled(ProfileEnded(anew=False))

    async def settled(self, event: Event) -> None:
        """Enter the state after something that may have taught a new front, which is reported first."""
        decision = self._standing.decide(event)
        if Action.REPORT_FRONT in decision.actions:
            self._link.report_front(await shield_until_done(self._front_report))
        self._follow(decision)

    def happened(self, event: Event) -> None:
        """Enter the state after an event."""
        self._follow(self._standing.decide(event))

    async def retire(self, reason: str) -> None:
        """Let no training begin any more, and wait for the end of the one in hand; `reason` says why."""
        self._closing = True
        async with self.training:
            self.happened(BegunAnew(reason))

    async def aclose(self) -> None:
        """Stop looking after a degraded device and measuring one anew; nothing touches the device after this."""
        self._closing = True
        await run_uncancelled(self._closed())

    async def _closed(self) -> None:
        await stop_tasks(self._recovery)
        if self._renewal:
            await asyncio.wait([self._renewal])
        # Whoever trains was told to end; until it has, a thread of it may be setting the device.
        async with self.training:
            pass

    def _follow(self, decision: Decision) -> None:
        self._standing.report(decision, self._learner.profiled_modes)
        if self._closing:
            # What the last training asks for would set the device after it was put back.
            return
        if Action.MEASURE_ANEW in decision.actions:
            self._renewal = background_task("measure anew", self._measure_anew())
        if Action.RECOVER in decision.actions and (self._recovery is None or self._recovery.done()):
            self._recovery = background_task("recovery", self._recover())

    async def _measure_anew(self) -> None:
        loop = asyncio.get_running_loop()

        def report(progress: Progress) -> None:
            if self._closing:
                raise StoppedError
            loop.call_soon_threadsafe(self.happened, ModeMeasured(progress.detail))

        async with self.training:
            try:
                await shield_until_done(self._learner.measure_anew, report)
                await shield_until_done(self._watch.park)
            except StoppedError:
                return
            except WattfleetError as error:
                self._failed_renewals += 1
                self.happened(DeviceFailed(str(error)))
                return
            self._failed_renewals = 0
            await self.settled(ProfileEnded(anew=True))

    async def _recover(self) -> None:
        """Keep the device out of the rounds until it is well again."""
        while self._standing.state is DeviceState.DEGRADED:
            doublings = min(max(0, self._failed_renewals - 1), _MOST_DOUBLINGS)
            await asyncio.sleep(_CHECKED_EVERY_S * 2**doublings)
            async with self.training:
                try:
                    await shield_until_done(self._watch.recover)
                except WattfleetError:
                    continue
                except Exception:
                    # The boundary of the recovery, which is not to end before the device is well.
                    _log.exception("the device could not be looked after")
                    continue
                self.happened(DeviceRecovered())
