"""The interface of all predictors of time and power."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from statistics import NormalDist
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchArray, Board, Hardware, ModeArray, PowerMode, Profile, WorkloadFacts

# --- Quantiles --------------------------------------------------------------------------------------------------------
# Quantiles of the normal distribution, without importing scipy in processes that make no predictions.


_STANDARD_NORMAL = NormalDist()


def normal_quantile(probability: float) -> float:
    """The standard normal quantile of a probability within (0, 1)."""
    return _STANDARD_NORMAL.inv_cdf(probability)


# --- Predictor --------------------------------------------------------------------------------------------------------

Values = NDArray[np.float64]
P = TypeVar("P", bound="Predictor")

MIN_MODES = 5
"""Minimum number of measured modes to fit any kind of predictor, with or without a reference."""

MIN_CORPUS_MODES = 400
"""Minimum number of modes of a corpus, a profile large enough to train a reference. It may be fitted differently."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time and power at `n` modes; their logarithms are modelled as normally distributed.

    Attributes:
        minibatch_ms: `[n]` median milliseconds per minibatch, or per batch of inference.
        power_mw: `[n]` median board milliwatts while working.
        time_log_sd: `[n]` standard deviation of the logarithm of the time (0.03 is about 3 %).
        power_log_sd: `[n]` standard deviation of the logarithm of the power.
    """

    minibatch_ms: Values
    power_mw: Values
    time_log_sd: Values
    power_log_sd: Values

    def among(self, chosen: NDArray[np.bool_]) -> Prediction:
        """Select the predictions of some of the modes.

        Args:
            chosen: `[n]` true for the modes to keep.
        """
        return Prediction(*(getattr(self, column.name)[chosen] for column in fields(self)))

    @classmethod
    def joined(cls, predictions: Sequence[Prediction]) -> Prediction:
        """Concatenate the predictions of several sets of modes."""
        return cls(*(np.concatenate([getattr(each, column.name) for each in predictions]) for column in fields(cls)))

    def minibatch_ms_quantile(self, q: float) -> Values:
        """The `q` quantile of the time, `[n]` ms."""
        return np.asarray(self.minibatch_ms * np.exp(normal_quantile(q) * self.time_log_sd))

    def power_mw_quantile(self, q: float) -> Values:
        """The `q` quantile of the power, `[n]` mW."""
        return np.asarray(self.power_mw * np.exp(normal_quantile(q) * self.power_log_sd))


class Predictor(Protocol):
    """A fitted predictor of one workload on one device.

    The `fit` of a class may take further options, all with defaults.

    Attributes:
        transfers: whether a reference changes what this kind of predictor predicts.
    """

    transfers: ClassVar[bool]

    @property
    def name(self) -> str:
        """The kind of predictor, as named in manifests and on command lines."""
        ...

    @classmethod
    def fit(cls: type[P], profile: Profile, reference: P | None = None, facts: WorkloadFacts = WorkloadFacts()) -> P:
        """Fit to measured modes, or transfer a reference of the same class to them.

        Args:
            profile: measured modes, of one or several batch sizes.
            reference: the predictor to transfer from; None starts from general assumptions.
            facts: known facts of the workload. Kinds of predictors that do not use them ignore them.

        Raises:
            InvalidInputError: the profile holds too few modes for this kind of predictor, or several batch sizes and
                this kind predicts only one.
        """
        ...

    def adapted(self: P, of: Hardware, to: Hardware) -> P:
        """This predictor scaled to another board by the two boards' data sheets, as a start for a transfer.

        Kinds that do not model hardware return themselves.
        """
        ...

    def predict(self, modes: ModeArray, batch: BatchArray | None = None) -> Prediction:
        """Predict modes, measured or not; all values are finite and positive.

        Args:
            modes: `[n, 4]` modes.
            batch: `[n]` samples in the batch at each of them; None for the only batch size that was fitted.

        Raises:
            InvalidInputError: this kind predicts one batch size, and `batch` has others.
        """
        ...

    def save(self) -> bytes:
        """Serialize in safetensors format; the same predictor gives the same bytes."""
        ...

    @classmethod
    def load(cls: type[P], weights: bytes) -> P:
        """Read what `save` wrote.

        Raises:
            CorruptReferenceError: the bytes do not hold such a predictor.
        """
        ...


def adapt_to_board(predictor: P, of: Board | None, to: Board | None) -> P:
    """Adapt a predictor to another board if both boards are known; otherwise return it unchanged."""
    return predictor if of is None or to is None else predictor.adapted(of.hardware, to.hardware)


def mixes_references(kind: type[Predictor]) -> bool:
    """Whether a kind of predictor can transfer from several references at once."""
    return getattr(kind, "fit_mixed", None) is not None


def fit_from(kind: type[P], profile: Profile, references: Sequence[P], facts: WorkloadFacts) -> P:
    """Fit a kind of predictor to measured modes, from none, one or several references.

    Args:
        kind: the kind.
        profile: see `Predictor.fit`.
        references: the predictors to transfer from. A kind that mixes several has the class method `fit_mixed`.
        facts: see `Predictor.fit`.

    Raises:
        InvalidInputError: see `Predictor.fit`; or there are several references, and this kind transfers from one.
    """
    if len(references) < 2:
        return kind.fit(profile, next(iter(references), None), facts)
    if (fit_mixed := getattr(kind, "fit_mixed", None)) is None:
        raise InvalidInputError(
            f"the predictor {kind.name!r} transfers from one reference, not {len(references)}: give one, or use"
            " 'roofline'"
        )
    mixed: P = fit_mixed(profile, references, facts)
    return mixed


def only_batch(kind: str, profile: Profile, facts: WorkloadFacts) -> int | None:
    """The batch size that a kind of predictor is fitted to, if it predicts only one.

    Args:
        kind: the kind's name.
        profile: measured modes. If they state a batch size, it takes precedence over that of the facts.
        facts: known facts of the workload.

    Returns:
        Samples in the batch; None if it is unknown.

    Raises:
        InvalidInputError: the profile has several batch sizes.
    """
    require_one_batch(kind, profile.batches)
    return next(iter(profile.batches), facts.batch)


def require_one_batch(kind: str, batches: Iterable[int]) -> None:
    """Check batch sizes for a kind of predictor that predicts only one.

    Args:
        kind: the kind's name.
        batches: the batch sizes of a profile, or those to predict.

    Raises:
        InvalidInputError: there are several.
    """
    found = sorted(set(batches))
    if len(found) > 1:
        raise InvalidInputError(
            f"the predictor {kind!r} predicts one batch size: the rows have the batches"
            f" {', '.join(str(batch) for batch in found)}; keep the rows of one, or use another predictor"
        )


def require_fitted_batch(kind: str, fitted: int | None, batch: BatchArray | None) -> None:
    """Check the batch sizes to predict, for a kind of predictor that predicts only the one that was fitted.

    Args:
        kind: the kind's name.
        fitted: samples in the fitted batch; None if it is unknown, in which case any single batch size is accepted.
        batch: `[n]` samples in the batches to predict; None for the fitted one.

    Raises:
        InvalidInputError: there are several batch sizes, or one that was not fitted.
    """
    if batch is None:
        return
    require_one_batch(kind, batch.tolist())
    if fitted is not None and len(batch) and batch[0] != fitted:
        raise InvalidInputError(
            f"the predictor {kind!r} was fitted to the batch {fitted}, and cannot predict the batch {batch[0]}: fit it"
            " to rows of that batch, or use another predictor"
        )


# --- Warmup -----------------------------------------------------------------------------------------------------------
# Warm-up: the time that a training's first minibatch takes beyond a steady minibatch.
#
# The first minibatch of a process loads libraries, selects kernels and fills caches, which is CPU work. In the logged
# runs of an Orin Nano it takes about 7e9 CPU cycles, regardless of the other knobs. A training of `n` minibatches
# therefore takes the warm-up and `n` steady minibatches.

_CPU_KHZ = PowerMode._fields.index("cpu_khz")


def first_minibatch_gcycles(modes: ModeArray, first_minibatch_ms: Values) -> float:
    """CPU cycles of a device's first minibatch, in units of 1e9: the median over modes, 0 if none was measured.

    Args:
        modes: `[n, 4]` measured modes.
        first_minibatch_ms: `[n]` milliseconds of the first minibatch in each mode.
    """
    return float(np.median(first_minibatch_ms / 1e3 * modes[:, _CPU_KHZ] / 1e6)) if len(modes) else 0.0


def warmup_s(modes: ModeArray, minibatch_ms: Values, first_gcycles: float) -> Values:
    """Seconds of warm-up, `[n]`, not below 0.

    Args:
        modes: `[n, 4]` modes.
        minibatch_ms: `[n]` milliseconds of their steady minibatches.
        first_gcycles: the device's value of `first_minibatch_gcycles`.
    """
    return np.maximum(first_gcycles / (modes[:, _CPU_KHZ] / 1e6) - minibatch_ms / 1e3, 0.0)


def first_minibatch_s(mode: PowerMode, first_gcycles: float) -> float:
    """Seconds of CPU work in a training's first minibatch.

    Args:
        mode: the mode of the training.
        first_gcycles: the device's value of `first_minibatch_gcycles`.
    """
    return first_gcycles / (mode.cpu_khz / 1e6)


def steady_minibatch_s(training_s: float, minibatches: float, first_s: float) -> float | None:
    """Seconds of a steady minibatch, from the time of a whole training without its warm-up.

    Args:
        training_s: seconds of the whole training.
        minibatches: number of minibatches of the training.
        first_s: the value of `first_minibatch_s`.

    Returns:
        None if the first minibatch may have taken half of the training or more. The rest is then too short for an
        estimate.
    """
    if training_s <= 2 * first_s:
        return None
    if training_s >= minibatches * first_s:
        return training_s / minibatches  # no visible warm-up
    return (training_s - first_s) / (minibatches - 1)


# --- Kinds ------------------------------------------------------------------------------------------------------------
# The kinds of predictors, registered as entry points of the group `wattfleet.predictors`.
#
# A package that provides another kind declares it in its own metadata: the kind's name, and the class that implements
# `Predictor`. A class is imported only when its kind is used.

DEFAULT_PREDICTOR = "roofline"
"""The kind of predictor that agents fit and that references ship as."""

_GROUP = "wattfleet.predictors"
_BASELINES = ("boosting", "forest", "linear", "powertrain", "scratch", "tree")


@cache
def registered_kinds() -> Mapping[str, EntryPoint]:
    """The registered kinds by name, the default first."""
    found = {entry.name: entry for entry in entry_points(group=_GROUP)}
    return {name: found[name] for name in sorted(found, key=lambda name: (name != DEFAULT_PREDICTOR, name))}


def predictor_names() -> tuple[str, ...]:
    """Names of the installed kinds of predictors, the default first."""
    return tuple(registered_kinds())


def registered_kind(name: str) -> EntryPoint:
    """The entry point of a kind of predictor, without importing its class.

    Raises:
        InvalidInputError: no installed package provides this kind.
    """
    entry = registered_kinds().get(name)
    if entry is None:
        raise InvalidInputError(
            f"unknown predictor {name!r}: installed are {', '.join(predictor_names())}{_missing_package_hint()}"
        )
    return entry


def predictor_class(name: str) -> type[Predictor]:
    """The class of a kind of predictor.

    Raises:
        InvalidInputError: no installed package provides this kind.
    """
    entry = registered_kind(name)
    try:
        found: type[Predictor] = entry.load()
    except ModuleNotFoundError as error:
        if not entry.module.startswith(f"{error.name}."):
            raise
        raise InvalidInputError(f"predictor {name!r} needs the package {error.name!r}: install it") from None
    return found


def _missing_package_hint() -> str:
    """A hint to install the package of the baselines; empty if it is installed."""
    absent = [name for name in _BASELINES if name not in registered_kinds()]
    return f"; the package 'wattfleet.evaluation' provides {', '.join(absent)}: install it" if absent else ""
