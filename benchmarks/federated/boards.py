"""The fleet's boards: profiled by the agent's own code, and asked for their truth.

Profiling a board takes seconds, so that what is found is kept in a folder, one file per board.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.config import AgentConfig
from edge_agent.devices.simulated import SimulatedDevice
from edge_agent.profiled_workload import soft_workload
from edge_agent.readiness import make_ready
from reference_models import load
from wattfleet.boards import board
from wattfleet.front import Front, predicted_front
from wattfleet.modes import ModeArray, as_array
from wattfleet.predictor import Prediction
from wattfleet.strategies.presets import nearest_mode

REFERENCE = "agx_orin_resnet18"
MINIBATCHES = 1000
"""Minibatches of the epoch that kept fronts stand for; a front's shape does not depend on it."""

_COLUMNS = ("epoch_s", "power_w", "epoch_log_sd", "power_log_sd")


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
class BoardFacts:
    """What is known of a board by its agent, and what is true of it.

    Attributes:
        idle_w: watts while parked, as its agent measured them.
        profiled_modes: modes that its agent measured.
        predicted: the front that its agent reports.
        true: the front of its mean times and its powers without noise.
        presets: NVIDIA's presets that no other beats, by the same truth.
        maxn: its highest mode, by the same truth.
    """

    idle_w: float
    profiled_modes: int
    predicted: Front
    true: Front
    presets: Front
    maxn: Front


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
    return folder / f"{unit.device_id}-{unit.modes}.json"


def of_epoch(front: Front, minibatches: int) -> Front:
    """A kept front for epochs of another length."""
    stretch = minibatches / MINIBATCHES
    return Front(front.modes, front.epoch_s * stretch, front.power_w, front.epoch_log_sd, front.power_log_sd)


def profiled(unit: Unit) -> BoardFacts:
    """What the agent finds when it profiles a board, and the board's truth."""
    device = open_board(unit)
    with tempfile.TemporaryDirectory() as state:
        config = AgentConfig(
            device_id=unit.device_id,
            coordinator="",
            state_directory=Path(state),
            device_folder=Path(state),
            socket=Path(state, "socket"),
            minibatches_per_epoch=MINIBATCHES,
            seed=unit.seed,
        )
        workload, never = soft_workload(device), threading.Event()
        ready = make_ready(config, device, workload, load(REFERENCE), unit.modes, lambda progress: None, never)
        ready.learner.close()
    return with_truth(device, ready.idle_w, ready.learner.profiled_modes, ready.learner.front)


def with_truth(device: SimulatedDevice, idle_w: float, profiled_modes: int, predicted: Front) -> BoardFacts:
    """What was found of a board beside its truth."""
    known = board(device.board_kind)
    return BoardFacts(
        idle_w=idle_w,
        profiled_modes=profiled_modes,
        predicted=predicted,
        true=true_front(device, device.modes),
        presets=true_front(device, as_array([nearest_mode(device.modes, mode) for mode in known.presets.values()])),
        maxn=true_front(device, as_array([known.space.highest])),
    )


def true_front(device: SimulatedDevice, modes: ModeArray) -> Front:
    """The front of `[n, 4]` modes by the board's truth."""
    none = np.zeros(len(modes))
    truth = Prediction(device.mean_minibatch_ms(modes), device.truth(modes)[1], none, none)
    return predicted_front(modes, truth, MINIBATCHES)


def _document(found: BoardFacts) -> dict[str, Any]:
    fronts = {name: getattr(found, name) for name in ("predicted", "true", "presets", "maxn")}
    return {
        "idle_w": found.idle_w,
        "profiled_modes": found.profiled_modes,
        **{
            name: {column: getattr(front, column).tolist() for column in ("modes", *_COLUMNS)}
            for name, front in fronts.items()
        },
    }


def _facts(document: Mapping[str, Any]) -> BoardFacts:
    def front(name: str) -> Front:
        columns: Mapping[str, Sequence[Any]] = document[name]
        return Front(np.array(columns["modes"], dtype=np.float64), *(np.array(columns[name]) for name in _COLUMNS))

    fronts = {name: front(name) for name in ("predicted", "true", "presets", "maxn")}
    return BoardFacts(idle_w=document["idle_w"], profiled_modes=document["profiled_modes"], **fronts)
