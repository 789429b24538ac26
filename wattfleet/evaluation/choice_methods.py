"""Methods that choose a power mode from few measurements, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wattfleet.core.choosing import (
    POWER_QUANTILE,
    KnownModes,
    SamplingSettings,
    descending_modes,
    fastest_within_budget,
    next_modes,
    search_within_budgets,
)
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.modes import Board, Measurement, ModeArray, PowerMode, Profile, array_to_modes, nearest_mode
from wattfleet.core.prediction import DEFAULT_PREDICTOR, Prediction, predictor_names
from wattfleet.evaluation.corpus_predictions import Fit

# --- Choice method ----------------------------------------------------------------------------------------------------
# The interface of all choice methods.


Choose = Callable[[float], PowerMode | None]
"""Maps a budget in watts to the mode to train in; None if no known mode is within the budget."""


class ChoiceMethod(Protocol):
    """A way to find the fastest mode within a power budget from a limited number of measurements."""

    @property
    def name(self) -> str:
        """Name on command lines and in tables."""
        ...

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure modes within the session's limit and return the function that chooses a mode.

        The same arguments give the same measurements and choices.

        Args:
            session: measures the modes.
            budgets_w: budgets to choose modes for, W; one set of measurements serves them all.
            seed: seed of random draws, if the method makes any.

        Raises:
            InvalidInputError: the method cannot work with so few measurements.
        """
        ...


# --- Measurement session ----------------------------------------------------------------------------------------------
# A measurement session: the modes that a choice method may measure, and those measured so far.

Measure = Callable[[PowerMode], Measurement]


class MeasurementSession:
    """Measures modes of a device or a corpus, each at most once, up to a limit.

    Args:
        modes: `[n, 4]` modes that can be measured and chosen.
        measure: measures one of them.
        limit: maximum number of modes to measure.

    Raises:
        InvalidInputError: there are no modes, or the limit is negative.
    """

    def __init__(self, modes: ModeArray, measure: Measure, limit: int) -> None:
        if not len(modes) or limit < 0:
            raise InvalidInputError(
                f"a measurement session needs at least 1 mode and a limit of 0 or more, not {len(modes)} and {limit}"
            )
        self.modes = modes
        self.limit = min(limit, len(modes))
        self._measure = measure
        self._known = frozenset(array_to_modes(modes))
        self._measurements: dict[PowerMode, Measurement] = {}

    @property
    def measured(self) -> int:
        """Number of modes measured so far."""
        return len(self._measurements)

    @property
    def remaining(self) -> int:
        """Number of modes that may still be measured."""
        return self.limit - self.measured

    def measure(self, mode: PowerMode) -> Measurement:
        """Measure a mode. A mode that was measured before is looked up and does not count again.

        Raises:
            InvalidInputError: the mode is not available, or the limit is reached.
        """
        if mode not in self._measurements:
            if mode not in self._known:
                raise InvalidInputError(f"{mode.label()} is not one of the modes that can be measured")
            if not self.remaining:
                raise InvalidInputError(f"the limit of {self.limit} measured modes is reached")
            self._measurements[mode] = self._measure(mode)
        return self._measurements[mode]

    def measure_all(self, modes: ModeArray) -> None:
        """Measure `[k, 4]` modes in the given order."""
        for mode in array_to_modes(modes):
            self.measure(mode)

    def profile(self) -> Profile:
        """The measurements made so far."""
        return Profile.of(self._measurements.values())


# --- Binary search ----------------------------------------------------------------------------------------------------
# Multi-dimensional binary search: halves the range of one knob after the other, depending on the measured power.


@dataclass(frozen=True)
class BinarySearch:
    """Searches for each budget by `wattfleet.core.choosing.search_within_budgets`, then chooses the best measured mode.

    Searches share their measurements and continue up to the limit.
    """

    name: str = "binary-search"

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Search for each of the budgets. The seed has no effect."""

        def power_of(mode: PowerMode) -> float | None:
            return session.measure(mode).power_mw if session.remaining else None

        search_within_budgets(session.modes, [budget_w * 1e3 for budget_w in budgets_w], power_of)
        return fastest_measured(session.profile())


# --- Brute force ------------------------------------------------------------------------------------------------------
# Brute force: measures every mode.


@dataclass(frozen=True)
class BruteForce:
    """Measures every mode, which gives the best possible choice. All other methods are compared with it."""

    name: str = "brute-force"

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure all modes.

        Raises:
            InvalidInputError: the session's limit is below the number of modes.
        """
        if session.limit < len(session.modes):
            raise InvalidInputError(
                f"brute force measures all {len(session.modes)} modes, but the limit is {session.limit}:"
                f" allow {len(session.modes)}"
            )
        session.measure_all(session.modes)
        return fastest_measured(session.profile())


# --- Fastest mode -----------------------------------------------------------------------------------------------------
# Choosing the fastest mode from measurements, which never exceeds a budget, or from predictions.


def fastest_measured(profile: Profile) -> Choose:
    """Choose the fastest measured mode within the budget."""
    return fastest_known(KnownModes.only_measured(profile))


def fastest_known(known: KnownModes, probability: float = 0.5) -> Choose:
    """Choose the fastest mode that is within the budget with at least the given probability."""

    def choose(budget_w: float) -> PowerMode | None:
        try:
            return fastest_within_budget(known, budget_w * 1e3, probability).mode
        except InfeasibleBudgetError:
            return None

    return choose


# --- Maxn -------------------------------------------------------------------------------------------------------------
# MAXN: every knob at its highest value, regardless of the budget.


@dataclass(frozen=True)
class Maxn:
    """Always chooses the highest mode, without measuring. This is what a Jetson does if nobody sets a power mode."""

    name: str = "maxn"

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure nothing."""
        highest = array_to_modes(descending_modes(session.modes)[:1])[0]
        return lambda budget_w: highest


# --- Measure what matters ---------------------------------------------------------------------------------------------
# Wattfleet's own method: measures the modes it would choose before it chooses them.

# An unmeasured choice may exceed its budget with a probability of at most _RISK / (measured modes). After few
# measurements nearly every choice is unmeasured, and some risk saves much time. After many, little is left to gain.
_RISK = 6.0
_MAX_RISK = 0.3
# Before any measurement, the errors at all modes are nearly the same. The choices then keep either every budget or
# hardly any, so that a risk does not average out over the budgets.
_RISK_UNMEASURED = 1 - POWER_QUANTILE
SPREAD_OF_TRANSFER = 3
"""With a reference to transfer from, three spread-out modes are enough to choose the next ones by prediction."""


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

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure up to the session's limit, or fewer if more modes would not help.

        Raises:
            InvalidInputError: there are too few measurements for the predictor.
        """
        settings = SamplingSettings(limit=max(1, session.limit), spread=self.spread, seed=seed)
        budgets_mw = np.array(budgets_w, dtype=np.float64) * 1e3

        def predict(profile: Profile) -> Prediction:
            return self.fit(profile).predict(session.modes)

        while session.remaining and len(
            chosen := next_modes(session.profile(), session.modes, predict, settings, budgets_mw)
        ):
            session.measure_all(chosen)
        profile = session.profile()
        risk = min(_MAX_RISK, _RISK / len(profile)) if len(profile) else _RISK_UNMEASURED
        return fastest_known(KnownModes.of(session.modes, predict(profile), profile), 1 - risk)


# --- Presets ----------------------------------------------------------------------------------------------------------
# NVIDIA's preset modes, chosen by the watts in their names, such as `15W`.


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

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure nothing."""
        labelled = {watts: nearest_mode(session.modes, mode) for watts, mode in self._labelled().items()}

        def choose(budget_w: float) -> PowerMode | None:
            covered = [watts for watts in labelled if watts <= budget_w]
            return labelled[max(covered)] if covered else None

        return choose

    def _labelled(self) -> dict[int, PowerMode]:
        """The presets by the watts in their names, such as 15 for `15W`."""
        labels = {name: name.removesuffix("W") for name in self.presets}
        return {int(watts): self.presets[name] for name, watts in labels.items() if watts.isdecimal()}


# --- Random best ------------------------------------------------------------------------------------------------------
# Random search: chooses the best of the modes drawn at random.


@dataclass(frozen=True)
class RandomBest:
    """Measures modes drawn at random up to the limit, and chooses among them."""

    name: str = "random"

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure random modes up to the session's limit."""
        measure_random(session, seed)
        return fastest_measured(session.profile())


def measure_random(session: MeasurementSession, seed: int) -> None:
    """Measure modes drawn uniformly at random, up to the session's limit."""
    drawn = np.random.default_rng(seed).permutation(len(session.modes))[: session.limit]
    session.measure_all(session.modes[drawn])


# --- Random then predict ----------------------------------------------------------------------------------------------
# Measures random modes, then chooses by predictions alone, as PowerTrain does.


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

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure random modes up to the session's limit."""
        measure_random(session, seed)
        prediction = self.fit(session.profile()).predict(session.modes)
        by_time = np.lexsort((prediction.power_mw, prediction.minibatch_ms))

        def choose(budget_w: float) -> PowerMode | None:
            within = by_time[prediction.power_mw[by_time] <= budget_w * 1e3][:1]
            return next(iter(array_to_modes(session.modes[within])), None)

        return choose


# --- Registry ---------------------------------------------------------------------------------------------------------
# Choice methods by name.

_WITHOUT_PREDICTOR: dict[str, ChoiceMethod] = {
    method.name: method for method in (Maxn(), RandomBest(), BinarySearch(), BruteForce())
}
NAMES = ("wattfleet", *_WITHOUT_PREDICTOR, "presets", *predictor_names())
"""Names of all choice methods. Each kind of predictor is also a choice method (`RandomThenPredict`)."""


def choice_method_named(name: str, fit_of: Callable[[str], Fit], board: Board | None) -> ChoiceMethod:
    """Create a choice method by its name.

    Args:
        name: one of `NAMES`.
        fit_of: returns the function that fits a kind of predictor; called only if the method needs a predictor.
        board: the board, for its presets; None if it is unknown.

    Raises:
        InvalidInputError: the name is unknown, or it is `presets` and the board is unknown.
    """
    if name in _WITHOUT_PREDICTOR:
        return _WITHOUT_PREDICTOR[name]
    if name == "wattfleet":
        return MeasureWhatMatters(fit_of(DEFAULT_PREDICTOR))
    if name == "presets":
        if board is None:
            raise InvalidInputError("presets: no known board has these modes; choose another method")
        return Presets(board.presets)
    if name in predictor_names():
        return RandomThenPredict(name, fit_of(name))
    raise InvalidInputError(f"unknown choice method {name!r}: choose one of {', '.join(NAMES)}")
