"""The kinds of predictors, registered as entry points of the group `wattfleet.predictors`.

A package that provides another kind declares it in its own metadata: the kind's name, and the class that implements
`Predictor`. A class is imported only when its kind is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from wattfleet.errors import InvalidInputError
from wattfleet.prediction.predictor import Predictor

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
        package = entry.module.partition(".")[0]
        if error.name != package:
            raise
        raise InvalidInputError(f"predictor {name!r} needs the package {package!r}: install it") from None
    return found


def _missing_package_hint() -> str:
    """A hint to install the package of the baselines; empty if it is installed."""
    absent = [name for name in _BASELINES if name not in registered_kinds()]
    return f"; the package 'wattfleet_evaluation' provides {', '.join(absent)}: install it" if absent else ""
