"""The agent's unix socket, through which an unprivileged Flower ClientApp reaches the power knobs."""

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
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.profiling.journal import JournalError
from edge_agent.profiling.profiling_plan import StoppedError
from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.runtime.states import (
    MAY_TRAIN,
    DeviceFailed,
    Event,
    TrainingBegan,
    TrainingBrokeOff,
    TrainingEnded,
    TrainingRefused,
)
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.training.training import Observed, TrainingWatch
from edge_agent.training.training_power import PowerNotReadError
from edge_agent.workloads.step import StepTimes
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_io.tasks import run_uncancelled, shield_until_done
from wattfleet_proto.assignment import RoundAssignment
from wattfleet_proto.convert import assignment_from_start, mode_from_message
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.error_boundary import StatusTable
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc, session_pb2

_log = logging.getLogger(__name__)

_ACKNOWLEDGED_WITHIN_S = 30.0
# What an app may tell: the agent runs as root and the app does not.
_LONGEST_PLAN_ID = 200
_REPORT_SLACK_S = 1.0


class BusyError(WattfleetError):
    """The device is training for somebody else already."""


STATUS: StatusTable = {
    InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    ModeNotAppliedError: grpc.StatusCode.ABORTED,
    PowerNotReadError: grpc.StatusCode.UNAVAILABLE,
    BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    JournalError: grpc.StatusCode.INTERNAL,
    FittingFailedError: grpc.StatusCode.INTERNAL,
}

# After these the board is not to be trusted with a round; a request that was refused says nothing about it.
_DEVICE_TROUBLE = (ModeNotAppliedError, PowerNotReadError)


class LocalAgentServicer(local_pb2_grpc.LocalAgentServiceServicer):
    """Translates between the socket and the training watch."""

    def __init__(
        self,
        device_id: str,
        watch: TrainingWatch,
        link: CoordinatorSession,
        learner: OnlineLearner,
        care: RecoverySupervisor,
    ) -> None:
        """Serve one device.

        Args:
            device_id: its name.
            watch: what runs its trainings.
            link: where observations are reported.
            learner: takes in what rounds show.
            care: told of what happens to the device.
        """
        self._device_id = device_id
        self._watch = watch
        self._link = link
        self._learner = learner
        self._care = care

    async def Train(  # noqa: N802 - named by the protocol
        self, request_iterator: AsyncIterator[local_pb2.TrainRequest], context: Any
    ) -> AsyncIterator[local_pb2.TrainResponse]:
        """One round's training, from its Start to its Finish, or until the ClientApp is gone."""
        start = (await anext(request_iterator)).start
        if start.device_id != self._device_id:
            raise InvalidInputError(
                f"the assignment is {start.device_id}'s, this is {self._device_id}'s agent:"
                " give the SuperNode its own device-id and agent-socket"
            )
        if len(start.plan_id) > _LONGEST_PLAN_ID:
            raise InvalidInputError(f"a plan's id has {_LONGEST_PLAN_ID} characters at most, not {len(start.plan_id)}")
        if self._care.state not in MAY_TRAIN | {DeviceState.TRAINING}:
            raise BusyError(f"{self._device_id} is being measured: it cannot train now")
        if self._care.training.locked():
            raise BusyError(f"{self._device_id} is training already")
        async with self._care.training:
            if self._care.state not in MAY_TRAIN:
                raise BusyError(f"{self._device_id} is being made ready anew: it cannot train now")
            try:
                assignment = assignment_from_start(start)
                await shield_until_done(self._watch.start, assignment.mode, assignment.epochs, assignment.power_limit_w)
                self._care.happened(TrainingBegan(assignment.mode.label()))
                answered_s = time.monotonic()
                yield local_pb2.TrainResponse(started=local_pb2.TrainingStarted())
                async with aclosing(self._until_finish(start.plan_id, request_iterator)) as events:
                    async for event in events:
                        if isinstance(event, session_pb2.Reassign):
                            if await self._goes_on(event):
                                continue
                            yield local_pb2.TrainResponse(stop=local_pb2.StopTraining())
                        elif event.HasField("minibatches"):
                            measuring = await self._noted(event.minibatches, time.monotonic() - answered_s)
                            answered_s = time.monotonic()
                            yield local_pb2.TrainResponse(noted=local_pb2.MinibatchesNoted(measuring=measuring))
                        else:
                            request = event
                finished, observed = await self._finished(assignment, request.finish)
            except _DEVICE_TROUBLE as error:
                # Whatever watts it drew when the trouble began, it is not to go on drawing them until it has recovered.
                await run_uncancelled(self._give_up(DeviceFailed(str(error))))
                raise
            except InvalidInputError as error:
                if self._care.state is DeviceState.TRAINING:
                    await run_uncancelled(self._give_up(TrainingRefused(str(error))))
                raise
            except BaseException:
                # The stream broke off: whoever trained is gone, and nothing is to be learnt.
                await run_uncancelled(self._give_up(TrainingBrokeOff()))
                raise
            await run_uncancelled(self._learn(observed, request.finish.failed))
        # The next plan is made from what the coordinator knows: let it know before Flower hears of the reply.
        # While it is away, the round does not wait for it: the outbox keeps what was observed.
        if not (self._link.connected and await self._link.flush(_ACKNOWLEDGED_WITHIN_S)):
            _log.warning("the coordinator has yet to acknowledge %s", start.plan_id)
        yield local_pb2.TrainResponse(finished=finished)

    async def _until_finish(
        self, plan_id: str, requests: AsyncIterator[local_pb2.TrainRequest]
    ) -> AsyncGenerator[local_pb2.TrainRequest | session_pb2.Reassign, None]:
        """What the app says, its Finish being the last, and what the coordinator orders meanwhile, one at a time."""
        said = asyncio.ensure_future(anext(requests))
        ordered = asyncio.ensure_future(self._link.orders.next(plan_id))
        try:
            while True:
                await asyncio.wait((said, ordered), return_when=asyncio.FIRST_COMPLETED)
                if ordered.done():
                    order = ordered.result()
                    yield order
                    ordered = asyncio.ensure_future(self._link.orders.next(plan_id, after=order))
                if said.done():
                    request = said.result()
                    yield request
                    if not request.HasField("minibatches"):
                        return
                    said = asyncio.ensure_future(anext(requests))
        finally:
            said.cancel()
            ordered.cancel()

    async def _goes_on(self, order: session_pb2.Reassign) -> bool:
        """Put what the coordinator orders in force; whether the training goes on in it.

        Raises:
            ModeNotAppliedError: it could not be.
        """
        mode = mode_from_message(order.mode) if order.HasField("mode") else None
        await shield_until_done(self._watch.reassign, mode, order.power_limit_w)
        _log.info("the watts fell: %s", "to stop" if mode is None else f"on at {mode.label()}")
        return mode is not None

    async def _give_up(self, event: Event) -> None:
        """Park the device and learn nothing; `event` is what then happened."""
        try:
            await shield_until_done(self._watch.abandon)
        except _DEVICE_TROUBLE as error:
            self._care.happened(DeviceFailed(str(error)))
        else:
            self._care.happened(event)

    async def _noted(self, report: local_pb2.MinibatchesTrained, since_s: float) -> bool:
        """Measure by the minibatches that the app reports; whether it is to go on reporting.

        Args:
            report: what it says.
            since_s: seconds since it was last answered.

        Raises:
            InvalidInputError: no minibatches can have taken the times that it says.
        """
        times = [StepTimes(one.fetch_stall_ms, one.compute_ms) for one in report.minibatches]
        if not all(0 <= one.fetch_stall_ms < float("inf") and 0 < one.compute_ms < float("inf") for one in times):
            raise InvalidInputError("a minibatch has to wait for 0 ms or more and to compute for more than 0 ms")
        took_s = sum(one.fetch_stall_ms + one.compute_ms for one in times) / 1e3
        if not took_s <= since_s + _REPORT_SLACK_S:
            raise InvalidInputError(f"{took_s:g} s of minibatches in {since_s:.1f} s: report each of them once")
        return await shield_until_done(self._watch.minibatches_ended, times, report.paused)

    async def _finished(
        self, assignment: RoundAssignment, finish: local_pb2.FinishTraining
    ) -> tuple[local_pb2.TrainingFinished, Observed | None]:
        """End the training and report what was observed.

        Raises:
            InvalidInputError: more was done than was assigned, or less than nothing.
        """
        if finish.failed:
            await shield_until_done(self._watch.abandon)
            return local_pb2.TrainingFinished(), None
        epochs_done = finish.epochs_done if finish.HasField("epochs_done") else None
        if epochs_done is not None and not 0 <= epochs_done <= assignment.epochs:
            raise InvalidInputError(f"of {assignment.epochs:g} epochs, {epochs_done:g} cannot have been trained")
        observed = await shield_until_done(self._watch.finish, epochs_done)
        if observed is None:
            return local_pb2.TrainingFinished(), None
        self._link.report_observation(
            session_pb2.Observation(plan_id=assignment.plan_id, epoch_s=observed.epoch_s, power_w=observed.power_w)
        )
        return local_pb2.TrainingFinished(epoch_s=observed.epoch_s, power_w=observed.power_w), observed

    async def _learn(self, observed: Observed | None, failed: bool) -> None:
        """Take in what a round showed, and say what the device does next."""
        drift = not_learnt = None
        try:
            if observed is not None:
                drift = await shield_until_done(self._learner.observe, observed)
            elif not failed:
                await shield_until_done(self._learner.refit)
        except WattfleetError as error:
            # The round stands; only what it taught is lost.
            _log.error("nothing learnt from the round: %s", error)
            not_learnt = str(error)
        except StoppedError:
            not_learnt = "what the round showed is learnt from when the device is made ready again"
        except Exception:
            # The boundary of a round: the device is parked, and the next one finds it ready.
            _log.exception("nothing learnt from the round")
            not_learnt = "nothing was learnt from the round; see the log"
        await self._care.settled(TrainingEnded(failed, drift, not_learnt))
