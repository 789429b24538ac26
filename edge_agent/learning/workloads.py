"""Manages a device's workloads: opens a learner for each when needed, and limits their number and size on disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from weakref import WeakValueDictionary

from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.profiling.known_workload import UNNAMED, KnownWorkload
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.profiling.stored_profile import WorkloadFolders, read_predictor
from edge_agent.settings import WorkloadSettings
from wattfleet.core.errors import WattfleetError
from wattfleet.core.modes import MeasuredUnit, Workload
from wattfleet.core.prediction import Artefact
from wattfleet_proto.limits import MAX_SHARED_MODES

_log = logging.getLogger(__name__)

# Modes that a workload needs before it helps to predict other workloads on the board.
_TELLING_MODES = 3
# Each further workload makes a fit slower and improves it less.
_MOST_OTHERS = 4

Units = tuple[MeasuredUnit, ...]
"""Measurements of a workload by a few other devices, per device."""

OpenLearner = Callable[[KnownWorkload, Path], OnlineLearner]
"""Opens the learner of a workload, whose files are in a folder."""


class Workloads:
    """The workloads of one device. Its methods may be called in any thread.

    Args:
        folders: the folders in which the workloads are stored.
        default: the workload of runs that do not name one.
        open_learner: opens a workload's learner.
        removed: called with the name of a workload that was removed, as the device stores too many.
        settings: the maximum of stored workloads and of their bytes.
    """

    def __init__(
        self,
        folders: WorkloadFolders,
        default: KnownWorkload,
        open_learner: OpenLearner,
        removed: Callable[[str], None],
        settings: WorkloadSettings,
    ) -> None:
        self._folders = folders
        self._default = default
        self._open_learner = open_learner
        self._removed = removed
        self._settings = settings
        self._open: dict[str, OnlineLearner] = {}
        self._units: dict[str, Units] = {}
        self._latest: OnlineLearner | None = None
        self._live: set[str] | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        # Needed because opening a workload fits its predictor for seconds: the event loop must not wait for that.
        self._opening: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    @property
    def opened(self) -> Sequence[OnlineLearner]:
        """The open learners."""
        with self._lock:
            return list(self._open.values())

    @property
    def latest(self) -> OnlineLearner | None:
        """The learner of the latest training, or else of the first opened workload; None if none is open."""
        with self._lock:
            return self._latest or next(iter(self._open.values()), None)

    @property
    def profiled_modes(self) -> int:
        """Number of measured modes of the latest workload, which may have been trained before the agent started."""
        return self._stored_modes if self.latest is None else self.latest.profiled_modes

    @cached_property
    def _stored_modes(self) -> int:
        """Number of measured modes of the workload that was used last when the agent started."""
        with suppress(WattfleetError):
            for stored in self._folders.stored()[:1]:
                predictor = read_predictor(stored.folder)
                return 0 if predictor is None else int(predictor.details.figures.get("profiled_modes", 0))
        return 0

    def name_of(self, announced: str) -> str:
        """Return a workload's name on this device: a run that does not name one trains the default workload."""
        return self._default.workload.name if announced in ("", UNNAMED) else announced

    def learner(self, name: str) -> OnlineLearner:
        """Return the learner of a workload; open it if necessary.

        Args:
            name: the workload's name; `UNNAMED` or empty for the default one.

        Raises:
            WattfleetError: its files are damaged or cannot be written, or no predictor can be fitted.
            StoppedError: the workloads were closed.
        """
        return self._learner(self.name_of(name), None)

    def announced(self, workload: Workload, units: Units | None = None) -> OnlineLearner:
        """Return the learner of a workload that a run is going to train.

        Args:
            workload: the workload as the coordinator describes it.
            units: what other devices have measured; None for nothing new. If this device has measured
                enough modes itself, they do not cause another fit.

        Raises:
            WattfleetError: see `learner`.
            StoppedError: the workloads were closed.
        """
        name = self.name_of(workload.name)
        # A run that does not name its workload may train anything, so other devices' measurements do not apply.
        return self._learner(name, workload, units) if name == workload.name else self._learner(name, None)

    def trains(self, learner: OnlineLearner) -> None:
        """Note that a training of this workload begins: the workload is kept when others are removed."""
        with self._lock:
            self._latest = learner
        self._folders.note(learner.known)

    def live(self, workloads: Iterable[Workload]) -> None:
        """Note the announced workloads of all live runs: they are kept when others are removed."""
        with self._lock:
            self._live = {self.name_of(each.name) for each in workloads}
            self._units = {name: units for name, units in self._units.items() if name in self._live}

    def others_of(self, name: str) -> tuple[Artefact, ...]:
        """Return the stored predictors of other workloads with enough measured modes, the latest first."""
        found: list[Artefact] = []
        with suppress(WattfleetError):
            for stored in self._folders.stored():
                if stored.name != name and len(found) < _MOST_OTHERS:
                    with suppress(WattfleetError):
                        predictor = read_predictor(stored.folder)
                        if predictor and int(predictor.details.figures.get("profiled_modes", 0)) >= _TELLING_MODES:
                            found.append(predictor)
        return tuple(found)

    def units_of(self, name: str) -> Units:
        """Return other devices' measurements of a workload from its latest announcement."""
        with self._lock:
            return self._units.get(self.name_of(name), ())

    def close(self) -> None:
        """Close all journals; no workload can be opened after that."""
        with self._lock:
            self._is_closed = True
            for learner in self._open.values():
                learner.close()
            self._open.clear()

    def _learner(self, name: str, announced: Workload | None, units: Units | None = None) -> OnlineLearner:
        with self._opening_of(name):
            with self._lock:
                learner = self._open.get(name)
                has_news = units is not None and units != self._units.get(name, ())
                if units is not None:
                    self._units[name] = units
            if learner is None:
                learner = self._opened(name, announced)
                self._remove_least_used(name)
            elif announced is not None:
                self._folders.note(learner.known)
                if has_news and learner.profiled_modes < MAX_SHARED_MODES:
                    learner.others_measured()
            if announced is not None:
                learner.announced(announced)
            return learner

    def _opening_of(self, name: str) -> threading.Lock:
        """Return the lock to hold while opening or removing a workload."""
        with self._lock:
            return self._opening.setdefault(name, threading.Lock())

    def _opened(self, name: str, announced: Workload | None) -> OnlineLearner:
        known = self._folders.known(name)
        if name == self._default.workload.name:
            told = self._default
            known = told if known is None else known.completed(known.workload.facts, told.minibatches_per_epoch)
        elif known is None:
            known = KnownWorkload(announced or Workload(name))
        elif announced is not None:
            known = known.with_batches(announced.batches)
        learner = self._open_learner(known, self._folders.prepare(known))
        with self._lock:
            if not self._is_closed:
                self._open[name] = learner
                return learner
        learner.close()
        raise StoppedError

    def _remove_least_used(self, opened: str) -> None:
        """Remove the least recently used workloads until the stored ones keep to the settings.

        Workloads in use are kept even if that exceeds the settings. Nothing is removed before the first `live`.
        """
        stored = self._folders.stored()
        with self._lock:
            if self._live is None:
                return
            kept = {opened, self._default.workload.name, *self._live}
            if self._latest is not None:
                kept.add(self._latest.known.workload.name)
        removable = [each.name for each in reversed(stored) if each.name not in kept]
        excess = len(stored) - self._settings.max_workloads
        while removable and (excess > 0 or self._folders.size_bytes() > self._settings.max_state_mb * 1e6):
            if self._is_removed(removable.pop(0)):
                excess -= 1

    def _is_removed(self, name: str) -> bool:
        """Remove a workload, unless it is being opened."""
        opening = self._opening_of(name)
        if not opening.acquire(blocking=False):
            return False
        try:
            with self._lock:
                learner = self._open.pop(name, None)
            if learner is not None:
                learner.close()
            self._folders.remove(name)
        finally:
            opening.release()
        _log.warning(
            "the workload %r was removed: the device stores at most %d workloads in %g MB",
            name,
            self._settings.max_workloads,
            self._settings.max_state_mb,
        )
        self._removed(name)
        return True
