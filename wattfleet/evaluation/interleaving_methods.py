"""Methods that choose a mode for training and inference that share a board, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.choosing import (
    InfeasibleServiceError,
    InterleavedChoice,
    InterleavingObjective,
    KnownModes,
    PairedModes,
    Proposal,
    ServiceLimits,
    choose_interleaved,
    next_measurement,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchArray, Profile, Task
from wattfleet.core.prediction import Prediction
from wattfleet.evaluation.corpus_predictions import CorpusPredictions, Fit
from wattfleet.evaluation.grid_search import BATCH, Grid, LimitsJudge, Measured
from wattfleet.evaluation.powertrain import Schedule, predicted_corpus

# --- Session ----------------------------------------------------------------------------------------------------------
# An interleaving session: the measurements of training and of inference that a method may make and has made.


Rows = NDArray[np.intp]

_TASKS = (Task.TRAINING, Task.INFERENCE)


@dataclass(frozen=True)
class PairCorpora:
    """Measurements of training and inference on one board in the same modes.

    Attributes:
        training: `n` modes.
        inference: `m` rows of these modes, with their batches.
        training_rows: `[n]` row of each in the file of training.
        inference_rows: `[m]` row of each in the file of inference.
    """

    training: Profile
    inference: Profile
    training_rows: Rows
    inference_rows: Rows

    @classmethod
    def of(cls, training: Profile, inference: Profile) -> PairCorpora:
        """Keep the modes that training and inference have in common.

        Raises:
            InvalidInputError: the training has several batch sizes, the inference states no batches, or they have no
                mode in common.
        """
        if len(training.batches) > 1:
            raise InvalidInputError(
                "--training: the file has several batch sizes: keep the rows of the one that will be trained"
            )
        if inference.batch is None:
            raise InvalidInputError("--inference: the file has no column 'batch': state the batch of each row")
        pair = PairedModes.of(KnownModes.only_measured(training), KnownModes.only_measured(inference))
        used = np.unique(pair.mode_of)
        known = {tuple(mode) for mode in training.modes[used].tolist()}
        kept = np.flatnonzero([tuple(mode) in known for mode in inference.modes.tolist()])
        return cls(training.rows(used), inference.rows(kept), used, kept)

    @cached_property
    def batch(self) -> BatchArray:
        """`[m]` samples in the batch of each row of inference."""
        assert self.inference.batch is not None, "checked when the corpora were paired"
        return self.inference.batch

    @cached_property
    def measured(self) -> PairedModes:
        """All rows, with their measured values."""
        return PairedModes.of(KnownModes.only_measured(self.training), KnownModes.only_measured(self.inference))

    def of_task(self, task: Task) -> Profile:
        """The rows of a task."""
        return self.training if task is Task.TRAINING else self.inference

    def known(self, predicted: Mapping[Task, Prediction], rows: Mapping[Task, Sequence[int]]) -> PairedModes:
        """All rows: those of `rows` with their measured values, and the others as predicted."""
        training, inference = (_known(self.of_task(task), predicted[task], rows[task]) for task in _TASKS)
        return PairedModes(training, inference, self.measured.mode_of)


class InterleavingSession:
    """Measures modes of training, and modes with batches of inference, each at most once, up to a limit for both.

    Args:
        corpora: all that can be measured.
        limit: maximum number of measurements.

    Attributes:
        corpora: all that can be measured.
        limit: maximum number of measurements.
        rows: the measured rows of each task, in the order of measuring.

    Raises:
        InvalidInputError: the limit is below 2: a choice needs one measurement of each.
    """

    def __init__(self, corpora: PairCorpora, limit: int) -> None:
        if limit < 2:
            raise InvalidInputError(
                f"a choice needs a measurement of training and one of inference: allow 2 or more, not {limit}"
            )
        self.corpora = corpora
        self.limit = limit
        self.rows: dict[Task, list[int]] = {task: [] for task in _TASKS}

    @property
    def measured(self) -> int:
        """Number of measurements so far."""
        return sum(len(rows) for rows in self.rows.values())

    @property
    def remaining(self) -> int:
        """Number of measurements that may still be made."""
        return self.limit - self.measured

    def measure(self, proposal: Proposal) -> None:
        """Measure a row; one that was measured before does not count again.

        Raises:
            InvalidInputError: the limit is reached.
        """
        rows = self.rows[proposal.task]
        if proposal.row in rows:
            return
        if not self.remaining:
            raise InvalidInputError(f"the limit of {self.limit} measurements is reached")
        rows.append(proposal.row)

    def measure_pair(self, row: int) -> bool:
        """Measure a row of inference and the training in its mode; False if the limit does not allow both."""
        mode = int(self.corpora.measured.mode_of[row])
        proposals = [Proposal(Task.TRAINING, mode), Proposal(Task.INFERENCE, row)]
        if sum(each.row not in self.rows[each.task] for each in proposals) > self.remaining:
            return False
        for each in proposals:
            self.measure(each)
        return True

    def measure_everything(self) -> None:
        """Measure all rows regardless of the limit."""
        self.rows = {task: list(range(len(self.corpora.of_task(task)))) for task in _TASKS}

    def is_measured(self) -> NDArray[np.bool_]:
        """`[m]` whether both the inference and the training of its mode were measured."""
        trained, answered = (np.isin(np.arange(len(self.corpora.of_task(task))), self.rows[task]) for task in _TASKS)
        return np.asarray(answered & trained[self.corpora.measured.mode_of])


def _known(corpus: Profile, prediction: Prediction, rows: Sequence[int]) -> KnownModes:
    at = np.array(rows, dtype=np.intp)
    ms, mw = prediction.minibatch_ms.copy(), prediction.power_mw.copy()
    time_sd, power_sd = prediction.time_log_sd.copy(), prediction.power_log_sd.copy()
    measured = np.zeros(len(corpus), dtype=bool)
    ms[at], mw[at], time_sd[at], power_sd[at], measured[at] = corpus.minibatch_ms[at], corpus.power_mw[at], 0, 0, True
    return KnownModes(corpus.modes, ms, mw, time_sd, power_sd, measured, corpus.batch)


# --- Interleaving method ----------------------------------------------------------------------------------------------
# The interface of all interleaving methods.

Choose = Callable[[ServiceLimits], int | None]
"""Maps limits to a row of inference, which is a mode with a batch; None if no known row keeps them."""


class InterleavingMethod(Protocol):
    """A way to find the best mode and inference batch from a limited number of measurements."""

    @property
    def name(self) -> str:
        """Name on command lines and in tables."""
        ...

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Measure within the session's limit and return the function that chooses.

        The same arguments give the same measurements and choices.

        Args:
            session: makes the measurements.
            problems: the limits to choose for, each separately.
            objective: what the choice maximizes.
            seed: seed of random draws, if the method makes any.

        Raises:
            InvalidInputError: the method cannot work with so few measurements.
        """
        ...


def best_known(pair: PairedModes, objective: InterleavingObjective, probability: float = 0.5) -> Choose:
    """Choose the best row that keeps its limits, each value with at least the given probability."""

    def choose(limits: ServiceLimits) -> int | None:
        found = _best(pair, limits, objective, probability)
        return None if found is None else found.row

    return choose


def best_measured(session: InterleavingSession, objective: InterleavingObjective) -> Choose:
    """Choose the best row of which both training and inference were measured."""
    rows = session.is_measured().nonzero()[0]
    measured = session.corpora.measured.among(session.is_measured())

    def choose(limits: ServiceLimits) -> int | None:
        found = _best(measured, limits, objective, 0.5) if len(rows) else None
        return None if found is None else int(rows[found.row])

    return choose


def _best(
    pair: PairedModes, limits: ServiceLimits, objective: InterleavingObjective, probability: float
) -> InterleavedChoice | None:
    try:
        return choose_interleaved(pair, limits, objective, probability)
    except InfeasibleServiceError:
        return None


# --- Baselines --------------------------------------------------------------------------------------------------------
# Interleaving methods without a search: random measurements, and all of them.


@dataclass(frozen=True)
class RandomPairs:
    """Measures modes and batches drawn at random, each with the training in its mode."""

    name: str = "random"

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Measure random modes with batches, up to the session's limit."""
        for row in np.random.default_rng(seed).permutation(len(session.corpora.batch)).tolist():
            if not session.measure_pair(row):
                break
        return best_measured(session, objective)


@dataclass(frozen=True)
class EveryPair:
    """Measures all rows regardless of the limit. All other methods are compared with this best possible choice."""

    name: str = "brute-force"

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Measure everything."""
        session.measure_everything()
        return best_measured(session, objective)


# --- Searches ---------------------------------------------------------------------------------------------------------
# The published searches over power mode and inference batch, which choose by measurements alone.


@dataclass(frozen=True)
class BinarySearch:
    """Measures the middle of the remaining modes and batches, and drops half of the values of one dimension.

    A knob goes up where the pair keeps the budget. The batch goes up where it keeps the latency, or where the inference
    takes longer than its requests to arrive.
    """

    name: str = "binary-search"

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Search for each of the problems. The seed has no effect."""
        for limits in problems:
            possible = _CollectableRows(session, limits)

            def upper(dimension: int, row: int, judge: LimitsJudge = possible.judge) -> bool:
                return judge.wants_larger_batch(row) if dimension == BATCH else judge.keeps_budget(row)

            possible.grid.halve(upper)
        return best_measured(session, objective)


@dataclass(frozen=True)
class GradientSearch:
    """Measures the slope of time against power along each knob from the middle, then searches along the steepest."""

    name: str = "gradient"

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Search for each of the problems. The seed has no effect."""
        for limits in problems:
            possible = _CollectableRows(session, limits)
            possible.grid.climb(possible.judge)
        return best_measured(session, objective)


class _CollectableRows:
    """The rows whose batch can be collected within a latency."""

    def __init__(self, session: InterleavingSession, limits: ServiceLimits) -> None:
        self._session = session
        corpora = session.corpora
        self._rows = np.flatnonzero(limits.longest_ms(corpora.batch) > 0)
        settings = np.column_stack([corpora.inference.modes, corpora.batch])[self._rows]
        self.grid = Grid(settings, lambda row: session.measure_pair(int(self._rows[row])))
        self.judge = LimitsJudge(limits, self._measured)

    def _measured(self, row: int) -> Measured:
        pair, at = self._session.corpora.measured, int(self._rows[row])
        mode = pair.mode_of[at]
        return Measured(
            float(pair.inference.minibatch_ms[at]),
            float(max(pair.inference.power_mw[at], pair.training.power_mw[mode])),
            float(pair.training.minibatch_ms[mode]),
            int(self._session.corpora.batch[at]),
        )


# --- Predict pairs ----------------------------------------------------------------------------------------------------
# The published networks, trained on random measurements: the best predicted mode and batch is chosen.


@dataclass(frozen=True)
class NetworkFromRandom:
    """Measures random modes of training and random modes with batches of inference, half of the limit each.

    Four networks are trained on them: time and power of training by mode, and of inference by mode and batch. As in the
    published work, a choice has no margin for the error of the prediction.
    """

    name: str = "network"

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Measure up to the session's limit, and train."""
        drawn, corpora = np.random.default_rng(seed), session.corpora
        for task in session.rows:
            for row in drawn.permutation(len(corpora.of_task(task)))[: session.limit // 2].tolist():
                session.measure(Proposal(task, row))
        predicted = {
            task: predicted_corpus(corpora.of_task(task), np.array(rows, dtype=np.intp), Schedule(seed=seed))
            for task, rows in session.rows.items()
        }
        return best_known(corpora.known(predicted, session.rows), objective)


# --- Measure what matters ---------------------------------------------------------------------------------------------
# Wattfleet's own method: measures what is most likely to improve the choice.

# Measurements of a task up to which its predictor is fitted again, for one problem and for many that share their
# measurements. Fits to more of them choose no better.
_FITTED = 3
_FITTED_SHARED = 12
# If problems share their measurements, this many of them, drawn at random, determine what to measure next.
_PROBLEMS = 150
# Probability with which each unmeasured time and power must keep its limit.
_PROBABILITY = 0.99


@dataclass
class MeasureWhatMattersBesideInference:
    """Measures what `wattfleet.core.choosing.next_measurement` proposes, then chooses the best mode and batch.

    For a single problem, only a measured mode and batch is chosen, which cannot break a limit. Problems that
    share their measurements also choose by predictions, with `_PROBABILITY`.

    Attributes:
        fit: for each task, fits the predictor; it must predict without any measurement.
        name: name in tables.
    """

    fit: Mapping[Task, Fit]
    name: str = "wattfleet"

    def __post_init__(self) -> None:
        self._predictions = {task: CorpusPredictions(fit) for task, fit in self.fit.items()}

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Measure up to the session's limit, or fewer if no further measurement can improve a choice."""
        drawn, shared = np.random.default_rng(seed), len(problems) > 1
        while session.remaining:
            some = problems
            if len(problems) > _PROBLEMS:
                some = [problems[at] for at in drawn.choice(len(problems), _PROBLEMS, replace=False)]
            known = self._known(session, _FITTED_SHARED if shared else _FITTED)
            proposal = next_measurement(known, some, objective)
            if proposal is None:
                break
            session.measure(proposal)
        return (
            best_known(self._known(session), objective, _PROBABILITY) if shared else best_measured(session, objective)
        )

    def _known(self, session: InterleavingSession, fitted: int | None = None) -> PairedModes:
        corpora = session.corpora
        predicted = {
            task: self._predictions[task].after(corpora.of_task(task), session.rows[task], fitted) for task in Task
        }
        return corpora.known(predicted, session.rows)


# --- Registry ---------------------------------------------------------------------------------------------------------
# Interleaving methods by name.

_WITHOUT_REFERENCE: dict[str, InterleavingMethod] = {
    method.name: method
    for method in (GradientSearch(), BinarySearch(), RandomPairs(), NetworkFromRandom(), EveryPair())
}
NAMES = ("wattfleet", *_WITHOUT_REFERENCE)
"""Names of all interleaving methods."""


def interleaving_method_named(name: str, fit: Callable[[Task], Fit]) -> InterleavingMethod:
    """Create an interleaving method by its name.

    Args:
        name: one of `NAMES`.
        fit: returns the function that fits the predictor of a task; called only if the method needs one.

    Raises:
        InvalidInputError: the name is unknown.
    """
    if name in _WITHOUT_REFERENCE:
        return _WITHOUT_REFERENCE[name]
    if name == "wattfleet":
        return MeasureWhatMattersBesideInference({task: fit(task) for task in Task})
    raise InvalidInputError(f"unknown strategy {name!r}: choose one of {', '.join(NAMES)}")
