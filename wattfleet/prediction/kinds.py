"""The kinds of predictors by name; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from wattfleet.errors import InvalidInputError
from wattfleet.prediction.predictor import Predictor


@dataclass(frozen=True)
class Kind:
    """A kind of predictor.

    Attributes:
        module: where its class is.
        class_name: the class.
        transfers: whether a reference changes what it predicts.
    """

    module: str
    class_name: str
    transfers: bool

    def predictor_class(self) -> type[Predictor]:
        """Import the class."""
        found: type[Predictor] = getattr(import_module(self.module), self.class_name)
        return found


PREDICTOR_KINDS: Mapping[str, Kind] = {
    "roofline": Kind("wattfleet.prediction.roofline.predictor", "RooflinePredictor", transfers=True),
    "powertrain": Kind("wattfleet_evaluation.powertrain.predictors", "PowerTrainPredictor", transfers=True),
    "scratch": Kind("wattfleet_evaluation.powertrain.predictors", "ScratchPredictor", transfers=False),
}


def predictor_kind(name: str) -> Kind:
    """The kind of predictor of a name.

    Raises:
        InvalidInputError: no such kind.
    """
    if name not in PREDICTOR_KINDS:
        raise InvalidInputError(f"unknown predictor {name!r}: choose one of {', '.join(PREDICTOR_KINDS)}")
    return PREDICTOR_KINDS[name]
