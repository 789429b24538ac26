"""Serves apps' trainings as long as the agent runs, and refuses them while the device is being prepared."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import grpc

from edge_agent.devices.device import Device
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.profiling.profiled_workload import ProfiledWorkload, StoppedError, built_in_workload
from edge_agent.runtime.app_requests import BusyError
from edge_agent.runtime.device_trainings import DeviceTrainings
from edge_agent.runtime.peer_credentials import PEER, PeerCredentials, user_name
from edge_agent.runtime.readiness import Readiness
from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_service import TooManyAppsError
from edge_agent.serving.turns import TurnPurpose
from edge_agent.session.coordinator_session import Announced, CoordinatorRequests, ProfileOrder
from edge_agent.settings import WorkloadSettings
from edge_agent.workloads.loading import OpenSteps
from edge_agent.workloads.process import workload_steps
from wattfleet.common.console import plain_text
from wattfleet.common.tasks import background_task, run_uncancelled, shield_until_done, stop_tasks
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.prediction.roofline import BASE_BATCH
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.limits import is_flower_run
from wattfleet_proto.names import owner_socket
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc

_log = logging.getLogger(__name__)


# --- Training now -----------------------------------------------------------------------------------------------------
# Asks a running agent for its training in progress; only the agent's owner may ask.


_TIMEOUT_S = 5.0


def training_now(socket: Path) -> dict[str, Any] | None:
    """Return the training in progress of the agent at a socket; None if there is none, or if this user may not see it.

    Args:
        socket: the path of the agent's socket.
    """
    owner = owner_socket(socket)
    try:
        if not owner.exists():
            return None
        with grpc.insecure_channel(f"unix:{owner}") as channel:
            stub: Any = local_pb2_grpc.LocalAgentServiceStub(channel)
            answer = stub.ShowTraining(local_pb2.ShowTrainingRequest(), timeout=_TIMEOUT_S)
    except (grpc.RpcError, PermissionError):
        return None
    if not answer.HasField("training"):
        return None
    training = answer.training
    return {
        "plan_id": training.plan_id,
        "running_s": training.running_s,
        "uid": training.uid,
        "user": user_name(training.uid),
        "pid": training.pid,
    }


# --- Requested work ---------------------------------------------------------------------------------------------------
# Carries out the coordinator's requests other than trainings: fronts of announced workloads, and measurements.


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
        in_turns = partial(self._turns.from_thread, TurnPurpose.MINIBATCH)
        return ProfiledWorkload(steps, (order.synthetic, batch)).in_turns(in_turns)


# --- App trainings ----------------------------------------------------------------------------------------------------

_ENDS_WITHIN_S = 1.0
"""Time for the last training of a ready device to deliver its answers, s."""

_MAX_OF_PROCESS = 8
"""Maximum of open trainings per process: one trains, and the others wait for their grant or are refused."""


_MOST_UNPLANNED_RUNS = 100
"""Maximum of runs without plans that an agent remembers to have warned of, since apps choose the ids of runs."""


class AppTrainings(local_pb2_grpc.LocalAgentServiceServicer):
    """The gRPC service for apps; passes their trainings on to the ready device.

    The agent's socket serves it from the agent's start to its end.

    Args:
        device_id: the device's name.
        refuses_unplanned: returns whether the site does not allow trainings without a plan.
        report_unplanned: reports such a training to the coordinator, by its run's id, and whether it was refused.
    """

    def __init__(
        self,
        device_id: str,
        refuses_unplanned: Callable[[], bool] = lambda: False,
        report_unplanned: Callable[[str, bool], None] = lambda run_id, is_refused: None,
    ) -> None:
        self._device_id = device_id
        self._refuses_unplanned = refuses_unplanned
        self._report_unplanned = report_unplanned
        self._unplanned_runs: dict[str, None] = {}  # the oldest first
        self._ready: DeviceTrainings | None = None
        self._calls: dict[asyncio.Task[Any], PeerCredentials | None] = {}

    @asynccontextmanager
    async def served_by(self, trainings: DeviceTrainings) -> AsyncIterator[None]:
        """Pass trainings on within this context. At its end, trainings in progress are ended and the device is parked.

        Args:
            trainings: runs the trainings of the ready device.
        """
        self._ready = trainings
        try:
            yield
        finally:
            self._ready = None
            await run_uncancelled(self._end_calls())

    async def Train(  # noqa: N802 - named by the protocol
        self, request_iterator: AsyncIterator[local_pb2.TrainRequest], context: Any
    ) -> AsyncIterator[local_pb2.TrainResponse]:
        """Run one round's training, from its Start to its Finish or until the ClientApp disconnects.

        Raises:
            BusyError: the device is being prepared, or the agent is stopping.
            TooManyAppsError: the process already has the maximum of open trainings.
        """
        ready, call, peer = self._ready, asyncio.current_task(), PEER.get()
        assert call is not None, "gRPC runs every call in a task"
        if ready is None:
            raise BusyError(f"{self._device_id} is being prepared and cannot train now; try again later")
        if peer is not None and list(self._calls.values()).count(peer) >= _MAX_OF_PROCESS:
            raise TooManyAppsError(f"{peer} has {_MAX_OF_PROCESS} open trainings, the maximum: end one of them first")
        self._calls[call] = peer
        try:
            async with aclosing(ready.answers_to(request_iterator)) as answers:
                async for answer in answers:
                    yield answer
        except asyncio.CancelledError:
            if self._ready is ready:
                raise
            raise BusyError(
                f"{self._device_id} ends the training, since its agent is stopping or preparing it again"
            ) from None
        finally:
            self._calls.pop(call, None)

    async def ShowTraining(  # noqa: N802 - named by the protocol
        self, request: local_pb2.ShowTrainingRequest, context: Any
    ) -> local_pb2.ShowTrainingResponse:
        """Return the training in progress and the process that started it."""
        running = None if self._ready is None else self._ready.running
        if running is None:
            return local_pb2.ShowTrainingResponse()
        training = local_pb2.TrainingNow(plan_id=running.plan_id, running_s=time.monotonic() - running.began_s)
        if running.peer is not None:
            training.uid, training.pid = running.peer.uid, running.peer.pid
        return local_pb2.ShowTrainingResponse(training=training)

    async def GetDevice(  # noqa: N802 - named by the protocol
        self, request: local_pb2.GetDeviceRequest, context: Any
    ) -> local_pb2.GetDeviceResponse:
        """Return the device's name, even while the device is being prepared."""
        return local_pb2.GetDeviceResponse(device_id=self._device_id)

    async def NoteUnplanned(  # noqa: N802 - named by the protocol
        self, request: local_pb2.NoteUnplannedRequest, context: Any
    ) -> local_pb2.NoteUnplannedResponse:
        """Log and report once that an app trains without a plan, and return why the site does not allow it, if so."""
        if not is_flower_run(request.run_id):
            raise InvalidInputError("run_id must be the id of a Flower run, a number of at most 20 digits")
        is_refused = self._refuses_unplanned()
        if request.run_id not in self._unplanned_runs:
            self._unplanned_runs[request.run_id] = None
            if len(self._unplanned_runs) > _MOST_UNPLANNED_RUNS:
                del self._unplanned_runs[next(iter(self._unplanned_runs))]
            _log.warning(
                "Flower's run %s trains without a plan%s: wrap the strategy of its app in PowerAware",
                plain_text(request.run_id),
                ", and is refused, since the site's rules say so" if is_refused else ", outside of the budget",
            )
            self._report_unplanned(request.run_id, is_refused)
        if not is_refused:
            return local_pb2.NoteUnplannedResponse()
        return local_pb2.NoteUnplannedResponse(
            refusal=f"{self._device_id} trains only as its coordinator plans, since the site file has"
            ' unplanned_trainings = "refuse": wrap the app\'s strategy in PowerAware'
        )

    async def _end_calls(self) -> None:
        if calls := list(self._calls):
            await asyncio.wait(calls, timeout=_ENDS_WITHIN_S)
            await stop_tasks(*calls)
