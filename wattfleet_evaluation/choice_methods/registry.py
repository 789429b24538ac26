"""Strategies by their names."""

from __future__ import annotations

from collections.abc import Callable

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Board
from wattfleet.prediction import DEFAULT_PREDICTOR, predictor_names
from wattfleet_evaluation.choice_methods.binary_search import BinarySearch
from wattfleet_evaluation.choice_methods.brute_force import BruteForce
from wattfleet_evaluation.choice_methods.choice_method import Strategy
from wattfleet_evaluation.choice_methods.maxn import Maxn
from wattfleet_evaluation.choice_methods.measure_what_matters import MeasureWhatMatters
from wattfleet_evaluation.choice_methods.presets import Presets
from wattfleet_evaluation.choice_methods.random_best import RandomBest
from wattfleet_evaluation.choice_methods.random_then_predict import Fit, RandomThenPredict

_UNAIDED: dict[str, Strategy] = {
    strategy.name: strategy for strategy in (Maxn(), RandomBest(), BinarySearch(), BruteForce())
}
NAMES = ("wattfleet", *_UNAIDED, "presets", *predictor_names())
"""All strategies; the kinds of predictors are strategies of their own."""


def strategy_named(name: str, fit_of: Callable[[str], Fit], board: Board | None) -> Strategy:
    """One strategy by its name.

    Args:
        name: one of `NAMES`.
        fit_of: how a kind of predictor is fitted; called only where the strategy needs one.
        board: the kind of board, for its presets; None where it is not known.

    Raises:
        InvalidInputError: no such strategy, or the presets of a board that is not known.
    """
    if name in _UNAIDED:
        return _UNAIDED[name]
    if name == "wattfleet":
        return MeasureWhatMatters(fit_of(DEFAULT_PREDICTOR))
    if name == "presets":
        if board is None:
            raise InvalidInputError("presets: no board that Wattfleet knows has these modes, choose another strategy")
        return Presets(board.presets)
    if name in predictor_names():
        return RandomThenPredict(name, fit_of(name))
    raise InvalidInputError(f"unknown strategy {name!r}: choose one of {', '.join(NAMES)}")
