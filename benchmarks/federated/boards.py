"""The fleet's boards: their profiles, measured by the agent's own code, and their true values.

Profiling a board takes seconds, so the results are cached in a folder, one file per board.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.devices.virtual.virtual_board import Load
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.profiling.stored_profile import read_fitted
from edge_agent.runtime.readiness import prepare_device
from edge_agent.settings import AgentSettings, DeviceSettings, ProfileSettings
from reference_models import load
from wattfleet.core.choosing import POWER_QUANTILE, BatchEfficiency, Front, pareto_front, predicted_front
from wattfleet.core.modes import (
    BatchArray,
    ModeArray,
    PowerMode,
    Workload,
    WorkloadFacts,
    board_named,
    modes_to_array,
    nearest_mode,
)
from wattfleet.core.prediction import Prediction
from wattfleet.core.prediction.roofline import PowerParameters, TimeParameters

REFERENCE = "agx_orin_resnet18"
_MINIBATCHES = 1000

BASE_BATCH = 16
"""The batch size unless it is tuned; profiles are measured with it."""

BATCHES = (8, 16, 32, 64)
"""The batch sizes to choose from if the batch size is tuned."""

PRESET_BATCHES = (BASE_BATCH,)
"""The batch sizes that are combined with NVIDIA's presets."""


@dataclass(frozen=True)
class Unit:
    """One board of the fleet.

    Attributes:
        device_id: its name.
        kind: kind of board.
        seed: seed that identifies the unit among those of its kind.
        modes: maximum number of modes that its agent measures.
    """

    device_id: str
    kind: str
    seed: int
    modes: int


@dataclass(frozen=True)
class Candidates:
    """The modes that can be on the front for an epoch of some length, with their predicted or true values.

    Attributes:
        modes: `[n, 4]` modes.
        batch: `[n]` batch size of each row; a mode may occur with several batch sizes.
        prediction: time and power of each row.
        first_gcycles: CPU cycles of a training's first minibatch, in units of 1e9.
    """

    modes: ModeArray
    batch: BatchArray
    prediction: Prediction
    first_gcycles: float

    @classmethod
    def of(cls, modes: ModeArray, predictions: Mapping[int, Prediction], first_gcycles: float) -> Candidates:
        """Drop modes dominated by another one with the same batch size and CPU clock, which has the same warm-up.

        Args:
            modes: `[n, 4]` modes.
            predictions: predictions for all modes, by batch size.
            first_gcycles: CPU cycles of a training's first minibatch, in units of 1e9.
        """
        found = []
        for batch, prediction in predictions.items():
            planned_mw, clocks = prediction.power_mw_quantile(POWER_QUANTILE), modes[:, 1]
            same = [np.flatnonzero(clocks == clock) for clock in np.unique(clocks)]
            kept = np.concatenate(
                [rows[pareto_front(prediction.minibatch_ms[rows], planned_mw[rows])] for rows in same]
            )
            found.append((modes[kept], np.full(len(kept), batch), prediction.among(kept)))
        return cls(
            np.concatenate([modes for modes, *_ in found]),
            np.concatenate([batch for _, batch, _ in found]),
            Prediction.joined([prediction for *_, prediction in found]),
            first_gcycles,
        )

    def front(self, minibatches: int) -> Front:
        """Return the front for epochs of the given number of minibatches of `BASE_BATCH` samples."""
        own = self.batch == BASE_BATCH
        return predicted_front(self.modes[own], self.prediction.among(own), minibatches, self.first_gcycles)

    def batch_front(self, samples: float, largest: int, efficiency: BatchEfficiency) -> Front:
        """Return the front over modes and batch sizes, for epochs that make the same progress with every batch size.

        Args:
            samples: samples of an epoch with batches of `BASE_BATCH`.
            largest: largest batch size that the device's data allow.
            efficiency: samples needed with each batch size; batch sizes without a value are left out.
        """
        epochs = {
            batch: passes(batch, efficiency)
            for batch in np.unique(self.batch).tolist()
            if batch == BASE_BATCH or (batch <= largest and efficiency.knows(batch))
        }
        own = np.isin(self.batch, list(epochs))
        batch = self.batch[own]
        minibatches = np.array([samples * epochs[int(each)] / each for each in batch])
        return predicted_front(self.modes[own], self.prediction.among(own), minibatches, self.first_gcycles, batch)


def passes(batch: int, efficiency: BatchEfficiency) -> float:
    """Return how many passes over the data make as much progress as one pass with `BASE_BATCH`."""
    return 1.0 if batch == BASE_BATCH else efficiency.of(batch) / efficiency.of(BASE_BATCH)


@dataclass(frozen=True)
class BoardFacts:
    """The predictions of a board's agent, and the board's true values.

    Attributes:
        idle_w: watts while parked, as its agent measured them.
        profiled_modes: modes that its agent measured.
        predicted: the agent's predictions.
        true: true mean times and powers, without noise.
        presets: true values of NVIDIA's presets.
        maxn: true values of the highest mode.
    """

    idle_w: float
    profiled_modes: int
    predicted: Candidates
    true: Candidates
    presets: Candidates
    maxn: Candidates


def units(fleet: Mapping[str, int], modes: int) -> list[Unit]:
    """Return the boards of a fleet; each is a different unit.

    Args:
        fleet: number of boards by kind.
        modes: maximum number of modes that each agent measures.
    """
    found = [(kind, number) for kind, count in fleet.items() for number in range(count)]
    return [Unit(f"{kind}-{number:02}", kind, number, modes) for kind, number in found]


class Board(SimulatedDevice):
    """A simulated board that trains ResNet-18 with any batch size; workloads differ only in the batch size."""

    def __init__(self, board_kind: str, seed: int) -> None:
        self._loads: dict[tuple[PowerMode, Workload | None], Load] = {}
        super().__init__(board_kind, seed)

    def _load_at(self, mode: PowerMode) -> Load:
        key = mode, self._workload
        if key not in self._loads:
            self._loads[key] = super()._load_at(mode)
        return self._loads[key]

    def _physics(self, workload: Workload | None) -> tuple[TimeParameters, PowerParameters]:
        return super()._physics(None)


def with_batch(batch: int) -> Workload:
    """Return ResNet-18 with a batch size."""
    return Workload("resnet18", WorkloadFacts(batch=batch))


def open_board(unit: Unit) -> Board:
    """Open the simulated board."""
    return Board(unit.kind, unit.seed)


def facts(unit: Unit, folder: Path) -> BoardFacts:
    """Return the facts of a board from the folder; if they are missing, measure and store them."""
    if not is_kept(unit, folder):
        keep(unit, profiled(unit), folder)
    return _facts(json.loads(_file(unit, folder).read_text(encoding="utf-8")))


def is_kept(unit: Unit, folder: Path) -> bool:
    """Return whether the facts of a board are in the folder."""
    return _file(unit, folder).exists()


def keep(unit: Unit, found: BoardFacts, folder: Path) -> None:
    """Store the facts of a board atomically."""
    kept = _file(unit, folder)
    folder.mkdir(parents=True, exist_ok=True)
    draft = kept.with_suffix(".tmp")
    draft.write_text(json.dumps(_document(found)), encoding="utf-8")
    draft.replace(kept)


def _file(unit: Unit, folder: Path) -> Path:
    return folder / f"{unit.device_id}-{unit.modes}-batches.json"


def profiled(unit: Unit) -> BoardFacts:
    """Profile a board as its agent does; return its predictions and the board's true values."""
    device = open_board(unit)
    with tempfile.TemporaryDirectory() as state:
        settings = AgentSettings(
            device=DeviceSettings(
                spec=f"simulated:{unit.kind}", id=unit.device_id, state_dir=Path(state), seed=unit.seed
            ),
            profile=ProfileSettings(minibatches_per_epoch=_MINIBATCHES, modes_first=unit.modes),
        )
        workload, never = built_in_workload(device.step), threading.Event()
        ready = prepare_device(settings, device, workload, [load(REFERENCE)], unit.modes, lambda progress: None, never)
        modes = ready.workloads.profiled_modes
        ready.workloads.close()
        fitted = read_fitted(Path(state), device)  # no mode overloads a simulated board
    n = len(device.modes)
    predictions = {batch: fitted.predictor.predict(device.modes, np.full(n, batch)) for batch in BATCHES}
    predicted = Candidates.of(device.modes, predictions, fitted.measured.first_gcycles)
    return with_truth(device, ready.idle_w, modes, predicted)


def with_truth(device: Board, idle_w: float, profiled_modes: int, predicted: Candidates) -> BoardFacts:
    """Return the predictions for a board with its true values."""
    known = board_named(device.board_kind)
    return BoardFacts(
        idle_w=idle_w,
        profiled_modes=profiled_modes,
        predicted=predicted,
        true=truth(device, device.modes),
        presets=truth(
            device,
            modes_to_array([nearest_mode(device.modes, mode) for mode in known.presets.values()]),
            PRESET_BATCHES,
        ),
        maxn=truth(device, modes_to_array([known.space.highest]), PRESET_BATCHES),
    )


def truth(device: Board, modes: ModeArray, batches: Sequence[int] = BATCHES) -> Candidates:
    """Return the true values of `[n, 4]` modes with each batch size."""
    none = np.zeros(len(modes))
    predictions = {batch: Prediction(*device.mean_truth(modes, with_batch(batch)), none, none) for batch in batches}
    return Candidates.of(modes, predictions, device.mean_first_gcycles)


_KINDS = ("predicted", "true", "presets", "maxn")


def _document(found: BoardFacts) -> dict[str, Any]:
    def columns(kept: Candidates) -> dict[str, Any]:
        prediction = {column.name: getattr(kept.prediction, column.name).tolist() for column in fields(Prediction)}
        return {
            "modes": kept.modes.tolist(),
            "batch": kept.batch.tolist(),
            "prediction": prediction,
            "first_gcycles": kept.first_gcycles,
        }

    known = {"idle_w": found.idle_w, "profiled_modes": found.profiled_modes}
    return known | {kind: columns(getattr(found, kind)) for kind in _KINDS}


def _facts(document: Mapping[str, Any]) -> BoardFacts:
    def candidates(columns: Mapping[str, Any]) -> Candidates:
        prediction = Prediction(**{name: np.array(values) for name, values in columns["prediction"].items()})
        modes = np.array(columns["modes"], dtype=np.float64)
        return Candidates(modes, np.array(columns["batch"]), prediction, columns["first_gcycles"])

    kinds = {kind: candidates(document[kind]) for kind in _KINDS}
    return BoardFacts(idle_w=document["idle_w"], profiled_modes=document["profiled_modes"], **kinds)
