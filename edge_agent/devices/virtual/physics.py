"""The physics of simulated boards: their parameters, deviations of single boards, and workloads."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.modes import ModeArray, Workload, board_named
from wattfleet.core.prediction.roofline import PowerParameters, TimeParameters

# --- Board parameters -------------------------------------------------------------------------------------------------
# The parameters of simulated boards, read from the data file of `python -m wattfleet.simulation.board_fit`.


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


# --- Deviation --------------------------------------------------------------------------------------------------------
# A fixed, smooth deviation of one board from the physics, with the distribution of real boards' residuals.

# Deviations stay similar over a factor of e^0.8 in any knob: the correlation of the AGX Orin corpora's residuals
# falls to a half at 0.5, a third at 1 and a tenth at 2 (in logarithms of a clock, or of the number of cores).
_LENGTH = 0.8
# Frequencies drawn from a t distribution of twice this many degrees of freedom give a Matern kernel of this order:
# once differentiable, rougher than the squared exponential that a Gaussian process usually assumes.
_SMOOTHNESS = 1.5
_WAVES = 256
_REFERENCE_MODES = 2000


class DeviationField:
    """A smooth random function of the mode, or of mode and batch, whose values over a space have a given distribution.

    A sum of plane waves is nearly Gaussian; its rank within the space selects the quantile, so that heavy tails become
    whole regions with large deviations.

    Args:
        space: `[n, k]` modes, or modes with batches, over which the distribution holds.
        levels: `[q]` ascending probabilities in (0, 1).
        quantiles: `[q]` ascending values (log deviations) at these levels.
        rng: the random number generator.
    """

    def __init__(
        self,
        space: NDArray[np.float64],
        levels: NDArray[np.float64],
        quantiles: NDArray[np.float64],
        rng: np.random.Generator,
    ) -> None:
        degrees = 2 * _SMOOTHNESS
        stretch = np.sqrt(degrees / rng.chisquare(degrees, (_WAVES, 1)))
        self._frequencies = rng.standard_normal((_WAVES, space.shape[1])) * stretch / _LENGTH
        self._phases = rng.uniform(0, 2 * np.pi, _WAVES)
        some = rng.choice(len(space), min(len(space), _REFERENCE_MODES), replace=False)
        self._heights = np.sort(self._height(space[some]))
        self._levels, self._quantiles = levels, quantiles

    def at(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the log deviation at `[n, k]` points of the space, `[n]`."""
        ranks = (np.arange(len(self._heights)) + 0.5) / len(self._heights)
        level = np.interp(self._height(points), self._heights, ranks)
        return np.interp(level, self._levels, self._quantiles)

    def _height(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.cos(np.log(points) @ self._frequencies.T + self._phases).sum(axis=1))


# --- Workload physics -------------------------------------------------------------------------------------------------
# The physics of workloads other than the one to which a simulated board's parameters were fitted.

# The workload of the boards' own parameters: ResNet-18 on ImageNet's images, with batches of 16.
_PARAMETERS = 11.7e6
_STEP_FLOPS_OF_A_SAMPLE = 3 * 2 * 1.8e9
# The work of a network grows more slowly than its size: large networks reuse less of each parameter.
_GROWTH_WITH_PARAMETERS = 0.5
_TRAFFIC_GROWTH = 0.8
# A training process that loads its data itself uses about one core for this, and does nothing else meanwhile.
_ALONE_WORKERS, _ALONE_OVERLAP = 0.4, 0.075
_LEAST, _MOST = 0.02, 50.0
# The difference between two workloads of the same size, as a standard deviation of the logarithm.
_COMPUTE_LOG_SD, _LOADING_LOG_SD, _LAUNCH_LOG_SD, _TRAFFIC_LOG_SD, _POWER_LOG_SD = 0.3, 0.5, 0.4, 0.25, 0.12


def physics_of(
    time: TimeParameters, power: PowerParameters, workload: Workload
) -> tuple[TimeParameters, PowerParameters]:
    """Return the parameters of a workload on a board.

    The network's size sets how much is computed. Anything that the facts leave open is derived from the workload's
    name, and is the same on every board.

    Args:
        time: the board's time parameters for its own workload.
        power: its power parameters for the same.
        workload: the workload to simulate.
    """
    rng = np.random.default_rng([zlib.crc32(workload.name.encode())])
    compute, loading, launch, traffic, core_w, gpu_w, memory_w = np.exp(
        rng.standard_normal(7)
        * (
            _COMPUTE_LOG_SD,
            _LOADING_LOG_SD,
            _LAUNCH_LOG_SD,
            _TRAFFIC_LOG_SD,
            _POWER_LOG_SD,
            _POWER_LOG_SD,
            _POWER_LOG_SD,
        )
    ).tolist()
    size = _relative_size(workload)
    workers = workload.facts.loader_workers
    if workers == 0:
        time = replace(time, workers=_ALONE_WORKERS, loading_overlap=_ALONE_OVERLAP)
    return (
        replace(
            time,
            compute_mcycles=time.compute_mcycles * size * compute,
            serial_compute_mcycles=time.serial_compute_mcycles * size * compute,
            traffic_mcycles=time.traffic_mcycles * size**_TRAFFIC_GROWTH * traffic,
            loading_mcycles=time.loading_mcycles * loading,
            loading_stall_mcycles=time.loading_stall_mcycles * loading,
            launch_mcycles=time.launch_mcycles * launch,
            workers=float(workers) if workers else time.workers,
        ),
        replace(
            power,
            core_busy_mw=power.core_busy_mw * core_w,
            gpu_busy_mw=power.gpu_busy_mw * gpu_w,
            mem_traffic_mw=power.mem_traffic_mw * memory_w,
        ),
    )


def _relative_size(workload: Workload) -> float:
    """Return the work of a sample, relative to the board's own workload."""
    facts = workload.facts
    if facts.step_flops is not None and facts.batch is not None:
        size = facts.step_flops / facts.batch / _STEP_FLOPS_OF_A_SAMPLE
    elif facts.parameters is not None:
        size = (facts.parameters / _PARAMETERS) ** _GROWTH_WITH_PARAMETERS
    else:
        size = 1.0
    return min(max(size, _LEAST), _MOST) if math.isfinite(size) else 1.0


# --- Inference physics ------------------------------------------------------------------------------------------------
# The physics of inference on a simulated board.

_P = TypeVar("_P", TimeParameters, PowerParameters)

# Other workloads are derived from this one, on the board on which it was measured.
_MEASURED, _MEASURED_ON = "resnet", "agx-orin"
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
# A forward pass has one third of a training step's operations.
_STEPS_OF_TRAINING = 3
# The parameters that differ between boards; overlaps, processes and fixed parts belong to the workload.
_OF_BOARD = (
    "loading_mcycles",
    "loading_stall_mcycles",
    "launch_mcycles",
    "compute_mcycles",
    "serial_compute_mcycles",
    "traffic_mcycles",
    "fixed_ms",
)


def inference_physics_of(
    time: TimeParameters, power: PowerParameters, workload: Workload
) -> tuple[TimeParameters, PowerParameters]:
    """Return the parameters of an inference workload on a board.

    Two workloads were measured, on an AGX Orin: `mobilenetv3` and `resnet`. On another board or unit, each of their
    parameters is scaled like that of training. Other workloads are derived from `resnet` like trainings from the
    board's own training.

    Args:
        time: the board's time parameters for its own training.
        power: its power parameters for the same.
        workload: the workload to serve.
    """
    measured, agx = _fitted(workload), board_parameters(_MEASURED_ON)
    served = (
        _scaled(measured.time, time, agx.time, _OF_BOARD),
        _scaled(measured.power, power, agx.power, tuple(vars(measured.power))),
    )
    if inference_parameters(workload.name) is not None:
        return served
    facts = workload.facts
    if facts.step_flops is not None:
        facts = replace(facts, step_flops=_STEPS_OF_TRAINING * facts.step_flops)
    return physics_of(*served, replace(workload, facts=facts))


def inference_deviation(
    modes: ModeArray, workload: Workload, seed: Sequence[int]
) -> tuple[DeviationField, DeviationField]:
    """Return a board's deviations from this physics in time and in power, as functions of mode and batch.

    Args:
        modes: `[n, 4]` modes of the board.
        workload: the served workload.
        seed: random seed of the board and the workload.
    """
    space = np.column_stack([modes, np.resize(_BATCHES, len(modes))])
    rng, spread = np.random.default_rng(seed), _fitted(workload).deviation
    of_time = DeviationField(space, spread.levels, spread.time, rng)
    return of_time, DeviationField(space, spread.levels, spread.power, rng)


def _fitted(workload: Workload) -> InferenceParameters:
    fitted = inference_parameters(workload.name) or inference_parameters(_MEASURED)
    assert fitted is not None, "the data file has the workload from which others are derived"
    return fitted


def _scaled(served: _P, board: _P, measured_on: _P, names: tuple[str, ...]) -> _P:
    factors = {name: getattr(board, name) / getattr(measured_on, name) for name in names}
    return replace(served, **{name: getattr(served, name) * factor for name, factor in factors.items()})
