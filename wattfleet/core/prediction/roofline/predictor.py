"""The default predictor: a physical model fitted to the measured rows, and a Gaussian process on its residuals.

A population of measured workloads gives the prior of the parameters, so that a few rows suffice. Unknown facts of the
workload, such as whether other processes load its data, become hypotheses. Each is weighted by how well it explains the
measurements. The problem is that of PowerTrain (doi:10.1016/j.future.2024.07.001, section 3.3), which solves it with
neural networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchArray, Hardware, ModeArray, PowerMode, Profile, WorkloadFacts, array_to_modes
from wattfleet.core.prediction.predictor import MIN_CORPUS_MODES, MIN_MODES, Prediction
from wattfleet.core.prediction.roofline.estimation import (
    Model,
    Prior,
    Remainder,
    Surface,
    jacobian,
    residual_weights,
    value_at,
)
from wattfleet.core.prediction.roofline.hypothesis import (
    SHARE,
    Assumptions,
    FittedQuantity,
    Hypothesis,
    Rows,
    fit_power,
    fit_time,
    fit_whole_corpus,
    power_physics,
    time_physics,
    with_power,
)
from wattfleet.core.prediction.roofline.physics import (
    BASE_BATCH,
    Settings,
    StepShares,
    TimeParameters,
    settings_of,
    step_shares,
)
from wattfleet.core.prediction.roofline.population import Estimate, Member, Population, population_of
from wattfleet.core.prediction.roofline.priors import (
    TYPICAL_WORKERS,
    general_power_prior,
    general_time_prior,
    hypotheses,
)
from wattfleet.core.prediction.roofline.serialization import predictor_tensors, read_predictor_tensors
from wattfleet.core.prediction.tensors import read_tensors, write_tensors

# --- Units ------------------------------------------------------------------------------------------------------------
# The prior of a workload on one unit of a board, from the measurements of other units.
#
# Units of one kind are similar, but not equal: each parameter of a unit is normally distributed around that of its
# kind. A fit to the rows of all known units gives the distribution of the kind's parameters, and thus the prior of a
# further unit's parameters. This is the empirical Bayes estimate of a random-effects model (Laird and Ware, "Random-
# Effects Models for Longitudinal Data", Biometrics 1982) whose variance between units is assumed.


Values = NDArray[np.float64]

# Log standard deviation of a unit's parameters around those of its kind.
_UNIT_SD = 0.05


def unit_rows(units: Sequence[Profile], batch: int) -> Rows:
    """Concatenate the rows of several units for a fit.

    Args:
        units: the measured rows of each unit.
        batch: samples in a minibatch, for units whose rows do not state it.
    """
    settings = [
        settings_of(each.modes, np.full(len(each), batch) if each.batch is None else each.batch) for each in units
    ]
    return Rows(
        np.concatenate(settings),
        np.log(np.concatenate([each.minibatch_ms for each in units])),
        np.log(np.concatenate([each.power_mw for each in units])),
    )


def assumptions_from_units(rows: Rows, units: int, assumed: Assumptions) -> Assumptions:
    """The prior of a further unit, learned from measurements of other units of its kind.

    Args:
        rows: the measured rows of the other units.
        units: the number of these units.
        assumed: the prior without these measurements.

    Raises:
        InvalidInputError: no plausible parameters explain the rows.
    """
    time = fit_time(rows, assumed)
    power = fit_power(rows, assumed, time)
    return replace(assumed, time=_unit_prior(time, units), power=_unit_prior(power, units))


def _unit_prior(kind: FittedQuantity, units: int) -> Prior:
    """The prior of another unit's parameters of one quantity, from a fit to the rows of several units."""
    correction = kind.remainder.correction
    spread = correction.gradient @ correction.prior_root
    information = spread.T @ np.linalg.solve(correction.residual_covariance(), spread)
    posterior = np.linalg.inv(information + np.eye(len(information)))
    covariance = correction.prior_root @ posterior @ correction.prior_root.T
    k = len(kind.log_parameters)
    # However many rows there are, the kind's parameters are only known as well as the mean over this many units.
    between = _UNIT_SD**2 * (1 + 1 / units) * np.eye(k)
    return Prior.correlated(kind.log_parameters, covariance[:k, :k] + between)


# --- Explanation ------------------------------------------------------------------------------------------------------
# Explaining which resources bound a training step, in plain text for operators.
#
# The resources are those of the model in `wattfleet.core.prediction.roofline.physics`.

_RESOURCES: Mapping[str, tuple[str, str]] = {
    "loading": ("loading the data", "Faster with more cores or a higher CPU clock."),
    "launch": ("launching the GPU's work from the CPU", "Faster with a higher CPU clock; more cores do not help."),
    "compute": ("computing on the GPU", "Faster with a higher GPU clock."),
    "memory": ("moving data between GPU and memory", "Faster with a higher memory clock."),
    "fixed": ("work that no clock changes", "No knob makes it faster."),
}
# Smallest share of a further resource that is mentioned.
_MIN_MENTIONED = 0.2


@dataclass(frozen=True)
class Explanation:
    """The resources that bound a step at one mode.

    Attributes:
        mode: the mode.
        shares: shares of `loading`, `launch`, `compute`, `memory` and `fixed`, the largest first; they sum to 1.
            Speeding a resource up by 1 % shortens the step by its share of 1 %.
    """

    mode: PowerMode
    shares: Mapping[str, float]

    @property
    def bound(self) -> str:
        """The resource with the largest share."""
        return next(iter(self.shares))

    def words(self) -> str:
        """Two sentences: what bounds the step, and what would make it faster."""
        (first, share), *rest = self.shares.items()
        also = [f"{_RESOURCES[name][0]} ({value:.0%})" for name, value in rest if value >= _MIN_MENTIONED]
        text = f"Bound by {_RESOURCES[first][0]} ({share:.0%} of the step)"
        if also:
            text += f", then by {' and '.join(also)}"
        return f"{text}. {_RESOURCES[first][1]}"


def explain(time: TimeParameters, settings: Settings) -> list[Explanation]:
    """Explain the step at each of `[n, 5]` settings."""
    names = [field.name for field in fields(StepShares)]
    shares = np.stack(astuple(step_shares(time, settings)), axis=1)
    found = []
    for mode, row in zip(array_to_modes(settings[:, :4]), shares, strict=True):
        order = np.argsort(-row, kind="stable")
        found.append(Explanation(mode, {names[k]: float(row[k]) for k in order}))
    return found


# --- Members ----------------------------------------------------------------------------------------------------------
# Estimating a measured workload's parameters for a population.

# The model's own errors are correlated at neighbouring modes. Thousands of rows therefore carry no more information
# than this number of independent rows with this error.
_INDEPENDENT_ROWS = 150
_ERROR_SD = 0.03
_WIDTH = 0.1
# A parameter with less information than this stays at the value of the transfer. It is the information of a log
# standard deviation of 3.
_MIN_INFORMATION = 0.1


def measured_member(profile: Profile, facts: WorkloadFacts, hardware: Hardware) -> Member:
    """Estimate a workload's parameters from its measurements.

    Args:
        profile: its measured rows, of one batch size or several.
        facts: its task, and whether it has loader workers.
        hardware: the board that it was measured on.
    """
    batch = np.full(len(profile), facts.batch or BASE_BATCH) if profile.batch is None else profile.batch
    rows = Rows(settings_of(profile.modes, batch), np.log(profile.minibatch_ms), np.log(profile.power_mw))
    # The median step differs between batch sizes, but the general prior is wide.
    prior = general_time_prior(float(np.median(profile.minibatch_ms)), facts)
    fitted = fit_whole_corpus(rows, prior, general_power_prior())
    physics = power_physics(fitted.time, rows.settings)
    return Member(
        facts,
        hardware,
        _estimate(time_physics(rows.settings), fitted.time.log(), rows.log_ms, fitted.time_remainder),
        _estimate(physics, fitted.power.log(), rows.log_mw, fitted.power_remainder),
    )


def _estimate(physics: Model, parameters: Values, observed: Values, remainder: Remainder) -> Estimate:
    """The fitted parameters with the information that the rows carry about them."""
    gradient = jacobian(physics, parameters)
    weights = residual_weights(observed - value_at(physics, parameters), _WIDTH)
    counted = min(1.0, _INDEPENDENT_ROWS / len(observed))
    information = counted / _ERROR_SD**2 * (gradient.T * weights) @ gradient
    return Estimate(parameters, information, remainder.surface)


def learned_member(fitted: Hypothesis, facts: WorkloadFacts, hardware: Hardware) -> Member:
    """Turn a workload whose predictor was fitted into a member of a population.

    Only the information of its own rows counts. The prior of the transfer is removed again, because it came from the
    population that is to contain this member.

    Args:
        fitted: the most probable hypothesis of a transfer to a few rows, or of a fit to a corpus.
        facts: known facts of the workload. If its loader workers are unknown, those of the hypothesis are used.
        hardware: the board of the workload.
    """
    if facts.loader_workers is None:
        facts = replace(facts, loader_workers=fitted.loader_workers)
    time, power = fitted.time_remainder, fitted.power_remainder
    if not power.correction.prior_root.any():
        # It was fitted to a whole corpus.
        known = population_of(fitted.time.log(), fitted.power.log(), (time.surface, power.surface), hardware)
        return replace(known.members[0], facts=facts)
    return Member(
        facts,
        hardware,
        _estimate_without_prior(fitted.time.log(), time),
        _estimate_without_prior(fitted.power.log(), power),
    )


def _estimate_without_prior(parameters: Values, remainder: Remainder) -> Estimate:
    """The estimate from a correction's rows without the prior, if the model is linear around the fitted parameters."""
    correction = remainder.correction
    gradient, of_share = correction.gradient[:, :-1], correction.gradient[:, -1]
    residuals = correction.residual_covariance() @ correction.weights
    # The share of the surface is not a parameter of the workload, so it adds to the residuals.
    share, share_sd = SHARE
    residuals = residuals + of_share * (remainder.share - share)
    covariance = correction.residual_covariance() + share_sd**2 * np.outer(of_share, of_share)
    information = gradient.T @ np.linalg.solve(covariance, gradient)
    pull = gradient.T @ np.linalg.solve(covariance, residuals)
    shift = np.linalg.solve(information + _MIN_INFORMATION * np.eye(len(parameters)), pull)
    # The smooth residual of this workload, without the deviations of single rows.
    surface = Surface(correction.points.settings, correction.process.amplitude**2 * correction.weights)
    return Estimate(parameters + shift, information, surface)


# --- Predictor --------------------------------------------------------------------------------------------------------

# A hypothesis that is less probable than this is dropped.
_MIN_PROBABILITY = 0.03
# Prior probability that another unit's measurements carry no information about this device: the other unit's meter may
# be wrong, or it may train something else.
_WRONG_UNIT_PROBABILITY = 0.4
# The same for rows on another kind of board: a whole board is less likely to be wrong than its single meter.
_WRONG_KIND_PROBABILITY = 0.1
# Rows that are predicted at once, which bounds the memory.
_CHUNK = 20_000


@dataclass(frozen=True)
class RooflinePredictor:
    """Predicts time and power at every mode and batch size of one device for one workload.

    Attributes:
        hypotheses: the fitted hypotheses about the workload's unknown facts, the most probable first.
        batch: the batch size that is predicted if none is stated; None after a fit to several.
        hardware: the board that it describes; None if it is unknown.
        population: the workloads from which a transfer learns its prior; None uses this workload alone.
        units: other units' measurements of the workload to transfer to; not saved.
        elsewhere: measurements of this workload on other kinds of board, each with its board; not saved.
    """

    name: ClassVar[str] = "roofline"
    transfers: ClassVar[bool] = True

    hypotheses: tuple[Hypothesis, ...]
    batch: int | None = BASE_BATCH
    hardware: Hardware | None = None
    population: Population | None = None
    units: tuple[Profile, ...] = ()
    elsewhere: tuple[tuple[Hardware, Profile], ...] = ()

    @property
    def likeliest(self) -> Hypothesis:
        """The most probable hypothesis."""
        return self.hypotheses[0]

    @classmethod
    def fit(
        cls,
        profile: Profile,
        reference: RooflinePredictor | None = None,
        facts: WorkloadFacts | None = None,
    ) -> RooflinePredictor:
        """Fit to measured modes and batch sizes, or transfer a reference to them.

        Args:
            profile: measured rows; at least `MIN_MODES` without a reference. With a reference it may be empty: then
                the population's mean is predicted, with intervals as wide as its workloads differ. A knob that the
                device lacks has the same value in every row, and the fit is valid at that value.
            reference: the predictor of another workload or device; None starts from general priors.
            facts: known facts of the workload; None if only the profile's task is known.

        Raises:
            InvalidInputError: too few modes.
        """
        return cls.fit_mixed(profile, [] if reference is None else [reference], facts)

    @classmethod
    def fit_mixed(
        cls, profile: Profile, references: Sequence[RooflinePredictor], facts: WorkloadFacts | None = None
    ) -> RooflinePredictor:
        """Transfer several references to measured rows. Each is weighted by how well it explains the rows.

        Args:
            profile: measured rows, see `fit`.
            references: the predictors to transfer from, for the same board; none starts from general priors.
            facts: see `fit`.

        Raises:
            InvalidInputError: too few modes.
        """
        known = replace(facts or WorkloadFacts(), task=profile.task)
        if not references and len(profile) < MIN_MODES:
            raise InvalidInputError(
                f"{len(profile)} measured modes are too few to fit a predictor: measure at least {MIN_MODES},"
                " or give a reference to transfer from"
            )
        batch: int | None = known.batch or BASE_BATCH
        if profile.batch is not None and len(profile):
            batch = profile.batches[0] if len(profile.batches) == 1 else None
        stated = profile.batch if profile.batch is not None else np.full(len(profile), known.batch or BASE_BATCH)
        rows = Rows(settings_of(profile.modes, stated), np.log(profile.minibatch_ms), np.log(profile.power_mw))
        hardware = references[0].hardware if references else None
        if len(profile) >= MIN_CORPUS_MODES:
            median_ms = float(np.median(profile.minibatch_ms))
            whole = fit_whole_corpus(rows, general_time_prior(median_ms, known), general_power_prior())
            return cls((whole,), batch, hardware)
        return cls(_weighted_hypotheses(rows, references, known), batch, hardware)

    def adapted(self, of: Hardware, to: Hardware) -> RooflinePredictor:
        """This predictor scaled to another board's hardware, as a start for a transfer.

        A GPU with half the cores needs twice the cycles for the same work. So does a memory bus of half the width, at
        half the power. A board's lowest power is assumed to be proportional to its lowest preset.
        """
        # Differences that the data sheets do not show stay uncertain, because the members are still of the first board.
        population = self.population or self.own_population(of)
        hypotheses = tuple(each.adapted(of, to) for each in self.hypotheses)
        return replace(self, hypotheses=hypotheses, hardware=to, population=population)

    def own_population(self, hardware: Hardware | None) -> Population:
        """A population of this workload alone, measured on a board; None is an unknown board."""
        each = self.likeliest
        surfaces = each.time_remainder.surface, each.power_remainder.surface
        return population_of(each.time.log(), each.power.log(), surfaces, hardware)

    def with_workload(self, fitted: RooflinePredictor, facts: WorkloadFacts) -> RooflinePredictor:
        """Add a workload of the same board to this reference's population.

        A transfer to a further workload of the board starts from what the board showed with that one, such as its
        voltage curves, its lowest power and the speed of its loader.

        Args:
            fitted: a transfer to the measured rows of the other workload.
            facts: known facts of that workload, see `learned_member`.
        """
        known = self.population or self.own_population(self.hardware)
        board = fitted.hardware or self.hardware or known.members[0].hardware
        return replace(self, population=known.with_member(learned_member(fitted.likeliest, facts, board)))

    def with_units(self, units: Sequence[Profile]) -> RooflinePredictor:
        """Add other units' measurements of the workload to transfer to.

        A transfer compares the reference with and without these units, and weights both by how well they explain the
        device's own measurements.

        Args:
            units: the measured rows of each unit. Each unit makes a transfer slower and adds less than the one before.
        """
        return replace(self, units=tuple(each for each in units if len(each)))

    def with_elsewhere(self, elsewhere: Sequence[tuple[Hardware, Profile]]) -> RooflinePredictor:
        """Add measurements of the workload to transfer to on other kinds of board.

        What the workload has of its own is mostly the same on all boards. What a board has of its own is known from the
        population. As in `with_units`, the transfer also considers that these rows may contain no information.

        Args:
            elsewhere: the measured rows, each with the board that they were measured on.
        """
        return replace(self, elsewhere=tuple((board, each) for board, each in elsewhere if len(each)))

    def predict(self, modes: ModeArray, batch: BatchArray | None = None) -> Prediction:
        """Predict modes, measured or not.

        Args:
            modes: `[n, 4]` modes.
            batch: `[n]` samples in the batch at each of them; None for the only batch size that was fitted.

        Raises:
            InvalidInputError: no batch size is stated, and several were fitted.
        """
        if batch is None:
            if self.batch is None:
                raise InvalidInputError(
                    "the predictor was fitted to several batch sizes: state the batch size of each row to predict"
                )
            batch = np.full(len(modes), self.batch)
        settings = settings_of(modes, batch)
        chunks = [settings[start : start + _CHUNK] for start in range(0, max(len(settings), 1), _CHUNK)]
        log_ms, time_sd, log_mw, power_sd = np.concatenate([self._mixed(chunk) for chunk in chunks], axis=1)
        return Prediction(np.exp(log_ms), np.exp(log_mw), time_sd, power_sd)

    def _mixed(self, settings: Values) -> Values:
        """Mean and standard deviation over the hypotheses, of the logarithms of time and power, `[4, n]`."""
        found = np.array([each.predict(settings) for each in self.hypotheses])
        if len(found) == 1:
            return np.asarray(found[0])
        weights = np.array([each.probability for each in self.hypotheses])[:, None, None]
        means, variances = found[:, 0::2], found[:, 1::2] ** 2
        mean = (weights * means).sum(0)
        sd = np.sqrt((weights * (variances + (means - mean) ** 2)).sum(0))
        return np.stack([mean[0], sd[0], mean[1], sd[1]])

    def explain(self, mode: PowerMode, batch: int | None = None) -> Explanation:
        """Explain which resources bound a step at a mode, by the most probable physics without its correction."""
        settings = settings_of(np.array([mode], dtype=np.float64), np.array([batch or self.batch or BASE_BATCH]))
        return explain(self.likeliest.time, settings)[0]

    def save(self) -> bytes:
        """Serialize in safetensors format; the same predictor gives the same bytes."""
        return write_tensors(predictor_tensors(self.hypotheses, self.batch, self.hardware, self.population))

    @classmethod
    def load(cls, weights: bytes) -> RooflinePredictor:
        """Read what `save` wrote.

        Raises:
            CorruptReferenceError: the bytes do not hold such a predictor.
        """
        return cls(*read_predictor_tensors(read_tensors(weights)))


def _weighted_hypotheses(
    rows: Rows, references: Sequence[RooflinePredictor], facts: WorkloadFacts
) -> tuple[Hypothesis, ...]:
    """The hypotheses about a workload that are probable after the measurements, the most probable first."""
    assumed: list[tuple[float, Assumptions]] = []
    for reference in references:
        board = reference.hardware
        population = reference.population or reference.own_population(board)
        for probability, known in hypotheses(facts):
            priors = population.time_prior(known, board), population.power_prior(known, board)
            surfaces = population.surfaces(known.task, board)
            alone = Assumptions(*priors, surfaces, known.loader_workers)
            weight = probability / len(references)
            if reference.elsewhere:
                with suppress(InvalidInputError):
                    members = [
                        _member_elsewhere(population, where, profile, known) for where, profile in reference.elsewhere
                    ]
                    priors = (
                        population.time_prior(known, board, members),
                        population.power_prior(known, board, members),
                    )
                    assumed.append((weight * _WRONG_KIND_PROBABILITY, alone))
                    weight *= 1 - _WRONG_KIND_PROBABILITY
                    alone = Assumptions(*priors, surfaces, known.loader_workers)
            if reference.units:
                others = unit_rows(reference.units, facts.batch or BASE_BATCH)
                # Rows that no plausible parameters explain carry no information about this device.
                with suppress(InvalidInputError):
                    learned = assumptions_from_units(others, len(reference.units), alone)
                    all_wrong = _WRONG_UNIT_PROBABILITY ** len(reference.units)
                    assumed.append((weight * (1 - all_wrong), learned))
                    weight *= all_wrong
            assumed.append((weight, alone))
    if not references:
        median_ms = float(np.exp(np.median(rows.log_ms)))
        zero = Surface.zero()
        priors = general_time_prior(median_ms, facts), general_power_prior()
        workers = TYPICAL_WORKERS if facts.loader_workers is None else facts.loader_workers
        assumed.append((1.0, Assumptions(*priors, (zero, zero), workers)))
    times = [fit_time(rows, each) for _, each in assumed]
    evidence = [np.log(probability) + time.log_evidence for (probability, _), time in zip(assumed, times, strict=True)]
    weights = softmax(np.array(evidence))
    probable = [k for k in np.argsort(-weights, kind="stable").tolist() if weights[k] >= _MIN_PROBABILITY]
    total = float(weights[probable].sum())
    return tuple(with_power(rows, assumed[k][1], times[k], float(weights[k]) / total) for k in probable)


@lru_cache(maxsize=64)  # next modes are chosen by one fit after the other, with the same rows elsewhere
def _member_elsewhere(population: Population, board: Hardware, profile: Profile, facts: WorkloadFacts) -> Member:
    """A workload's parameters on another board, estimated from its rows there."""
    rows = unit_rows([profile], facts.batch or BASE_BATCH)
    priors = population.time_prior(facts, board), population.power_prior(facts, board)
    assumed = Assumptions(*priors, population.surfaces(facts.task, board), facts.loader_workers)
    return learned_member(with_power(rows, assumed, fit_time(rows, assumed), 1.0), facts, board)
