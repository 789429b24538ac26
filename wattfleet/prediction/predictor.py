"""The interface of all predictors of time and power."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchArray, Board, Hardware, ModeArray, Profile, WorkloadFacts
from wattfleet.prediction.quantiles import normal_quantile

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
