"""What a device of a world learns: the agent's real workloads, journals and learners, on a board without noise."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from edge_agent.learning.fitting import Fitted, Fitting
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.learning.workloads import Workloads
from edge_agent.paths import PROFILE_FILE
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.known_workload import BUILT_IN, KnownWorkload
from edge_agent.profiling.stored_profile import WorkloadFolders, own_rows
from edge_agent.runtime.readiness import Readiness
from edge_agent.settings import WorkloadSettings
from tests.fakes.scripted_device import ScriptedDevice
from wattfleet.choosing import SamplingSettings
from wattfleet.modes import ModeArray, PowerMode, Profile, Workload, WorkloadFacts, array_to_modes, modes_to_array
from wattfleet.prediction import Artefact, Prediction

MODES = tuple(PowerMode(4, 1_900_800 - 100_000 * k, 600_000_000, 2_133_000_000) for k in range(8))
_ASSUMED_BATCH = 16
_ENOUGH_MODES = 6

Row = tuple[str, PowerMode, int]
"""A row of a journal: its kind, mode and batch; time and watts follow from these."""


@cache
def physics(device: str, workload: str, mode: PowerMode, batch: int) -> tuple[float, float]:
    """True milliseconds per minibatch, and true watts; they differ for all workloads of a device.

    A larger batch takes longer, and draws more power.
    """
    chance = random.Random(f"{device} {workload}")
    first_ms, first_w = chance.uniform(100.0, 300.0), chance.uniform(12.0, 24.0)
    slower = 1.0 + chance.uniform(0.1, 0.4) * MODES.index(mode)
    return first_ms * slower * math.sqrt(batch / 16), first_w / slower**0.7 * (batch / 16) ** 0.3


class Board(ScriptedDevice):
    """A board whose times and power depend on the workload that it trains."""

    board_kind = "orin-nx"

    def __init__(self, device: str) -> None:
        super().__init__(power_at=lambda at_s: 1e3 * self.drawn_w)
        self.modes = modes_to_array(MODES)
        self.in_force = MODES[-1]
        self._device = device
        self.trained: tuple[str, int] | None = None

    @property
    def drawn_w(self) -> float:
        """The current power in watts."""
        assert self.trained is not None
        return physics(self._device, self.trained[0], self.in_force, self.trained[1])[1]

    def minibatch(self) -> None:
        """Train a minibatch."""
        assert self.trained is not None
        self.clock.sleep_s(physics(self._device, self.trained[0], self.in_force, self.trained[1])[0] / 1e3)


class Guesses:
    """Replaces a fitted predictor (a `Fitting`): measured values, and guesses within their stated spread."""

    def __init__(self, device: str, known: KnownWorkload) -> None:
        self._device, self._name = device, known.workload.name
        self._batch = known.workload.facts.batch or _ASSUMED_BATCH

    def fit(self, profile: Profile, measured_modes: int) -> Fitted:
        own = own_rows(profile, self._batch)
        measured = dict(zip(array_to_modes(own.modes), zip(own.minibatch_ms, own.power_mw, strict=True), strict=True))
        rows = []
        for mode in MODES:
            if mode in measured:
                rows.append((*measured[mode], 0.01, 0.01))
            else:
                chance = random.Random(f"guess {self._device} {self._name} {mode}")
                true_ms, true_w = physics(self._device, self._name, mode, self._batch)
                guessed = true_ms * chance.uniform(0.9, 1.1), 1e3 * true_w * chance.uniform(0.95, 1.1)
                rows.append((*guessed, 0.15, 0.1))
        # Worlds do not store predictors.
        return Fitted(None, Prediction(*np.array(rows).T))  # type: ignore[arg-type]

    def next_modes(self, profile: Profile, settings: SamplingSettings, exclude: ModeArray) -> ModeArray:
        own = own_rows(profile, self._batch)
        known = {*array_to_modes(own.modes), *array_to_modes(exclude)}
        left = max(0, settings.limit - len(own))
        return modes_to_array([mode for mode in MODES if mode not in known][: min(left, settings.batch)])


class Learning:
    """The workloads of one device, using the agent's own parts.

    Attributes:
        board: the board that it measures.
        folders: where the workloads are stored.
        ready: creates the reports of fronts.
        rows: the rows that the journal of each workload has to contain, according to this world's events.
    """

    def __init__(
        self,
        device: str,
        folder: Path,
        idle_w: float,
        settings: WorkloadSettings,
        removed: Callable[[str], None],
        rows: dict[str, Counter[Row]],
    ) -> None:
        self.board, self.rows = Board(device), rows
        self.folders = WorkloadFolders(folder)
        self._device, self._settings, self._removed = device, settings, removed
        default = KnownWorkload(Workload(BUILT_IN, WorkloadFacts(batch=_ASSUMED_BATCH)))
        self.workloads = Workloads(self.folders, default, self._opened, self._forget, settings)
        self.ready = Readiness(self.workloads, idle_w, MODES[-1], "", True, 0)

    def _forget(self, name: str) -> None:
        self.rows.pop(name, None)
        self._removed(name)

    def _opened(self, known: KnownWorkload, folder: Path) -> OnlineLearner:
        """Open a learner as `edge_agent.runtime.readiness` does, without a process for the fit."""
        batch = known.workload.facts.batch or _ASSUMED_BATCH
        header = JournalHeader(self._device, self.board.board_kind, "hardware", known.workload.name, batch)
        journal = Journal.open(folder / PROFILE_FILE, header)
        journal.batch = known.workload.facts.batch or journal.header.minibatch

        @contextmanager
        def open_fitting(known: KnownWorkload) -> Iterator[Fitting]:
            yield Guesses(self._device, known)

        with open_fitting(known) as fitting:
            fitted = fitting.fit(Profile.of(journal.measurements), len(journal.records))
        return OnlineLearner(
            self.board, None, journal, open_fitting, fitted, _ENOUGH_MODES, known, 0, _keep, note=self.folders.note
        )

    def happened(self, workload: str, row: Row) -> None:
        """Record a row that was acknowledged."""
        self.rows.setdefault(workload, Counter())[row] += 1

    def wrong_rows(self, workload: str) -> str | None:
        """Errors in a workload's journal, in words; the journal is read without the code under test."""
        path = self.folders.folder(workload) / PROFILE_FILE
        lines = path.read_text().splitlines() if path.exists() else []
        header, *records = [json.loads(line) for line in lines] or [{}]
        if header and (header["device_id"], header["workload"]) != (self._device, workload):
            return f"begins with {header}"
        found: Counter[Row] = Counter()
        for record in records:
            kind = record.get("kind", "mode")
            if kind not in ("mode", "round"):
                continue
            mode, batch = PowerMode(*record["mode"]), record.get("batch", header["minibatch"])
            true_ms, true_w = physics(self._device, workload, mode, batch)
            if not (
                math.isclose(record["minibatch_ms"], true_ms, rel_tol=1e-6)
                and math.isclose(record["power_mw"], 1e3 * true_w, rel_tol=1e-6)
            ):
                return f"has a row of another workload or batch: {record}"
            found[kind, mode, batch] += 1
        expected = self.rows.get(workload, Counter())
        return None if found == expected else f"lacks {expected - found} and has {found - expected} too many"


def _keep(artefact: Artefact) -> None:
    """Do nothing, since worlds do not keep predictors."""
