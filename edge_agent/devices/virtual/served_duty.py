"""A run of a duty beside a training on a simulated board, event by event in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.virtual.virtual_board import Load, step_times_s
from wattfleet.duties import Demand

Values = NDArray[np.float64]

# A step counts with the time that 95 % of its kind do not exceed, as in the agent's live estimates.
_CAREFUL = np.array([1.645])
_DRAWS = 4096


@dataclass(frozen=True)
class SharedBoard:
    """What a board does in one mode.

    Attributes:
        training: the load of a training minibatch; None if nothing is trained.
        inference: the load of inference with a number of requests.
        batch: most requests in a batch.
        switch_ms: ms that a change between inference and training takes.
    """

    training: Load | None
    inference: Callable[[int], Load]
    batch: int
    switch_ms: float


@dataclass(frozen=True)
class ServedDuty:
    """What a run gave; all times are seconds from its start.

    Attributes:
        arrival_s: `[n]` when each request arrived, ascending. Those that still wait at the end are left out.
        latency_ms: `[n]` ms from then to the end of its batch.
        batches: number of batches of inference.
        minibatch_end_s: `[m]` when each training minibatch ended.
        duration_s: the length of the run.
        power_mw: mean power, mW.
    """

    arrival_s: Values
    latency_ms: Values
    batches: int
    minibatch_end_s: Values
    duration_s: float
    power_mw: float

    @property
    def minibatch_ms(self) -> float:
        """Mean time from one training minibatch to the next, ms; infinite if there was none."""
        return 1e3 * self.duration_s / len(self.minibatch_end_s) if len(self.minibatch_end_s) else np.inf

    def share_within(self, latency_ms: float) -> float:
        """The share of the requests that were answered within a latency; 1 if there were none."""
        return float((self.latency_ms <= latency_ms).mean()) if len(self.latency_ms) else 1.0


def serve_duty(board: SharedBoard, demand: Demand, duration_s: float, seed: int) -> ServedDuty:
    """Serve random requests for some time, and train between them.

    Inference begins once a batch is full, or once no other minibatch fits before it: a minibatch fits if the switches,
    the minibatch and an inference end within the latency of the oldest request, or of one that would arrive now.
    Without training, inference begins with the first request.

    Args:
        board: the board, whose steps jitter.
        demand: the duty; its requests arrive at random.
        duration_s: the length of the run. The last step may end later.
        seed: of arrivals and jitter.
    """
    rng = np.random.default_rng(seed)
    arrivals = _arrivals(demand.arrival_per_s, duration_s, rng)
    run = _Run(board, rng)
    answered = 0
    while run.now_s < duration_s:
        waiting = int(np.searchsorted(arrivals, run.now_s, side="right")) - answered
        oldest_s = arrivals[answered] if waiting else run.now_s
        if waiting < board.batch and run.minibatch_fits(oldest_s + demand.latency_ms / 1e3, waiting, demand):
            run.train()
        elif waiting:
            answered += run.answer(min(waiting, board.batch))
        else:
            run.idle(min(arrivals[answered] if answered < len(arrivals) else duration_s, duration_s))
    return ServedDuty(
        arrivals[:answered],
        1e3 * (np.repeat(run.answer_end_s, run.answer_size) - arrivals[:answered]),
        len(run.answer_end_s),
        np.array(run.minibatch_end_s),
        run.now_s,
        run.energy_mj / run.now_s,
    )


def _arrivals(per_s: float, duration_s: float, rng: np.random.Generator) -> Values:
    """Ascending moments of a Poisson process, s."""
    return np.sort(rng.uniform(0, duration_s, rng.poisson(per_s * duration_s)))


class _Run:
    """The time, the energy and the events of a run."""

    def __init__(self, board: SharedBoard, rng: np.random.Generator) -> None:
        self._board = board
        self._rng = rng
        self._deviations = rng.standard_normal(0)
        self._inference: dict[int, tuple[Load, float]] = {}
        self._trained_last: bool | None = None
        self._idle_mw = self._load(1)[0].idle_mw
        self._minibatch_s = 0.0 if board.training is None else _careful_s(board.training)
        self.now_s = 0.0
        self.energy_mj = 0.0
        self.answer_end_s: list[float] = []
        self.answer_size: list[int] = []
        self.minibatch_end_s: list[float] = []

    def minibatch_fits(self, deadline_s: float, waiting: int, demand: Demand) -> bool:
        """Whether a minibatch, and then an inference of all who wait by then, end by a deadline."""
        if self._board.training is None:
            return False
        gathered = waiting + int(np.ceil(self._minibatch_s * demand.arrival_per_s))
        _, inference_s = self._load(max(1, min(gathered, self._board.batch)))
        switches_s = self._board.switch_ms / 1e3 * (1 if self._trained_last else 2)
        return self.now_s + switches_s + self._minibatch_s + inference_s <= deadline_s

    def train(self) -> None:
        """Train a minibatch."""
        assert self._board.training is not None, "a minibatch fits only if something is trained"
        self._switch(to_training=True)
        self._step(self._board.training)
        self.minibatch_end_s.append(self.now_s)

    def answer(self, requests: int) -> int:
        """Answer so many requests; return their number."""
        self._switch(to_training=False)
        self._step(self._load(requests)[0])
        self.answer_end_s.append(self.now_s)
        self.answer_size.append(requests)
        return requests

    def idle(self, until_s: float) -> None:
        """Do nothing until a moment."""
        self._spend(until_s - self.now_s, self._idle_mw)

    def _load(self, requests: int) -> tuple[Load, float]:
        """The load of inference, and its careful time in s."""
        if requests not in self._inference:
            load = self._board.inference(requests)
            self._inference[requests] = load, _careful_s(load)
        return self._inference[requests]

    def _switch(self, to_training: bool) -> None:
        if self._trained_last is not None and self._trained_last is not to_training:
            self._spend(self._board.switch_ms / 1e3, self._idle_mw)
        self._trained_last = to_training

    def _step(self, load: Load) -> None:
        if not len(self._deviations):
            self._deviations = self._rng.standard_normal(_DRAWS)
        self._spend(float(step_times_s(load, self._deviations[:1])[0]), load.power_mw)
        self._deviations = self._deviations[1:]

    def _spend(self, seconds: float, power_mw: float) -> None:
        self.now_s += seconds
        self.energy_mj += seconds * power_mw


def _careful_s(load: Load) -> float:
    return float(step_times_s(load, _CAREFUL)[0])
