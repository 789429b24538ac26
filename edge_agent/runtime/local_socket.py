"""The agent's local service, through which an unprivileged Flower ClientApp uses the power knobs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.learning.fitting_process import FittingFailedError
from edge_agent.learning.observation import Observed
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.profiling.journal import JournalError
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.runtime.states import (
    MAY_TRAIN,
    DeviceFailed,
    Event,
    TrainingAborted,
    TrainingBegan,
    TrainingEnded,
    TrainingRejected,
)
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.settings import SessionSettings
from edge_agent.training.training import TrainingWatch
from edge_agent.training.training_power import PowerNotReadError
from edge_agent.workloads.step import StepTimes
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_io.tasks import run_uncancelled, shield_until_done
from wattfleet_proto.assignment import RoundAssignment
from wattfleet_proto.convert import assignment_from_start, mode_from_message
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.error_boundary import StatusTable
from wattfleet_proto.message_sizes import MAX_ID_CHARACTERS, MAX_PLAN_ID_CHARACTERS
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc, session_pb2

_log = logging.getLogger(__name__)

# Limits on what an app may send: the agent runs as root and the app does not.
_MAX_MINIBATCHES = 10_000  # in one report; an app reports several times a second
_REPORT_SLACK_S = 1.0


class BusyError(WattfleetError):
    """The device cannot train now."""


class StreamEndedError(WattfleetError):
    """The app ended its stream during a training, without a Finish: the device is parked."""


STATUS: StatusTable = {
    InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    ModeNotAppliedError: grpc.StatusCode.ABORTED,
    PowerNotReadError: grpc.StatusCode.UNAVAILABLE,
    BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StreamEndedError: grpc.StatusCode.ABORTED,
    JournalError: grpc.StatusCode.INTERNAL,
    FittingFailedError: grpc.StatusCode.INTERNAL,
}

# After these errors the device is degraded. An invalid request, in contrast, says nothing about the device.
_DEVICE_ERRORS = (ModeNotAppliedError, PowerNotReadError)


class LocalAgentServicer(local_pb2_grpc.LocalAgentServiceServicer):
    """Translates between the local protocol and the training watch."""

    def __init__(
        self,
        device_id: str,
        watch: TrainingWatch,
        session: CoordinatorSession,
        learner: OnlineLearner,
        supervisor: RecoverySupervisor,
        settings: SessionSettings = SessionSettings(),
    ) -> None:
        """Serve one device.

        Args:
            device_id: its name.
            watch: runs its trainings.
            session: reports observations to the coordinator.
            learner: learns from what rounds show.
            supervisor: handles the events of the trainings.
            settings: how long to wait for the coordinator's acknowledgement.
        """
        self._device_id = device_id
        self._watch = watch
        self._session = session
        self._learner = learner
        self._supervisor = supervisor
        self._acknowledge_timeout_s = settings.acknowledge_timeout_s

    async def Train(  # noqa: N802 - named by the protocol
        self, request_iterator: AsyncIterator[local_pb2.TrainRequest], context: Any
    ) -> AsyncIterator[local_pb2.TrainResponse]:
        """Run one round's training, from its Start to its Finish or until the ClientApp disconnects."""
        first = await anext(request_iterator, None)
        if first is None:
            raise InvalidInputError("the stream ended before its Start: send a Start first")
        start = first.start
        if start.device_id != self._device_id:
            raise InvalidInputError(
                f"the assignment is for {start.device_id[:MAX_ID_CHARACTERS]}, but this is the agent of"
                f" {self._device_id}: give the SuperNode its own device-id and agent-socket"
            )
        if len(start.plan_id) > MAX_PLAN_ID_CHARACTERS:
            raise InvalidInputError(
                f"plan_id must have at most {MAX_PLAN_ID_CHARACTERS} characters, not {len(start.plan_id):,}"
            )
        if self._supervisor.state not in MAY_TRAIN | {DeviceState.TRAINING}:
            raise BusyError(f"{self._device_id} is being profiled and cannot train now; try again later")
        if self._supervisor.device_lock.locked():
            raise BusyError(f"{self._device_id} is training already; try again later")
        async with self._supervisor.device_lock:
            if self._supervisor.state not in MAY_TRAIN:
                raise BusyError(f"{self._device_id} is being prepared and cannot train now; try again later")
            try:
                assignment = assignment_from_start(start)
                await shield_until_done(self._watch.start, assignment.mode, assignment.epochs, assignment.power_limit_w)
                self._supervisor.handle(TrainingBegan(assignment.mode.label()))
                answered_s = time.monotonic()
                yield local_pb2.TrainResponse(started=local_pb2.TrainingStarted())
                async with aclosing(self._until_finish(start.plan_id, request_iterator)) as events:
                    async for event in events:
                        if isinstance(event, session_pb2.Reassign):
                            if await self._reassign(event):
                                continue
                            yield local_pb2.TrainResponse(stop=local_pb2.StopTraining())
                        elif event.HasField("minibatches"):
                            measuring = await self._measure(event.minibatches, time.monotonic() - answered_s)
                            answered_s = time.monotonic()
                            yield local_pb2.TrainResponse(noted=local_pb2.MinibatchesNoted(measuring=measuring))
                        else:
                            request = event
                finished, observed = await self._finished(assignment, request.finish)
            except _DEVICE_ERRORS as error:
                # Park it at once: it must not draw its training power until it has recovered.
                await run_uncancelled(self._give_up(DeviceFailed(str(error))))
                raise
            except InvalidInputError as error:
                if self._supervisor.state is DeviceState.TRAINING:
                    await run_uncancelled(self._give_up(TrainingRejected(str(error))))
                raise
            except BaseException:
                # The stream has broken off: the app is gone, and there is nothing to learn.
                await run_uncancelled(self._give_up(TrainingAborted()))
                raise
            await run_uncancelled(self._learn(observed, request.finish.failed))
        # The next plan needs the observation: deliver it before Flower gets the reply. Do not wait while the
        # coordinator is away: the outbox keeps it.
        if not (self._session.connected and await self._session.flush(self._acknowledge_timeout_s)):
            _log.warning("the coordinator has not acknowledged the observation of %s yet", start.plan_id)
        yield local_pb2.TrainResponse(finished=finished)

    async def _until_finish(
        self, plan_id: str, requests: AsyncIterator[local_pb2.TrainRequest]
    ) -> AsyncGenerator[local_pb2.TrainRequest | session_pb2.Reassign, None]:
        """The app's requests up to its Finish, and the coordinator's orders meanwhile, one at a time."""
        requested = asyncio.ensure_future(anext(requests))
        ordered = asyncio.ensure_future(self._session.orders.next(plan_id))
        try:
            while True:
                await asyncio.wait((requested, ordered), return_when=asyncio.FIRST_COMPLETED)
                if ordered.done():
                    order = ordered.result()
                    yield order
                    ordered = asyncio.ensure_future(self._session.orders.next(plan_id, after=order))
                if requested.done():
                    try:
                        request = requested.result()
                    except StopAsyncIteration:
                        raise StreamEndedError(
                            f"the stream of {plan_id} ended before its Finish: the device is parked"
                        ) from None
                    yield request
                    if not request.HasField("minibatches"):
                        return
                    requested = asyncio.ensure_future(anext(requests))
        finally:
            requested.cancel()
            ordered.cancel()

    async def _reassign(self, order: session_pb2.Reassign) -> bool:
        """Apply an order of the coordinator; return whether the training continues.

        Raises:
            ModeNotAppliedError: the mode could not be applied.
        """
        mode = mode_from_message(order.mode) if order.HasField("mode") else None
        await shield_until_done(self._watch.reassign, mode, order.power_limit_w)
        _log.info(
            "the power limit fell: %s",
            "the training stops" if mode is None else f"training continues at {mode.label()}",
        )
        return mode is not None

    async def _give_up(self, event: Event) -> None:
        """Park the device and learn nothing; report `event` unless parking fails."""
        try:
            await shield_until_done(self._watch.abandon)
        except _DEVICE_ERRORS as error:
            self._supervisor.handle(DeviceFailed(str(error)))
        else:
            self._supervisor.handle(event)

    async def _measure(self, report: local_pb2.MinibatchesTrained, since_s: float) -> bool:
        """Measure modes by the minibatches that the app reports; return whether it should go on reporting.

        Args:
            report: the app's report.
            since_s: seconds since its last report was answered.

        Raises:
            InvalidInputError: the reported times are impossible.
        """
        if len(report.minibatches) > _MAX_MINIBATCHES:
            raise InvalidInputError(
                f"a report has at most {_MAX_MINIBATCHES:,} minibatches, not {len(report.minibatches):,}: report them"
                " while the training runs"
            )
        times = [StepTimes(one.fetch_stall_ms, one.compute_ms) for one in report.minibatches]
        if not all(0 <= one.fetch_stall_ms < float("inf") and 0 < one.compute_ms < float("inf") for one in times):
            raise InvalidInputError("fetch_stall_ms must be 0 or more, and compute_ms above 0")
        took_s = sum(one.fetch_stall_ms + one.compute_ms for one in times) / 1e3
        if not took_s <= since_s + _REPORT_SLACK_S:
            raise InvalidInputError(
                f"{took_s:g} s of minibatches reported within {since_s:.1f} s: report each minibatch once"
            )
        return await shield_until_done(self._watch.minibatches_ended, times, report.paused)

    async def _finished(
        self, assignment: RoundAssignment, finish: local_pb2.FinishTraining
    ) -> tuple[local_pb2.TrainingFinished, Observed | None]:
        """End the training and report the observation.

        Raises:
            InvalidInputError: the number of trained epochs is negative or exceeds the assignment.
        """
        if finish.failed:
            await shield_until_done(self._watch.abandon)
            return local_pb2.TrainingFinished(), None
        epochs_done = finish.epochs_done if finish.HasField("epochs_done") else None
        if epochs_done is not None and not 0 <= epochs_done <= assignment.epochs:
            raise InvalidInputError(f"epochs_done must be 0 to {assignment.epochs:g}, as assigned, not {epochs_done:g}")
        observed = await shield_until_done(self._watch.finish, epochs_done)
        if observed is None:
            return local_pb2.TrainingFinished(), None
        self._session.report_observation(
            session_pb2.Observation(plan_id=assignment.plan_id, epoch_s=observed.epoch_s, power_w=observed.power_w)
        )
        return local_pb2.TrainingFinished(epoch_s=observed.epoch_s, power_w=observed.power_w), observed

    async def _learn(self, observed: Observed | None, failed: bool) -> None:
        """Learn from a round, and report the state that follows."""
        drift = not_learned = None
        try:
            if observed is not None:
                drift = await shield_until_done(self._learner.observe, observed)
            elif not failed:
                await shield_until_done(self._learner.refit)
        except WattfleetError as error:
            # The round itself is complete; only its observation is lost to the predictor.
            _log.error("nothing was learned from the round: %s", error)
            not_learned = str(error)
        except StoppedError:
            not_learned = "the observation counts once the device is prepared again"
        except Exception:
            # An unexpected error ends the learning only: the device is parked, and ready for the next round.
            _log.exception("nothing was learned from the round")
            not_learned = "nothing was learned from the round; see the agent's log"
        await self._supervisor.handle_with_front(TrainingEnded(failed, drift, not_learned))
