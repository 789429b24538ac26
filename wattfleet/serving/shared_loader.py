"""`share_device`: a training that yields the device to requests between its minibatches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from wattfleet.common.version import wait_for_gpu
from wattfleet.common.wrapped_loader import WrappedLoader, note_wait
from wattfleet.serving.agent_stream import AgentStream
from wattfleet_proto.names import CURRENT_SOCKET
from wattfleet_proto.v1 import duty_pb2, duty_pb2_grpc

Batch = TypeVar("Batch")

_log = logging.getLogger(__name__)

_SILENCE_S = 3.0
"""After this time without a message, s, the agent counts as stopped: it reports each second that a minibatch waits."""


def share_device(loader: Iterable[Batch], *, agent_socket: str | None = None) -> Iterable[Batch]:
    """Yield each batch of a loader once the device's agent gives the training a turn.

    The agent gives a turn if, according to recent times, the device's requests are still answered in time. Without an
    agent, every batch is yielded at once. Wrap it around `profiled` and `until_deadline`:
    `share_device(profiled(loader))`.

    Args:
        loader: yields minibatches; its length and attributes remain available.
        agent_socket: path of the agent's unix socket; None for the socket of the mod's training, or else the default
            path.
    """

    def shared(batches: Iterable[Batch]) -> Iterator[Batch]:
        return _in_turns(batches, agent_socket or CURRENT_SOCKET.get())

    return _SharedLoader(loader, shared)


class _SharedLoader(WrappedLoader[Batch]):
    shares_device = True


def _in_turns(batches: Iterable[Batch], socket: str) -> Iterator[Batch]:
    turns = _TrainingTurns(socket)
    try:
        for batch in batches:
            note_wait(turns.wait())
            begun_s = time.perf_counter()
            try:
                yield batch
            finally:
                wait_for_gpu()
                turns.keep_pace(begun_s)
                turns.end(time.perf_counter() - begun_s)
    finally:
        turns.close()


class _TrainingTurns:
    """The turns of one training, for use in its own thread."""

    def __init__(self, socket: str) -> None:
        self._changed = threading.Condition()
        self._has_turn = self._is_lost = False
        self._heard_s = time.monotonic()
        self._reason = ""
        self._least_s = 0.0
        self._stream: AgentStream[duty_pb2.ShareRequest] = AgentStream(
            socket,
            lambda channel, requests: duty_pb2_grpc.DutyServiceStub(channel).Share(requests),
            list,
            self._receive,
            self._lost,
            "minibatches are trained without turns",
        )

    def wait(self) -> float:
        """Wait for the next minibatch's turn, or until the agent is gone; return the seconds waited."""
        begun_s = time.monotonic()
        with self._changed:
            self._has_turn = self._is_lost = False
            self._heard_s = begun_s
        wanted = duty_pb2.ShareRequest(wanted=duty_pb2.MinibatchWanted())
        if not self._stream.send(wanted):
            return 0.0
        with self._changed:
            while not (self._has_turn or self._is_lost):
                left_s = self._heard_s + _SILENCE_S - time.monotonic()
                if left_s <= 0:
                    _log.warning("the agent does not answer: minibatches are trained without turns until it does")
                    break
                self._changed.wait(left_s)
        if not self._has_turn and not self._is_lost:
            self._stream.reopen()
        return time.monotonic() - begun_s

    def keep_pace(self, begun_s: float) -> None:
        """Wait until the minibatch has taken as long as on the agent's simulated board.

        Args:
            begun_s: start of the minibatch, by `time.perf_counter`, s.
        """
        if self._has_turn:
            time.sleep(max(0.0, begun_s + self._least_s - time.perf_counter()))

    def end(self, took_s: float) -> None:
        """Report the end of the minibatch."""
        if self._has_turn:
            self._has_turn = False
            ended = duty_pb2.MinibatchEnded(minibatch_ms=took_s * 1e3)
            self._stream.send(duty_pb2.ShareRequest(ended=ended))

    def close(self) -> None:
        self._stream.close()

    def _receive(self, response: Any) -> None:
        with self._changed:
            self._heard_s = time.monotonic()
            if response.HasField("turn"):
                self._has_turn = True
                self._least_s = sum(response.turn.least_ms) / 1e3
            elif response.waiting.reason and response.waiting.reason != self._reason:
                self._reason = response.waiting.reason
                _log.info("the training waits: %s", self._reason)
            self._changed.notify_all()

    def _lost(self) -> None:
        with self._changed:
            self._is_lost = True
            self._has_turn = False
            self._changed.notify_all()
