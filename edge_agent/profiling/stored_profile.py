"""Reads the profile and the fitted predictor of a workload from its folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.device import Device
from edge_agent.paths import PREDICTOR_DIRECTORY, PROFILE_FILE
from edge_agent.profiling.excluded_modes import ExcludedModes
from edge_agent.profiling.journal import Journal, JournalError, JournalHeader, read_header
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.profiling.workload_folders import StoredWorkload, WorkloadFolders
from wattfleet.choosing import Front, KnownModes, ProfilingMethod, predicted_front
from wattfleet.errors import CorruptReferenceError, InvalidInputError
from wattfleet.modes import BatchArray, PowerMode, Profile
from wattfleet.prediction import Artefact, Prediction, Predictor, read_artefact, restore_predictor
from wattfleet_io.atomic_files import read_regular_file


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
        workload: the workload's name; None if there is only one.

    Raises:
        InvalidInputError: there is no such workload, or there are several and none was named.
        JournalError: the profile of an earlier version is damaged.
    """
    stored = WorkloadFolders(state_directory).stored()
    names = ", ".join(repr(each.name) for each in stored)
    if not stored:
        raise InvalidInputError(
            f"{state_directory}: holds no fitted predictor: no mode is measured yet; run `wattfleet agent profile`"
            " first, or pass the agent's own directory as --state-dir"
        )
    if workload is None:
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
    """Check that a profile was taken from this kind of device.

    Raises:
        InvalidInputError: it was taken from another kind.
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
