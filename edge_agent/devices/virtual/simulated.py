"""A simulated board: physics fitted to real boards, plus deviations of its own."""

from __future__ import annotations

import zlib
from dataclasses import fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.virtual.board_parameters import board_parameters
from edge_agent.devices.virtual.deviation import DeviationField
from edge_agent.devices.virtual.virtual_board import Load, VirtualBoard, mean_stretch
from edge_agent.devices.virtual.workload_physics import physics_of
from wattfleet.modes import ModeArray, PowerMode, Workload, board_named, modes_to_array
from wattfleet.prediction.roofline import (
    PowerParameters,
    TimeParameters,
    power_mw,
    settings_of,
    step_parts,
    step_time_ms,
)

_P = TypeVar("_P", TimeParameters, PowerParameters)

# Two boards of a kind differ by a few percent in every parameter.
_UNIT_LOG_SD = 0.03
# A minibatch's jitter grows with the share of the step in which the loader is busy: 0.3 % if it idles, 14 %
# if the step waits for it (the Orin Nano's logs: 0.2 to 0.8 % and 13 to 37 %).
_JITTER_FLOOR, _JITTER_LOADING = 0.003, 0.14


class SimulatedDevice(VirtualBoard):
    """A board of a known kind. It trains ResNet-18, minibatch 16, unless it is told another workload.

    Its true values are the physics of its kind with this unit's parameters, times a smooth deviation. The seed fixes
    both. Of another workload, the facts and the name decide how much work a step is; a step's parameters and the smooth
    deviation stay those of the board.

    Args:
        board_kind: one of `wattfleet.modes.boards.BOARDS`.
        seed: random seed of the unit and its noise.

    Raises:
        InvalidInputError: no such kind.
    """

    def __init__(self, board_kind: str, seed: int) -> None:
        space = board_named(board_kind).space
        kind = board_parameters(board_kind)
        modes = space.array()
        # Boards of different kinds with the same seed must deviate differently.
        rng = np.random.default_rng([seed, zlib.crc32(board_kind.encode())])
        self._time, self._power = _unit(kind.time, rng), _unit(kind.power, rng)
        self._time_deviation = DeviationField(modes, kind.deviation.levels, kind.deviation.time, rng)
        self._power_deviation = DeviationField(modes, kind.deviation.levels, kind.deviation.power, rng)
        # Idle power: the clocks keep running, but nothing is busy.
        self._idle_power = replace(
            self._power, core_busy_mw=0, gpu_busy_mw=0, gpu_stall_mw=0, mem_traffic_mw=0, mem_compute_mw=0
        )
        super().__init__(board_kind, "simulated", modes, space.highest, int(rng.integers(2**32)))

    def truth(
        self, modes: ModeArray, workload: Workload | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The noiseless true values at `[n, 4]` modes, offered or not: `[n]` ms per minibatch and `[n]` mW.

        Args:
            modes: the modes.
            workload: what is trained; None for ResNet-18, minibatch 16.
        """
        time, power = self._physics(workload)
        settings = _settings(modes, workload)
        minibatch_ms = step_time_ms(time, settings) * np.exp(self._time_deviation.at(modes))
        training_mw = power_mw(power, time, settings) * np.exp(self._power_deviation.at(modes))
        return minibatch_ms, training_mw

    def _physics(self, workload: Workload | None) -> tuple[TimeParameters, PowerParameters]:
        return (self._time, self._power) if workload is None else physics_of(self._time, self._power, workload)

    def mean_minibatch_ms(self, modes: ModeArray) -> NDArray[np.float64]:
        """The noiseless mean at `[n, 4]` modes, `[n]` ms per minibatch; above the median, as jitter is skewed."""
        return self.truth(modes)[0] * mean_stretch(self._jitter(modes, None))

    def _load_at(self, mode: PowerMode) -> Load:
        at = modes_to_array([mode])
        minibatch_ms, training_mw = self.truth(at, self._workload)
        idle_mw = float(power_mw(self._idle_power, self._time, settings_of(at, None))[0])
        jitter = float(self._jitter(at, self._workload)[0])
        # The deviation may put the training power below idle power.
        return Load(float(minibatch_ms[0]), float(training_mw[0]), min(idle_mw, float(training_mw[0])), jitter)

    def _jitter(self, modes: ModeArray, workload: Workload | None) -> NDArray[np.float64]:
        parts = step_parts(self._physics(workload)[0], _settings(modes, workload))
        loading = np.minimum(1.0, parts.loading_ms / parts.step_ms)
        return np.asarray(_JITTER_FLOOR + _JITTER_LOADING * loading**3)


def _settings(modes: ModeArray, workload: Workload | None) -> NDArray[np.float64]:
    batch = None if workload is None else workload.facts.batch
    return settings_of(modes, None if batch is None else np.full(len(modes), batch))


def _unit(kind: _P, rng: np.random.Generator) -> _P:
    """The parameters of one unit of a kind. Growth with the batch is not varied: all batches have the same size."""
    varied = [each.name for each in fields(kind) if not each.name.endswith("_fixed")]
    factors = np.exp(rng.normal(0, _UNIT_LOG_SD, len(varied))).tolist()
    return replace(kind, **{name: getattr(kind, name) * by for name, by in zip(varied, factors, strict=True)})
