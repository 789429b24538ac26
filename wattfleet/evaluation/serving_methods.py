"""Methods that choose a mode and a batch for inference, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.choosing import (
    ChosenMode,
    InfeasibleServiceError,
    KnownModes,
    Objective,
    SamplingSettings,
    ServiceLimits,
    ServingGoal,
    choose_serving,
    next_modes,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchArray, Measurement, ModeArray, Profile
from wattfleet.core.prediction import Prediction
from wattfleet.evaluation.corpus_predictions import CorpusPredictions, Fit
from wattfleet.evaluation.grid_search import BATCH, Grid, LimitsJudge, Measured
from wattfleet.evaluation.powertrain import Schedule, predicted_corpus

# --- Serving session --------------------------------------------------------------------------------------------------
# A serving session: the settings that a serving method may measure, and those measured so far.


class ServingSession:
    """Measures settings of a corpus, each at most once, up to a limit. A setting is a mode with a batch size.

    Args:
        corpus: all settings, with their batches.
        limit: maximum number of settings to measure.

    Attributes:
        corpus: all settings.
        modes: `[n, 4]` modes of the settings.
        batch: `[n]` batch sizes of the settings.
        limit: maximum number of settings to measure.

    Raises:
        InvalidInputError: the corpus is empty or states no batches, or the limit is negative.
    """

    def __init__(self, corpus: Profile, limit: int) -> None:
        if not len(corpus) or corpus.batch is None or limit < 0:
            raise InvalidInputError(
                "a serving session needs rows with a batch, and a limit of 0 or more, not"
                f" {len(corpus)} rows with {len(corpus.batches)} batches and {limit}"
            )
        self.modes: ModeArray = corpus.modes
        self.batch: BatchArray = corpus.batch
        self.limit = min(limit, len(corpus))
        self.corpus = corpus
        self._rows: dict[int, Measurement] = {}
        settings = np.column_stack([corpus.modes, corpus.batch]).tolist()
        self._row_of = {tuple(setting): row for row, setting in enumerate(settings)}

    @property
    def measured(self) -> int:
        """Number of settings measured so far."""
        return len(self._rows)

    @property
    def rows(self) -> list[int]:
        """Indices of the measured settings, in the order of measuring."""
        return list(self._rows)

    @property
    def remaining(self) -> int:
        """Number of settings that may still be measured."""
        return self.limit - self.measured

    def measure(self, row: int) -> Measurement:
        """Measure the setting at an index. One that was measured before is looked up and does not count again.

        Raises:
            InvalidInputError: the limit is reached.
        """
        if row not in self._rows:
            if not self.remaining:
                raise InvalidInputError(f"the limit of {self.limit} measured settings is reached")
            (self._rows[row],) = self.corpus.rows(np.array([row])).measurements()
        return self._rows[row]

    def measure_if_allowed(self, row: int) -> bool:
        """Measure the setting at an index if the limit allows it; return whether the setting has been measured."""
        if row not in self._rows and not self.remaining:
            return False
        self.measure(row)
        return True

    def measure_all(self, settings: NDArray[np.float64]) -> None:
        """Measure `[m, 5]` modes with their batch sizes.

        Raises:
            InvalidInputError: the limit is reached.
        """
        for setting in settings.tolist():
            self.measure(self._row_of[tuple(setting)])

    def measure_random(self, rows: NDArray[np.intp], seed: int) -> None:
        """Measure settings drawn uniformly at random from `[k]` indices, as many as may still be measured."""
        for row in np.random.default_rng(seed).permutation(rows)[: self.remaining].tolist():
            self.measure(row)

    def profile(self) -> Profile:
        """The measurements made so far."""
        return self.corpus.rows(np.array(self.rows, dtype=np.intp))


# --- Serving method ---------------------------------------------------------------------------------------------------
# The interface of all serving methods.

Choose = Callable[[ServiceLimits], ChosenMode | None]
"""Maps limits to a mode with its batch; None if no known setting keeps them."""


class ServingMethod(Protocol):
    """A way to find the best mode and batch size for inference from a limited number of measurements."""

    @property
    def name(self) -> str:
        """Name on command lines and in tables."""
        ...

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure settings within the session's limit and return the function that chooses one.

        The same arguments give the same measurements and choices.

        Args:
            session: measures the settings.
            problems: the limits to choose for. They differ only in their power budget.
            objective: what the choice optimizes.
            seed: seed of random draws, if the method makes any.

        Raises:
            InvalidInputError: the method cannot work with so few measurements.
        """
        ...


def best_known(known: KnownModes, objective: Objective, probability: float = 0.5) -> Choose:
    """Choose the best setting that keeps time and power, each with at least the given probability."""

    def choose(limits: ServiceLimits) -> ChosenMode | None:
        try:
            return choose_serving(known, limits, objective, probability)
        except InfeasibleServiceError:
            return None

    return choose


def best_measured(profile: Profile, objective: Objective) -> Choose:
    """Choose the best measured setting."""
    return best_known(KnownModes.only_measured(profile), objective)


# --- Baselines --------------------------------------------------------------------------------------------------------
# Serving methods without a predictor: they choose among what they measured.


@dataclass(frozen=True)
class RandomSettings:
    """Measures settings drawn at random up to the limit."""

    name: str = "random"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure random settings up to the session's limit."""
        session.measure_random(np.arange(len(session.batch)), seed)
        return best_measured(session.profile(), objective)


@dataclass(frozen=True)
class SingleSamples:
    """Does not batch: measures modes drawn at random with the smallest batch size, 1 in most corpora."""

    name: str = "batch-1"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure random modes with the smallest batch, up to the session's limit."""
        session.measure_random(np.flatnonzero(session.batch == session.batch.min()), seed)
        return best_measured(session.profile(), objective)


@dataclass(frozen=True)
class LargestBatch:
    """Measures modes drawn at random with the largest batch size that can be collected within the latency."""

    name: str = "largest-batch"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure random modes with the largest batch that is possible, up to the session's limit."""
        possible = session.batch[problems[0].longest_ms(session.batch) > 0]
        session.measure_random(np.flatnonzero(session.batch == possible.max(initial=0)), seed)
        return best_measured(session.profile(), objective)


@dataclass(frozen=True)
class EverySetting:
    """Measures every setting, which gives the best possible choice. All other methods are compared with it."""

    name: str = "brute-force"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure all settings.

        Raises:
            InvalidInputError: the session's limit is below the number of settings.
        """
        if session.limit < len(session.batch):
            raise InvalidInputError(
                f"brute force measures all {len(session.batch)} settings, but the limit is {session.limit}: allow"
                f" {len(session.batch)}"
            )
        session.measure_random(np.arange(len(session.batch)), seed)
        return best_measured(session.profile(), objective)


# --- Searches ---------------------------------------------------------------------------------------------------------
# Searches that choose by measurements alone: the published searches for modes, extended by the batch size.


@dataclass(frozen=True)
class SettingSearch:
    """For each problem, measures the middle of the remaining settings and drops half of the values of one dimension.

    Searches share their measurements and continue up to the limit. Batch sizes that cannot be collected within the
    latency are left out from the beginning.
    """

    name: str = "binary-search"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Search for each of the problems. The seed has no effect."""
        for problem in problems:
            possible = _CollectableSettings(session, problem)

            def upper(dimension: int, row: int, judge: LimitsJudge = possible.judge) -> bool:
                if dimension == BATCH:
                    return judge.wants_larger_batch(row)
                # Higher values of a knob take less time and draw more power.
                wants_more = objective is Objective.MOST_SAMPLES or not judge.keeps_latency(row)
                return judge.keeps_budget(row) and wants_more

            possible.grid.halve(upper)
        return best_measured(session.profile(), objective)


@dataclass(frozen=True)
class SettingGradient:
    """Measures the slope of time against power along each knob from the middle, then searches along the steepest."""

    name: str = "gradient"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Search for each of the problems. The seed has no effect."""
        for problem in problems:
            possible = _CollectableSettings(session, problem)
            possible.grid.climb(possible.judge)
        return best_measured(session.profile(), objective)


class _CollectableSettings:
    """The settings whose batch can be collected within a latency."""

    def __init__(self, session: ServingSession, limits: ServiceLimits) -> None:
        self._session = session
        self._rows = np.flatnonzero(limits.longest_ms(session.batch) > 0)
        settings = np.column_stack([session.modes, session.batch])[self._rows]
        self.grid = Grid(settings, lambda row: session.measure_if_allowed(int(self._rows[row])))
        self.judge = LimitsJudge(limits, self._measured)

    def _measured(self, row: int) -> Measured:
        at = int(self._rows[row])
        found = self._session.measure(at)
        return Measured(found.minibatch_ms, found.power_mw, found.minibatch_ms, int(self._session.batch[at]))


# --- Predict settings -------------------------------------------------------------------------------------------------
# Measures random settings, predicts all others, and chooses with a margin for the uncertainty.

PROBABILITY = 0.95
"""Probability with which an unmeasured setting must keep its time, and the same for its power."""


@dataclass(frozen=True)
class PredictSettings:
    """Fits a predictor to settings drawn at random and chooses among all by measurements and predictions.

    A measured setting must keep the limits by its measured time and power, and an unmeasured one with `PROBABILITY`.

    Attributes:
        fit: fits the predictor, which must predict several batch sizes.
        name: name in tables.
    """

    fit: Fit
    name: str = "roofline"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure random settings up to the session's limit."""
        session.measure_random(np.arange(len(session.batch)), seed)
        profile = session.profile()
        prediction = self.fit(profile).predict(session.modes, session.batch)
        known = KnownModes.of(session.modes, prediction, profile, session.batch)
        return best_known(known, objective, PROBABILITY)


@dataclass(frozen=True)
class NetworkSettings:
    """Trains the published networks on settings drawn at random, and chooses among their predictions.

    As in the published work, a choice has no margin for the error of the prediction.
    """

    name: str = "network"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure random settings up to the session's limit, and train."""
        session.measure_random(np.arange(len(session.batch)), seed)
        rows = np.array(session.rows, dtype=np.intp)
        prediction = predicted_corpus(session.corpus, rows, Schedule(seed=seed))
        known = KnownModes.of(session.modes, prediction, session.profile(), session.batch)
        return best_known(known, objective)


# --- Measure what matters ---------------------------------------------------------------------------------------------
# Wattfleet's own method: measures the modes and batch sizes that it would choose before it chooses them.

# With a reference to transfer from, three spread-out settings are enough to choose the next ones by prediction.
_SPREAD = 3
# Measuring two settings per fit halves the time for fitting.
_SETTINGS_PER_FIT = 2


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
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure up to the session's limit, or fewer if no further measurement can improve a choice."""
        goal = ServingGoal(tuple(problems), objective)
        settings = SamplingSettings(
            limit=max(1, session.limit),
            spread=_SPREAD,
            batch=1 if self.chooses_measured else _SETTINGS_PER_FIT,
            tolerance=0,
            seed=seed,
        )

        def predict(profile: Profile) -> Prediction:
            return self._predictions.after(session.corpus, session.rows, _SPREAD if self.chooses_measured else None)

        while session.remaining and len(
            found := next_modes(session.profile(), session.modes, predict, settings, batch=session.batch, serving=goal)
        ):
            session.measure_all(found)
        profile = session.profile()
        if self.chooses_measured:
            return best_measured(profile, objective)
        known = KnownModes.of(session.modes, predict(profile), profile, session.batch)
        return best_known(known, objective, PROBABILITY)


# --- Registry ---------------------------------------------------------------------------------------------------------
# Serving methods by name.

_WITHOUT_REFERENCE: dict[str, ServingMethod] = {
    method.name: method
    for method in (
        SettingSearch(),
        SettingGradient(),
        NetworkSettings(),
        LargestBatch(),
        SingleSamples(),
        RandomSettings(),
        EverySetting(),
    )
}
NAMES = ("wattfleet", "roofline", *_WITHOUT_REFERENCE)
"""Names of all serving methods."""


def serving_method_named(name: str, fit: Callable[[], Fit], chooses_measured: bool = False) -> ServingMethod:
    """Create a serving method by its name.

    Args:
        name: one of `NAMES`.
        fit: returns the function that fits the predictor; called only if the method needs one.
        chooses_measured: see `MeasureWhatMattersForServing`; other methods ignore it.

    Raises:
        InvalidInputError: the name is unknown.
    """
    if name in _WITHOUT_REFERENCE:
        return _WITHOUT_REFERENCE[name]
    if name == "wattfleet":
        return MeasureWhatMattersForServing(fit(), chooses_measured)
    if name == "roofline":
        return PredictSettings(fit())
    raise InvalidInputError(f"unknown method {name!r} for inference: choose one of {', '.join(NAMES)}")
