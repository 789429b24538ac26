"""Prepares a device for training: measures some modes, transfers the reference, measures idle power."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from edge_agent.devices.device import Device
from edge_agent.learning.fitting_process import fitting_process
from edge_agent.learning.online_learner import OnlineLearner, most_modes
from edge_agent.learning.profiling_plan import Progress, profile_device
from edge_agent.learning.transfer import Transfer, keep_predictor
from edge_agent.paths import PROFILE_FILE
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.profiled_workload import ProfiledWorkload
from edge_agent.profiling.profiler import Profiler
from edge_agent.settings import AgentSettings
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, array_to_modes
from wattfleet.prediction import Artefact
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Readiness:
    """The results of preparing a device.

    Attributes:
        learner: knows the device's front, and learns from rounds.
        idle_w: power of the parked device, W.
        parked: the mode between trainings.
        reference_digest: digest of the reference predictor.
    """

    learner: OnlineLearner
    idle_w: float
    parked: PowerMode
    reference_digest: str

    def front_report(self) -> session_pb2.FrontReport:
        """The report of the current front."""
        return session_pb2.FrontReport(
            front=front_to_message(self.learner.front),
            idle_w=self.idle_w,
            profiled_modes=self.learner.profiled_modes,
            reference_digest=self.reference_digest,
        )


def make_ready(
    settings: AgentSettings,
    device: Device,
    profiled: ProfiledWorkload,
    reference: Artefact,
    profile_modes: int,
    report: Callable[[Progress], None],
    stopping: threading.Event,
) -> Readiness:
    """Measure idle power and some modes, transfer the reference to the device, and predict its front.

    The device is left parked in its lowest mode. The profile is journalled, so that a restart continues where it
    stopped. The fitted predictor is stored in the state directory.

    Args:
        settings: the agent's.
        device: the board.
        profiled: the workload that is trained while modes are measured.
        reference: the predictor to transfer from.
        profile_modes: limit on the modes to measure.
        report: called after every step.
        stopping: once set, measuring and fitting raise `StoppedError`, also later in the learner.
    """
    identity, profile = settings.device, settings.profile
    workload = profiled.described(reference.details.workload, profile.minibatches_per_epoch)
    identity.state_dir.mkdir(parents=True, exist_ok=True)
    header = JournalHeader(identity.id, device.board_kind, device.provenance, workload.name, workload.minibatch)
    transfer = Transfer(reference, header, profile.minibatches_per_epoch)

    open_fitting = fitting_process(transfer, device.modes, stopping, profile.fit_timeout_s)
    open_steps = profiled.stopped_by(stopping).open_steps

    def keep(fitted: Artefact) -> None:
        try:
            keep_predictor(fitted, identity.state_dir)
        except InvalidInputError as error:
            # It can be fitted again from the journal, so a full disk need not end the profile or the round.
            _log.error("the predictor is kept in memory only, as it cannot be stored: %s", error)

    journal = Journal.open(identity.state_dir / PROFILE_FILE, header)
    try:
        most = most_modes(journal, profile_modes)
        first = most if profile.modes_first is None else min(profile.modes_first, most)
        with open_fitting() as fitting:
            fitted = profile_device(
                device, open_steps, journal, fitting, first, identity.seed, report, profile.tolerance
            )
        learner = OnlineLearner(
            device,
            open_steps,
            journal,
            open_fitting,
            fitted,
            profile_modes,
            profile.minibatches_per_epoch,
            identity.seed,
            keep,
            tolerance=profile.tolerance,
        )
        parked = parked_mode(device)
        idle_w = Profiler(device).measure_idle(parked, profile.idle_s) / 1e3
    except BaseException:
        journal.close()
        raise
    return Readiness(learner, idle_w, parked, reference.digest)


def parked_mode(device: Device) -> PowerMode:
    """The mode between trainings, with the least idle power: the lowest frequencies, then the fewest cores."""
    return min(array_to_modes(device.modes), key=lambda mode: (mode.cpu_khz, mode.gpu_hz, mode.mem_hz, mode.cores))
