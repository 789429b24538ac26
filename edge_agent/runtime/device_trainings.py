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
from edge_agent.learning.online_learner import Observed, OnlineLearner
from edge_agent.learning.workloads import Workloads
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.runtime.app_requests import (
    AppAnswers,
    AppNotStoppingError,
    BusyError,
    Pause,
    PauseEnded,
    reported_times,
    require_start,
    until_finish,
)
from edge_agent.runtime.peer_credentials import PEER, PeerCredentials
from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.runtime.states import (
    MAY_TRAIN,
    DeviceFailed,
    Event,
    TrainingAborted,
    TrainingBegan,
    TrainingEnded,
    TrainingParked,
    TrainingRejected,
)
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.grants import AgentGrant
from edge_agent.settings import ConnectionSettings
from edge_agent.training.training import PowerNotReadError, TrainingRunner
from wattfleet.common.tasks import background_task, run_uncancelled, shield_until_done
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import PowerMode
from wattfleet_proto.assignment import RoundAssignment
from wattfleet_proto.convert import assignment_from_start
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.names import MINOR
from wattfleet_proto.v1 import local_pb2, session_pb2

_log = logging.getLogger(__name__)


# --- Round learning ---------------------------------------------------------------------------------------------------
# What a device learns from a round, once its training has ended.


async def learn_from_round(
    learner: OnlineLearner,
    observed: Observed | None,
    finish: local_pb2.FinishTraining,
    supervisor: RecoverySupervisor,
    unmeasured: str | None = None,
) -> None:
    """Learn from a round, and report the state that follows.

    Args:
        learner: the learner of the trained workload.
        observed: the observation of the round; None if there is none.
        finish: the app's last message.
        supervisor: handles the end of the training.
        unmeasured: why the training has measured no mode; None if it has measured one.
    """
    drift = not_learned = None
    failed = finish.failed
    has_less_choice = finish.is_out_of_memory and learner.out_of_memory()
    try:
        if observed is not None:
            drift = await shield_until_done(learner.observe, observed)
        elif not failed or has_less_choice:
            await shield_until_done(learner.refit)
    except WattfleetError as error:
        # The round itself is complete; only its observation is lost to the predictor.
        _log.error("nothing was learned from the round: %s", error)
        not_learned = str(error)
    except StoppedError:
        not_learned = "the observation counts once the device is prepared again"
    except Exception:
        # An unexpected error ends only the learning: the device is parked and ready for the next round.
        _log.exception("nothing was learned from the round")
        not_learned = "nothing was learned from the round; see the agent's log"
    if failed or learner.profiled_modes:
        unmeasured = None
    if unmeasured is not None and unmeasured != learner.unmeasured:
        _log.warning("no mode of %s measured yet: %s", learner.known.workload.name, unmeasured)
    learner.unmeasured = unmeasured
    await supervisor.handle_with_front(TrainingEnded(failed, drift, not_learned, unmeasured))
    if has_less_choice:
        await supervisor.report_fronts()


# --- Granted training -------------------------------------------------------------------------------------------------
# Keeps a training within the watts of its grant, even if its app trains other minibatches than planned.


class GrantedTraining:
    """One training, from its start.

    All methods but `refit` touch the device: call them in a thread, one at a time.

    Attributes:
        learner: the learner of the trained workload.
    """

    def __init__(
        self, watch: TrainingRunner, learner: OnlineLearner, grant: AgentGrant, mode: PowerMode, epochs: float
    ) -> None:
        """Apply a mode and start to observe the training, unless the mode differs from the granted one.

        Args:
            watch: runs the training.
            learner: the learner of the trained workload.
            grant: allows the training.
            mode: a mode that keeps within the grant.
            epochs: local epochs to train.

        Raises:
            InvalidInputError: the number of epochs is out of range.
            ModeNotAppliedError: the mode could not be applied.
        """
        watch.start(learner, mode, epochs, grant.power_limit_w, grant.measuring, grant.planned_s)
        if mode != grant.mode:
            _log.warning("training begins at %s: other devices have shown that it draws less", mode.label())
            watch.lower(mode)
        self.learner = learner
        self._watch = watch
        self._power_limit_w = grant.power_limit_w
        self._is_stopped = False
        self._is_refitted = False
        self._not_fitted: Exception | None = None

    def loader_seen(self, loader: local_pb2.LoaderSeen) -> bool:
        """Use what the app reports of its data loader.

        Returns:
            Whether the app's minibatches differ from those of the predictor. If so, call `refit` and then
            `keep_within_grant`.

        Raises:
            InvalidInputError: a number is out of range.
            ModeNotAppliedError: the training's own mode could not be restored after measurements.
        """
        batch, workers, length = (
            getattr(loader, name) if loader.HasField(name) else None
            for name in ("batch", "loader_workers", "minibatches_per_epoch")
        )
        changed = self.learner.loader_seen(batch, workers, length, loader.takes_planned_batch)
        self._watch.loader_seen(changed, loader.after_minibatch)
        if changed or self.learner.is_outdated:
            return True
        self._watch.loader_handled()
        return False

    def refit(self) -> bool:
        """Fit the predictor to the app's minibatches. This may take seconds, and the training may end meanwhile.

        Returns:
            Whether the fit succeeded.
        """
        try:
            self.learner.refit_if_outdated()
        except (WattfleetError, StoppedError) as error:
            self._not_fitted = error
        return self._not_fitted is None

    def keep_within_grant(self, app_has_finished: bool) -> str | None:
        """After `refit`, lower the mode if it may exceed the grant with the app's minibatches.

        Args:
            app_has_finished: the app has ended its training meanwhile.

        Returns:
            None if the training continues. Otherwise the reason to stop it: no mode keeps within the grant, and the
            device is parked.

        Raises:
            ModeNotAppliedError: the lower mode could not be applied, or the device could not be parked.
        """
        self._is_refitted = self._not_fitted is None
        stop_reason = None
        if not self._is_stopped:
            if self._not_fitted is None:
                stop_reason = self._lower_within_grant()
            else:
                # Their power is unknown and may exceed any limit.
                why = str(self._not_fitted) or "the agent is stopping"
                stop_reason = self._stop_since(f"the watts of {self._minibatches} cannot be predicted: {why}")
        self._watch.loader_handled(app_has_finished)
        return stop_reason

    def continue_under(self, grant: AgentGrant) -> str | None:
        """Continue under another grant, in its mode or in a lower one that keeps within it, as in `keep_within_grant`.

        A training that is already stopping ignores the grant.

        Returns:
            None if the training continues. Otherwise the reason to stop it: no mode keeps within the grant, and the
            device is parked.

        Raises:
            InvalidInputError: its mode draws more than the grant allows, and was planned with the current front.
            ModeNotAppliedError: its mode could not be applied.
        """
        assert grant.mode is not None, "the training stops: its grant has no mode"
        if self._is_stopped:
            return None
        mode: PowerMode | None = grant.mode
        if self._is_refitted:
            # The coordinator may have planned it before it had the front of the app's minibatches.
            mode = self._mode_within(grant.mode, grant.power_limit_w)
            if mode is None:
                return self._stop_since(self._no_mode(grant.power_limit_w))
        else:
            mode = self.learner.granted_mode(grant.mode, grant.power_limit_w)
        self._watch.reassign(mode, grant.power_limit_w)
        self._power_limit_w = grant.power_limit_w
        _log.info("training continues at %s within %.1f W", self._watch.mode.label(), grant.power_limit_w)
        return None

    def park(self) -> None:
        """Park the device, since the training has to end.

        Raises:
            ModeNotAppliedError: the device could not be parked.
        """
        self._is_stopped = True
        self._watch.reassign(None, 0.0)

    def _lower_within_grant(self) -> str | None:
        granted, limit_w = self._watch.mode, self._power_limit_w
        mode = self._mode_within(granted, limit_w)
        if mode is None:
            return self._stop_since(self._no_mode(limit_w))
        if mode != granted:
            self._watch.lower(mode)
            _log.warning(
                "training continues at %s instead of %s: %s may draw more than the %.1f W granted",
                mode.label(),
                granted.label(),
                self._minibatches,
                limit_w,
            )
        return None

    def _mode_within(self, mode: PowerMode, limit_w: float) -> PowerMode | None:
        try:
            return self.learner.mode_within(mode, limit_w)
        except WattfleetError as error:
            _log.error("no mode of %s is known to keep within %.1f W: %s", self._minibatches, limit_w, error)
            return None

    def _stop_since(self, reason: str) -> str:
        self.park()
        return reason

    def _no_mode(self, limit_w: float) -> str:
        what = self._minibatches
        return f"no power mode keeps {what} within the {limit_w:.1f} W granted: the next round is planned for them"

    @property
    def _minibatches(self) -> str:
        batch = self.learner.known.workload.facts.batch
        return "the app's minibatches" if batch is None else f"the app's minibatches of {batch:,} samples"


# --- Device trainings -------------------------------------------------------------------------------------------------


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


ACKNOWLEDGE_TIMEOUT_S = 30.0
"""Time to wait at the end of a round for the coordinator to acknowledge the observation, s."""

GRANT_TIMEOUT_S = 10.0
"""Time to wait at the start of a training for the coordinator's grant, which may be on its way, s."""

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
        watch: TrainingRunner,
        session: CoordinatorSession,
        workloads: Workloads,
        supervisor: RecoverySupervisor,
        settings: ConnectionSettings = ConnectionSettings(),
    ) -> None:
        """Set up the trainings of one device.

        Args:
            device_id: the device's name.
            watch: runs its trainings.
            session: reports observations to the coordinator.
            workloads: learn from rounds.
            supervisor: handles the events of the trainings.
            settings: the agent's settings, among them the timeout for apps to stop.
        """
        self._device_id = device_id
        self._watch = watch
        self._session = session
        self._workloads = workloads
        self._supervisor = supervisor
        self._stop_timeout_s = settings.stop_timeout_s
        self._refitting: set[asyncio.Task[None]] = set()
        self.running: RunningTraining | None = None

    def answers_to(
        self, requests: AsyncIterator[local_pb2.TrainRequest]
    ) -> AsyncGenerator[local_pb2.TrainResponse, None]:
        """Run one round's training and yield the answers to its app. Closing the generator ends the training."""
        return AppAnswers().run(partial(self._train, requests))

    async def _train(self, request_iterator: AsyncIterator[local_pb2.TrainRequest], answers: AppAnswers) -> None:
        """Run one round's training, without ever waiting for the app to read an answer."""
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
        await self._session.grants.wait_for(start.plan_id, GRANT_TIMEOUT_S)
        if self._supervisor.is_busy:
            raise BusyError(f"{self._device_id} is training already; try again later")
        async with self._supervisor.device_lock:
            if self._supervisor.state not in MAY_TRAIN:
                raise BusyError(f"{self._device_id} is being prepared and cannot train now; try again later")
            assignment = assignment_from_start(start)
            grant = self._session.grants.begin(assignment.plan_id)
            self._watch.expect()  # from here on, the energy of the previous training is not reported again
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
                        if isinstance(event, AgentGrant):
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
                if grant.counts_energy and (drawn := self._watch.drawn) is not None:
                    self._session.report_energy(
                        session_pb2.TrainingEnergy(
                            plan_id=grant.plan_id, energy_j=drawn.energy_j, lasted_s=drawn.lasted_s
                        )
                    )
            self._supervisor.handle(TrainingParked("learns from its training"))
            await run_uncancelled(
                learn_from_round(training.learner, observed, request.finish, self._supervisor, unmeasured)
            )
        # The next plan needs the observation: deliver it before Flower gets the reply. While the coordinator is
        # unreachable, do not wait: the outbox keeps it.
        if not (self._session.connected and await self._session.flush(ACKNOWLEDGE_TIMEOUT_S)):
            _log.warning("the coordinator has not acknowledged the observation of %s yet", start.plan_id)
        answers.put(local_pb2.TrainResponse(finished=finished))

    def _begin(self, grant: AgentGrant, epochs: float) -> GrantedTraining:
        """Apply the mode of a grant and start to observe the training."""
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

    async def _continue(self, training: GrantedTraining, grant: AgentGrant) -> None:
        """Continue the training under another grant."""
        stop_reason = await shield_until_done(training.continue_under, grant)
        self._session.grants.applied(grant)
        await self._stop_since(stop_reason)

    async def _stop(self, training: GrantedTraining, reason: str) -> None:
        """Park the device during a training, which ends with its current minibatch."""
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
        """
        times = reported_times(report, since_s)
        return await shield_until_done(self._watch.minibatches_ended, times, report.paused, report.is_pass_over)

    async def _finished(
        self, assignment: RoundAssignment, grant: AgentGrant, finish: local_pb2.FinishTraining
    ) -> tuple[local_pb2.TrainingFinished, Observed | None]:
        """End the training and report the observation."""
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
