"""Reads the profile and the fitted predictor from a state directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.device import Device
from edge_agent.paths import PREDICTOR_DIRECTORY, PROFILE_FILE
from edge_agent.profiling.excluded_modes import ExcludedModes
from edge_agent.profiling.journal import Journal, JournalError, JournalHeader
from wattfleet.choosing import Front, KnownModes, ProfilingMethod, predicted_front
from wattfleet.errors import CorruptReferenceError, InvalidInputError
from wattfleet.modes import BatchArray, Profile
from wattfleet.prediction import Artefact, Prediction, Predictor, read_artefact, restore_predictor
from wattfleet_io.atomic_files import read_regular_file
from wattfleet_io.parsing import parse_json


@dataclass(frozen=True)
class MeasuredProfile:
    """A device's profile so far, since its last renewal.

    Attributes:
        header: what was measured.
        profile: the newest values of each mode, from a measurement or a round.
        measured_modes: modes that were measured for the profile.
        discarded: number of disturbed measurements.
        seconds: time spent measuring, device-clock seconds.
        renewed: the reason of the last renewal; None if there was none.
        excluded: modes that the board cannot sustain.
        first_gcycles: CPU cycles of a training's first minibatch, in units of 1e9; 0 if unknown.
        method: the method that selected the modes last.
    """

    header: JournalHeader
    profile: Profile
    measured_modes: int
    discarded: int
    seconds: float
    renewed: str | None
    excluded: ExcludedModes
    first_gcycles: float
    method: ProfilingMethod

    @classmethod
    def of(cls, header: JournalHeader, journal: Journal) -> MeasuredProfile:
        """The profile in a journal."""
        return cls(
            header,
            Profile.of(journal.measurements),
            len(journal.records),
            len(journal.discarded),
            journal.seconds,
            journal.renewal.reason if journal.renewal else None,
            ExcludedModes.of(journal),
            journal.first_gcycles,
            journal.method,
        )


@dataclass(frozen=True)
class FittedDevice:
    """A device's fitted predictor and what it knows of every mode.

    Attributes:
        artefact: the fitted predictor as it is stored.
        predictor: the same, ready to predict.
        measured: the profile behind it.
        prediction: the prediction for each of the device's modes.
        known: measured values if there are any, predicted ones otherwise.
    """

    artefact: Artefact
    predictor: Predictor
    measured: MeasuredProfile
    prediction: Prediction
    known: KnownModes

    @property
    def choosable(self) -> KnownModes:
        """What is known of the allowed modes; predictions for excluded ones may be too optimistic."""
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
        """Minibatches of one pass over the device's data."""
        return self.artefact.details.workload.minibatches_per_epoch

    @property
    def _allowed(self) -> NDArray[np.bool_]:
        return self.measured.excluded.allows(self.known.modes)


def read_profile(state_directory: Path) -> MeasuredProfile | None:
    """The profile; None if there is none.

    Raises:
        JournalError: it cannot be read, or is damaged before its last line.
    """
    path = state_directory / PROFILE_FILE
    try:
        held = read_regular_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from None
    first, ended, _ = held.partition(b"\n")
    if not ended:
        return None
    try:
        header = JournalHeader.from_line(parse_json(first))
    except (ValueError, TypeError, AttributeError):
        raise JournalError(f"{path}, line 1: is damaged; move the file away to measure again") from None
    # A copy in memory: opening a journal drops an incomplete last line, which the agent may be writing at the moment.
    copy = os.memfd_create(PROFILE_FILE)
    with os.fdopen(os.dup(copy), "wb") as file:
        file.write(held)
    with Journal.on(copy, path, header) as journal:
        return MeasuredProfile.of(header, journal)


def read_predictor(state_directory: Path) -> Artefact | None:
    """The fitted predictor; None if there is none.

    Raises:
        CorruptReferenceError: it is damaged.
        InvalidInputError: another version of Wattfleet wrote it.
    """
    folder = state_directory / PREDICTOR_DIRECTORY
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


def own_batch(profile: Profile, minibatch: int, n: int) -> BatchArray | None:
    """The batch to predict `n` modes with: `[n]` times the workload's minibatch; None if no row states its batch."""
    return None if profile.batch is None else np.full(n, minibatch)


def own_rows(profile: Profile, minibatch: int) -> Profile:
    """The rows that were measured with the workload's minibatch; all rows if they do not state it."""
    return profile if profile.batch is None else profile.rows(profile.batch == minibatch)


def read_fitted(state_directory: Path, device: Device) -> FittedDevice:
    """Read and combine all that is known of a device's modes.

    Raises:
        InvalidInputError: there is no fitted predictor, or it belongs to another device.
        JournalError: the profile is damaged.
        CorruptReferenceError: the predictor is damaged.
    """
    artefact = read_predictor(state_directory)
    measured = read_profile(state_directory)
    if artefact is None or measured is None:
        so_far = f"{measured.measured_modes} modes are measured so far" if measured else "no mode is measured yet"
        raise InvalidInputError(
            f"{state_directory}: holds no fitted predictor: {so_far}; run `wattfleet agent profile` first, or pass the"
            " agent's own directory as --state-dir"
        )
    require_profile_of(device, measured, state_directory)
    predictor = restore_predictor(artefact)
    minibatch = measured.header.minibatch
    prediction = predictor.predict(device.modes, own_batch(measured.profile, minibatch, len(device.modes)))
    known = KnownModes.of(device.modes, prediction, own_rows(measured.profile, minibatch))
    return FittedDevice(artefact, predictor, measured, prediction, known)


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
