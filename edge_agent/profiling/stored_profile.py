"""Reads the profile and the fitted predictor of a workload from its folder."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.device import Device
from edge_agent.paths import IDLE_FILE, PREDICTOR_DIRECTORY, PROFILE_FILE, WORKLOAD_FILE, WORKLOADS_DIRECTORY
from edge_agent.profiling.journal import Journal, JournalError, read_header
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.profiling.mode_measurement import ExcludedModes
from wattfleet.common.atomic_files import make_state_folder, read_regular_file, replace_file, require_own_folder
from wattfleet.common.parsing import parse_json
from wattfleet.core.choosing import BatchEfficiency, Front, KnownModes, KnownTrainings, predicted_front
from wattfleet.core.errors import CorruptReferenceError, InvalidInputError, WattfleetError
from wattfleet.core.modes import (
    BatchArray,
    JournalHeader,
    PowerMode,
    Profile,
    ProfilingMethod,
    Workload,
    WorkloadFacts,
    array_to_modes,
)
from wattfleet.core.prediction import Artefact, Prediction, Predictor, read_artefact, restore_predictor, warmup_s

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredProfile:
    """A device's profile so far, since its last renewal.

    Attributes:
        header: what was measured.
        batch: current batch size, samples.
        profile: the newest values of each mode, from a measurement or a round.
        measured_modes: number of modes measured for the profile.
        discarded: number of disturbed measurements.
        seconds: time spent measuring, device-clock seconds.
        renewed: the reason of the last renewal; None if there was none.
        excluded: modes that the board cannot sustain.
        first_gcycles: CPU cycles of a training's first minibatch, in units of 1e9; 0 if unknown.
        method: the method that last selected modes.
        data_waits: share of a minibatch's time spent waiting for data, 0 to 1, in the modes where this was measured.
        peak_ratio: highest ratio of a measured mode's peak power to its median power; None if no peak was recorded.
        peaks_mw: peak power of each mode and batch where it was recorded, mW.
    """

    header: JournalHeader
    batch: int
    profile: Profile
    measured_modes: int
    discarded: int
    seconds: float
    renewed: str | None
    excluded: ExcludedModes
    first_gcycles: float
    method: ProfilingMethod
    data_waits: Mapping[PowerMode, float]
    peak_ratio: float | None
    peaks_mw: Mapping[tuple[PowerMode, int], float]

    @classmethod
    def of(cls, journal: Journal) -> MeasuredProfile:
        """Return the profile in a journal."""
        return cls(
            journal.header,
            journal.batch,
            Profile.of(journal.measurements),
            len(journal.records),
            len(journal.discarded),
            journal.seconds,
            journal.renewal.reason if journal.renewal else None,
            ExcludedModes.of(journal),
            journal.first_gcycles,
            journal.method,
            {
                record.mode: record.fetch_stall_ms / record.minibatch_ms
                for record in journal.records
                if record.fetch_stall_ms is not None
            },
            max((each.peak_mw / each.power_mw for each in journal.records if each.peak_mw is not None), default=None),
            {
                (each.mode, each.batch or journal.header.minibatch): each.peak_mw
                for each in journal.records
                if each.peak_mw is not None
            },
        )


@dataclass(frozen=True)
class FittedDevice:
    """A device's fitted predictor, and the measured or predicted values of every mode.

    Attributes:
        workload: what is known of the workload.
        artefact: the fitted predictor as it is stored.
        predictor: the same predictor, ready to predict.
        measured: the profile that it was fitted to.
        prediction: the prediction for each of the device's modes.
        known: measured values if there are any, predicted ones otherwise.
    """

    workload: KnownWorkload
    artefact: Artefact
    predictor: Predictor
    measured: MeasuredProfile
    prediction: Prediction
    known: KnownModes

    @property
    def choosable(self) -> KnownModes:
        """The values of the allowed modes; predictions for excluded ones may be too optimistic."""
        return self.known.among(self._allowed)

    def choosable_with(self, efficiency: BatchEfficiency) -> KnownModes:
        """Return the values of the allowed modes with each batch of an efficiency that fits into the memory.

        Raises:
            InvalidInputError: none of the batches fits into the memory, or the predictor predicts one batch only.
        """
        too_large = self.workload.too_large_batch or math.inf
        batches = [each for each in efficiency.batches if efficiency.knows(each) and each < too_large]
        if not batches:
            raise InvalidInputError(
                f"no batch of the efficiency fits into the device's memory: use one with a batch below {too_large:g}"
            )
        modes = self.known.modes[self._allowed]
        profile = self.measured.profile
        if profile.batch is None:
            profile = replace(profile, batch=np.full(len(profile), self.measured.batch))
        batch = np.repeat(batches, len(modes))
        repeated = np.tile(modes, (len(batches), 1))
        return KnownModes.of(repeated, self.predictor.predict(repeated, batch), profile, batch)

    def trainings(
        self, known: KnownModes, epochs: float, idle_mw: float, efficiency: BatchEfficiency | None = None
    ) -> KnownTrainings:
        """Return time and energy of a training in each of some modes.

        With an efficiency, an epoch with another batch has the minibatches that make the progress of an epoch with the
        current one.

        Args:
            known: the modes, with their batches if there is an efficiency.
            epochs: epochs of the training.
            idle_mw: mW that do not count as energy.
            efficiency: the samples needed with each batch.

        Raises:
            InvalidInputError: the efficiency of the current batch is not known.
        """
        minibatches = np.full(len(known.modes), epochs * self.minibatches_per_epoch)
        if efficiency is not None:
            sizes, index = np.unique(known.stated_batch(), return_inverse=True)
            own = self.measured.batch
            shares = [own / size * efficiency.of(size) / efficiency.of(own) for size in sizes.tolist()]
            minibatches = np.maximum(1.0, minibatches * np.array(shares)[index])
        warm_s = warmup_s(known.modes, known.minibatch_ms, self.measured.first_gcycles)
        return KnownTrainings(known, minibatches, warm_s, idle_mw)

    def peaks_mw(self, known: KnownModes) -> NDArray[np.float64]:
        """Return the peak power of some modes, `[n]` mW: recorded, or estimated from the power.

        The estimate is the power times the highest ratio of peak to median in any measured mode.

        Raises:
            InvalidInputError: no peak was recorded.
        """
        if self.measured.peak_ratio is None:
            raise InvalidInputError(
                "no peak power was recorded, as the profile is of an earlier version: measure one more mode with"
                " `wattfleet agent profile`, or limit the median power with --budget-w"
            )
        peaks = known.power_mw * self.measured.peak_ratio
        batch = known.batch if known.batch is not None else np.full(len(known.modes), self.measured.batch)
        for place in np.flatnonzero(known.measured).tolist():
            (mode,) = array_to_modes(known.modes[place : place + 1])
            peaks[place] = self.measured.peaks_mw.get((mode, int(batch[place])), peaks[place])
        return peaks

    @property
    def front(self) -> Front:
        """The predicted front of the allowed modes, as the agent reports it."""
        allowed = self._allowed
        modes = self.known.modes[allowed]
        prediction, first_gcycles = self.prediction.among(allowed), self.measured.first_gcycles
        return predicted_front(modes, prediction, self.minibatches_per_epoch, first_gcycles)

    @property
    def minibatches_per_epoch(self) -> int:
        """Minibatches of one pass over the device's data; while unknown, the number used for the predictor's fit."""
        return self.workload.minibatches_per_epoch or self.artefact.details.workload.minibatches_per_epoch

    @property
    def is_length_assumed(self) -> bool:
        """Whether the number of minibatches per epoch is assumed: neither an app nor an option has stated it."""
        return self.workload.minibatches_per_epoch is None

    def with_minibatches_per_epoch(self, minibatches: int | None) -> FittedDevice:
        """Return a copy with this number of minibatches per epoch; None leaves it unchanged."""
        if minibatches is None:
            return self
        return replace(self, workload=replace(self.workload, minibatches_per_epoch=minibatches))

    @property
    def _allowed(self) -> NDArray[np.bool_]:
        return self.measured.excluded.allows(self.known.modes)


def read_profile(folder: Path, batch: int | None = None) -> MeasuredProfile | None:
    """Return the profile of a workload; None if there is none.

    Args:
        folder: the workload's folder.
        batch: current batch size, samples; None uses the journal's.

    Raises:
        JournalError: the journal cannot be read, or is damaged before its last line.
    """
    path = folder / PROFILE_FILE
    header = read_header(path)
    if header is None:
        return None
    try:
        held = read_regular_file(path)
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from None
    # A copy in memory: opening a journal drops an incomplete last line, which the agent may just be writing.
    copy = os.memfd_create(PROFILE_FILE)
    with os.fdopen(os.dup(copy), "wb") as file:
        file.write(held)
    with Journal.on(copy, path, header) as journal:
        journal.batch = batch or header.minibatch
        return MeasuredProfile.of(journal)


def read_device_id(folders: Iterable[Path]) -> str | None:
    """Return the id of the device whose profiles are in these folders of workloads; None if there is no profile.

    Raises:
        JournalError: a profile cannot be read, or its first line is damaged.
    """
    headers = (read_header(folder / PROFILE_FILE) for folder in folders)
    return next((header.device_id for header in headers if header is not None), None)


def read_predictor(workload_folder: Path) -> Artefact | None:
    """Return the fitted predictor of a workload; None if there is none.

    Raises:
        CorruptReferenceError: the predictor is damaged.
        InvalidInputError: another version of Wattfleet wrote it.
    """
    folder = workload_folder / PREDICTOR_DIRECTORY
    try:
        return read_artefact(folder) if folder.is_dir() else None
    except CorruptReferenceError as error:
        raise CorruptReferenceError(
            f"{str(error).partition(':')[0]}: the fitted predictor is damaged; remove the folder and restart the"
            " agent, which then fits it again"
        ) from None
    except PermissionError:
        raise InvalidInputError(
            f"{folder}: no permission to read it; run this as root, or as a member of its group"
        ) from None


def own_batch(profile: Profile, batch: int, n: int) -> BatchArray | None:
    """Return the batches to predict `n` modes with: `[n]` times the current one; None if no row states its batch."""
    return None if profile.batch is None else np.full(n, batch)


def own_rows(profile: Profile, batch: int) -> Profile:
    """Return the rows measured with the current batch; all rows if they do not state their batch."""
    return profile if profile.batch is None else profile.rows(profile.batch == batch)


def chosen_workload(state_directory: Path, workload: str | None = None) -> StoredWorkload:
    """Return the workload that a command refers to.

    Args:
        state_directory: the agent's state directory.
        workload: the workload's name; None if there is only one, or only one of which a mode is measured.

    Raises:
        InvalidInputError: there is no such workload, or there are several and none was named.
    """
    stored = WorkloadFolders(state_directory).stored()
    names = ", ".join(repr(each.name) for each in stored)
    if not stored:
        raise InvalidInputError(
            f"{state_directory}: holds no fitted predictor: no mode is measured yet; run `wattfleet agent profile`"
            " first, or pass the agent's own directory as --state-dir"
        )
    if workload is None:
        # A profile that failed before its first mode leaves a workload without a predictor.
        if len(fitted := [each for each in stored if (each.folder / PREDICTOR_DIRECTORY).exists()]) == 1:
            return fitted[0]
        if len(stored) > 1:
            raise InvalidInputError(f"{state_directory}: holds several workloads; pass one as --workload: {names}")
        return stored[0]
    for each in stored:
        if each.name == workload:
            return each
    raise InvalidInputError(f"{state_directory}: holds no workload {workload!r}; choose one of {names}")


def read_fitted(state_directory: Path, device: Device, workload: str | None = None) -> FittedDevice:
    """Read and combine everything known of a device's modes.

    Args:
        state_directory: the agent's state directory.
        device: the board.
        workload: name of the workload; None if there is only one.

    Raises:
        InvalidInputError: there is no such workload or fitted predictor, or it belongs to another device.
        JournalError: the profile is damaged.
        CorruptReferenceError: the predictor is damaged.
    """
    stored = chosen_workload(state_directory, workload)
    artefact = read_predictor(stored.folder)
    measured = read_profile(stored.folder, stored.known.workload.facts.batch)
    if artefact is None or measured is None:
        so_far = f"{measured.measured_modes} modes are measured so far" if measured else "no mode is measured yet"
        raise InvalidInputError(
            f"{state_directory}: holds no fitted predictor: {so_far}; run `wattfleet agent profile` first, or pass the"
            " agent's own directory as --state-dir"
        )
    require_profile_of(device, measured, state_directory)
    predictor = restore_predictor(artefact)
    prediction = predictor.predict(device.modes, own_batch(measured.profile, measured.batch, len(device.modes)))
    known = KnownModes.of(device.modes, prediction, own_rows(measured.profile, measured.batch))
    return FittedDevice(stored.known, artefact, predictor, measured, prediction, known)


def require_profile_of(device: Device, measured: MeasuredProfile, state_directory: Path) -> None:
    """Check that a profile was taken from this kind of device, and that its figures are comparable.

    Raises:
        InvalidInputError: it was taken from another kind, or its figures are of another basis.
    """
    if measured.header.board_kind != device.board_kind:
        raise InvalidInputError(
            f"{state_directory}: holds the profile of the board {measured.header.board_kind}, but this device is"
            f" {device.board_kind}; pass the profiled device as --device"
        )
    if measured.header.provenance != device.provenance:
        raise InvalidInputError(
            f"{state_directory}: holds a {measured.header.provenance} profile, but this device's figures are"
            f" {device.provenance}; pass the profiled device as --device"
        )
    if measured.header.basis != device.basis:
        raise InvalidInputError(
            f"{state_directory}: holds a profile whose figures are of {measured.header.basis or 'an earlier meter'},"
            f" but this device's are of {device.basis}: run `wattfleet agent profile`, which keeps both apart"
        )


# --- Idle power -------------------------------------------------------------------------------------------------------
# What the device draws while it trains nothing: one value for all workloads.


def keep_idle(idle_mw: float, device: Device, state_directory: Path) -> None:
    """Store the idle power of a device, mW; log a failure."""
    path = state_directory / IDLE_FILE
    try:
        replace_file(path, json.dumps({**_source_of(device), "idle_mw": idle_mw}).encode() + b"\n")
    except OSError as error:
        _log.error("%s: cannot be written: %s; the idle power is kept in memory only", path, error.strerror)


def read_idle_mw(device: Device, state_directory: Path) -> float | None:
    """Return the stored idle power of a device, mW; None if none is stored, or if it is not comparable.

    Raises:
        InvalidInputError: the file is damaged, or cannot be read.
    """
    path = state_directory / IDLE_FILE
    try:
        content = parse_json(read_regular_file(path))
        idle_mw = float(content.pop("idle_mw"))
        if not 0 <= idle_mw < math.inf:
            raise ValueError("the idle power is not finite and at least 0")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidInputError(
            f"{path}: is damaged; remove it, and run `wattfleet agent profile` or restart the agent, which measures the"
            " idle power again"
        ) from None
    return idle_mw if content == _source_of(device) else None


def _source_of(device: Device) -> dict[str, str]:
    return {"board_kind": device.board_kind, "provenance": device.provenance, "basis": device.basis}


# --- Workload folders -------------------------------------------------------------------------------------------------
# The folders of a state directory, one per workload.

_READABLE_CHARACTERS = 40


@dataclass(frozen=True)
class StoredWorkload:
    """A workload in a state directory.

    Attributes:
        known: what is known of the workload.
        folder: its folder.
        last_use: number of its last use, counted over all workloads; 0 if unknown.
    """

    known: KnownWorkload
    folder: Path
    last_use: int

    @property
    def name(self) -> str:
        """Its name."""
        return self.known.workload.name


def folder_name(workload: str) -> str:
    """Return the name of a workload's folder: readable, safe on any file system, and unique."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", workload).strip("-.")[:_READABLE_CHARACTERS]
    return f"{readable}-{hashlib.sha256(workload.encode()).hexdigest()[:12]}"


class WorkloadFolders:
    """The workloads of a state directory. Its methods may be called in any thread.

    Args:
        state_directory: the agent's state directory.
    """

    def __init__(self, state_directory: Path) -> None:
        self._root = state_directory / WORKLOADS_DIRECTORY
        self._last_use: int | None = None
        self._noting = threading.Lock()

    def folder(self, workload: str) -> Path:
        """Return the folder of a workload; it may not exist yet."""
        return self._root / folder_name(workload)

    def stored(self) -> list[StoredWorkload]:
        """Return all workloads, the most recently used first; log and leave out folders without a usable description.

        Raises:
            InvalidInputError: a folder cannot be read.
        """
        found = []
        try:
            for folder in sorted(self._root.iterdir()) if self._root.is_dir() else []:
                if not folder.is_symlink() and folder.is_dir() and (stored := _described(folder)) is not None:
                    found.append(stored)
        except PermissionError as error:
            raise InvalidInputError(
                f"{error.filename}: no permission to read it; run this as root, or as a member of its group"
            ) from None
        return sorted(found, key=lambda stored: -stored.last_use)

    def prepare(self, known: KnownWorkload) -> Path:
        """Create a workload's folder if it is missing, and note that the workload is used now.

        Raises:
            InvalidInputError: the folder cannot be created, or belongs to another user.
        """
        folder = self.folder(known.workload.name)
        self._count_uses()  # before a folder without a description can exist
        try:
            make_state_folder(folder)
            require_own_folder(self._root)
            require_own_folder(folder)
        except OSError as error:
            raise InvalidInputError(f"{folder}: {error.strerror}") from None
        self.note(known)
        return folder

    def note(self, known: KnownWorkload) -> None:
        """Store what is known of a workload, and that it is used now; log a failure."""
        path = self.folder(known.workload.name) / WORKLOAD_FILE
        with self._noting:
            self._last_use = self._count_uses() + 1
            content: Mapping[str, Any] = {**known.content(), "last_use": self._last_use}
            try:
                replace_file(path, json.dumps(content).encode() + b"\n")
            except OSError as error:
                _log.error("%s: cannot be written: %s; it is kept in memory only", path, error.strerror)

    def _count_uses(self) -> int:
        """Return the number of the last use of any workload."""
        if self._last_use is None:
            self._last_use = max((stored.last_use for stored in self.stored()), default=0)
        return self._last_use

    def known(self, workload: str) -> KnownWorkload | None:
        """Return what is stored of a workload; None if nothing is."""
        folder = self.folder(workload)
        stored = _described(folder) if folder.is_dir() else None
        return None if stored is None or stored.name != workload else stored.known

    def remove(self, workload: str) -> None:
        """Remove a workload and all its files; log a failure."""
        try:
            shutil.rmtree(self.folder(workload))
        except OSError as error:
            _log.error("%s: cannot be removed: %s", error.filename, error.strerror)

    def size_bytes(self) -> int:
        """Return the total size of all files of all workloads, bytes."""
        sizes = 0
        for folder, _, files in os.walk(self._root):
            for name in files:
                try:
                    sizes += (Path(folder) / name).lstat().st_size
                except OSError:
                    continue  # it was removed meanwhile
        return sizes


def _described(folder: Path) -> StoredWorkload | None:
    path = folder / WORKLOAD_FILE
    try:
        content = parse_json(read_regular_file(path))
        last_use = content["last_use"]
        stored = StoredWorkload(KnownWorkload.from_content(content), folder, last_use)
        if folder_name(stored.name) == folder.name and type(last_use) is int and last_use >= 0:
            return stored
    except PermissionError:
        raise
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, InvalidInputError):
        pass
    return _from_journal(folder)


def _from_journal(folder: Path) -> StoredWorkload | None:
    """Return the workload of a folder whose description is lost, from its journal."""
    try:
        header = read_header(folder / PROFILE_FILE)
        if header is not None and folder_name(header.workload) == folder.name:
            known = KnownWorkload(Workload(header.workload, WorkloadFacts(batch=header.minibatch)))
            return StoredWorkload(known, folder, 0)
    except WattfleetError as error:
        _log.debug("%s: %s", folder, error)
    _log.warning("%s: does not describe a workload, so it is not used; remove it", folder)
    return None
