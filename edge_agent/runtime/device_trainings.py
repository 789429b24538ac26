"""Runs the trainings of a ready device, each as its app requests and within the grant of its round."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.learning.observation import Observed
from edge_agent.learning.workloads import Workloads
from edge_agent.runtime.app_answers import AppAnswers
from edge_agent.runtime.app_requests import (
    AppNotStoppingError,
    Pause,
    PauseEnded,
    reported_times,
    require_start,
    until_finish,
)
from edge_agent.runtime.granted_training import GrantedTraining
from edge_agent.runtime.peer_credentials import PEER, PeerCredentials
from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.runtime.round_learning import learn_from_round
from edge_agent.runtime.socket_errors import BusyError
from edge_agent.runtime.states import (
    MAY_TRAIN,
    DeviceFailed,
    Event,
    TrainingAborted,
    TrainingBegan,
    TrainingParked,
    TrainingRejected,
)
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.held_grant import Grant
from edge_agent.settings import SessionSettings
from edge_agent.training.training import TrainingWatch
from edge_agent.training.training_power import PowerNotReadError
from wattfleet.errors import InvalidInputError
from wattfleet_io.tasks import background_task, run_uncancelled, shield_until_done
from wattfleet_proto.assignment import RoundAssignment
from wattfleet_proto.convert import assignment_from_start
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import local_pb2, session_pb2
from wattfleet_proto.version import MINOR

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunningTraining:
    """The training in progress and the process that started it.

    Attributes:
        plan_id: the plan of the training.
        peer: the process that started it; None if unknown.
        began_s: its start on the monotonic clock, s.
    """

    plan_id: str
    peer: PeerCredentials | None
    began_s: float


# These errors degrade the device. An invalid request does not, since it shows nothing about the device.
_DEVICE_ERRORS = (ModeNotAppliedError, PowerNotReadError)


class DeviceTrainings:
    """Runs the trainings of one device for its apps, one at a time.

    Attributes:
        running: the training in progress; None while nothing trains.
    """

    def __init__(
        self,
        device_id: str,
        watch: TrainingWatch,
        session: CoordinatorSession,
        workloads: Workloads,
        supervisor: RecoverySupervisor,
        settings: SessionSettings = SessionSettings(),
    ) -> None:
        """Set up the trainings of one device.

        Args:
            device_id: the device's name.
            watch: runs its trainings.
            session: reports observations to the coordinator.
            workloads: learn from rounds.
            supervisor: handles the events of the trainings.
            settings: the agent's settings, among them the timeouts for the coordinator's grant and acknowledgement and
                for apps to stop.
        """
        self._device_id = device_id
        self._watch = watch
        self._session = session
        self._workloads = workloads
        self._supervisor = supervisor
        self._acknowledge_timeout_s = settings.acknowledge_timeout_s
        self._grant_timeout_s = settings.grant_timeout_s
        self._stop_timeout_s = settings.stop_timeout_s
        self._refitting: set[asyncio.Task[None]] = set()
        self.running: RunningTraining | None = None

    def answers_to(
        self, requests: AsyncIterator[local_pb2.TrainRequest]
    ) -> AsyncGenerator[local_pb2.TrainResponse, None]:
        """Run one round's training and yield the answers to its app. Closing the generator ends the training."""
        return AppAnswers().run(partial(self._train, requests))

    async def _train(self, request_iterator: AsyncIterator[local_pb2.TrainRequest], answers: AppAnswers) -> None:
        """Run one round's training, without ever waiting for the app to read an answer.

        Raises:
            WattfleetError: why the training was refused or ended.
        """
        first = await anext(request_iterator, None)
        if first is None:
            raise InvalidInputError("the stream ended before its Start: send a Start first")
        start = first.start
        require_start(start, self._device_id)
        if self._supervisor.state not in MAY_TRAIN | {DeviceState.TRAINING}:
            raise BusyError(f"{self._device_id} is being profiled and cannot train now; try again later")
        if self._supervisor.is_busy:
            raise BusyError(f"{self._device_id} is training already; try again later")
        # Before the device is locked, so that an invented plan cannot keep other apps from training.
        await self._session.grants.wait_for(start.plan_id, self._grant_timeout_s)
        if self._supervisor.is_busy:
            raise BusyError(f"{self._device_id} is training already; try again later")
        async with self._supervisor.device_lock:
            if self._supervisor.state not in MAY_TRAIN:
                raise BusyError(f"{self._device_id} is being prepared and cannot train now; try again later")
            assignment = assignment_from_start(start)
            grant = self._session.grants.begin(assignment.plan_id)
            try:
                training = await shield_until_done(self._begin, grant, assignment.epochs)
                self._supervisor.handle(TrainingBegan(self._watch.mode.label()))
                answered_s = time.monotonic()
                self.running = RunningTraining(assignment.plan_id, PEER.get(), answered_s)
                _log.info("%s is trained by %s", assignment.plan_id, PEER.get() or "an unknown process")
                answers.put(local_pb2.TrainResponse(started=local_pb2.TrainingStarted(protocol_minor=MINOR)))
                pause = Pause()
                changes = until_finish(request_iterator, answers, self._session.grants, pause, self._stop_timeout_s)
                async with aclosing(changes) as events:
                    async for event in events:
                        if isinstance(event, Grant):
                            await self._continue(training, event)
                        elif isinstance(event, str):
                            await self._stop(training, event)
                            answers.put(local_pb2.TrainResponse(stop=local_pb2.StopTraining(reason=event)))
                        elif isinstance(event, PauseEnded):
                            await self._stop_since(
                                await shield_until_done(training.keep_within_grant, event.app_has_finished)
                            )
                        elif event.HasField("loader"):
                            pause.work = await run_uncancelled(self._loader_seen(training, event.loader))
                        elif event.HasField("minibatches"):
                            measuring = await self._measure(event.minibatches, time.monotonic() - answered_s)
                            answered_s = time.monotonic()
                            answers.put(local_pb2.TrainResponse(noted=local_pb2.MinibatchesNoted(measuring=measuring)))
                        else:
                            request = event
                unmeasured = self._watch.why_unmeasured()
                finished, observed = await self._finished(assignment, grant, request.finish)
            except _DEVICE_ERRORS as error:
                # Park it at once: it must not draw its training power until it has recovered.
                await run_uncancelled(self._give_up(DeviceFailed(str(error))))
                raise
            except (InvalidInputError, AppNotStoppingError) as error:
                if self._supervisor.state is DeviceState.TRAINING:
                    await run_uncancelled(self._give_up(TrainingRejected(str(error))))
                else:  # nothing was applied
                    self._session.grants.ended()
                raise
            except BaseException:
                # The stream has broken off: the app is gone, and there is nothing to learn.
                await run_uncancelled(self._give_up(TrainingAborted()))
                raise
            finally:
                self.running = None
            self._supervisor.handle(TrainingParked("learns from its training"))
            await run_uncancelled(
                learn_from_round(training.learner, observed, request.finish, self._supervisor, unmeasured)
            )
        # The next plan needs the observation: deliver it before Flower gets the reply. While the coordinator is
        # unreachable, do not wait: the outbox keeps it.
        if not (self._session.connected and await self._session.flush(self._acknowledge_timeout_s)):
            _log.warning("the coordinator has not acknowledged the observation of %s yet", start.plan_id)
        answers.put(local_pb2.TrainResponse(finished=finished))

    def _begin(self, grant: Grant, epochs: float) -> GrantedTraining:
        """Apply the mode of a grant and start to observe the training.

        Raises:
            InvalidInputError: the mode draws more than the grant allows, or the number of epochs is out of range.
            ModeNotAppliedError: the mode could not be applied.
            WattfleetError: the files of the workload are damaged, or no predictor can be fitted.
        """
        assert grant.mode is not None, "a training cannot start: its grant has no mode"
        learner = self._workloads.learner(grant.workload)
        learner.trains_with(grant.batch)
        learner.refit_if_outdated()
        mode = learner.granted_mode(grant.mode, grant.power_limit_w)
        self._workloads.trains(learner)
        return GrantedTraining(self._watch, learner, grant, mode, epochs)

    async def _loader_seen(self, training: GrantedTraining, loader: local_pb2.LoaderSeen) -> asyncio.Task[None] | None:
        """Use what the app reports of its data loader, and start to refit the predictor to its minibatches if needed.

        The front is reported even if the app disconnects or fails meanwhile, so that the next plan counts them.

        Raises:
            InvalidInputError: a number is out of range.
            ModeNotAppliedError: the training's own mode could not be restored after measurements.
        """
        if not await asyncio.to_thread(training.loader_seen, loader):
            return None

        async def refit() -> None:
            if await shield_until_done(training.refit):
                await self._supervisor.report_fronts()

        refitting = background_task("fit to the minibatches of an app", refit())
        self._refitting.add(refitting)
        refitting.add_done_callback(self._refitting.discard)
        return refitting

    async def _stop_since(self, reason: str | None) -> None:
        """Stop the training for a reason that the device itself has; with None, do nothing."""
        if reason is not None:
            await self._session.grants.stop(reason)

    async def _continue(self, training: GrantedTraining, grant: Grant) -> None:
        """Continue the training under another grant.

        Raises:
            InvalidInputError: its mode draws more than it allows.
            ModeNotAppliedError: its mode could not be applied.
        """
        stop_reason = await shield_until_done(training.continue_under, grant)
        self._session.grants.applied(grant)
        await self._stop_since(stop_reason)

    async def _stop(self, training: GrantedTraining, reason: str) -> None:
        """Park the device during a training, which ends with its current minibatch.

        Raises:
            ModeNotAppliedError: the device could not be parked.
        """
        await shield_until_done(training.park)
        self._session.grants.ended()
        self._supervisor.handle(TrainingParked(f"the training stops: {reason}"))
        _log.warning("the training stops: %s", reason)

    async def _give_up(self, event: Event) -> None:
        """Park the device without learning from the training; report `event` unless parking fails."""
        try:
            await shield_until_done(self._watch.abandon)
            # Park again, since the training may have ended without parking the device.
            await shield_until_done(self._watch.park)
        except _DEVICE_ERRORS as error:
            # Its grant is over only once it is parked, after it has recovered.
            self._supervisor.handle(DeviceFailed(str(error)))
        else:
            self._session.grants.ended()
            self._supervisor.handle(event)

    async def _measure(self, report: local_pb2.MinibatchesTrained, since_s: float) -> bool:
        """Use the app's reported minibatches to measure modes; return whether the app should keep reporting.

        Args:
            report: the app's report.
            since_s: seconds since its last report was answered.

        Raises:
            InvalidInputError: the reported times are impossible.
        """
        times = reported_times(report, since_s)
        return await shield_until_done(self._watch.minibatches_ended, times, report.paused, report.is_pass_over)

    async def _finished(
        self, assignment: RoundAssignment, grant: Grant, finish: local_pb2.FinishTraining
    ) -> tuple[local_pb2.TrainingFinished, Observed | None]:
        """End the training and report the observation.

        Raises:
            InvalidInputError: the number of trained epochs is negative or exceeds the assignment.
        """
        if finish.failed:
            await shield_until_done(self._watch.abandon)
            self._session.grants.ended()
            return local_pb2.TrainingFinished(), None
        epochs_done = finish.epochs_done if finish.HasField("epochs_done") else None
        if epochs_done is not None and not 0 <= epochs_done <= assignment.epochs:
            raise InvalidInputError(f"epochs_done must be 0 to {assignment.epochs:g}, as assigned, not {epochs_done:g}")
        observed = await shield_until_done(self._watch.finish, epochs_done)
        self._session.grants.ended()
        if observed is None:
            return local_pb2.TrainingFinished(), None
        if grant.measuring is not None:  # no round waits for the observation
            return local_pb2.TrainingFinished(epoch_s=observed.epoch_s, power_w=observed.power_w), observed
        self._session.report_observation(
            session_pb2.Observation(
                plan_id=assignment.plan_id,
                epoch_s=observed.epoch_s,
                power_w=observed.power_w,
                beside_duty=observed.is_shared,
            )
        )
        return local_pb2.TrainingFinished(epoch_s=observed.epoch_s, power_w=observed.power_w), observed
