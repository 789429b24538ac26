"""What a state directory holds of its device: the profile and the fitted predictor; read, never written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.device import Device
from edge_agent.paths import PREDICTOR_DIRECTORY, PROFILE_FILE
from edge_agent.profiling.excluded_modes import ExcludedModes
from edge_agent.profiling.journal import Journal, JournalError, JournalHeader
from wattfleet.choosing import Front, KnownModes, predicted_front
from wattfleet.errors import CorruptReferenceError, InvalidInputError
from wattfleet.modes import Profile
from wattfleet.prediction import Artefact, Prediction, Predictor, read_artefact, restore_predictor


@dataclass(frozen=True)
class MeasuredProfile:
    """A device's profile as far as it is, since it was last begun anew.

    Attributes:
        header: what was measured.
        profile: what is known of each mode, measured or shown by a round.
        measured_modes: modes that were measured for the profile.
        discarded: measurements that were given up, as something disturbed them.
        seconds: what measuring took, device-clock seconds.
        renewed: why it was begun anew; None where it never was.
        bearing: which modes the board does not bear.
        first_gcycles: CPU cycles of a training's first minibatch, in units of 1e9; 0 where that is not known.
    """

    header: JournalHeader
    profile: Profile
    measured_modes: int
    discarded: int
    seconds: float
    renewed: str | None
    bearing: ExcludedModes
    first_gcycles: float

    @classmethod
    def of(cls, header: JournalHeader, journal: Journal) -> MeasuredProfile:
        """What a journal holds."""
        return cls(
            header,
            Profile.of(journal.measurements),
            len(journal.records),
            len(journal.discarded),
            journal.seconds,
            journal.renewal.reason if journal.renewal else None,
            ExcludedModes.of(journal),
            journal.first_gcycles,
        )


@dataclass(frozen=True)
class FittedDevice:
    """What is known of a device's modes, ready to choose from.

    Attributes:
        artefact: the fitted predictor as it is stored.
        predictor: the same, to be asked.
        measured: the profile behind it.
        prediction: of each of the device's modes.
        known: measured values where there are any, predicted ones elsewhere.
    """

    artefact: Artefact
    predictor: Predictor
    measured: MeasuredProfile
    prediction: Prediction
    known: KnownModes

    @property
    def choosable(self) -> KnownModes:
        """What is known of the modes that the board bears; of the others, too much may be hoped for."""
        return self.known.among(self._borne)

    @property
    def front(self) -> Front:
        """The predicted front of the modes that the board bears, as the agent reports it."""
        borne = self._borne
        modes = self.known.modes[borne]
        prediction, first_gcycles = self.prediction.among(borne), self.measured.first_gcycles
        return predicted_front(modes, prediction, self.minibatches_per_epoch, first_gcycles)

    @property
    def minibatches_per_epoch(self) -> int:
        """Minibatches of one pass over the device's data."""
        return self.artefact.details.workload.minibatches_per_epoch

    @property
    def _borne(self) -> NDArray[np.bool_]:
        return self.measured.bearing.bears(self.known.modes)


def read_profile(state_directory: Path) -> MeasuredProfile | None:
    """The profile; None where none was begun.

    Raises:
        JournalError: it cannot be read, or is damaged elsewhere than at its end.
    """
    path = state_directory / PROFILE_FILE
    try:
        held = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from None
    first, ended, _ = held.partition(b"\n")
    if not ended:
        return None
    try:
        line = json.loads(first)
        header = JournalHeader(**{name: value for name, value in line.items() if name != "journal"})
    except (ValueError, TypeError, AttributeError):
        raise JournalError(f"{path}, line 1: is damaged; move the file away to measure anew") from None
    with _copy_in_memory(held) as copy:
        try:
            with Journal.open(copy, header) as journal:
                return MeasuredProfile.of(header, journal)
        except JournalError as error:
            raise JournalError(str(error).replace(str(copy), str(path))) from None


@contextmanager
def _copy_in_memory(content: bytes) -> Iterator[Path]:
    """A file that takes no place on a disk, which may be full.

    Opening a journal cuts off an unfinished line; in the file itself that may be one the agent is just writing.
    """
    descriptor = os.memfd_create(PROFILE_FILE)
    try:
        os.write(descriptor, content)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def read_predictor(state_directory: Path) -> Artefact | None:
    """The fitted predictor; None where none was fitted yet.

    Raises:
        CorruptReferenceError: it is damaged.
        InvalidInputError: another version of Wattfleet wrote it.
    """
    folder = state_directory / PREDICTOR_DIRECTORY
    try:
        return read_artefact(folder) if folder.is_dir() else None
    except CorruptReferenceError as error:
        raise CorruptReferenceError(
            f"{str(error).partition(':')[0]}: the fitted predictor is damaged: remove the folder and restart the"
            " agent, which fits it anew to the profile"
        ) from None
    except PermissionError:
        raise InvalidInputError(f"{folder}: may not be looked into: run this as root, or as one of its group") from None


def read_fitted(state_directory: Path, device: Device) -> FittedDevice:
    """What is known of all modes of a device.

    Raises:
        InvalidInputError: no predictor was fitted yet, or it belongs to another device.
        JournalError: the profile is damaged.
        CorruptReferenceError: the predictor is damaged.
    """
    artefact = read_predictor(state_directory)
    measured = read_profile(state_directory)
    if artefact is None or measured is None:
        so_far = f"{measured.measured_modes} modes are measured so far" if measured else "no mode is measured yet"
        raise InvalidInputError(
            f"{state_directory}: holds no fitted predictor, {so_far}: let the agent profile the device first, or name"
            " the agent's own directory with --state-dir"
        )
    require_profile_of(device, measured, state_directory)
    predictor = restore_predictor(artefact)
    prediction = predictor.predict(device.modes)
    known = KnownModes.of(device.modes, prediction, measured.profile)
    return FittedDevice(artefact, predictor, measured, prediction, known)


def require_profile_of(device: Device, measured: MeasuredProfile, state_directory: Path) -> None:
    """Make sure that a profile was taken from a device like this one.

    Raises:
        InvalidInputError: it was taken from another.
    """
    if measured.header.board_kind != device.board_kind:
        raise InvalidInputError(
            f"{state_directory}: holds the profile of the board {measured.header.board_kind}, and this device is"
            f" {device.board_kind}: name that one with --device"
        )
    if measured.header.provenance != device.provenance:
        raise InvalidInputError(
            f"{state_directory}: holds a profile that is {measured.header.provenance}, and the figures of this device"
            f" are {device.provenance}: name the device that it was taken from with --device"
        )
