"""Simulated boards: time and power of every mode with every batch size, and the power limits of the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.joint.runs import BATCHES
from edge_agent.devices.virtual.simulated import SimulatedDevice
from reference_models import load
from wattfleet.core.choosing import (
    JointMeasurement,
    JointProfile,
    JointTable,
    KnownModes,
    PowerLimit,
    gpu_frequencies,
    pareto_front,
    profile_jointly,
    spread_modes,
)
from wattfleet.core.modes import (
    BOARDS,
    ModeArray,
    PowerMode,
    Profile,
    Workload,
    WorkloadFacts,
    array_to_modes,
    modes_to_array,
)
from wattfleet.core.prediction import RooflinePredictor, restore_predictor

KINDS = ("agx-orin", "orin-nano")
LEVELS = (0.1, 0.25, 0.5, 0.75, 1.0)
"""The power limits on a scale from 0, the least with which baseline 1 can train every network, to 1, the maximum."""

_REFERENCE = "agx_orin_resnet18"
_LOADER_WORKERS = 4
_RESNET18_FLOPS = 3 * 2 * 1.8e9
# Noise of repeated measurements: log standard deviations of the time and of the power.
_TIME_SD, _POWER_SD = 0.005, 0.01


@dataclass(frozen=True)
class Network:
    """A network of the published kind, which the board trains instead of the small network that was trained on the CPU.

    Attributes:
        name: the workload's name. The simulated board derives from it what the other facts do not determine.
        relative_work: work of a sample on the GPU, relative to ResNet-18 on images of 224 x 224 pixels.
    """

    name: str
    relative_work: float

    def facts(self, batch: int) -> WorkloadFacts:
        """Return the facts of its training with a batch size."""
        return WorkloadFacts(
            batch=batch, loader_workers=_LOADER_WORKERS, step_flops=self.relative_work * _RESNET18_FLOPS * batch
        )

    def workload(self, batch: int) -> Workload:
        """Return the workload of its training with a batch size."""
        return Workload(self.name, self.facts(batch))


NETWORKS: Mapping[str, Network] = {
    "resnet": Network("resnet18", 1.0),
    # At MAXN of an AGX Orin, a measured minibatch of MobileNetV3 takes 96.2 ms, and one of ResNet-18 59.2 ms.
    "mobilenet": Network("mobilenetv3", 96.2 / 59.2),
    # There is no measurement. In the publication, its time depends on the clock like that of ResNet-18.
    "transformer": Network("char-transformer", 1.0),
}
"""The networks that the boards train, by the network of the task."""


@dataclass(frozen=True)
class Training:
    """The true time and power of training a network on one unit.

    Attributes:
        gpu_clock: every GPU frequency with every batch size, all other knobs at their maximum.
        all_modes: every mode with every batch size, without modes that another mode with the same batch size beats in
            both time and power, since they are never chosen.
        everything: the same including these modes.
    """

    gpu_clock: JointTable
    all_modes: JointTable
    everything: JointTable


class Unit:
    """One simulated unit of a kind of board.

    Args:
        kind: the kind of board.
        seed: the number of the unit.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self._kind = kind
        self._seed = seed
        self._scatter = np.random.default_rng(seed)
        self._device = SimulatedDevice(kind, seed)
        self._ladder = gpu_frequencies(BOARDS[kind].space)
        self.trainings = {name: self._training(network) for name, network in NETWORKS.items()}

    def power_range_mw(self) -> tuple[float, float]:
        """Return the maximum power of any training at the lowest GPU frequency, and at all frequencies, mW."""
        low_mw, high_mw = [], []
        for training in self.trainings.values():
            known = training.gpu_clock.known
            low_mw.append(float(known.power_mw[known.modes[:, 2] == self._ladder[0].gpu_hz].max()))
            high_mw.append(float(known.power_mw.max()))
        return max(low_mw), max(high_mw)

    def truth(self, network: str, mode: PowerMode, batch: int) -> tuple[float, float]:
        """Return the true ms of a minibatch, and the true mW."""
        minibatch_ms, power_mw = self._device.truth(modes_to_array([mode]), NETWORKS[network].workload(batch))
        return float(minibatch_ms[0]), float(power_mw[0])

    def measured(self, network: str, mode: PowerMode, batch: int) -> tuple[float, float]:
        """Return one measurement with noise: ms of a minibatch, and mW."""
        minibatch_ms, power_mw = self.truth(network, mode, batch)
        time_error, power_error = np.exp(self._scatter.normal(0, (_TIME_SD, _POWER_SD))).tolist()
        return minibatch_ms * time_error, power_mw * power_error

    def profiled(self, network: str, limit: PowerLimit) -> JointProfile:
        """Return the rows that the published profiling order measures below a limit; measurements are exact."""

        def measure(mode: PowerMode, batch: int) -> JointMeasurement:
            return JointMeasurement(mode, batch, *self.truth(network, mode, batch))

        return profile_jointly(self._ladder, BATCHES, limit, measure)

    def predicted(self, network: str, measurements: int) -> JointTable:
        """Predict every mode with every batch size from a few measurements."""
        known = self.trainings[network].everything.known
        chosen = spread_modes(known.modes, measurements, self._seed, known.stated_batch())
        modes, batches = chosen[:, :4], chosen[:, 4].astype(np.int64)
        rows = zip(array_to_modes(modes), batches.tolist(), strict=True)
        minibatch_ms, power_mw = np.array([self.measured(network, mode, batch) for mode, batch in rows]).T
        measured = Profile(modes, minibatch_ms, power_mw, batches)
        reference = restore_predictor(load(_REFERENCE), BOARDS[self._kind])
        assert isinstance(reference, RooflinePredictor), "the shipped reference is a roofline predictor"
        fitted = RooflinePredictor.fit(measured, reference, WorkloadFacts(loader_workers=_LOADER_WORKERS))
        prediction = fitted.predict(known.modes, known.stated_batch())
        return JointTable(KnownModes.of(known.modes, prediction, measured, known.stated_batch()))

    def _training(self, network: Network) -> Training:
        everything = self._table(network, self._device.modes)
        return Training(self._table(network, modes_to_array(self._ladder)), undominated(everything), everything)

    def _table(self, network: Network, modes: ModeArray) -> JointTable:
        rows = [self._device.truth(modes, network.workload(batch)) for batch in BATCHES]
        minibatch_ms, power_mw = (np.concatenate(column) for column in zip(*rows, strict=True))
        return true_table(np.tile(modes, (len(BATCHES), 1)), minibatch_ms, power_mw, np.repeat(BATCHES, len(modes)))


def true_table(modes: ModeArray, minibatch_ms: np.ndarray, power_mw: np.ndarray, batch: np.ndarray) -> JointTable:
    """Return a table of `n` modes with batch sizes whose time and power are known exactly."""
    zero = np.zeros(len(modes))
    return JointTable(KnownModes(modes, minibatch_ms, power_mw, zero, zero, np.ones(len(modes), dtype=bool), batch))


def undominated(table: JointTable) -> JointTable:
    """Return the rows of a table that no other row with the same batch size beats in both time and power."""
    kept = np.zeros(len(table.known.modes), dtype=bool)
    batches = table.known.stated_batch()
    for batch in np.unique(batches):
        rows = np.flatnonzero(batches == batch)
        kept[rows[pareto_front(table.known.minibatch_ms[rows], table.known.power_mw[rows])]] = True
    return table.among(kept)


def frequencies(kind: str) -> int:
    """Return the number of a board's GPU frequencies."""
    return len(BOARDS[kind].space.gpu_hz)


def limits_mw(units: Sequence[Unit]) -> list[float]:
    """Return the power limits of a kind of board, ascending, mW, rounded to 0.1 W; every unit can train below each."""
    ranges = [unit.power_range_mw() for unit in units]
    low_mw, high_mw = (max(column) for column in zip(*ranges, strict=True))
    return [float(np.ceil((low_mw + level * (high_mw - low_mw)) / 100) * 100) for level in LEVELS]
