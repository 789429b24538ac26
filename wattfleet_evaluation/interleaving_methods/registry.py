"""Interleaving methods by name."""

from __future__ import annotations

from collections.abc import Callable

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Task
from wattfleet_evaluation.corpus_predictions import Fit
from wattfleet_evaluation.interleaving_methods.baselines import EveryPair, RandomPairs
from wattfleet_evaluation.interleaving_methods.interleaving_method import InterleavingMethod
from wattfleet_evaluation.interleaving_methods.measure_what_matters import MeasureWhatMattersBesideInference
from wattfleet_evaluation.interleaving_methods.predict_pairs import NetworkFromRandom
from wattfleet_evaluation.interleaving_methods.searches import BinarySearch, GradientSearch

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
