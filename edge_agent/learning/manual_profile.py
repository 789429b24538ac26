"""A manual profile: writes the same journal and predictor as the daemon, without a coordinator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_agent.devices.device import Device
from edge_agent.devices.meters import power_now_mw
from edge_agent.learning.fitting import FittingHere
from edge_agent.learning.online_learner import most_modes
from edge_agent.learning.profiling_plan import ProfilingProgress, profile_device
from edge_agent.learning.transfer import Transfer, keep_predictor, keep_reference
from edge_agent.paths import PROFILE_FILE
from edge_agent.profiling.journal import Journal, keep_apart, require_same_device
from edge_agent.profiling.known_workload import BUILT_IN, KnownWorkload
from edge_agent.profiling.mode_measurement import MeasurementError
from edge_agent.profiling.profiled_workload import ProfiledWorkload
from edge_agent.profiling.stored_profile import WorkloadFolders
from wattfleet.common.atomic_files import make_state_folder
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    Discarded,
    JournalHeader,
    ModeRecord,
    ProfilingMethod,
    Workload,
    WorkloadFacts,
    require_workload_name,
)
from wattfleet.core.prediction import MIN_MODES, Artefact
from wattfleet.core.prediction.roofline import BASE_BATCH


@dataclass(frozen=True)
class ManualProfileSettings:
    """Settings of a manual profile.

    Attributes:
        device_id: the device's name in its fleet.
        workload: the name under which the profile is stored; None uses the trained workload's name.
        minibatches_per_epoch: minibatches of one pass over the device's data; None uses the reference's.
        modes: maximum number of modes to measure, including those of earlier runs.
        tolerance: measuring stops once no measurement is expected to shorten a step by more than this share.
        seed: random seed for choosing modes.
        loader_workers: number of processes that load the workload's data; None if unknown.
        method: the method that selects the modes. `scratch` fits the predictor without the reference, all others with
            it.
        budgets_w: the budgets of `binary-search`, W.

    Raises:
        InvalidInputError: a number is out of range.
    """

    device_id: str
    workload: str | None
    minibatches_per_epoch: int | None
    modes: int
    tolerance: float
    seed: int
    loader_workers: int | None = None
    method: ProfilingMethod = ProfilingMethod.TRANSFER
    budgets_w: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.device_id:
            raise InvalidInputError("the device has no name; pass --device-id")
        if self.workload is not None:
            require_workload_name(self.workload)
        if self.minibatches_per_epoch is not None and self.minibatches_per_epoch < 1:
            raise InvalidInputError(f"--minibatches-per-epoch must be at least 1, not {self.minibatches_per_epoch}")
        if self.modes < 1:
            raise InvalidInputError(f"--modes must be at least 1, not {self.modes}")
        if not 0 <= self.tolerance < 1:
            raise InvalidInputError(f"--tolerance must be at least 0 and below 1, not {self.tolerance:g}")
        if self.method is ProfilingMethod.SCRATCH and self.modes < MIN_MODES:
            raise InvalidInputError(f"--method scratch needs --modes {MIN_MODES} or more, not {self.modes}")
        if not all(0 < watts < math.inf for watts in self.budgets_w):
            raise InvalidInputError("--budget-w must be finite and above 0 W")


@dataclass(frozen=True)
class ManualProfile:
    """The result of a manual profile.

    Attributes:
        header: what was measured.
        folder: where journal and predictor are stored.
        records: the measured modes, including earlier runs.
        discarded: the disturbed measurements.
        seconds: time spent measuring, device-clock seconds.
        limit: maximum number of modes to measure.
        artefact: the fitted predictor as stored.
    """

    header: JournalHeader
    folder: Path
    records: tuple[ModeRecord, ...]
    discarded: tuple[Discarded, ...]
    seconds: float
    limit: int
    artefact: Artefact


def profile_manually(
    settings: ManualProfileSettings,
    device: Device,
    profiled: ProfiledWorkload,
    reference: Artefact,
    state_directory: Path,
    begun: Callable[[int, int], None],
    report: Callable[[ProfilingProgress], None],
) -> ManualProfile:
    """Measure modes, fit the device's predictor to them, and store it.

    The device is left in the mode measured last: call this inside `backed_up`.

    Args:
        settings: the number of modes to measure, and the device.
        device: the board.
        profiled: the workload to train.
        reference: the predictor to transfer from.
        state_directory: the agent's state directory; created if missing.
        begun: called with the number of modes already measured, and the limit.
        report: called with the progress after every mode.

    Raises:
        InvalidInputError: an existing journal belongs to another device or workload, or a file cannot be written.
        JournalError: the journal cannot be written; its earlier modes are safe.
        MeasurementError: power cannot be read.
        ModeNotAppliedError: a mode did not take effect.
        TooHotError: the board did not cool down.
    """
    per_epoch = settings.minibatches_per_epoch or reference.details.workload.minibatches_per_epoch
    assert profiled.open_steps is not None, "a manual profile trains by itself"
    trained, minibatch = profiled.trained or (BUILT_IN, BASE_BATCH)
    name = settings.workload or trained
    header = JournalHeader(settings.device_id, device.board_kind, device.provenance, name, minibatch, device.basis)
    source = None if settings.method is ProfilingMethod.SCRATCH else reference
    folders = WorkloadFolders(state_directory)
    told = WorkloadFacts(batch=minibatch, loader_workers=settings.loader_workers)
    known = folders.known(name) or KnownWorkload(Workload(name, told))
    known = known.completed(told, settings.minibatches_per_epoch)
    transfer = Transfer((source,) if source else (), header, per_epoch, known.workload.facts)
    fitting = FittingHere(transfer, device.modes)
    _require_power(device)
    _create(state_directory)
    keep_apart(folders.folder(name) / PROFILE_FILE, header)
    require_same_device(folders.folder(name) / PROFILE_FILE, header)
    folder = folders.prepare(known)
    with Journal.open(folder / PROFILE_FILE, header) as journal:
        journal.batch = minibatch
        if source is not None:
            keep_reference(source, state_directory)
        sampled = settings.method in (ProfilingMethod.TRANSFER, ProfilingMethod.SCRATCH)
        limit = min(most_modes(journal, settings.modes) if sampled else settings.modes, len(device.modes))
        begun(len(journal.records), limit)
        artefact = profile_device(
            device,
            profiled.open_steps,
            journal,
            fitting,
            limit,
            settings.seed,
            report,
            settings.tolerance,
            settings.method,
            [watts * 1e3 for watts in settings.budgets_w],
        ).artefact
        keep_predictor(artefact, folder)
        return ManualProfile(header, folder, journal.records, journal.discarded, journal.seconds, limit, artefact)


def _create(state_directory: Path) -> None:
    try:
        make_state_folder(state_directory)
    except OSError as error:
        raise InvalidInputError(
            f"{state_directory}: cannot be created: {error.strerror}; run this as root, or pass another --state-dir"
        ) from None


def _require_power(device: Device) -> None:
    """Fail before the first minibatch if power cannot be read."""
    if math.isnan(power_now_mw(device)):
        raise MeasurementError(
            f"{device.board_kind}: power cannot be read, so no mode can be measured; run"
            " `wattfleet agent doctor` for the reason"
        )
