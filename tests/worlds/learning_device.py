"""A device whose agent learns announced workloads, and measures their modes during trainings."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_agent.learning.fitting import Fitted, Fitting
from edge_agent.learning.online_learner import Observed, OnlineLearner
from edge_agent.learning.workloads import Workloads
from edge_agent.paths import PROFILE_FILE
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.known_workload import BUILT_IN, KnownWorkload
from edge_agent.profiling.profiler import ProductiveProfiler
from edge_agent.profiling.stored_profile import WorkloadFolders, own_rows
from edge_agent.runtime.device_trainings import GrantedTraining
from edge_agent.runtime.readiness import Readiness
from edge_agent.session.grants import AgentGrant
from edge_agent.settings import WorkloadSettings
from edge_agent.workloads.loading import StepTimes
from tests.fakes.boards import ScriptedDevice
from tests.worlds.agent import App, Device
from wattfleet.core.choosing import Front, SamplingSettings
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    JournalHeader,
    ModeArray,
    PowerMode,
    Profile,
    Workload,
    WorkloadFacts,
    array_to_modes,
    modes_to_array,
)
from wattfleet.core.prediction import Artefact, Prediction
from wattfleet_proto.convert import workload_from_message
from wattfleet_proto.limits import MeasuringLimits
from wattfleet_proto.v1 import local_pb2, session_pb2

if TYPE_CHECKING:
    from tests.worlds.many_workloads import ManyWorkloads


# --- Learning ---------------------------------------------------------------------------------------------------------
# What a device of a world learns: the agent's real workloads, journals and learners, on a board without noise.


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
        self.ready = Readiness(self.workloads, idle_w, MODES[-1], "", 0)

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
            mode, batch = PowerMode(*record["mode"]), record["batch"] or header["minibatch"]
            true_ms, true_w = physics(self._device, workload, mode, batch)
            # The first whole training of an unknown length is a row in predicted minibatches.
            tolerance = 0.15 if kind == "round" else 1e-6
            if not (
                math.isclose(record["minibatch_ms"], true_ms, rel_tol=tolerance)
                and math.isclose(record["power_mw"], 1e3 * true_w, rel_tol=1e-6)
            ):
                return f"has a row of another workload or batch: {record}"
            found[kind, mode, batch] += 1
        expected = self.rows.get(workload, Counter())
        return None if found == expected else f"lacks {expected - found} and has {found - expected} too many"


def _keep(artefact: Artefact) -> None:
    """Do nothing, since worlds do not keep predictors."""


# --- Learning device --------------------------------------------------------------------------------------------------

BATCHES = (8, 16, 32)
_MEASURING_STEPS = 2_000


class Knobs:
    """A board's modes during a training; replaces a `TrainingRunner`, since a world does not observe the power.

    Attributes:
        mode: mode of the training; None before the first.
        is_lowered: whether the device itself has lowered the mode.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self.mode: PowerMode | None = None
        self.is_lowered = False

    def start(
        self,
        learner: OnlineLearner,
        mode: PowerMode,
        epochs: float,
        power_limit_w: float,
        measuring: MeasuringLimits | None = None,
        planned_s: float = 0.0,
    ) -> None:
        self.is_lowered = False
        self.reassign(mode, power_limit_w)

    def loader_seen(self, changed: bool, after_minibatch: bool = False) -> None:
        pass

    def loader_handled(self, app_has_finished: bool = False) -> None:
        pass

    def lower(self, mode: PowerMode) -> None:
        self.is_lowered = True
        self.reassign(mode, 0.0)

    def reassign(self, mode: PowerMode | None, power_limit_w: float) -> None:
        self.mode = mode or MODES[-1]
        self._board.apply(self.mode)


class LearningDevice(Device):
    """A device with several workloads.

    Attributes:
        learning: what it knows of the workloads.
        heard: the newest fronts of each workload that the coordinator has received, latest first.
    """

    def __init__(
        self, world: ManyWorkloads, device_id: str, folder: Path, settings: WorkloadSettings, idle_w: float
    ) -> None:
        self._folder, self._settings = folder, settings
        self._rows: dict[str, Counter[Row]] = {}
        self.heard: dict[str, list[Front]] = {}
        self._many = world
        super().__init__(world, device_id, {}, idle_w, world.rng.uniform(-0.009, 0.009))

    # --- restarts of the agent ----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self.learning = Learning(self.id, self._folder, self.idle_w, self._settings, self._report_removed, self._rows)
        self._knobs = Knobs(self.learning.board)
        self._granted: GrantedTraining | None = None
        self._profiler: ProductiveProfiler | None = None

    def _dies(self) -> None:
        self.learning.workloads.close()
        self._many.draws_changed = True
        self._granted = self._profiler = None

    @property
    def drawn_w(self) -> float:
        training = self.training
        if training is None or self._granted is None:
            return super().drawn_w
        return max(training.power_limit_w, self.learning.board.drawn_w)

    # --- session ------------------------------------------------------------------------------------------------

    def reported_fronts(self, workload: str) -> list[Front]:
        return self.heard.get(workload, [])

    def length_of(self, workload: str) -> int:
        """Minibatches of an epoch of the device's own data."""
        return random.Random(f"length {self.id} {workload}").randint(20, 120)

    def _announced(self, announced: session_pb2.WorkloadsAnnounced) -> None:
        self.learning.workloads.live(map(workload_from_message, announced.workloads))
        for message in announced.workloads:
            self.learning.ready.announced(workload_from_message(message))
            self._report_fronts()

    def _report_fronts(self) -> None:
        for report in self.learning.ready.due_fronts():
            self._many.reported(self, report)
            self.outbox.add(session_pb2.SessionRequest(front=report))
        self._send_soon()

    def _report_removed(self, workload: str) -> None:
        self._many.removed(self, workload)
        removed = session_pb2.WorkloadRemoved(workload=workload)
        self.outbox.add(session_pb2.SessionRequest(removed=removed))
        self._send_soon()

    # --- trainings ----------------------------------------------------------------------------------------------

    def _training_began(self, app: App, grant: AgentGrant) -> None:
        """Begin a training as `DeviceTrainings` does, with the loader reported by the app."""
        assert grant.mode is not None
        learning = self.learning
        self._many.draws_changed = True
        learner = learning.workloads.learner(grant.workload)
        batch = self._many.batch_of(grant.plan_id)
        learning.board.trained = (grant.workload, batch)
        try:
            mode = learner.granted_mode(grant.mode, grant.power_limit_w)
        except InvalidInputError as error:
            self._world.note(f"{self.id}: refuses {grant.plan_id}: {error}")
            self._many.counts["refused trainings"] += 1
            app.lasts_s, app.is_failing = 0.0, True
            return
        learning.workloads.trains(learner)
        knobs: Any = self._knobs
        self._granted = training = GrantedTraining(knobs, learner, grant, mode, 1.0)
        has_length = self.rng.random() < 0.95
        length = self.length_of(grant.workload) if has_length else None
        loader = local_pb2.LoaderSeen(batch=batch, loader_workers=2, minibatches_per_epoch=length)
        stop_reason = None
        if training.loader_seen(loader):
            training.refit()
            self._report_fronts()
            stop_reason = training.keep_within_grant(app_has_finished=False)
        self._many.counts["lowered modes"] += self._knobs.is_lowered
        if stop_reason is not None:
            self._stop(stop_reason)
            self._in_this_life(0.0, self._look)
            return
        self._profiler = learner.productive(grant.power_limit_w)
        self._profiler.begin()
        mode = self._knobs.mode
        assert mode is not None
        app.lasts_s = self.length_of(grant.workload) * physics(self.id, grant.workload, mode, batch)[0] / 1e3
        life = self._life
        self._timeline.after(0.5 * app.lasts_s, lambda: self._measure(app, life))

    def _measure(self, app: App, life: int) -> None:
        """Measure a mode half-way through the training; the others follow in later trainings."""
        profiler, training = self._profiler, self.training
        if self._life != life or self.app is not app or profiler is None or training is None:
            return
        board = self.learning.board
        assert board.trained is not None
        workload, batch = board.trained
        mode = None
        for _ in range(_MEASURING_STEPS):
            if not profiler.measuring:
                return
            if board.in_force is not mode:
                mode = board.in_force
                self._world.oracle.check()
            begin_s = board.clock.now_s()
            board.minibatch()
            took_ms = (board.clock.now_s() - begin_s) * 1e3
            if profiler.minibatch_ended(StepTimes(0.0, took_ms)):
                assert mode is not None
                self.learning.happened(workload, ("mode", mode, batch))
                self._many.counts["measured modes"] += 1
        raise AssertionError("a mode is measured without end")

    def _change_mode(self, grant: AgentGrant) -> None:
        self._pause()
        self._many.draws_changed = True
        if self._granted is None:
            return
        stop_reason = self._granted.continue_under(grant)
        if stop_reason is not None:
            self._stop(stop_reason)

    def _stop(self, reason: str) -> None:
        """Stop the training, since no mode is within its grant: park the device, and tell the app to end."""
        self._many.counts["trainings stopped by the device"] += 1
        self._granted = None
        self.held.stop(reason)

    def _training_ended(self, training: AgentGrant, is_finished: bool) -> None:
        self._pause()
        granted, self._granted = self._granted, None
        if granted is None or training.mode is None:
            return
        learner = granted.learner
        if is_finished and not self._knobs.is_lowered:
            mode, workload, board = self._knobs.mode, training.workload, self.learning.board
            assert board.trained is not None and mode is not None
            true_ms, true_w = physics(self.id, workload, mode, board.trained[1])
            epoch_s = true_ms * learner.minibatches_per_epoch / 1e3
            self._observed(training, epoch_s, true_w)
            self._many.counts["trainings"] += 1
            self.learning.happened(workload, ("round", mode, board.trained[1]))
            if learner.observe(Observed(mode, epoch_s, true_w)) is not None:
                self._many.counts["drifts"] += 1
                learner.reprofile(lambda progress: None)
        else:
            learner.refit()
        self._many.check_journal(self, training.workload)
        self._report_fronts()

    def _pause(self) -> None:
        if self._profiler is not None:
            self._profiler.pause()
            self._profiler = None
