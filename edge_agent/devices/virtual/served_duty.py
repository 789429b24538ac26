"""Simulates a duty beside a training on a simulated board, event by event in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.virtual.virtual_board import Load, step_times_s
from wattfleet.core.duties import Demand

# --- Random requests --------------------------------------------------------------------------------------------------
# Requests that arrive randomly at a simulated board, and wait for their answers.


Values = NDArray[np.float64]

_DRAWS = 4096


class RandomRequests:
    """A Poisson process of requests from 0 s on, and its unanswered requests.

    Args:
        per_s: mean number of requests per second.
        rng: the random number generator for arrivals.
    """

    def __init__(self, per_s: float, rng: np.random.Generator) -> None:
        self._mean_gap_s = 1 / per_s
        self._rng = rng
        self._at_s = np.zeros(1)
        self._first = 1
        self._draw()

    @property
    def next_s(self) -> float:
        """When the oldest unanswered request arrives or arrived, s."""
        return float(self._at_s[self._first])

    def waiting(self, now_s: float) -> int:
        """Return the number of requests that have arrived and are unanswered."""
        while self._at_s[-1] <= now_s:
            self._draw()
        return int(np.searchsorted(self._at_s, now_s, side="right")) - self._first

    def answered(self, count: int) -> Values:
        """Answer the oldest requests, and return their arrival times, s."""
        answered_s = self._at_s[self._first : self._first + count]
        self._first += count
        return answered_s

    def postpone(self, seconds: float) -> None:
        """Delay the arrival of all unanswered requests."""
        self._at_s = self._at_s[self._first :] + seconds
        self._first = 0

    def _draw(self) -> None:
        further_s = self._at_s[-1] + np.cumsum(self._rng.exponential(self._mean_gap_s, _DRAWS))
        self._at_s = np.concatenate([self._at_s[self._first :], further_s])
        self._first = 0


# --- Served duty ------------------------------------------------------------------------------------------------------

# Deviation for a step's estimated time: the time that 95 % of such steps do not exceed, as in the agent's live
# estimates.
_CAREFUL = np.array([1.645])


@dataclass(frozen=True)
class SharedBoard:
    """The work of a board in one mode.

    Attributes:
        training: the load of a training minibatch; None if nothing is trained.
        inference: returns the load of inference for a number of requests.
        batch: maximum of requests in a batch.
        switch_ms: time of a change between inference and training, ms.
    """

    training: Load | None
    inference: Callable[[int], Load]
    batch: int
    switch_ms: float


@dataclass(frozen=True)
class ServedDuty:
    """The result of serving a duty for a period. All times are seconds of the board's clock.

    Attributes:
        begin_s: the start of the period.
        arrival_s: `[n]` when each answered request arrived, ascending. Requests that still wait at the end are left
            out.
        latency_ms: `[n]` time from its arrival to the end of its batch, ms.
        batch_end_s: `[b]` when each batch of inference ended.
        batch_size: `[b]` number of requests in each batch.
        minibatch_end_s: `[m]` when each training minibatch ended.
        step_end_s: `[k]` when each step of any kind ended, pauses included.
        step_mw: `[k]` the power during each step, mW.
    """

    begin_s: float
    arrival_s: Values
    latency_ms: Values
    batch_end_s: Values
    batch_size: NDArray[np.int64]
    minibatch_end_s: Values
    step_end_s: Values
    step_mw: Values

    @property
    def batches(self) -> int:
        """The number of batches of inference."""
        return len(self.batch_end_s)

    @property
    def latencies_by_batch_ms(self) -> list[Values]:
        """Return the latencies of each batch, ms."""
        return np.split(self.latency_ms, np.cumsum(self.batch_size)[:-1])

    @property
    def minibatch_s(self) -> Values:
        """`[m]` times of the training minibatches without the switch before them, s."""
        ends_s = np.concatenate([[self.begin_s], self.step_end_s])
        return np.asarray(self.minibatch_end_s - ends_s[np.searchsorted(self.step_end_s, self.minibatch_end_s)])

    @property
    def duration_s(self) -> float:
        """The duration of the period, s."""
        return float(self.step_end_s[-1]) - self.begin_s if len(self.step_end_s) else 0.0

    @property
    def power_mw(self) -> float:
        """The mean power, mW; 0 if no time has passed."""
        return float(self.mean_powers(np.inf)[1].sum())

    @property
    def minibatch_ms(self) -> float:
        """The mean time from one training minibatch to the next, ms; infinite without minibatches."""
        return 1e3 * self.duration_s / len(self.minibatch_end_s) if len(self.minibatch_end_s) else np.inf

    def share_within(self, latency_ms: float) -> float:
        """Return the share of requests answered within a latency; 1 without requests."""
        return float((self.latency_ms <= latency_ms).mean()) if len(self.latency_ms) else 1.0

    def mean_powers(self, every_s: float) -> tuple[Values, Values]:
        """Return `[p]` lengths, s, and `[p]` mean powers, mW, of successive equal spans; the last may be shorter.

        Args:
            every_s: the length of a span, s.
        """
        if not self.duration_s:
            return np.empty(0), np.empty(0)
        ends_s = np.concatenate([[self.begin_s], self.step_end_s])
        energy_mj = np.concatenate([[0.0], np.cumsum(np.diff(ends_s) * self.step_mw)])
        spans = max(1, int(np.ceil(self.duration_s / every_s)))
        edges_s = self.begin_s + np.minimum(np.arange(spans + 1) * min(every_s, self.duration_s), self.duration_s)
        seconds = np.diff(edges_s)
        return seconds, np.diff(np.interp(edges_s, ends_s, energy_mj)) / seconds


def serve_duty(board: SharedBoard, demand: Demand, duration_s: float, seed: int) -> ServedDuty:
    """Serve random requests from 0 s on for a duration, and train between them; see `RequestService.serve`.

    Args:
        board: the board; the times of its steps vary randomly.
        demand: the duty; its requests arrive at random.
        duration_s: the length of the run. The last step may end later.
        seed: random seed for arrivals and jitter.
    """
    return RequestService(demand, seed).serve(board, duration_s)


class RequestService:
    """Serves the requests of a duty in successive periods; waiting requests are kept for the next period.

    Args:
        demand: the duty; its requests arrive at random.
        seed: random seed for arrivals and jitter.

    Attributes:
        now_s: the end of the last period, s.
    """

    def __init__(self, demand: Demand, seed: int) -> None:
        arrivals, self._jitter = np.random.default_rng(seed).spawn(2)
        self._demand = demand
        self._requests = RandomRequests(demand.arrival_per_s, arrivals)
        self._trained_last: bool | None = None
        self.now_s = 0.0

    def pause_until(self, until_s: float) -> None:
        """Pause the requests until a given time: none arrives, and the waiting ones do not wait longer."""
        self._requests.postpone(until_s - self.now_s)
        self.now_s = until_s

    def serve(self, board: SharedBoard, until_s: float, minibatches: int | None = None) -> ServedDuty:
        """Serve random requests, and train between them, until a given time or number of trained minibatches.

        Inference begins once a batch is full, or once no other minibatch fits before it: a minibatch fits if the
        switches, the minibatch and an inference end within the latency of the oldest request, or of one that would
        arrive now. Without training, inference begins with the first request.

        Args:
            board: the board; the times of its steps vary randomly.
            until_s: the end, s; finite. The last step may end later.
            minibatches: end earlier, after this number of minibatches; None for no limit.
        """
        run = _Period(board, self._jitter, self.now_s, self._trained_last)
        arrivals = [np.empty(0)]
        while run.now_s < until_s and (minibatches is None or len(run.minibatch_end_s) < minibatches):
            waiting = self._requests.waiting(run.now_s)
            oldest_s = self._requests.next_s if waiting else run.now_s
            if waiting < board.batch and run.minibatch_fits(
                oldest_s + self._demand.latency_ms / 1e3, waiting, self._demand
            ):
                run.train()
            elif waiting:
                arrivals.append(self._requests.answered(min(waiting, board.batch)))
                run.answer(len(arrivals[-1]))
            else:
                run.idle(min(self._requests.next_s, until_s))
        begin_s, self.now_s, self._trained_last = self.now_s, run.now_s, run.trained_last
        arrival_s = np.concatenate(arrivals)
        size = np.array(run.answer_size, dtype=np.int64)
        return ServedDuty(
            begin_s,
            arrival_s,
            1e3 * (np.repeat(run.answer_end_s, size) - arrival_s),
            np.array(run.answer_end_s),
            size,
            np.array(run.minibatch_end_s),
            np.array(run.step_end_s),
            np.array(run.step_mw),
        )


class _Period:
    """The time and the events of one period."""

    def __init__(self, board: SharedBoard, rng: np.random.Generator, now_s: float, trained_last: bool | None) -> None:
        self._board = board
        self._rng = rng
        self._deviations = rng.standard_normal(0)
        self._inference: dict[int, tuple[Load, float]] = {}
        self._idle_mw = self._load(1)[0].idle_mw
        self._minibatch_s = 0.0 if board.training is None else _high_estimate_s(board.training)
        self.trained_last = trained_last
        self.now_s = now_s
        self.step_end_s: list[float] = []
        self.step_mw: list[float] = []
        self.answer_end_s: list[float] = []
        self.answer_size: list[int] = []
        self.minibatch_end_s: list[float] = []

    def minibatch_fits(self, deadline_s: float, waiting: int, demand: Demand) -> bool:
        """Return whether a minibatch and then the inference of all requests waiting by then end by a deadline."""
        if self._board.training is None:
            return False
        gathered = waiting + int(np.ceil(self._minibatch_s * demand.arrival_per_s))
        _, inference_s = self._load(max(1, min(gathered, self._board.batch)))
        switches_s = self._board.switch_ms / 1e3 * (1 if self.trained_last else 2)
        return self.now_s + switches_s + self._minibatch_s + inference_s <= deadline_s

    def train(self) -> None:
        """Train a minibatch."""
        assert self._board.training is not None, "a minibatch fits only if something is trained"
        self._switch(to_training=True)
        self._step(self._board.training)
        self.minibatch_end_s.append(self.now_s)

    def answer(self, requests: int) -> None:
        """Answer this number of requests."""
        self._switch(to_training=False)
        self._step(self._load(requests)[0])
        self.answer_end_s.append(self.now_s)
        self.answer_size.append(requests)

    def idle(self, until_s: float) -> None:
        """Do nothing until a given time."""
        self._spend(until_s - self.now_s, self._idle_mw)

    def _load(self, requests: int) -> tuple[Load, float]:
        """Return the load of inference, and a high estimate of its time, s."""
        if requests not in self._inference:
            load = self._board.inference(requests)
            self._inference[requests] = load, _high_estimate_s(load)
        return self._inference[requests]

    def _switch(self, to_training: bool) -> None:
        if self.trained_last is not None and self.trained_last is not to_training:
            self._spend(self._board.switch_ms / 1e3, self._idle_mw)
        self.trained_last = to_training

    def _step(self, load: Load) -> None:
        if not len(self._deviations):
            self._deviations = self._rng.standard_normal(_DRAWS)
        self._spend(float(step_times_s(load, self._deviations[:1])[0]), load.power_mw)
        self._deviations = self._deviations[1:]

    def _spend(self, seconds: float, power_mw: float) -> None:
        self.now_s += seconds
        self.step_end_s.append(self.now_s)
        self.step_mw.append(power_mw)


def _high_estimate_s(load: Load) -> float:
    return float(step_times_s(load, _CAREFUL)[0])
