"""A profile taken by hand: the daemon's journal and predictor, without a coordinator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_agent.devices.device import Device
from edge_agent.devices.meters.power_now import power_now_mw
from edge_agent.learning.fitting import FittingHere
from edge_agent.learning.online_learner import most_modes
from edge_agent.learning.profiling_plan import Progress, profile_device
from edge_agent.learning.transfer import Transfer, keep_predictor, keep_reference
from edge_agent.paths import PROFILE_FILE
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.journal_records import Discarded, ModeRecord
from edge_agent.profiling.mode_measurement import MeasurementError
from edge_agent.profiling.profiled_workload import ProfiledWorkload
from wattfleet.errors import InvalidInputError
from wattfleet.prediction import Artefact


@dataclass(frozen=True)
class HandProfileSettings:
    """How a profile is taken by hand.

    Attributes:
        device_id: the device's name in its fleet.
        minibatches_per_epoch: minibatches of one pass over the device's data; None takes the reference's.
        modes: modes to measure in all, at most.
        tolerance: measuring ends once no choice of a mode promises to get faster by more than this share.
        seed: of the choice of modes.

    Raises:
        InvalidInputError: a number is out of range.
    """

    device_id: str
    minibatches_per_epoch: int | None
    modes: int
    tolerance: float
    seed: int

    def __post_init__(self) -> None:
        if not self.device_id:
            raise InvalidInputError("a device needs a name: give one with --device-id")
        if self.minibatches_per_epoch is not None and self.minibatches_per_epoch < 1:
            raise InvalidInputError(f"an epoch has at least 1 minibatch, not {self.minibatches_per_epoch}")
        if self.modes < 1:
            raise InvalidInputError(f"a profile holds at least 1 mode, not {self.modes}")
        if not 0 <= self.tolerance < 1:
            raise InvalidInputError(f"a tolerance is a share from 0 to below 1, not {self.tolerance:g}")


@dataclass(frozen=True)
class HandProfile:
    """What a profile by hand has found.

    Attributes:
        header: what was measured.
        records: the modes measured so far, those of earlier runs included.
        discarded: measurements that were given up.
        seconds: what measuring took, device-clock seconds.
        most: modes that would have been measured at most.
        artefact: the predictor that was fitted to them, as it was stored.
    """

    header: JournalHeader
    records: tuple[ModeRecord, ...]
    discarded: tuple[Discarded, ...]
    seconds: float
    most: int
    artefact: Artefact


def profile_by_hand(
    settings: HandProfileSettings,
    device: Device,
    profiled: ProfiledWorkload,
    reference: Artefact,
    state_directory: Path,
    begun: Callable[[int, int], None],
    report: Callable[[Progress], None],
) -> HandProfile:
    """Measure modes, fit the device's predictor to them, and store it.

    The device is left in the mode measured last: call this inside `backed_up`.

    Args:
        settings: how many modes, and for whom.
        device: the board.
        profiled: what is trained meanwhile.
        reference: the predictor to transfer from.
        state_directory: where the journal and the predictor are kept; it is made where it is missing.
        begun: called with the number of modes that an earlier run measured, and the limit.
        report: called after every measured mode.

    Raises:
        InvalidInputError: the journal that is there is of something else, or a file cannot be written.
        JournalError: the journal cannot be written; the modes before are kept.
        MeasurementError: power cannot be read.
        ModeNotAppliedError: a mode did not take effect.
        TooHotError: the board did not cool down.
    """
    per_epoch = settings.minibatches_per_epoch or reference.details.workload.minibatches_per_epoch
    workload = profiled.described(reference.details.workload, per_epoch)
    header = JournalHeader(settings.device_id, device.board_kind, device.provenance, workload.name, workload.minibatch)
    transfer = Transfer(reference, header, per_epoch)
    fitting = FittingHere(transfer, device.modes)
    _require_power(device)
    _make(state_directory)
    with Journal.open(state_directory / PROFILE_FILE, header) as journal:
        keep_reference(reference, state_directory)
        most = min(most_modes(journal, settings.modes), len(device.modes))
        begun(len(journal.records), most)
        artefact = profile_device(
            device, profiled.open_steps, journal, fitting, most, settings.seed, report, settings.tolerance
        ).artefact
        keep_predictor(artefact, state_directory)
        return HandProfile(header, journal.records, journal.discarded, journal.seconds, most, artefact)


def _make(state_directory: Path) -> None:
    try:
        state_directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            f"{state_directory}: cannot be made: {error.strerror}; run this as root, or name another with --state-dir"
        ) from None


def _require_power(device: Device) -> None:
    """Find out before the first minibatch, not after a minute of them, that power cannot be read."""
    if math.isnan(power_now_mw(device)):
        raise MeasurementError(
            f"{device.board_kind}: power cannot be read, so no mode can be measured; run"
            " `wattfleet agent doctor` for the reason"
        )
