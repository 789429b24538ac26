"""Linear, tree, forest and gradient-boosting regressions of time and power, as kinds of predictors.

PowerTrain (doi:10.1016/j.future.2024.07.001, section 3) reports that it tried linear regression, decision trees and
random forests first, and gives no figures for them. Here the logarithm of time or power is fitted over the logarithms
of the four knobs. A linear regression is then a product of powers of the knobs, which never predicts a negative value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.errors import CorruptReferenceError, InvalidInputError
from wattfleet.core.modes import BatchArray, Hardware, ModeArray, Profile, WorkloadFacts
from wattfleet.core.prediction import (
    MIN_MODES,
    Prediction,
    batch_array,
    normal_quantile,
    only_batch,
    read_array,
    read_batch,
    read_tensors,
    require_fitted_batch,
    tensor_size,
    write_tensors,
)

Values = NDArray[np.float64]
R = TypeVar("R", bound="Regression")

_FOLDS = 5
_COVERED = 0.9
_MIN_LOG_SD = 1e-6


@dataclass(frozen=True)
class RegressedQuantity:
    """One regressed quantity.

    Attributes:
        regressor: the fitted scikit-learn regressor, from `[n, 4]` logarithms of knobs to `[n]` logarithms.
        log_sd: standard deviation of the logarithm of the error, the same at all modes.
    """

    regressor: Any
    log_sd: float

    def predict(self, logarithms: Values) -> tuple[Values, Values]:
        """The `[n]` values at `[n, 4]` logarithms of knobs, and the `[n]` standard deviations of their logarithms."""
        # scikit-learn refuses to predict nothing.
        predicted = self.regressor.predict(logarithms) if len(logarithms) else np.empty(0)
        return np.exp(np.asarray(predicted, dtype=np.float64)), np.full(len(logarithms), self.log_sd)


class Regression:
    """A regression of time and one of power on the measured modes of one workload. Nothing is transferred.

    A regression is stored as the rows it was fitted to, and is fitted again when it is read: the trees of scikit-learn
    have no stored form that holds only numbers.

    Attributes:
        profile: the measured modes, in the order of their knobs.
        time: milliseconds per minibatch.
        power: milliwatts.
        batch: samples in the fitted batch; None if it is unknown.
    """

    name: ClassVar[str]
    transfers: ClassVar[bool] = False

    def __init__(self, profile: Profile, time: RegressedQuantity, power: RegressedQuantity, batch: int | None) -> None:
        self.profile = profile
        self.time = time
        self.power = power
        self.batch = batch

    @classmethod
    def unfitted(cls) -> Any:
        """A new scikit-learn regressor of this kind."""
        raise NotImplementedError

    @classmethod
    def fit(cls: type[R], profile: Profile, reference: R | None = None, facts: WorkloadFacts = WorkloadFacts()) -> R:
        """Fit to measured modes.

        Args:
            profile: at least `MIN_MODES` modes; their order does not matter.
            reference: ignored, since nothing is transferred.
            facts: its batch size, if the profile does not state one. The rest is ignored.

        Raises:
            InvalidInputError: too few modes, several batch sizes, or scikit-learn is not installed.
        """
        batch = only_batch(cls.name, profile, facts)
        if len(profile) < MIN_MODES:
            raise InvalidInputError(
                f"{len(profile)} measured modes are too few to fit a predictor: measure at least {MIN_MODES}"
            )
        profile = profile.rows(np.lexsort(profile.modes.T))
        knobs = np.log(profile.modes)
        time, power = (cls._quantity(knobs, values) for values in (profile.minibatch_ms, profile.power_mw))
        return cls(profile, time, power, batch)

    @classmethod
    def _quantity(cls, knobs: Values, observed: Values) -> RegressedQuantity:
        """Fit one quantity, and estimate its error on rows that the fit has not seen.

        The 90 % interval is as wide as 90 % of the errors of a five-fold cross-validation need (a conformal interval).
        After fewer than ten modes it covers the largest of these errors.
        """
        logarithms = np.log(observed)
        errors = np.empty(len(observed))
        for held in _folds(len(observed)):
            rest = np.setdiff1d(np.arange(len(observed)), held)
            errors[held] = logarithms[held] - cls._fitted(knobs[rest], logarithms[rest]).predict(knobs[held])
        rank = min(int(np.ceil(_COVERED * (len(errors) + 1))), len(errors))
        widest = float(np.sort(np.abs(errors))[rank - 1])
        log_sd = max(widest / normal_quantile((1 + _COVERED) / 2), _MIN_LOG_SD)
        return RegressedQuantity(cls._fitted(knobs, logarithms), log_sd)

    @classmethod
    def _fitted(cls, knobs: Values, logarithms: Values) -> Any:
        try:
            return cls.unfitted().fit(knobs, logarithms)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "sklearn":
                raise
            raise InvalidInputError(
                "this predictor needs scikit-learn: install it with pip install 'wattfleet[simulation]', or use"
                " roofline"
            ) from None

    def adapted(self: R, of: Hardware, to: Hardware) -> R:
        """Return itself: a regression does not depend on hardware data."""
        return self

    def predict(self, modes: ModeArray, batch: BatchArray | None = None) -> Prediction:
        """Predict `[n, 4]` modes, measured or not.

        Raises:
            InvalidInputError: `[n]` batch sizes that differ from each other, or from the fitted one.
        """
        require_fitted_batch(self.name, self.batch, batch)
        knobs = np.log(modes)
        (minibatch_ms, time_log_sd), (power_mw, power_log_sd) = self.time.predict(knobs), self.power.predict(knobs)
        return Prediction(minibatch_ms, power_mw, time_log_sd, power_log_sd)

    def save(self) -> bytes:
        """The rows in safetensors format; the same predictor gives the same bytes."""
        profile = self.profile
        rows = {"modes": profile.modes, "minibatch_ms": profile.minibatch_ms, "power_mw": profile.power_mw}
        return write_tensors(rows | {"batch": batch_array(self.batch)})

    @classmethod
    def load(cls: type[R], weights: bytes) -> R:
        """Read what `save` wrote, and fit it again.

        Raises:
            CorruptReferenceError: these bytes hold no such predictor.
        """
        tensors = read_tensors(weights)
        count = tensor_size(tensors, "power_mw")
        modes = read_array(tensors, "modes", count, 4, positive=True)
        times, powers = (read_array(tensors, name, count, positive=True) for name in ("minibatch_ms", "power_mw"))
        facts = WorkloadFacts(batch=read_batch(tensors))
        try:
            return cls.fit(Profile(modes, times, powers), facts=facts)
        except InvalidInputError as error:
            raise CorruptReferenceError(
                f"the reference's weights hold no usable rows ({error}): fetch it again"
            ) from None


def _folds(count: int) -> Iterator[NDArray[np.int_]]:
    """The held-out rows of each fold: every row in one fold, drawn with a fixed seed."""
    order = np.random.default_rng(0).permutation(count)
    return (order[fold::_FOLDS] for fold in range(_FOLDS))


class LinearPredictor(Regression):
    """Ridge regression; cross-validation chooses the penalty, since ten modes barely determine five coefficients."""

    name = "linear"

    @classmethod
    def unfitted(cls) -> Any:
        """Standardised inputs and a ridge regression."""
        from sklearn.linear_model import RidgeCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        return make_pipeline(StandardScaler(), RidgeCV(alphas=np.logspace(-3, 2, 11)))


class TreePredictor(Regression):
    """A decision tree with the defaults of scikit-learn."""

    name = "tree"

    @classmethod
    def unfitted(cls) -> Any:
        """A decision tree."""
        from sklearn.tree import DecisionTreeRegressor

        return DecisionTreeRegressor(random_state=0)


class ForestPredictor(Regression):
    """A random forest of 100 trees with the defaults of scikit-learn."""

    name = "forest"

    @classmethod
    def unfitted(cls) -> Any:
        """A random forest."""
        from sklearn.ensemble import RandomForestRegressor

        return RandomForestRegressor(random_state=0)


class BoostingPredictor(Regression):
    """Gradient-boosted trees with the defaults of scikit-learn."""

    name = "boosting"

    @classmethod
    def unfitted(cls) -> Any:
        """Gradient-boosted trees."""
        from sklearn.ensemble import GradientBoostingRegressor

        return GradientBoostingRegressor(random_state=0)
