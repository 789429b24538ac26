"""Strategies by their names."""

from __future__ import annotations

from collections.abc import Mapping

from wattfleet.boards import Board
from wattfleet.errors import InvalidInputError
from wattfleet.strategies.binary_search import BinarySearch
from wattfleet.strategies.brute_force import BruteForce
from wattfleet.strategies.maxn import Maxn
from wattfleet.strategies.measure_what_matters import MeasureWhatMatters
from wattfleet.strategies.presets import Presets
from wattfleet.strategies.random_best import RandomBest
from wattfleet.strategies.random_then_predict import Fit, RandomThenPredict
from wattfleet.strategies.strategy import Strategy

DEFAULT_PREDICTOR = "roofline"
"""The predictor that the strategy `wattfleet` fits."""


def strategies(fits: Mapping[str, Fit], board: Board | None) -> dict[str, Strategy]:
    """All strategies that can work, by name.

    Args:
        fits: predictors by name; each is a strategy of that name, and the default one serves `wattfleet`.
        board: the kind of board, for its presets; None where it is not known.
    """
    known: list[Strategy] = [Maxn(), RandomBest(), BinarySearch(), BruteForce()]
    if board is not None:
        known.append(Presets(board.presets))
    if DEFAULT_PREDICTOR in fits:
        known.append(MeasureWhatMatters(fits[DEFAULT_PREDICTOR]))
    known += [RandomThenPredict(name, fit) for name, fit in fits.items()]
    return {strategy.name: strategy for strategy in known}


def strategy_named(name: str, fits: Mapping[str, Fit], board: Board | None) -> Strategy:
    """One strategy by its name.

    Args:
        name: which one.
        fits: predictors by name.
        board: the kind of board, for its presets; None where it is not known.

    Raises:
        InvalidInputError: no such strategy, or the presets of a board that is not known.
    """
    if name == "presets" and board is None:
        raise InvalidInputError("presets: these modes are of no board that Wattfleet knows, choose another strategy")
    known = strategies(fits, board)
    if name not in known:
        raise InvalidInputError(f"unknown strategy {name!r}: choose one of {', '.join(sorted(known))}")
    return known[name]
