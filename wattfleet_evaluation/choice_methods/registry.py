"""Choice methods by name."""

from __future__ import annotations

from collections.abc import Callable

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Board
from wattfleet.prediction import DEFAULT_PREDICTOR, predictor_names
from wattfleet_evaluation.choice_methods.binary_search import BinarySearch
from wattfleet_evaluation.choice_methods.brute_force import BruteForce
from wattfleet_evaluation.choice_methods.choice_method import ChoiceMethod
from wattfleet_evaluation.choice_methods.maxn import Maxn
from wattfleet_evaluation.choice_methods.measure_what_matters import MeasureWhatMatters
from wattfleet_evaluation.choice_methods.presets import Presets
from wattfleet_evaluation.choice_methods.random_best import RandomBest
from wattfleet_evaluation.choice_methods.random_then_predict import RandomThenPredict
from wattfleet_evaluation.corpus_predictions import Fit

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
