"""Serving methods by name."""

from __future__ import annotations

from collections.abc import Callable

from wattfleet.errors import InvalidInputError
from wattfleet_evaluation.corpus_predictions import Fit
from wattfleet_evaluation.serving_methods.baselines import EverySetting, LargestBatch, RandomSettings, SingleSamples
from wattfleet_evaluation.serving_methods.measure_what_matters import MeasureWhatMattersForServing
from wattfleet_evaluation.serving_methods.predict_settings import NetworkSettings, PredictSettings
from wattfleet_evaluation.serving_methods.searches import SettingGradient, SettingSearch
from wattfleet_evaluation.serving_methods.serving_method import ServingMethod

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
