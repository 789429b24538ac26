"""Carries out the coordinator's requests other than trainings: fronts of announced workloads, and measurements."""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial
from typing import Any
from weakref import WeakSet

from edge_agent.devices.device import Device
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.profiling.profiled_workload import ProfiledWorkload, StoppedError, built_in_workload
from edge_agent.runtime.readiness import Readiness
from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.turns import Kind
from edge_agent.session.requests import Announced, CoordinatorRequests, ProfileOrder
from edge_agent.settings import WorkloadSettings
from edge_agent.workloads.process import workload_steps
from edge_agent.workloads.step import OpenSteps
from wattfleet.errors import WattfleetError
from wattfleet.prediction.roofline import BASE_BATCH
from wattfleet_io.tasks import background_task, run_uncancelled, shield_until_done, stop_tasks
from wattfleet_proto.device_state import DeviceState

_log = logging.getLogger(__name__)


class RequestedWork:
    """Carries out the coordinator's requests, one after the other.

    Args:
        device: the board.
        settings: the agent's settings, among them where a synthetic workload computes.
        ready: the device's workloads.
        supervisor: measures modes once the device is free, and reports fronts.
        requests: the coordinator's requests.
        stopping: ends a measurement once it is set.
        turns: shares the device between requests and measurements.
    """

    def __init__(
        self,
        device: Device,
        settings: WorkloadSettings,
        ready: Readiness,
        supervisor: RecoverySupervisor,
        requests: CoordinatorRequests,
        stopping: threading.Event,
        turns: DeviceTurns,
    ) -> None:
        self._device = device
        self._settings = settings
        self._ready = ready
        self._supervisor = supervisor
        self._requests = requests
        self._stopping = stopping
        self._turns = turns
        self._measured: WeakSet[OnlineLearner] = WeakSet()

    async def serve_until(self, ended: asyncio.Task[Any]) -> None:
        """Carry out requests until `ended` is done; nothing touches the device after that."""
        self._requests.repeat()
        work = background_task("requested work", self._serve())
        try:
            await asyncio.wait([ended])
        finally:
            self._stopping.set()
            await run_uncancelled(stop_tasks(work))

    async def _serve(self) -> None:
        while True:
            announced, orders = await self._requests.next()
            self._ready.workloads.live(each.workload for each in announced)
            for each in announced:
                await self._announce(each)
            for order in orders:
                await self._profile(order)

    async def _announce(self, announced: Announced) -> None:
        """Report the front of a workload; if nothing is measured, the front comes from the prior alone."""
        workload = announced.workload
        learner = await self._learner(announced)
        if learner is None:
            return
        ahead = self._ready.ahead
        is_new = learner not in self._measured and learner.profiled_modes < ahead
        self._measured.add(learner)  # Measuring may end early, and every new run repeats the announcement.
        if is_new and self._device.built_in_workload() is not None:
            reason = f"measuring the workload {workload.name!r} before its first round"
            await self._supervisor.profile_ahead(reason, partial(learner.profile_ahead, ahead))
        await self._supervisor.report_fronts()

    async def _profile(self, order: ProfileOrder) -> None:
        """Measure modes with a synthetic workload, as the coordinator has ordered."""
        learner = await self._learner(Announced(order.workload))
        if learner is None:
            return
        try:
            steps = self._steps(order, learner).stopped_by(self._stopping).open_steps
        except WattfleetError as error:
            _log.error("the ordered measurement of %r is not possible: %s", order.workload.name, error)
            return
        # Without a front, the coordinator cannot account for the power that the device draws while measuring.
        await self._supervisor.report_fronts()
        reason = f"measuring the workload {order.workload.name!r}, as the coordinator has ordered"
        await self._supervisor.profile_ahead(reason, lambda report: learner.profile_ahead(order.modes, report, steps))

    async def _learner(self, announced: Announced) -> OnlineLearner | None:
        """Return the learner of a workload; if it has none, log the reason and return None."""
        try:
            is_training = self._supervisor.state is DeviceState.TRAINING
            return await shield_until_done(self._ready.announced, announced.workload, announced.units, is_training)
        except WattfleetError as error:
            _log.error("the workload %r cannot be predicted: %s", announced.workload.name, error)
        except StoppedError:
            pass
        return None

    def _steps(self, order: ProfileOrder, learner: OnlineLearner) -> ProfiledWorkload:
        built_in = self._device.built_in_workload(learner.paced)
        if built_in is not None:
            return built_in_workload(built_in)
        batch = learner.known.workload.facts.batch or BASE_BATCH
        steps: OpenSteps = workload_steps(order.synthetic, batch, self._settings.processor)
        in_turns = partial(self._turns.from_thread, Kind.MINIBATCH)
        return ProfiledWorkload(steps, (order.synthetic, batch)).in_turns(in_turns)
