"""What makes a device ready to train: some modes measured, the reference transferred, idling known."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from edge_agent.devices.device import Device
from edge_agent.learning.fitting_process import fitting_process
from edge_agent.learning.online_learner import OnlineLearner, most_modes
from edge_agent.learning.transfer import Transfer, keep_predictor
from edge_agent.paths import PROFILE_FILE
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.profiled_workload import ProfiledWorkload
from edge_agent.profiling.profiler import Profiler
from edge_agent.profiling.profiling_plan import Progress, profile_device
from edge_agent.runtime.config import AgentConfig
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, array_to_modes
from wattfleet.prediction import Artefact
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)

IDLE_S = 20.0
"""How long idling is measured, device-clock seconds."""


@dataclass(frozen=True)
class Readiness:
    """What an agent has once its device is ready to train.

    Attributes:
        learner: knows the device's front, and goes on learning.
        idle_w: watts of the device while parked.
        parked: the mode between trainings.
        reference_digest: of the predictor that was transferred.
    """

    learner: OnlineLearner
    idle_w: float
    parked: PowerMode
    reference_digest: str

    def front_report(self) -> session_pb2.FrontReport:
        """The front by what is known now, as it travels."""
        return session_pb2.FrontReport(
            front=front_to_message(self.learner.front),
            idle_w=self.idle_w,
            profiled_modes=self.learner.profiled_modes,
            reference_digest=self.reference_digest,
        )


def make_ready(
    config: AgentConfig,
    device: Device,
    profiled: ProfiledWorkload,
    reference: Artefact,
    profile_modes: int,
    report: Callable[[Progress], None],
    stopping: threading.Event,
) -> Readiness:
    """Measure idling and some modes, transfer the reference to the device, and predict its front.

    The device is left parked in its lowest mode. The profile is journalled, so a restart goes on where it stopped;
    the fitted predictor is kept in the state directory.

    Args:
        config: whose device it is.
        device: the board.
        profiled: what is trained meanwhile.
        reference: the predictor to transfer from.
        profile_modes: modes to measure at most.
        report: told of every step.
        stopping: once set, measuring and fitting raise `StoppedError`, those of the learner included.
    """
    workload = profiled.described(reference.details.workload, config.minibatches_per_epoch)
    config.state_directory.mkdir(parents=True, exist_ok=True)
    header = JournalHeader(config.device_id, device.board_kind, device.provenance, workload.name, workload.minibatch)
    transfer = Transfer(reference, header, config.minibatches_per_epoch)

    open_fitting = fitting_process(transfer, device.modes, stopping)
    open_steps = profiled.stopped_by(stopping).open_steps

    def keep(fitted: Artefact) -> None:
        try:
            keep_predictor(fitted, config.state_directory)
        except InvalidInputError as error:
            # It can be fitted again from the journal: a full disk ends neither a profile nor a round for this.
            _log.error("the predictor is kept in memory only: %s", error)

    journal = Journal.open(config.state_directory / PROFILE_FILE, header)
    try:
        most = most_modes(journal, profile_modes)
        first = most if config.modes_first is None else min(config.modes_first, most)
        with open_fitting() as fitting:
            fitted = profile_device(device, open_steps, journal, fitting, first, config.seed, report, config.tolerance)
        learner = OnlineLearner(
            device,
            open_steps,
            journal,
            open_fitting,
            fitted,
            profile_modes,
            config.minibatches_per_epoch,
            config.seed,
            keep,
            tolerance=config.tolerance,
        )
        parked = parked_mode(device)
        idle_w = Profiler(device).measure_idle(parked, IDLE_S) / 1e3
    except BaseException:
        journal.close()
        raise
    return Readiness(learner, idle_w, parked, reference.digest)


def parked_mode(device: Device) -> PowerMode:
    """The mode between trainings: the lowest frequencies, then the fewest cores, where idling takes least."""
    return min(array_to_modes(device.modes), key=lambda mode: (mode.cpu_khz, mode.gpu_hz, mode.mem_hz, mode.cores))
