"""Reads an app's requests during its training, together with changed grants and reasons to stop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.learning.fitting_process import FittingFailedError
from edge_agent.profiling.journal import JournalError
from edge_agent.runtime.peer_credentials import PeerNotAllowedError
from edge_agent.serving.duty_service import TooManyAppsError
from edge_agent.session.grants import AgentGrant, GrantKeeper, NoGrantError
from edge_agent.training.training import PowerNotReadError
from edge_agent.workloads.loading import StepTimes
from wattfleet.common.tasks import run_uncancelled, stop_tasks
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.error_boundary import StatusTable
from wattfleet_proto.limits import MAX_ID_CHARACTERS, MAX_PLAN_ID_CHARACTERS
from wattfleet_proto.v1 import local_pb2

# --- App answers ------------------------------------------------------------------------------------------------------
# Queues the agent's answers to an app, so that a training never waits for an app that does not read them.


class AppAnswers:
    """A queue of the answers to one app."""

    def __init__(self) -> None:
        """Start with an empty queue."""
        self._waiting: asyncio.Queue[local_pb2.TrainResponse | None] = asyncio.Queue()

    def put(self, answer: local_pb2.TrainResponse) -> None:
        """Queue an answer; it is sent as soon as the app reads."""
        self._waiting.put_nowait(answer)

    async def wait_until_read(self) -> None:
        """Wait until the app has read all queued answers.

        Do so before reading the next request: this keeps the queue short.
        """
        await self._waiting.join()

    async def run(self, work: Callable[[AppAnswers], Coroutine[Any, Any, None]]) -> AsyncGenerator[Any, None]:
        """Run a training in its own task; yield its answers, then raise its error if it failed.

        If the app disconnects, the training is cancelled, and this generator ends only after the training has.
        """
        working = asyncio.create_task(work(self), name="training of an app")
        working.add_done_callback(lambda _: self._waiting.put_nowait(None))
        try:
            while (answer := await self._waiting.get()) is not None:
                yield answer
                self._waiting.task_done()
            working.result()
        finally:
            await run_uncancelled(stop_tasks(working))


# --- App requests -----------------------------------------------------------------------------------------------------

# Limits on what an app may send: the agent runs as root and the app does not.
_MAX_MINIBATCHES = 10_000  # in one report; an app reports several times a second
_REPORT_SLACK_S = 1.0


class StreamEndedError(WattfleetError):
    """The app ended its stream during a training, without a Finish: the device is parked."""


class AppNotStoppingError(WattfleetError):
    """The app did not stop its training when asked: its stream is closed, so that other apps can use the device."""


def require_start(start: local_pb2.StartTraining, device_id: str) -> None:
    """Check an app's Start message.

    Raises:
        InvalidInputError: the message is for another device, or its plan id is too long.
    """
    if start.device_id != device_id:
        raise InvalidInputError(
            f"the assignment is for {start.device_id[:MAX_ID_CHARACTERS]}, but this is the agent of"
            f" {device_id}: give the SuperNode its own device-id and agent-socket"
        )
    if len(start.plan_id) > MAX_PLAN_ID_CHARACTERS:
        raise InvalidInputError(
            f"plan_id must have at most {MAX_PLAN_ID_CHARACTERS} characters, not {len(start.plan_id):,}"
        )


def reported_times(report: local_pb2.MinibatchesTrained, since_s: float) -> list[StepTimes]:
    """Return the minibatch times in an app's report.

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
    if not all(0 <= one.fetch_stall_ms < math.inf and 0 < one.compute_ms < math.inf for one in times):
        raise InvalidInputError("fetch_stall_ms must be 0 or more, and compute_ms must be above 0")
    took_s = sum(one.fetch_stall_ms + one.compute_ms for one in times) / 1e3
    if not took_s <= since_s + _REPORT_SLACK_S:
        raise InvalidInputError(
            f"{took_s:g} s of minibatches were reported within {since_s:.1f} s: report each minibatch once"
        )
    return times


@dataclass(frozen=True)
class PauseEnded:
    """Reports that the app's requests are read again after a pause.

    Attributes:
        app_has_finished: its next request is its Finish, which came during the pause.
    """

    app_has_finished: bool


class Pause:
    """Delays an app's requests while the agent works for it; changes of its training are still passed on.

    Attributes:
        work: the work in progress; None while requests are read.
    """

    def __init__(self) -> None:
        """Start without a pause."""
        self.work: asyncio.Future[None] | None = None


async def until_finish(
    requests: AsyncIterator[local_pb2.TrainRequest],
    answers: AppAnswers,
    grants: GrantKeeper,
    pause: Pause,
    stop_timeout_s: float,
) -> AsyncGenerator[local_pb2.TrainRequest | AgentGrant | PauseEnded | str, None]:
    """Yield an app's requests up to its Finish, and the changes of its training meanwhile, one at a time.

    A yielded grant replaces the training's grant. A yielded text is the reason why the training has to stop; it comes
    at most once.

    Args:
        requests: the app's requests.
        answers: the answers to the app; the next request is read after the app has read them.
        grants: the coordinator's grants.
        pause: delays requests while it lasts.
        stop_timeout_s: time for the app to end its training after a stop, s.

    Raises:
        AppNotStoppingError: the app did not stop in time.
        StreamEndedError: the app has ended its stream.
    """

    async def next_request() -> local_pb2.TrainRequest:
        await answers.wait_until_read()
        return await anext(requests)

    requested = asyncio.ensure_future(next_request())
    stop_by_s: float | None = None
    changed: asyncio.Future[AgentGrant | str] | None = asyncio.ensure_future(grants.next_change())
    try:
        while True:
            working = pause.work
            waiting: list[asyncio.Future[Any]] = [requested if working is None else working]
            if changed is not None:
                waiting.append(changed)
            left_s = None if stop_by_s is None else stop_by_s - time.monotonic()
            await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if stop_by_s is not None and time.monotonic() >= stop_by_s:
                raise AppNotStoppingError(f"the app did not end its training within {stop_timeout_s:g} s")
            if changed is not None and changed.done():
                change = changed.result()
                changed = None
                yield change
                if isinstance(change, AgentGrant):
                    changed = asyncio.ensure_future(grants.next_change())
                else:
                    stop_by_s = time.monotonic() + stop_timeout_s
            if working is not None:
                if working.done():
                    pause.work = None
                    yield PauseEnded(_is_finish(requested))
                    if changed is not None and (reason := grants.must_stop()) is not None:
                        # Before the next request is answered: the app would train on meanwhile.
                        changed.cancel()
                        changed = None
                        yield reason
                        stop_by_s = time.monotonic() + stop_timeout_s
            elif requested.done():
                try:
                    request = requested.result()
                except StopAsyncIteration:
                    raise StreamEndedError("the app's stream ended before its Finish: the device is parked") from None
                yield request
                if not (request.HasField("minibatches") or request.HasField("loader")):
                    return
                requested = asyncio.ensure_future(next_request())
    finally:
        requested.cancel()
        if changed is not None:
            changed.cancel()


def _is_finish(requested: asyncio.Future[local_pb2.TrainRequest]) -> bool:
    """Return whether a request has arrived and is a Finish."""
    arrived = requested.done() and not requested.cancelled() and requested.exception() is None
    return arrived and requested.result().HasField("finish")


# --- Socket errors ----------------------------------------------------------------------------------------------------
# The errors that the agent's sockets return, and their gRPC statuses.


class BusyError(WattfleetError):
    """The device cannot train now."""


class OwnerOnlyError(WattfleetError):
    """Only the agent's own user may do this: run the command as that user."""


STATUS: StatusTable = {
    PeerNotAllowedError: grpc.StatusCode.PERMISSION_DENIED,
    OwnerOnlyError: grpc.StatusCode.PERMISSION_DENIED,
    InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    ModeNotAppliedError: grpc.StatusCode.ABORTED,
    PowerNotReadError: grpc.StatusCode.UNAVAILABLE,
    BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TooManyAppsError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NoGrantError: grpc.StatusCode.FAILED_PRECONDITION,
    StreamEndedError: grpc.StatusCode.ABORTED,
    AppNotStoppingError: grpc.StatusCode.ABORTED,
    JournalError: grpc.StatusCode.INTERNAL,
    FittingFailedError: grpc.StatusCode.INTERNAL,
}
