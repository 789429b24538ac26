"""A simulated board: physics fitted to real boards, plus deviations of its own."""

from __future__ import annotations

import zlib
from dataclasses import fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.virtual.board_parameters import board_parameters
from edge_agent.devices.virtual.deviation import DeviationField
from edge_agent.devices.virtual.inference_physics import inference_deviation, inference_physics_of
from edge_agent.devices.virtual.virtual_board import Load, VirtualBoard
from edge_agent.devices.virtual.workload_physics import physics_of
from wattfleet.modes import ModeArray, PowerMode, Task, Workload, board_named, modes_to_array
from wattfleet.prediction.roofline import (
    PowerParameters,
    TimeParameters,
    power_mw,
    settings_of,
    step_parts,
    step_time_ms,
)

_P = TypeVar("_P", TimeParameters, PowerParameters)

# Two boards of a kind differ by a few per cent in every parameter.
_UNIT_LOG_SD = 0.03
# A minibatch's jitter grows with the share of the step in which the loader is busy: 0.3 % if it idles, 14 %
# if the step waits for it (the Orin Nano's logs: 0.2 to 0.8 % and 13 to 37 %).
_JITTER_FLOOR, _JITTER_LOADING = 0.003, 0.14


class SimulatedDevice(VirtualBoard):
    """A board of a known kind. By default, it trains ResNet-18 with minibatches of 16.

    Its true values are the physics of its kind with this unit's parameters, times a smooth deviation. The seed fixes
    both. For another workload, its facts and name determine the work of a step; a step's parameters and the smooth
    deviation remain those of the board. Inference batches have the times measured on an AGX Orin
    (`inference_physics_of`), with their own deviation.

    Args:
        board_kind: one of `wattfleet.modes.boards.BOARDS`.
        seed: random seed of the unit and its noise.

    Raises:
        InvalidInputError: there is no such kind.
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
        self._seed_of_kind = (seed, zlib.crc32(board_kind.encode()))
        self._inference_deviations: dict[str, tuple[DeviationField, DeviationField]] = {}
        # Idle power: the clocks keep running, but nothing is busy.
        self._idle_power = replace(
            self._power, core_busy_mw=0, gpu_busy_mw=0, gpu_stall_mw=0, mem_traffic_mw=0, mem_compute_mw=0
        )
        super().__init__(board_kind, "simulated", modes, space.highest, int(rng.integers(2**32)))

    def truth(
        self, modes: ModeArray, workload: Workload | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the noiseless true values in `[n, 4]` modes, offered or not: `[n]` ms per minibatch and `[n]` mW.

        Args:
            modes: the modes.
            workload: the trained or served workload; None for the training of ResNet-18 with minibatches of 16. For
                inference, the values are for the batch size in its facts, or for 16.
        """
        time, power = self._physics(workload)
        settings = _settings(modes, workload)
        of_time, of_power = self._log_deviation(settings, workload)
        return step_time_ms(time, settings) * np.exp(of_time), power_mw(power, time, settings) * np.exp(of_power)

    def _physics(self, workload: Workload | None) -> tuple[TimeParameters, PowerParameters]:
        if workload is None:
            return self._time, self._power
        physics = inference_physics_of if _is_inference(workload) else physics_of
        return physics(self._time, self._power, workload)

    def _log_deviation(
        self, settings: NDArray[np.float64], workload: Workload | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the log deviations of time and power from the physics at `[n, 5]` settings, `[n]` each."""
        if workload is None or not _is_inference(workload):
            modes = settings[:, :-1]
            return self._time_deviation.at(modes), self._power_deviation.at(modes)
        if workload.name not in self._inference_deviations:
            seed = (*self._seed_of_kind, zlib.crc32(workload.name.encode()))
            self._inference_deviations[workload.name] = inference_deviation(self.modes, workload, seed)
        of_time, of_power = self._inference_deviations[workload.name]
        return of_time.at(settings), of_power.at(settings)

    def load(self, mode: PowerMode, workload: Workload | None = None) -> Load:
        """Return time and power of a workload in a mode, without measurement noise.

        Args:
            mode: the mode.
            workload: the trained or served workload; see `truth`.
        """
        at = modes_to_array([mode])
        minibatch_ms, training_mw = self.truth(at, workload)
        idle_mw = float(power_mw(self._idle_power, self._time, settings_of(at, None))[0])
        jitter = float(self._jitter(at, workload)[0])
        # The deviation may put the training power below idle power.
        return Load(float(minibatch_ms[0]), float(training_mw[0]), min(idle_mw, float(training_mw[0])), jitter)

    def _load_at(self, mode: PowerMode) -> Load:
        return self.load(mode, self._workload)

    def _jitter(self, modes: ModeArray, workload: Workload | None) -> NDArray[np.float64]:
        parts = step_parts(self._physics(workload)[0], _settings(modes, workload))
        loading = np.minimum(1.0, parts.loading_ms / parts.step_ms)
        return np.asarray(_JITTER_FLOOR + _JITTER_LOADING * loading**3)


def _is_inference(workload: Workload) -> bool:
    return workload.facts.task is Task.INFERENCE


def _settings(modes: ModeArray, workload: Workload | None) -> NDArray[np.float64]:
    batch = None if workload is None else workload.facts.batch
    return settings_of(modes, None if batch is None else np.full(len(modes), batch))


def _unit(kind: _P, rng: np.random.Generator) -> _P:
    """Return the parameters of one unit of a kind.

    Growth with the batch is not varied, as all batches have the same size.
    """
    varied = [each.name for each in fields(kind) if not each.name.endswith("_fixed")]
    factors = np.exp(rng.normal(0, _UNIT_LOG_SD, len(varied))).tolist()
    return replace(kind, **{name: getattr(kind, name) * by for name, by in zip(varied, factors, strict=True)})
