"""Methods that choose from few measurements: a power mode, a batch size with it, or both for training beside inference.

A method measures rows of a *bench* within a limit, and then chooses a row for each *problem*: a power budget in watts,
or a latency, an arrival rate and a power budget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.choosing import (
    POWER_QUANTILE,
    ChosenMode,
    InfeasibleServiceError,
    InterleavingObjective,
    KnownModes,
    Objective,
    PairedModes,
    Proposal,
    SamplingSettings,
    ServiceLimits,
    ServingGoal,
    choose_interleaved,
    choose_serving,
    descending_modes,
    fastest_within_budget,
    next_measurement,
    next_modes,
    search_within_budgets,
)
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.modes import (
    BatchArray,
    Board,
    ModeArray,
    PowerMode,
    Profile,
    Task,
    nearest_mode,
)
from wattfleet.core.prediction import DEFAULT_PREDICTOR, Prediction, Predictor, conditioned, predictor_names
from wattfleet.evaluation.grid_search import BATCH, Grid, LimitsJudge, Measured
from wattfleet.evaluation.powertrain import Schedule, predicted_corpus

P = TypeVar("P")
"""A problem: a budget in W, or the limits of a service."""

Choose = Callable[[P], int | None]
"""Maps a problem to a row of the bench; None if no known row keeps its limits."""

MeasuredRows = Mapping[Task, Sequence[int]]
"""The measured rows of each task, in the order of measuring."""

Fit = Callable[[Profile], Predictor]
"""Fits a predictor to measured rows; the reference to transfer from is bound to the function."""


# --- Benches ----------------------------------------------------------------------------------------------------------
# What can be measured and chosen, and which of the known rows is the best.


class Bench(ABC, Generic[P]):
    """What can be measured and chosen.

    Attributes:
        corpora: the rows of each task that can be measured.
        modes: `[n, 4]` modes of the rows that can be chosen.
        batch: `[n]` their batch sizes; None if they differ only in their modes.
    """

    corpora: Mapping[Task, Profile]
    modes: ModeArray
    batch: BatchArray | None

    @cached_property
    def settings(self) -> NDArray[np.float64]:
        """`[n, 4]` modes of the rows, or `[n, 5]` modes with their batch sizes."""
        return self.modes if self.batch is None else np.column_stack([self.modes, self.batch])

    @cached_property
    def row_of(self) -> dict[tuple[float, ...], int]:
        """The row of each setting."""
        return {tuple(setting): row for row, setting in enumerate(self.settings.tolist())}

    @abstractmethod
    def needed(self, row: int) -> Sequence[Proposal]:
        """The measurements that a choice of a row needs."""

    @abstractmethod
    def chooser(
        self, measured: MeasuredRows, predicted: Mapping[Task, Prediction] | None = None, probability: float = 0.5
    ) -> Choose[P]:
        """The function that chooses the best row.

        Args:
            measured: the measured rows, which have to keep the limits by their measured values.
            predicted: predictions of all rows; None chooses among the measured ones only.
            probability: probability with which each other time and power has to keep its limit.
        """


class _OneTask(Bench[P]):
    """Rows of one task."""

    def __init__(self, corpus: Profile, batch: BatchArray | None) -> None:
        if not len(corpus):
            raise InvalidInputError("there is nothing to measure: give a file with at least 1 row")
        self.corpus, self.modes, self.batch = corpus, corpus.modes, batch
        self.corpora = {corpus.task: corpus}

    def needed(self, row: int) -> Sequence[Proposal]:
        return [Proposal(self.corpus.task, row)]

    def chooser(
        self, measured: MeasuredRows, predicted: Mapping[Task, Prediction] | None = None, probability: float = 0.5
    ) -> Choose[P]:
        rows = np.array(measured[self.corpus.task], dtype=np.intp)
        known = (
            KnownModes.only_measured(self.corpus.rows(rows))
            if predicted is None
            else _known(self.corpus, predicted[self.corpus.task], rows)
        )

        def choose(problem: P) -> int | None:
            try:
                found = self._best(known, problem, probability)
            except (InfeasibleBudgetError, InfeasibleServiceError):
                return None
            return self.row_of[(*found.mode, *([] if self.batch is None or found.batch is None else [found.batch]))]

        return choose

    @abstractmethod
    def _best(self, known: KnownModes, problem: P, probability: float) -> ChosenMode: ...


class TrainingBench(_OneTask[float]):
    """Modes to train in: the fastest one within a budget is the best."""

    def __init__(self, corpus: Profile) -> None:
        """Choose among the modes of a corpus.

        Raises:
            InvalidInputError: there are none.
        """
        super().__init__(corpus, None)

    def _best(self, known: KnownModes, problem: float, probability: float) -> ChosenMode:
        return fastest_within_budget(known, problem * 1e3, probability)


class ServiceBench(Bench[ServiceLimits]):
    """Modes with batch sizes that answer requests."""

    batch: BatchArray

    @abstractmethod
    def values_of(self, row: int) -> Measured:
        """The measured values of a row."""

    @abstractmethod
    def wants_faster(self, judge: LimitsJudge, row: int) -> bool:
        """Whether a search looks for a row that takes less time than one that keeps the budget."""


class InferenceBench(_OneTask[ServiceLimits], ServiceBench):
    """Modes with batch sizes for inference alone."""

    def __init__(self, corpus: Profile, objective: Objective) -> None:
        """Choose among the rows of a corpus.

        Raises:
            InvalidInputError: there are none, or they state no batches.
        """
        if corpus.batch is None:
            raise InvalidInputError(
                "the target has no column 'batch': state the batch of each row to choose among them"
            )
        super().__init__(corpus, corpus.batch)
        self.objective = objective

    def _best(self, known: KnownModes, problem: ServiceLimits, probability: float) -> ChosenMode:
        return choose_serving(known, problem, self.objective, probability)

    def values_of(self, row: int) -> Measured:
        """The measured values of a row."""
        ms, power_mw = float(self.corpus.minibatch_ms[row]), float(self.corpus.power_mw[row])
        return Measured(ms, power_mw, ms, int(self.batch[row]))

    def wants_faster(self, judge: LimitsJudge, row: int) -> bool:
        """Whether more samples a second are wanted, or the row is too late."""
        return self.objective is Objective.MOST_SAMPLES or not judge.keeps_latency(row)


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
    training_rows: NDArray[np.intp]
    inference_rows: NDArray[np.intp]

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


class PairBench(ServiceBench):
    """Modes with batch sizes for inference, beside training in the same mode."""

    def __init__(self, pair: PairCorpora, objective: InterleavingObjective) -> None:
        self.pair, self.objective = pair, objective
        self.corpora = {Task.TRAINING: pair.training, Task.INFERENCE: pair.inference}
        self.modes, self.batch = pair.inference.modes, pair.batch

    def needed(self, row: int) -> Sequence[Proposal]:
        """The inference of a row, and the training in its mode."""
        mode = int(self.pair.measured.mode_of[row])
        return [Proposal(Task.TRAINING, mode), Proposal(Task.INFERENCE, row)]

    def chooser(
        self, measured: MeasuredRows, predicted: Mapping[Task, Prediction] | None = None, probability: float = 0.5
    ) -> Choose[ServiceLimits]:
        """The function that chooses the best row; see `Bench`."""
        if predicted is None:
            trained, answered = (np.isin(np.arange(len(rows)), measured[task]) for task, rows in self.corpora.items())
            both = np.asarray(answered & trained[self.pair.measured.mode_of])
            known, rows = self.pair.measured.among(both), np.flatnonzero(both)
        else:
            known, rows = self.known(measured, predicted), np.arange(len(self.batch))

        def choose(limits: ServiceLimits) -> int | None:
            try:
                found = choose_interleaved(known, limits, self.objective, probability) if len(rows) else None
            except InfeasibleServiceError:
                return None
            return None if found is None else int(rows[found.row])

        return choose

    def known(self, measured: MeasuredRows, predicted: Mapping[Task, Prediction]) -> PairedModes:
        """All rows: the measured ones with their measured values, and the others as predicted."""
        training, inference = (
            _known(corpus, predicted[task], np.array(measured[task], dtype=np.intp))
            for task, corpus in self.corpora.items()
        )
        return PairedModes(training, inference, self.pair.measured.mode_of)

    def values_of(self, row: int) -> Measured:
        """The measured values of a row; its power is the larger one of training and inference."""
        pair = self.pair.measured
        mode = pair.mode_of[row]
        return Measured(
            float(pair.inference.minibatch_ms[row]),
            float(max(pair.inference.power_mw[row], pair.training.power_mw[mode])),
            float(pair.training.minibatch_ms[mode]),
            int(self.batch[row]),
        )

    def wants_faster(self, judge: LimitsJudge, row: int) -> bool:
        """Always, since it leaves more time for training."""
        return True


def _known(corpus: Profile, prediction: Prediction, rows: NDArray[np.intp]) -> KnownModes:
    """All rows of a corpus: some with their measured values, and the others as predicted."""
    ms, mw = prediction.minibatch_ms.copy(), prediction.power_mw.copy()
    time_sd, power_sd = prediction.time_log_sd.copy(), prediction.power_log_sd.copy()
    measured = np.zeros(len(corpus), dtype=bool)
    ms[rows], mw[rows], measured[rows] = corpus.minibatch_ms[rows], corpus.power_mw[rows], True
    time_sd[rows] = power_sd[rows] = 0.0
    return KnownModes(corpus.modes, ms, mw, time_sd, power_sd, measured, corpus.batch)


# --- Sessions and methods ---------------------------------------------------------------------------------------------


class Session(Generic[P]):
    """Measures rows of a bench, each at most once, up to a limit.

    Args:
        bench: what can be measured.
        limit: maximum number of measurements.

    Attributes:
        bench: what can be measured.
        limit: maximum number of measurements.
        rows: the measured rows of each task, in the order of measuring.

    Raises:
        InvalidInputError: the limit is negative, or it is 1 where a choice needs a measurement of each task.
    """

    def __init__(self, bench: Bench[P], limit: int) -> None:
        if len(bench.corpora) > 1 and limit < len(bench.corpora):
            raise InvalidInputError(
                f"a choice needs a measurement of training and one of inference: allow 2 or more, not {limit}"
            )
        if limit < 0:
            raise InvalidInputError(f"the limit of a session must be 0 or more measurements, not {limit}")
        self.bench = bench
        self.limit = min(limit, sum(map(len, bench.corpora.values())))
        self.rows: dict[Task, list[int]] = {task: [] for task in bench.corpora}

    @property
    def measured(self) -> int:
        """Number of measurements so far."""
        return sum(map(len, self.rows.values()))

    @property
    def remaining(self) -> int:
        """Number of measurements that may still be made."""
        return self.limit - self.measured

    def measure(self, row: int) -> bool:
        """Measure all that a choice of a row needs; False if the limit does not allow it."""
        missing = [each for each in self.bench.needed(row) if each.row not in self.rows[each.task]]
        if len(missing) > self.remaining:
            return False
        for each in missing:
            self.rows[each.task].append(each.row)
        return True

    def measure_one(self, proposal: Proposal) -> None:
        """Make a single measurement; one that was made before does not count again.

        Raises:
            InvalidInputError: the limit is reached.
        """
        if proposal.row in self.rows[proposal.task]:
            return
        if not self.remaining:
            raise InvalidInputError(f"the limit of {self.limit} measurements is reached")
        self.rows[proposal.task].append(proposal.row)

    def measure_settings(self, settings: NDArray[np.float64]) -> None:
        """Measure `[k, 4]` modes, or `[k, 5]` modes with their batch sizes, in the given order.

        Raises:
            InvalidInputError: the limit is reached.
        """
        for setting in settings.tolist():
            for proposal in self.bench.needed(self.bench.row_of[tuple(setting)]):
                self.measure_one(proposal)

    def measure_random(self, seed: int, rows: NDArray[np.intp] | None = None) -> None:
        """Measure rows drawn uniformly at random, from all or from some rows, up to the limit."""
        drawn = np.random.default_rng(seed).permutation(np.arange(len(self.bench.modes)) if rows is None else rows)
        for row in drawn.tolist():
            if not self.measure(row):
                return

    def profile(self) -> Profile:
        """The measurements made so far on a bench with one task."""
        ((task, corpus),) = self.bench.corpora.items()
        return corpus.rows(np.array(self.rows[task], dtype=np.intp))

    def best_measured(self) -> Choose[P]:
        """Choose the best row that was measured."""
        return self.bench.chooser(self.rows)


class Method(Protocol[P]):
    """A way to find the best row for each problem from a limited number of measurements."""

    @property
    def name(self) -> str:
        """Name on command lines and in tables."""
        ...

    def profile(self, session: Session[P], problems: Sequence[P], seed: int) -> Choose[P]:
        """Measure within the session's limit, and return the function that chooses.

        The same arguments give the same measurements and choices.

        Args:
            session: makes the measurements.
            problems: the problems that one set of measurements has to serve.
            seed: seed of random draws, if the method makes any.

        Raises:
            InvalidInputError: the method cannot work with so few measurements.
        """
        ...


# --- Baselines --------------------------------------------------------------------------------------------------------
# Methods without a predictor: they choose among what they measured, or do not measure at all.


@dataclass(frozen=True)
class RandomRows:
    """Measures rows drawn at random up to the limit, and chooses among them."""

    name: str = "random"

    def profile(self, session: Session[P], problems: Sequence[P], seed: int) -> Choose[P]:
        """Measure random rows up to the session's limit."""
        session.measure_random(seed)
        return session.best_measured()


@dataclass(frozen=True)
class EveryRow:
    """Measures every row, whatever the limit. All other methods are compared with this best possible choice."""

    name: str = "brute-force"

    def profile(self, session: Session[P], problems: Sequence[P], seed: int) -> Choose[P]:
        """Measure everything."""
        session.rows = {task: list(range(len(corpus))) for task, corpus in session.bench.corpora.items()}
        return session.best_measured()


@dataclass(frozen=True)
class Maxn:
    """Always chooses the highest mode, without measuring. This is what a Jetson does if nobody sets a power mode."""

    name: str = "maxn"

    def profile(self, session: Session[float], problems: Sequence[float], seed: int) -> Choose[float]:
        """Measure nothing."""
        highest = session.bench.row_of[tuple(descending_modes(session.bench.modes)[0].tolist())]
        return lambda budget_w: highest


@dataclass(frozen=True)
class Presets:
    """Chooses the preset with the most watts in its name that the budget covers, without measuring.

    A preset such as `30W` caps clocks, not watts, so it may draw more or far less. A preset without watts in its name
    (`MAXN`) is never chosen.

    Attributes:
        presets: the board's preset modes by name. If a preset cannot be set, the nearest mode takes its place.

    Raises:
        InvalidInputError: no preset has watts in its name.
    """

    presets: Mapping[str, PowerMode]
    name: str = "presets"

    def __post_init__(self) -> None:
        if not self._labelled():
            raise InvalidInputError(f"none of the presets {', '.join(self.presets)} has watts in its name")

    def profile(self, session: Session[float], problems: Sequence[float], seed: int) -> Choose[float]:
        """Measure nothing."""
        bench = session.bench
        rows = {watts: bench.row_of[nearest_mode(bench.modes, mode)] for watts, mode in self._labelled().items()}

        def choose(budget_w: float) -> int | None:
            covered = [watts for watts in rows if watts <= budget_w]
            return rows[max(covered)] if covered else None

        return choose

    def _labelled(self) -> dict[int, PowerMode]:
        """The presets by the watts in their names, such as 15 for `15W`."""
        labels = {name: name.removesuffix("W") for name in self.presets}
        return {int(watts): self.presets[name] for name, watts in labels.items() if watts.isdecimal()}


@dataclass(frozen=True)
class FixedBatch:
    """Measures modes drawn at random with one batch size.

    Attributes:
        largest: whether it is the largest batch that can be collected within the latency, instead of the smallest one.
    """

    largest: bool

    @property
    def name(self) -> str:
        """Name on command lines and in tables."""
        return "largest-batch" if self.largest else "batch-1"

    def profile(
        self, session: Session[ServiceLimits], problems: Sequence[ServiceLimits], seed: int
    ) -> Choose[ServiceLimits]:
        """Measure random modes with this batch, up to the session's limit. The problems differ only in their budget."""
        batch = _service_bench(session).batch
        possible = batch[problems[0].longest_ms(batch) > 0]
        wanted = possible.max(initial=0) if self.largest else batch.min()
        session.measure_random(seed, np.flatnonzero(batch == wanted))
        return session.best_measured()


# --- Searches ---------------------------------------------------------------------------------------------------------
# The published searches, which choose by measurements alone. Searches for several problems share their measurements and
# continue up to the limit.


@dataclass(frozen=True)
class ModeSearch:
    """Searches for each budget by `wattfleet.core.choosing.search_within_budgets`; chooses the best measured mode."""

    name: str = "binary-search"

    def profile(self, session: Session[float], problems: Sequence[float], seed: int) -> Choose[float]:
        """Search for each of the budgets. The seed has no effect."""
        bench = session.bench
        power_mw = bench.corpora[Task.TRAINING].power_mw

        def power_of(mode: PowerMode) -> float | None:
            row = bench.row_of[mode]
            return float(power_mw[row]) if session.remaining and session.measure(row) else None

        search_within_budgets(bench.modes, [budget_w * 1e3 for budget_w in problems], power_of)
        return session.best_measured()


@dataclass(frozen=True)
class HalvingSearch:
    """Measures the middle of the remaining modes and batches, and drops half of the values of one dimension.

    A knob goes up where a row keeps the budget and a faster one may be better. The batch goes up where it keeps the
    latency, or where the inference takes longer than its requests to arrive.
    """

    name: str = "binary-search"

    def profile(
        self, session: Session[ServiceLimits], problems: Sequence[ServiceLimits], seed: int
    ) -> Choose[ServiceLimits]:
        """Search for each of the problems. The seed has no effect."""
        bench = _service_bench(session)
        for limits in problems:
            grid, judge = _collectable(session, limits)

            def upper(dimension: int, row: int, judge: LimitsJudge = judge) -> bool:
                if dimension == BATCH:
                    return judge.wants_larger_batch(row)
                return judge.keeps_budget(row) and bench.wants_faster(judge, row)

            grid.halve(upper)
        return session.best_measured()


@dataclass(frozen=True)
class GradientSearch:
    """Measures the slope of time against power along each knob from the middle, then searches along the steepest."""

    name: str = "gradient"

    def profile(
        self, session: Session[ServiceLimits], problems: Sequence[ServiceLimits], seed: int
    ) -> Choose[ServiceLimits]:
        """Search for each of the problems. The seed has no effect."""
        for limits in problems:
            grid, judge = _collectable(session, limits)
            grid.climb(judge)
        return session.best_measured()


def _service_bench(session: Session[ServiceLimits]) -> ServiceBench:
    assert isinstance(session.bench, ServiceBench), "every bench with such problems is one"
    return session.bench


def _collectable(session: Session[ServiceLimits], limits: ServiceLimits) -> tuple[Grid, LimitsJudge]:
    """The rows whose batch can be collected within the latency, and a judge of their measured values."""
    bench = _service_bench(session)
    rows = np.flatnonzero(limits.longest_ms(bench.batch) > 0).tolist()
    grid = Grid(bench.settings[rows], lambda row: session.measure(rows[row]))
    return grid, LimitsJudge(limits, lambda row: bench.values_of(rows[row]))


# --- Predicting from random rows --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomThenPredict:
    """Fits a predictor to modes drawn at random and chooses by its median predictions.

    As published (doi:10.1016/j.future.2024.07.001, section 5): the least predicted time, without a margin, without
    preferring the lower power among nearly equal times, and ignoring the measured values.

    Attributes:
        name: the predictor's name.
        fit: fits it.
    """

    name: str
    fit: Fit

    def profile(self, session: Session[float], problems: Sequence[float], seed: int) -> Choose[float]:
        """Measure random modes up to the session's limit."""
        session.measure_random(seed)
        prediction = self.fit(session.profile()).predict(session.bench.modes)
        by_time = np.lexsort((prediction.power_mw, prediction.minibatch_ms))

        def choose(budget_w: float) -> int | None:
            within = by_time[prediction.power_mw[by_time] <= budget_w * 1e3]
            return int(within[0]) if len(within) else None

        return choose


PROBABILITY = 0.95
"""Probability with which an unmeasured row must keep its time, and the same for its power."""


@dataclass(frozen=True)
class PredictRows:
    """Fits a predictor to rows drawn at random and chooses among all by measurements and predictions.

    A measured row must keep the limits by its measured time and power, and an unmeasured one with `PROBABILITY`.

    Attributes:
        fit: fits the predictor, which must predict several batch sizes.
        name: name in tables.
    """

    fit: Fit
    name: str = "roofline"

    def profile(
        self, session: Session[ServiceLimits], problems: Sequence[ServiceLimits], seed: int
    ) -> Choose[ServiceLimits]:
        """Measure random rows up to the session's limit."""
        session.measure_random(seed)
        predicted = self.fit(session.profile()).predict(session.bench.modes, session.bench.batch)
        return session.bench.chooser(session.rows, {Task.INFERENCE: predicted}, PROBABILITY)


@dataclass(frozen=True)
class NetworkFromRandom:
    """Trains the published networks on rows drawn at random, the same number of each task, and chooses by them.

    As in the published work, a choice has no margin for the error of the prediction.
    """

    name: str = "network"

    def profile(
        self, session: Session[ServiceLimits], problems: Sequence[ServiceLimits], seed: int
    ) -> Choose[ServiceLimits]:
        """Measure up to the session's limit, and train."""
        drawn, corpora = np.random.default_rng(seed), session.bench.corpora
        for task, corpus in corpora.items():
            for row in drawn.permutation(len(corpus))[: session.limit // len(corpora)].tolist():
                session.measure_one(Proposal(task, row))
        predicted = {
            task: predicted_corpus(corpora[task], np.array(rows, dtype=np.intp), Schedule(seed=seed))
            for task, rows in session.rows.items()
        }
        return session.bench.chooser(session.rows, predicted)


# --- Measure what matters ---------------------------------------------------------------------------------------------
# Wattfleet's own methods: they measure what they would choose before they choose it.

# An unmeasured choice may exceed its budget with a probability of at most _RISK / (measured modes). After few
# measurements nearly every choice is unmeasured, and some risk saves much time. After many, little is left to gain.
_RISK = 6.0
_MAX_RISK = 0.3
# Before any measurement, the errors at all modes are nearly the same. The choices then keep either every budget or
# hardly any, so that a risk does not average out over the budgets.
_RISK_UNMEASURED = 1 - POWER_QUANTILE
SPREAD_OF_TRANSFER = 3
"""With a reference to transfer from, three spread-out rows are enough to choose the next ones by prediction."""
# Measuring two settings per fit halves the time for fitting.
_SETTINGS_PER_FIT = 2
# Beside inference: measurements of a task up to which its predictor is fitted again, for one problem and for many that
# share their measurements. Fits to more of them choose no better.
_FITTED = 3
_FITTED_SHARED = 12
# If problems share their measurements, this many of them, drawn at random, determine what to measure next.
_PROBLEMS = 150
# Beside inference: probability with which each unmeasured time and power must keep its limit.
_PROBABILITY_BESIDE = 0.99


class CorpusPredictions:
    """Predicts all rows of a corpus from the measured ones, and caches the fits.

    The first measurements are the most informative about the workload, so the predictor is fitted again after each of
    them. The last of these fits is conditioned on further measurements, which takes a tenth of the time of a fit.

    Args:
        fit: fits the predictor.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._known: dict[tuple[int, ...], Prediction] = {}

    def after(self, corpus: Profile, rows: Sequence[int], fitted: int | None = None) -> Prediction:
        """The prediction of all rows.

        Args:
            corpus: the corpus, the same one in every call.
            rows: the measured rows, in the order of measuring.
            fitted: number of measurements up to which the predictor is fitted; None fits it to all.
        """
        count = len(rows) if fitted is None else fitted
        first, further = tuple(sorted(rows[:count])), np.array(rows[count:], dtype=np.intp)
        if first not in self._known:
            predictor = self._fit(corpus.rows(np.array(first, dtype=np.intp)))
            self._known[first] = predictor.predict(corpus.modes, corpus.batch)
        return conditioned(self._known[first], corpus.modes, corpus.batch, further, corpus.rows(further))


@dataclass(frozen=True)
class MeasureWhatMatters:
    """Measures the modes that `wattfleet.core.choosing.next_modes` proposes for the budgets, then chooses the fastest.

    A measured mode must be within the budget by its measured power. An unmeasured mode must be within it with a
    probability that rises with the number of measured modes (0.70 after up to 20, 0.88 after 50). Without any
    measurement, the probability is 0.95.

    Attributes:
        fit: fits the predictor.
        name: name in tables.
        spread: modes that are measured before the predictor is used. The predictor has to accept that few.
    """

    fit: Fit
    name: str = "wattfleet"
    spread: int = SPREAD_OF_TRANSFER

    def profile(self, session: Session[float], problems: Sequence[float], seed: int) -> Choose[float]:
        """Measure up to the session's limit, or fewer if more modes would not help.

        Raises:
            InvalidInputError: there are too few measurements for the predictor.
        """
        modes = session.bench.modes
        settings = SamplingSettings(limit=max(1, session.limit), spread=self.spread, seed=seed)
        budgets_mw = np.array(problems, dtype=np.float64) * 1e3

        def predict(profile: Profile) -> Prediction:
            return self.fit(profile).predict(modes)

        while session.remaining and len(found := next_modes(session.profile(), modes, predict, settings, budgets_mw)):
            session.measure_settings(found)
        risk = min(_MAX_RISK, _RISK / session.measured) if session.measured else _RISK_UNMEASURED
        return session.bench.chooser(session.rows, {Task.TRAINING: predict(session.profile())}, 1 - risk)


@dataclass
class MeasureWhatMattersForServing:
    """Measures the settings that `wattfleet.core.choosing.next_modes` proposes for the limits, then chooses the best.

    A measured setting must keep the limits by its measured time and power, and an unmeasured one with `PROBABILITY`.

    Attributes:
        fit: fits the predictor, which must predict several batch sizes after three measurements.
        chooses_measured: whether only measured settings are chosen, which cannot break a limit. The predictor is then
            fitted only to the first measurements, and conditioned on the others. This is fast enough for thousands of
            problems.
        name: name in tables.
    """

    fit: Fit
    chooses_measured: bool = False
    name: str = "wattfleet"

    def __post_init__(self) -> None:
        self._predictions = CorpusPredictions(self.fit)

    def profile(
        self, session: Session[ServiceLimits], problems: Sequence[ServiceLimits], seed: int
    ) -> Choose[ServiceLimits]:
        """Measure up to the session's limit, or fewer if no further measurement can improve a choice."""
        bench = session.bench
        assert isinstance(bench, InferenceBench), "the method is for inference alone"
        goal = ServingGoal(tuple(problems), bench.objective)
        settings = SamplingSettings(
            limit=max(1, session.limit),
            spread=SPREAD_OF_TRANSFER,
            batch=1 if self.chooses_measured else _SETTINGS_PER_FIT,
            tolerance=0,
            seed=seed,
        )

        def predict(profile: Profile) -> Prediction:
            fitted = SPREAD_OF_TRANSFER if self.chooses_measured else None
            return self._predictions.after(bench.corpus, session.rows[Task.INFERENCE], fitted)

        while session.remaining and len(
            found := next_modes(session.profile(), bench.modes, predict, settings, batch=bench.batch, serving=goal)
        ):
            session.measure_settings(found)
        if self.chooses_measured:
            return session.best_measured()
        return bench.chooser(session.rows, {Task.INFERENCE: predict(session.profile())}, PROBABILITY)


@dataclass
class MeasureWhatMattersBesideInference:
    """Measures what `wattfleet.core.choosing.next_measurement` proposes, then chooses the best mode and batch.

    For a single problem, only a measured mode and batch is chosen, which cannot break a limit. Problems that
    share their measurements also choose by predictions, with a probability of 0.99.

    Attributes:
        fit: for each task, fits the predictor; it must predict without any measurement.
        name: name in tables.
    """

    fit: Mapping[Task, Fit]
    name: str = "wattfleet"

    def __post_init__(self) -> None:
        self._predictions = {task: CorpusPredictions(fit) for task, fit in self.fit.items()}

    def profile(
        self, session: Session[ServiceLimits], problems: Sequence[ServiceLimits], seed: int
    ) -> Choose[ServiceLimits]:
        """Measure up to the session's limit, or fewer if no further measurement can improve a choice."""
        bench = session.bench
        assert isinstance(bench, PairBench), "the method is for training beside inference"

        def predicted(fitted: int | None = None) -> Mapping[Task, Prediction]:
            corpora = bench.corpora.items()
            return {task: self._predictions[task].after(each, session.rows[task], fitted) for task, each in corpora}

        drawn, shared = np.random.default_rng(seed), len(problems) > 1
        while session.remaining:
            some = problems
            if len(problems) > _PROBLEMS:
                some = [problems[at] for at in drawn.choice(len(problems), _PROBLEMS, replace=False)]
            known = bench.known(session.rows, predicted(_FITTED_SHARED if shared else _FITTED))
            proposal = next_measurement(known, some, bench.objective)
            if proposal is None:
                break
            session.measure_one(proposal)
        return bench.chooser(session.rows, predicted(), _PROBABILITY_BESIDE) if shared else session.best_measured()


# --- Registry ---------------------------------------------------------------------------------------------------------
# Methods by name, for each kind of bench.

_TRAINING: dict[str, Method[float]] = {each.name: each for each in (Maxn(), RandomRows(), ModeSearch(), EveryRow())}
_SERVING: dict[str, Method[ServiceLimits]] = {
    each.name: each
    for each in (
        HalvingSearch(),
        GradientSearch(),
        NetworkFromRandom(),
        FixedBatch(largest=True),
        FixedBatch(largest=False),
        RandomRows(),
        EveryRow(),
    )
}
_INTERLEAVING: dict[str, Method[ServiceLimits]] = {
    each.name: each for each in (GradientSearch(), HalvingSearch(), RandomRows(), NetworkFromRandom(), EveryRow())
}
CHOICE_METHODS = ("wattfleet", *_TRAINING, "presets", *predictor_names())
"""Names of all methods for training. Each kind of predictor is also a method (`RandomThenPredict`)."""
SERVING_METHODS = ("wattfleet", "roofline", *_SERVING)
"""Names of all methods for inference."""
INTERLEAVING_METHODS = ("wattfleet", *_INTERLEAVING)
"""Names of all methods for training beside inference."""


def choice_method_named(name: str, fit_of: Callable[[str], Fit], board: Board | None) -> Method[float]:
    """Create a method for training by its name.

    Args:
        name: one of `CHOICE_METHODS`.
        fit_of: returns the function that fits a kind of predictor; called only if the method needs a predictor.
        board: the board, for its presets; None if it is unknown.

    Raises:
        InvalidInputError: the name is unknown, or it is `presets` and the board is unknown.
    """
    if name in _TRAINING:
        return _TRAINING[name]
    if name == "wattfleet":
        return MeasureWhatMatters(fit_of(DEFAULT_PREDICTOR))
    if name == "presets":
        if board is None:
            raise InvalidInputError("presets: no known board has these modes; choose another method")
        return Presets(board.presets)
    if name in predictor_names():
        return RandomThenPredict(name, fit_of(name))
    raise InvalidInputError(f"unknown choice method {name!r}: choose one of {', '.join(CHOICE_METHODS)}")


def serving_method_named(name: str, fit: Callable[[], Fit], chooses_measured: bool = False) -> Method[ServiceLimits]:
    """Create a method for inference by its name.

    Args:
        name: one of `SERVING_METHODS`.
        fit: returns the function that fits the predictor; called only if the method needs one.
        chooses_measured: see `MeasureWhatMattersForServing`; other methods ignore it.

    Raises:
        InvalidInputError: the name is unknown.
    """
    if name in _SERVING:
        return _SERVING[name]
    if name == "wattfleet":
        return MeasureWhatMattersForServing(fit(), chooses_measured)
    if name == "roofline":
        return PredictRows(fit())
    raise InvalidInputError(f"unknown method {name!r} for inference: choose one of {', '.join(SERVING_METHODS)}")


def interleaving_method_named(name: str, fit: Callable[[Task], Fit]) -> Method[ServiceLimits]:
    """Create a method for training beside inference by its name.

    Args:
        name: one of `INTERLEAVING_METHODS`.
        fit: returns the function that fits the predictor of a task; called only if the method needs one.

    Raises:
        InvalidInputError: the name is unknown.
    """
    if name in _INTERLEAVING:
        return _INTERLEAVING[name]
    if name == "wattfleet":
        return MeasureWhatMattersBesideInference({task: fit(task) for task in Task})
    raise InvalidInputError(f"unknown strategy {name!r}: choose one of {', '.join(INTERLEAVING_METHODS)}")
