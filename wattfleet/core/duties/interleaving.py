"""Computes how much a board can train in each power mode while it keeps a duty.

In every cycle, the board answers one batch of requests and trains some minibatches; each change between the two takes
time. Among the numbers of minibatches with which the duty is kept, the largest trains the most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.choosing import (
    POWER_QUANTILE,
    PROBABILITY,
    ChosenMode,
    KnownModes,
    fastest_within_budget,
)
from wattfleet.core.duties.queueing import (
    MAX_UTILIZATION,
    ArrivalPattern,
    CycleLimits,
    Demand,
    latency_at_quantile_ms,
    utilization,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchArray, PowerMode
from wattfleet.core.prediction import normal_quantile

Values = NDArray[np.float64]
Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]


class UnkeptDutyError(InvalidInputError):
    """No power mode of the board keeps the duty, even if nothing is trained."""


class TooManyRequestsError(UnkeptDutyError):
    """More requests arrive than the board can answer."""


class LatencyTooLowError(UnkeptDutyError):
    """The board can answer all requests, but too few of them within the latency."""


class NoTrainingTimeError(InvalidInputError):
    """The duty takes the whole board: it is kept only while nothing is trained."""


def most_minibatches(
    demand: Demand, batch: BatchArray, inference_ms: Values, minibatch_ms: Values, switch_ms: float
) -> Counts:
    """The maximum number of training minibatches in a cycle that keep a duty, `[n]`.

    Random requests are answered in cycles of one inference, the minibatches and two switches, and the next cycle starts
    immediately (`share_in_time`). Regular requests are answered once per full batch. As in the published work on
    training beside inference, collecting the batch and its inference then take at most the latency, and the inference,
    the minibatches and the switches at most the time to collect the next batch.

    Args:
        demand: the duty.
        batch: `[n]` maximum number of requests in a batch.
        inference_ms: `[n]` ms of the inference of a full batch.
        minibatch_ms: `[n]` ms of a training minibatch.
        switch_ms: ms that a change between inference and training takes.

    Returns:
        The numbers; 0 where the duty is kept only while nothing is trained, -1 where it is not kept at all.
    """
    if demand.pattern is ArrivalPattern.REGULAR:
        collect_ms = demand.collect_ms(batch)
        answered = (collect_ms + inference_ms <= demand.latency_ms) & (inference_ms <= collect_ms)
        fitting = np.floor((collect_ms - inference_ms - 2 * switch_ms) / minibatch_ms)
        return np.where(answered, np.maximum(fitting, 0), -1).astype(np.int64)

    minibatches = np.full(len(batch), -1, dtype=np.int64)
    for size in np.unique(batch).tolist():
        limits = CycleLimits.of(demand, size)
        rows = np.flatnonzero((batch == size) & (inference_ms <= limits.inference_ms))
        minibatches[rows] = limits.max_steps(inference_ms[rows], inference_ms[rows] + 2 * switch_ms, minibatch_ms[rows])
    return minibatches


@dataclass(frozen=True)
class SharedMode:
    """How training and inference share a board in one power mode.

    Attributes:
        mode: the power mode.
        batch: maximum number of requests in a batch of inference.
        minibatches: training minibatches between two batches.
        minibatch_ms: mean time from one minibatch to the next with the duty kept, ms.
        training_share: the share of the time in which training has the board.
        latency_ms: the latency that is kept at the demand's quantile, ms.
        gather_ms: how long the oldest request may wait before its batch requests the board, ms. It is the length of a
            cycle without its last minibatch and the switches, which may still be running at that time.
        power_mw: the larger of the powers of training and of inference, mW.
        measured: whether all times and powers were measured.
    """

    mode: PowerMode
    batch: int
    minibatches: int
    minibatch_ms: float
    training_share: float
    latency_ms: float
    gather_ms: float
    power_mw: float
    measured: bool


@dataclass(frozen=True)
class ModesWithDuty:
    """The power modes, each with batches of inference, in which a board keeps a duty.

    Attributes:
        demand: the duty.
        switch_ms: ms that a change between inference and training takes.
        alone: `[m]` modes and batches that keep it while nothing is trained, with the times of inference.
        beside: `[n]` modes and batches that keep it beside training, with the times of a training minibatch with the
            duty kept. The same mode may occur with several batches.
        minibatches: `[n]` training minibatches in a cycle.
        training_share: `[n]` the share of the time in which training has the board.
        inference_ms: `[n]` time of inference with which the duty is kept: measured, or at the stated probability.
        cycle_ms: `[n]` time of a cycle with which the duty is kept, likewise.
        latency_to_train_ms: a latency limit with which the board could also train, ms; infinite if there is none.
    """

    demand: Demand
    switch_ms: float
    alone: KnownModes
    beside: KnownModes
    minibatches: Counts
    training_share: Values
    inference_ms: Values
    cycle_ms: Values
    latency_to_train_ms: float

    def least_power(self, probability: float = PROBABILITY) -> ChosenMode:
        """The mode and batch with the least power with which the duty is kept while nothing is trained.

        Args:
            probability: quantile of the power by which unmeasured modes are compared.
        """
        return self.alone.chosen(int(self.alone.safe_power_mw(probability).argmin()))

    def least_power_in(self, mode: PowerMode, probability: float = PROBABILITY) -> ChosenMode | None:
        """Like `least_power`, but in one mode; None if the duty is not kept in it."""
        is_mode = (self.alone.modes == np.array(mode)).all(axis=1)
        return replace(self, alone=self.alone.among(is_mode)).least_power(probability) if is_mode.any() else None

    def fastest(self, budget_mw: float, probability: float = PROBABILITY) -> SharedMode:
        """The mode and batch that train the most within a budget.

        Args:
            budget_mw: mW that the board may draw.
            probability: probability with which an unmeasured mode must keep the budget.

        Raises:
            NoTrainingTimeError: the duty is kept only while nothing is trained.
            InfeasibleBudgetError: no mode keeps the budget.
        """
        return self._shared(fastest_within_budget(self.trainable(), budget_mw, probability))

    def in_mode(self, mode: PowerMode, budget_mw: float, probability: float = PROBABILITY) -> SharedMode:
        """The choice of batch and minibatches with which a given mode, such as that of a grant, trains the most.

        Args:
            mode: the power mode.
            budget_mw: mW that the board may draw.
            probability: probability with which an unmeasured mode must keep the budget.

        Raises:
            NoTrainingTimeError: the duty is not kept in this mode while the board trains.
            InfeasibleBudgetError: the mode does not keep the budget with any batch of inference.
        """
        is_mode = (self.trainable().modes == np.array(mode)).all(axis=1)
        if not is_mode.any():
            raise NoTrainingTimeError(
                f"the duty of {self.demand} is not kept in the mode {mode.label()} beside training"
            )
        return self._shared(fastest_within_budget(self.beside.among(is_mode), budget_mw, probability))

    def trainable(self) -> KnownModes:
        """Return `beside` after checking that it has at least one mode.

        Raises:
            NoTrainingTimeError: the duty is kept only while nothing is trained.
        """
        if not len(self.beside.modes):
            remedy = "send fewer requests"
            if np.isfinite(self.latency_to_train_ms):
                remedy = f"allow {np.ceil(self.latency_to_train_ms):g} ms, or fewer requests a second"
            raise NoTrainingTimeError(
                f"the duty takes the whole board: {self.demand} are answered only while nothing is trained; {remedy}"
            )
        return self.beside

    def _shared(self, chosen: ChosenMode) -> SharedMode:
        same = (self.beside.modes == np.array(chosen.mode)).all(axis=1)
        at = np.flatnonzero(same & (self.beside.stated_batch() == chosen.batch))
        (latency_ms,) = _latency_ms(
            self.demand, self.beside.stated_batch()[at], self.inference_ms[at], self.cycle_ms[at]
        )
        row = int(at[0])
        minibatches, inference_ms = int(self.minibatches[row]), float(self.inference_ms[row])
        careful_ms = (float(self.cycle_ms[row]) - inference_ms - 2 * self.switch_ms) / minibatches
        return SharedMode(
            mode=chosen.mode,
            batch=int(self.beside.stated_batch()[row]),
            minibatches=minibatches,
            minibatch_ms=chosen.minibatch_ms,
            training_share=float(self.training_share[row]),
            latency_ms=float(latency_ms),
            gather_ms=inference_ms + (minibatches - 1) * careful_ms,
            power_mw=chosen.power_mw,
            measured=chosen.measured,
        )


def keep_duty(
    training: KnownModes,
    inference: KnownModes,
    demand: Demand,
    switch_ms: float,
    probability: float = PROBABILITY,
) -> ModesWithDuty:
    """Find the modes that keep a duty, and how much each of them can train beside it.

    An unmeasured time is replaced by its quantile at `probability`. If the errors of inference and training are
    independent or positively correlated, the duty is kept with at least this probability. The expected figures of
    training are computed from the medians.

    Args:
        training: power modes of training, with one batch size.
        inference: power modes of inference with batches, of the same board. Modes that occur in only one of the two are
            left out.
        demand: the duty.
        switch_ms: ms that a change between inference and training takes, as it was measured on the board.
        probability: probability with which unmeasured times must keep the duty.

    Raises:
        TooManyRequestsError: more requests arrive than any mode can answer.
        LatencyTooLowError: no mode answers enough of them within the latency.
        InvalidInputError: they have no mode in common, training has a mode twice, the inference states no batches, the
            switch is not finite and at least 0, or the probability is not between 0 and 1.
    """
    if not 0 <= switch_ms < np.inf:
        raise InvalidInputError(f"the switch must take at least 0 ms, not {switch_ms:g}")
    inference.stated_batch()
    row_of = {tuple(mode): row for row, mode in enumerate(training.modes.tolist())}
    if len(row_of) < len(training.modes):
        raise InvalidInputError("a power mode of training occurs more than once: give the modes with one batch size")
    of_training = np.array([row_of.get(tuple(mode), -1) for mode in inference.modes.tolist()], dtype=np.intp)
    if not (of_training >= 0).any():
        raise InvalidInputError(
            "training and inference have no power mode in common: give those of the same board, in the same modes"
        )
    inference, of_training = inference.among(of_training >= 0), of_training[of_training >= 0]
    safe_ms, safe_minibatch_ms = inference.safe_minibatch_ms(probability), training.safe_minibatch_ms(probability)
    minibatches = most_minibatches(demand, inference.stated_batch(), safe_ms, safe_minibatch_ms[of_training], switch_ms)
    if (minibatches < 0).all():
        raise _unkept_duty(demand, inference.stated_batch(), safe_ms, probability)
    is_trainable = minibatches > 0
    rows, count = of_training[is_trainable], minibatches[is_trainable]
    beside, share = _beside(training, rows, inference.among(is_trainable), count, demand, switch_ms)
    return ModesWithDuty(
        demand,
        switch_ms,
        inference.among(minibatches >= 0),
        beside,
        count,
        share,
        safe_ms[is_trainable],
        safe_ms[is_trainable] + count * safe_minibatch_ms[rows] + 2 * switch_ms,
        _latency_to_train_ms(
            demand,
            inference.stated_batch(),
            safe_ms,
            safe_ms + safe_minibatch_ms[of_training] + 2 * switch_ms,
        ),
    )


def _beside(
    training: KnownModes,
    rows: NDArray[np.intp],
    inference: KnownModes,
    minibatches: Counts,
    demand: Demand,
    switch_ms: float,
) -> tuple[KnownModes, Values]:
    """The time of a training minibatch with the duty kept, the power of the pair, and training's share of the time.

    Args:
        training: the modes of training.
        rows: `[n]` indices into `training`.
        inference: `[n]` mode and batch of inference for each of these rows.
        minibatches: `[n]` minibatches in a cycle, at least 1.
        demand: the duty.
        switch_ms: ms of a switch.
    """
    alone_ms = minibatches * training.minibatch_ms[rows]
    cycle_ms = inference.minibatch_ms + alone_ms + 2 * switch_ms
    error_ms = np.hypot(inference.minibatch_ms * inference.time_log_sd, alone_ms * training.time_log_sd[rows])
    if demand.pattern is ArrivalPattern.REGULAR:
        cycle_ms, error_ms = demand.collect_ms(inference.stated_batch()), np.zeros_like(error_ms)
    power_mw = np.maximum(training.power_mw[rows], inference.power_mw)
    safe_mw = np.maximum(training.safe_power_mw(POWER_QUANTILE)[rows], inference.safe_power_mw(POWER_QUANTILE))
    known = KnownModes(
        inference.modes,
        cycle_ms / minibatches,
        power_mw,
        error_ms / cycle_ms,
        np.log(safe_mw / power_mw) / normal_quantile(POWER_QUANTILE),
        inference.measured & training.measured[rows],
        inference.stated_batch(),
    )
    return known, alone_ms / cycle_ms


def _latency_to_train_ms(demand: Demand, batch: BatchArray, inference_ms: Values, cycle_ms: Values) -> float:
    """The lowest latency limit that is kept with one minibatch per cycle, in the fastest mode of each batch size, ms.

    Args:
        demand: the duty.
        batch: `[m]` maximum number of requests in a batch.
        inference_ms: `[m]` ms of inference.
        cycle_ms: `[m]` ms of a cycle with one minibatch.
    """
    order = np.lexsort((cycle_ms, batch))
    shortest = order[np.unique(batch[order], return_index=True)[1]]
    if demand.pattern is ArrivalPattern.REGULAR:
        shortest = shortest[cycle_ms[shortest] <= demand.collect_ms(batch[shortest])]
    return float(_latency_ms(demand, batch[shortest], inference_ms[shortest], cycle_ms[shortest]).min(initial=np.inf))


def _latency_ms(demand: Demand, batch: BatchArray, inference_ms: Values, cycle_ms: Values) -> Values:
    if demand.pattern is ArrivalPattern.REGULAR:
        return demand.collect_ms(batch) + inference_ms
    return latency_at_quantile_ms(batch, inference_ms, cycle_ms, demand.arrival_per_s, demand.quantile)


def _unkept_duty(demand: Demand, batch: BatchArray, inference_ms: Values, probability: float) -> UnkeptDutyError:
    """The error for a duty that no mode keeps; its message states the remedy."""
    with_probability = f"with a probability of {probability:g}"
    fastest_per_s = float((1e3 * batch / inference_ms).max())
    most_per_s = MAX_UTILIZATION * fastest_per_s if demand.pattern is ArrivalPattern.RANDOM else fastest_per_s
    if demand.arrival_per_s > most_per_s:
        return TooManyRequestsError(
            f"{demand.arrival_per_s:g} requests a second are more than this board answers in any mode,"
            f" {with_probability}: send at most {_rounded_down(most_per_s)} a second"
        )
    is_stable = utilization(batch, inference_ms, demand.arrival_per_s) <= most_per_s / fastest_per_s
    least_ms = _latency_ms(demand, batch[is_stable], inference_ms[is_stable], inference_ms[is_stable]).min()
    return LatencyTooLowError(
        f"no mode answers {demand}, {with_probability}: allow at least {np.ceil(least_ms):g} ms, or fewer requests a"
        " second"
    )


def _rounded_down(per_s: float) -> str:
    return f"{np.floor(10 * per_s) / 10:g}"
