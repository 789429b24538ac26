"""Prepares a device for training: opens its workloads, measures modes if requested, and measures idle power."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from edge_agent.devices.device import Device
from edge_agent.devices.sysfs import applicable_presets
from edge_agent.learning.fitting import Fitting, InferenceFitting, NoFrontError, alone
from edge_agent.learning.fitting_process import fitting_process
from edge_agent.learning.online_learner import OnlineLearner, most_modes
from edge_agent.learning.profiling_plan import ProfilingProgress, profile_device
from edge_agent.learning.transfer import Transfer, keep_predictor, usable_references
from edge_agent.learning.workloads import Units, Workloads
from edge_agent.paths import PROFILE_FILE
from edge_agent.profiling.journal import Journal, JournalError, keep_apart, require_same_device
from edge_agent.profiling.known_workload import BUILT_IN, UNNAMED, KnownWorkload
from edge_agent.profiling.profiled_workload import ProfiledWorkload, built_in_workload
from edge_agent.profiling.profiler import Profiler
from edge_agent.profiling.stored_profile import WorkloadFolders, keep_idle
from edge_agent.serving.duty_planning import DutyPlanning
from edge_agent.settings import AgentSettings
from edge_agent.workloads.loading import OpenSteps
from wattfleet.common.atomic_files import make_state_folder
from wattfleet.common.console import plain_text
from wattfleet.core.choosing import descending_modes
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import JournalHeader, PowerMode, Profile, Workload, WorkloadFacts, array_to_modes
from wattfleet.core.prediction import Artefact
from wattfleet.core.prediction.roofline import BASE_BATCH
from wattfleet_proto.convert import (
    front_to_message,
    measured_to_message,
    presets_to_messages,
    workload_to_message,
)
from wattfleet_proto.limits import MAX_REASON_LENGTH
from wattfleet_proto.v1 import power_pb2, session_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Readiness:
    """The results of preparing a device.

    Attributes:
        workloads: hold the device's fronts, and learn from rounds.
        idle_w: power of the parked device, W.
        parked: the mode between trainings.
        reference_digest: digest of the most important reference predictor.
        ahead: modes to measure before the first round.
        share_modes: maximum of measured modes in a front's report, for other devices of this kind.
        resting_w: returns the most power that the resting device may draw while it answers requests, W; 0 without
            requests.
        presets: the board's presets by name, without those that need a reboot.
    """

    workloads: Workloads
    idle_w: float
    parked: PowerMode
    reference_digest: str
    ahead: int
    share_modes: int = 0
    resting_w: Callable[[], float] = lambda: 0.0
    presets: Mapping[str, PowerMode] = field(default_factory=dict)
    _announced: dict[str, set[str]] = field(default_factory=dict)
    _reported: dict[tuple[str, str], session_pb2.FrontReport] = field(default_factory=dict)
    _reporting: threading.Lock = field(default_factory=threading.Lock)

    def announced(self, workload: Workload, units: Units | None = None, is_training: bool = False) -> OnlineLearner:
        """Open the learner of a workload that a run is going to train; its front is reported from then on.

        The front is reported again even if it is unchanged, as the coordinator keeps a limited number of fronts and may
        have dropped it.

        Args:
            workload: the workload as the coordinator describes it.
            units: what other devices have measured; None for nothing new.
            is_training: whether the device is training. If so, others' measurements are used only by the fit after the
                training, as a fit now would disturb the measurements in progress.

        Raises:
            WattfleetError: its files are damaged or cannot be written, or no predictor can be fitted.
        """
        learner = self.workloads.announced(workload, units)
        learner.refit_if_outdated()  # the run may state a batch that was unknown
        if not is_training:
            learner.learn_from_others()
        own = learner.known.workload.name
        with self._reporting:
            self._announced.setdefault(own, set()).add(workload.name)
            self._reported.pop((own, workload.name), None)
        return learner

    def due_fronts(self) -> list[session_pb2.FrontReport]:
        """Return reports of the latest workload's front and of all fronts newly changed or announced.

        A workload without a plausible front, such as one with an absurd number of minibatches, is logged and left out.
        """
        with self._reporting:
            self._forget_removed()
            return [report for learner in self.workloads.opened for report in self._due_of(learner)]

    def _due_of(self, learner: OnlineLearner) -> list[session_pb2.FrontReport]:
        own, is_latest = learner.known.workload.name, learner is self.workloads.latest
        try:
            predicted = self._predicted(learner)
            reports = {name: self._report(learner, name, *predicted) for name in sorted(self._names_of(learner))}
        except WattfleetError as error:
            _log.error("the front of the workload %r cannot be reported: %s", own, error)
            return []
        changed = [name for name, report in reports.items() if self._reported.get((own, name)) != report]
        for name in changed:
            if reason := reports[name].no_front:
                _log.warning("trainings of the workload %r are not planned for this device: %s", name, reason)
        due = list(reports) if is_latest else changed
        self._reported.update({(own, name): reports[name] for name in due})
        return [reports[name] for name in due]

    def _forget_removed(self) -> None:
        """Forget which fronts of removed workloads were reported, so that a new announcement reports them again."""
        left = {learner.known.workload.name for learner in self.workloads.opened}
        for name in set(self._announced) - left:
            del self._announced[name]
        for key in [key for key in self._reported if key[0] not in left]:
            del self._reported[key]

    def _names_of(self, learner: OnlineLearner) -> set[str]:
        """Return the names under which a front is reported: as announced, which differs for the default workload."""
        own = learner.known.workload.name
        return self._announced.get(own) or {own}

    def _predicted(
        self, learner: OnlineLearner
    ) -> tuple[power_pb2.Front | None, str, list[power_pb2.PresetPoint], Workload]:
        """Return a workload's front or why there is none, the board's presets, and the workload as predicted."""
        try:
            front, workload = learner.predicted_front()
        except NoFrontError as error:
            return None, plain_text(str(error), MAX_REASON_LENGTH), [], learner.known.workload
        presets = presets_to_messages(learner.predicted_presets(self.presets)) if self.presets else []
        return front_to_message(front), "", presets, workload

    def _report(
        self,
        learner: OnlineLearner,
        name: str,
        front: power_pb2.Front | None,
        no_front: str,
        presets: Sequence[power_pb2.PresetPoint],
        workload: Workload,
    ) -> session_pb2.FrontReport:
        resting_w = self.resting_w()
        return session_pb2.FrontReport(
            front=front,
            no_front=no_front,
            idle_w=max(self.idle_w, resting_w),
            is_idle_with_duty=resting_w > self.idle_w,
            profiled_modes=learner.profiled_modes,
            reference_digest=self.reference_digest,
            presets=presets,
            workload=workload_to_message(replace(workload, name=name)),
            minibatches_per_epoch=learner.known.reported_minibatches,
            measured=map(measured_to_message, learner.measurements[: self.share_modes]),
        )


def prepare_device(
    settings: AgentSettings,
    device: Device,
    profiled: ProfiledWorkload,
    references: Sequence[Artefact],
    profile_modes: int,
    report: Callable[[ProfilingProgress], None],
    stopping: threading.Event,
    share_modes: int = 0,
    removed: Callable[[str], None] = lambda name: None,
    resting: Callable[[PowerMode], PowerMode] = lambda parked: parked,
    duty: DutyPlanning | None = None,
) -> Readiness:
    """Open the device's workloads, measure modes if requested, and measure idle power.

    The device is left parked in its lowest mode. A profile is journalled, so that a restart continues where it
    stopped. Fitted predictors are stored in the state directory.

    Args:
        settings: the agent's settings.
        device: the board.
        profiled: the workload that is trained while modes are measured without an app.
        references: the predictors to transfer from, the most important first.
        profile_modes: maximum of modes to measure per workload.
        report: called after every step.
        stopping: once set, measuring and fitting raise `StoppedError`, also later in the learners.
        share_modes: maximum of measured modes in a front's report, for other devices of this kind.
        removed: called with the name of a workload that was removed, as the device stores too many.
        resting: maps the parking mode to the mode in which the device rests while it answers requests.
        duty: plans trainings beside the device's duty; None without a duty.

    Raises:
        WattfleetError: the state directory is another device's, a file in it is damaged or cannot be written, or modes
            cannot be measured.
        UnusableReferenceError: none of the references can be used.
    """
    identity, profile = settings.device, settings.profile
    references = usable_references(references)
    make_state_folder(identity.state_dir)
    folders = WorkloadFolders(identity.state_dir)
    default = _default_workload(device, profiled, profile.minibatches_per_epoch)
    ahead = min(profile.modes_first or 0, profile_modes)
    for stored in folders.stored():
        try:
            header = _header(settings, device, stored.known)
            keep_apart(stored.folder / PROFILE_FILE, header)
            require_same_device(stored.folder / PROFILE_FILE, header)
        except JournalError as error:
            _log.error("the workload %r cannot be trained: %s", stored.name, error)

    def open_learner(known: KnownWorkload, folder: Path) -> OnlineLearner:
        is_default = known.workload.name == default.workload.name
        opener = _Opener(settings, device, references, profile_modes, stopping, folders, folder, workloads, duty)
        steps = _steps(device, profiled, known, is_default)
        return opener.open(known, steps, ahead if is_default else 0, report)

    workloads = Workloads(folders, default, open_learner, removed, settings.workload)
    if duty is not None:

        def open_fitting(transfer: Transfer) -> AbstractContextManager[Fitting]:
            return fitting_process(transfer, device.modes, stopping)()

        duty.fit = InferenceFitting(references, _header(settings, device, default), workloads.others_of, open_fitting)
    try:
        if ahead:
            workloads.learner(UNNAMED)
        parked = parked_mode(device)
        idle_mw = Profiler(device).measure_idle(resting(parked))
    except BaseException:
        workloads.close()
        raise
    keep_idle(idle_mw, device, identity.state_dir)
    return Readiness(
        workloads,
        idle_mw / 1e3,
        parked,
        references[0].digest,
        ahead,
        share_modes,
        (lambda: 0.0) if duty is None else duty.resting_w,
        applicable_presets(device),
    )


@dataclass(frozen=True)
class _Opener:
    """Opens the learner of one workload."""

    settings: AgentSettings
    device: Device
    references: Sequence[Artefact]
    profile_modes: int
    stopping: threading.Event
    folders: WorkloadFolders
    folder: Path
    workloads: Workloads
    duty: DutyPlanning | None

    def open(
        self,
        known: KnownWorkload,
        open_steps: OpenSteps | None,
        ahead: int,
        report: Callable[[ProfilingProgress], None],
    ) -> OnlineLearner:
        device, profile, seed = self.device, self.settings.profile, self.settings.device.seed
        steps = None
        if open_steps is not None:
            steps = ProfiledWorkload(open_steps, None).stopped_by(self.stopping).open_steps
        journal = Journal.open(self.folder / PROFILE_FILE, _header(self.settings, device, known))
        try:
            journal.batch = known.workload.facts.batch or journal.header.minibatch

            def open_fitting(known: KnownWorkload) -> AbstractContextManager[Fitting]:
                name, facts = known.workload.name, known.workload.facts
                others, units = self.workloads.others_of(name), self.workloads.units_of(name)
                transfer = Transfer(
                    tuple(self.references),
                    journal.header,
                    known.counted_minibatches,
                    facts,
                    others,
                    units,
                    known.offered_batches,
                )
                return fitting_process(transfer, device.modes, self.stopping)()

            with open_fitting(known) as fitting:
                if ahead and steps is not None:
                    most = min(ahead, most_modes(journal, self.profile_modes))
                    fitted = profile_device(device, steps, journal, fitting, most, seed, report, profile.tolerance)
                else:
                    fitted = fitting.fit(Profile.of(journal.measurements), len(journal.records))
            return OnlineLearner(
                device,
                steps,
                journal,
                open_fitting,
                fitted,
                self.profile_modes,
                known,
                seed,
                self.keep,
                tolerance=profile.tolerance,
                note=self.folders.note,
                beside=alone if self.duty is None else self.duty.beside,
            )
        except BaseException:
            journal.close()
            raise

    def keep(self, fitted: Artefact) -> None:
        try:
            keep_predictor(fitted, self.folder)
        except InvalidInputError as error:
            # A full disk does not end the profile or the round, since the predictor can be fitted again from the
            # journal.
            _log.error("the predictor is kept in memory only, as it cannot be stored: %s", error)


def _default_workload(device: Device, profiled: ProfiledWorkload, minibatches_per_epoch: int | None) -> KnownWorkload:
    """Return the workload of runs that do not name one."""
    if profiled.trained is not None:
        name, minibatch = profiled.trained
        return KnownWorkload(Workload(name, WorkloadFacts(batch=minibatch)), minibatches_per_epoch)
    return KnownWorkload(Workload(BUILT_IN, WorkloadFacts(batch=BASE_BATCH)), minibatches_per_epoch)


def _header(settings: AgentSettings, device: Device, known: KnownWorkload) -> JournalHeader:
    minibatch = known.workload.facts.batch or BASE_BATCH
    return JournalHeader(
        settings.device.id, device.board_kind, device.provenance, known.workload.name, minibatch, device.basis
    )


def _steps(device: Device, profiled: ProfiledWorkload, known: KnownWorkload, is_default: bool) -> OpenSteps | None:
    """Return the training for measuring a workload's modes without its app; None if only the app can train it."""
    built_in = device.built_in_workload(None if is_default else known.workload)
    if built_in is not None:
        return built_in_workload(built_in).open_steps
    return profiled.open_steps if is_default else None


def parked_mode(device: Device) -> PowerMode:
    """Return the mode between trainings, with the least idle power: the lowest frequencies, then the fewest cores."""
    return array_to_modes(descending_modes(device.modes)[-1:])[0]
