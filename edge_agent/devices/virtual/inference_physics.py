"""The physics of inference on a simulated board."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from edge_agent.devices.virtual.board_parameters import (
    InferenceParameters,
    board_parameters,
    inference_parameters,
)
from edge_agent.devices.virtual.deviation import DeviationField
from edge_agent.devices.virtual.workload_physics import physics_of
from wattfleet.modes import ModeArray, Workload
from wattfleet.prediction.roofline import PowerParameters, TimeParameters

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
