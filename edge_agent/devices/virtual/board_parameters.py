"""The parameters of simulated boards, read from the data file of `python -m wattfleet_simulation.board_fit`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import board_named
from wattfleet.prediction.roofline import PowerParameters, TimeParameters

FILE_NAME = "board_parameters.json"
"""The data file, beside this module."""


@dataclass(frozen=True)
class DeviationSpread:
    """The distribution of real boards' deviations from the physics, as logarithms.

    Attributes:
        levels: `[q]` ascending probabilities in (0, 1).
        time: `[q]` quantiles of log(measured / modelled) minibatch time.
        power: `[q]` quantiles of log(measured / modelled) power.
    """

    levels: NDArray[np.float64]
    time: NDArray[np.float64]
    power: NDArray[np.float64]


@dataclass(frozen=True)
class BoardParameters:
    """The physics of a kind of board while it trains ResNet-18, minibatch 16 (PowerTrain's reference workload).

    Attributes:
        time: parameters of the step time.
        power: parameters of the power.
        deviation: the distribution of a real board's deviations from these parameters.
    """

    time: TimeParameters
    power: PowerParameters
    deviation: DeviationSpread


@dataclass(frozen=True)
class InferenceParameters:
    """The physics of an AGX Orin while it runs one inference workload, with batches of 1 to 64 samples.

    Attributes:
        time: parameters of the time of a batch.
        power: parameters of the power.
        deviation: the distribution of the measured board's deviations from these parameters.
    """

    time: TimeParameters
    power: PowerParameters
    deviation: DeviationSpread


def board_parameters(kind: str) -> BoardParameters:
    """Return the parameters of a kind of board.

    Raises:
        InvalidInputError: there is no such kind.
    """
    document = _document()
    parameters = document["boards"][board_named(kind).kind]
    return BoardParameters(
        TimeParameters(**parameters["time"]), PowerParameters(**parameters["power"]), _spread(document["deviation"])
    )


def inference_workloads() -> list[str]:
    """Return the names of the measured inference workloads."""
    return sorted(_document()["inference"])


def inference_parameters(workload: str) -> InferenceParameters | None:
    """Return the parameters of an inference workload on an AGX Orin; None if it was not measured.

    Args:
        workload: the workload's name, such as `mobilenetv3`.
    """
    parameters = _document()["inference"].get(workload)
    if parameters is None:
        return None
    return InferenceParameters(
        TimeParameters(**parameters["time"]), PowerParameters(**parameters["power"]), _spread(parameters["deviation"])
    )


def _spread(content: dict[str, Any]) -> DeviationSpread:
    return DeviationSpread(*(np.array(content[name]) for name in ("levels", "time", "power")))


@cache
def _document() -> dict[str, Any]:
    text = files(__package__).joinpath(FILE_NAME).read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
