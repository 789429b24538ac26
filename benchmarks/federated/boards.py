"""The fleet's boards: their profiles, measured by the agent's own code, and their true values.

Profiling a board takes seconds, so that what is found is kept in a folder, one file per board.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.profiling.stored_profile import read_fitted
from edge_agent.runtime.readiness import make_ready
from edge_agent.settings import AgentSettings, DeviceSettings, ProfileSettings
from reference_models import load
from wattfleet.choosing import POWER_QUANTILE, Front, pareto_front, predicted_front
from wattfleet.modes import ModeArray, board_named, modes_to_array, nearest_mode
from wattfleet.prediction import Prediction

REFERENCE = "agx_orin_resnet18"
_MINIBATCHES = 1000


@dataclass(frozen=True)
class Unit:
    """One board of the fleet.

    Attributes:
        device_id: its name.
        kind: kind of board.
        seed: which unit of this kind.
        modes: modes that its agent measures at most.
    """

    device_id: str
    kind: str
    seed: int
    modes: int


@dataclass(frozen=True)
class Candidates:
    """Modes among which the best are for an epoch of any length, and what is known or true of them.

    Attributes:
        modes: `[n, 4]` modes.
        prediction: of each of them.
        first_gcycles: CPU cycles of a training's first minibatch, in units of 1e9.
    """

    modes: ModeArray
    prediction: Prediction
    first_gcycles: float

    @classmethod
    def of(cls, modes: ModeArray, prediction: Prediction, first_gcycles: float) -> Candidates:
        """Those of `[n, 4]` modes that no other at the same CPU clock, and so after a like start, beats."""
        planned_mw, clocks = prediction.power_mw_quantile(POWER_QUANTILE), modes[:, 1]
        same = [np.flatnonzero(clocks == clock) for clock in np.unique(clocks)]
        kept = np.concatenate([rows[pareto_front(prediction.minibatch_ms[rows], planned_mw[rows])] for rows in same])
        return cls(modes[kept], prediction.among(kept), first_gcycles)

    def front(self, minibatches: int) -> Front:
        """The front for epochs of so many minibatches."""
        return predicted_front(self.modes, self.prediction, minibatches, self.first_gcycles)


@dataclass(frozen=True)
class BoardFacts:
    """What is known of a board by its agent, and what is true of it.

    Attributes:
        idle_w: watts while parked, as its agent measured them.
        profiled_modes: modes that its agent measured.
        predicted: what its agent knows.
        true: its mean times and its powers without noise.
        presets: the same of NVIDIA's presets.
        maxn: the same of its highest mode.
    """

    idle_w: float
    profiled_modes: int
    predicted: Candidates
    true: Candidates
    presets: Candidates
    maxn: Candidates


def units(fleet: Mapping[str, int], modes: int) -> list[Unit]:
    """The boards of a fleet, each a unit of its own.

    Args:
        fleet: number of boards by kind.
        modes: modes that each agent measures at most.
    """
    found = [(kind, number) for kind, count in fleet.items() for number in range(count)]
    return [Unit(f"{kind}-{number:02}", kind, number, modes) for kind, number in found]


def open_board(unit: Unit) -> SimulatedDevice:
    """The board itself."""
    return SimulatedDevice(unit.kind, unit.seed)


def facts(unit: Unit, folder: Path) -> BoardFacts:
    """What is known and true of a board: from the folder, or found now and kept there."""
    kept = _file(unit, folder)
    if not kept.exists():
        keep(unit, profiled(unit), folder)
    return _facts(json.loads(kept.read_text(encoding="utf-8")))


def keep(unit: Unit, found: BoardFacts, folder: Path) -> None:
    """Keep what was found of a board, whole or not at all."""
    kept = _file(unit, folder)
    folder.mkdir(parents=True, exist_ok=True)
    draft = kept.with_suffix(".tmp")
    draft.write_text(json.dumps(_document(found)), encoding="utf-8")
    draft.replace(kept)


def _file(unit: Unit, folder: Path) -> Path:
    return folder / f"{unit.device_id}-{unit.modes}-candidates.json"


def profiled(unit: Unit) -> BoardFacts:
    """The results of the agent's profile of a board, and the board's true values."""
    device = open_board(unit)
    with tempfile.TemporaryDirectory() as state:
        settings = AgentSettings(
            device=DeviceSettings(
                spec=f"simulated:{unit.kind}", id=unit.device_id, state_dir=Path(state), seed=unit.seed
            ),
            profile=ProfileSettings(minibatches_per_epoch=_MINIBATCHES),
        )
        workload, never = built_in_workload(device.step), threading.Event()
        ready = make_ready(settings, device, workload, [load(REFERENCE)], unit.modes, lambda progress: None, never)
        modes = ready.workloads.profiled_modes
        ready.workloads.close()
        fitted = read_fitted(Path(state), device)  # a simulated board is overloaded by none of its modes
    predicted = Candidates.of(device.modes, fitted.prediction, fitted.measured.first_gcycles)
    return with_truth(device, ready.idle_w, modes, predicted)


def with_truth(device: SimulatedDevice, idle_w: float, profiled_modes: int, predicted: Candidates) -> BoardFacts:
    """The predictions for a board, together with its true values."""
    known = board_named(device.board_kind)
    return BoardFacts(
        idle_w=idle_w,
        profiled_modes=profiled_modes,
        predicted=predicted,
        true=truth(device, device.modes),
        presets=truth(device, modes_to_array([nearest_mode(device.modes, mode) for mode in known.presets.values()])),
        maxn=truth(device, modes_to_array([known.space.highest])),
    )


def truth(device: SimulatedDevice, modes: ModeArray) -> Candidates:
    """The true values of `[n, 4]` modes."""
    none = np.zeros(len(modes))
    prediction = Prediction(device.mean_minibatch_ms(modes), device.truth(modes)[1], none, none)
    return Candidates.of(modes, prediction, device.mean_first_gcycles)


_KINDS = ("predicted", "true", "presets", "maxn")


def _document(found: BoardFacts) -> dict[str, Any]:
    def columns(kept: Candidates) -> dict[str, Any]:
        prediction = {column.name: getattr(kept.prediction, column.name).tolist() for column in fields(Prediction)}
        return {"modes": kept.modes.tolist(), "prediction": prediction, "first_gcycles": kept.first_gcycles}

    known = {"idle_w": found.idle_w, "profiled_modes": found.profiled_modes}
    return known | {kind: columns(getattr(found, kind)) for kind in _KINDS}


def _facts(document: Mapping[str, Any]) -> BoardFacts:
    def candidates(columns: Mapping[str, Any]) -> Candidates:
        prediction = Prediction(**{name: np.array(values) for name, values in columns["prediction"].items()})
        return Candidates(np.array(columns["modes"], dtype=np.float64), prediction, columns["first_gcycles"])

    kinds = {kind: candidates(document[kind]) for kind in _KINDS}
    return BoardFacts(idle_w=document["idle_w"], profiled_modes=document["profiled_modes"], **kinds)
