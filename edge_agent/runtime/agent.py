"""The agent daemon: composes the session with the coordinator and the service of one device."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from edge_agent.devices.device import Device
from edge_agent.paths import INSTALLATION_FILE, OUTBOX_FILE, SESSION_FILE, WELCOME_FILE
from edge_agent.profiling.profiled_workload import ProfiledWorkload
from edge_agent.runtime.app_trainings import AppTrainings
from edge_agent.runtime.device_service import DeviceService
from edge_agent.runtime.installation import installation_name
from edge_agent.runtime.unix_socket import require_own_socket, serve_socket
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_device import DutyDevice
from edge_agent.serving.duty_file import DutyFile
from edge_agent.serving.duty_planning import DutyPlanning
from edge_agent.serving.duty_process import keep_duty_aside
from edge_agent.serving.duty_service import DutyServicer
from edge_agent.serving.inference_rows import InferenceRows
from edge_agent.serving.turns import Kind
from edge_agent.session.certificate_keeper import CertificateKeeper
from edge_agent.session.connection import connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.latest_welcome import LatestWelcome, WelcomeFile
from edge_agent.session.outbox import Outbox, OutboxFile
from edge_agent.session.status import SessionNews
from edge_agent.settings import AgentSettings
from edge_agent.training.knob_backup import backed_up
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_identity.channels import PLAINTEXT_WARNING
from wattfleet_io.atomic_files import require_own_folder
from wattfleet_io.tasks import run_until_first
from wattfleet_proto.convert import kept_duty_to_message, provenance_to_message
from wattfleet_proto.v1 import duty_pb2, session_pb2
from wattfleet_proto.version import own_version

_log = logging.getLogger(__name__)


async def run_agent(
    settings: AgentSettings, device: Device, profiled: ProfiledWorkload, device_folder: Path, stop: asyncio.Event
) -> None:
    """Serve one device until `stop` is set, then restore its knobs. No answer of the coordinator ends the agent.

    Args:
        settings: how to run.
        device: the board.
        profiled: the workload that is trained while modes are measured.
        device_folder: the folder for the device's lock and knob backup; the same for all agents of the device.
        stop: ends the agent.

    Raises:
        InvalidInputError: the socket cannot be served, the state directory is another user's or device's, or the
            connection to the coordinator would be unprotected although it must not.
        DeviceBusyError: another agent has locked the device.
        KnobBackupError: the knobs cannot be backed up; the device was not touched.
        WattfleetError: the device could not be profiled; finished measurements are kept.
    """
    require_own_socket(settings.device.socket)
    try:
        require_own_folder(settings.device.state_dir)
    except OSError as error:
        raise InvalidInputError(f"--state-dir: {error.strerror}") from None
    with backed_up(device, device_folder):
        await _run_with_device(settings, device, profiled, stop)


async def _run_with_device(
    settings: AgentSettings, device: Device, profiled: ProfiledWorkload, stop: asyncio.Event
) -> None:
    state_directory = settings.device.state_dir
    turns, duty_file, rows = DeviceTurns(), DutyFile(state_directory), InferenceRows(state_directory)
    board, planning = DutyDevice(device, turns), DutyPlanning(turns, rows, device.modes)
    turns.judge, planning.keep = planning.judge, keep_duty_aside
    endpoint = settings.endpoint()
    if endpoint.is_exposed:
        _log.warning("the connection to %s is %s", endpoint.address, PLAINTEXT_WARNING)
    connect = connects_to(endpoint)
    hello = session_pb2.Hello(
        device_id=settings.device.id,
        board=device.board_kind,
        provenance=provenance_to_message(device.provenance),
        mode_count=len(device.modes),
        protocol=own_version(),
        installation=installation_name(state_directory / INSTALLATION_FILE),
    )
    welcome = LatestWelcome(WelcomeFile(state_directory / WELCOME_FILE))
    outbox = Outbox(OutboxFile(state_directory / OUTBOX_FILE), settings.session)
    news = SessionNews(endpoint.address, state_directory / SESSION_FILE, is_exposed=endpoint.is_exposed)
    session = CoordinatorSession(connect, hello, welcome.receive, outbox, settings.session, news)
    keeper = CertificateKeeper(endpoint, session.reconnect)
    trainings = AppTrainings(settings.device.id)
    session.duty_figures = partial(_duty_figures, turns)
    if device.built_in_workload() is None:
        profiled = profiled.in_turns(partial(turns.from_thread, Kind.MINIBATCH))
    service = DeviceService(
        settings,
        board,
        profiled,
        session,
        welcome,
        connect,
        trainings,
        turns,
        planning,
    )
    turns.serve_here()
    take_up_duty(turns, duty_file, device)
    async with serve_socket(settings.device.socket, trainings, DutyServicer(device, turns, duty_file, rows)):
        try:
            works = {"session": session.run(), "device": service.run(), "certificate": keeper.run()}
            await run_until_first({**works, "stop": stop.wait()})
        finally:
            turns.stop()


def take_up_duty(turns: DeviceTurns, duty_file: DutyFile, device: Device) -> None:
    """Put the stored duty in force, and note the mode in force, each even if the other cannot be read."""
    try:
        turns.in_mode(device.current_mode())
    except WattfleetError as error:
        _log.error("the mode in force cannot be read: %s", error)
    try:
        turns.duty = duty_file.read()
    except WattfleetError as error:
        _log.error("the duty cannot be kept: %s", error)


def _duty_figures(turns: DeviceTurns) -> duty_pb2.DutyFigures | None:
    kept = turns.kept_duty()
    return None if kept is None else kept_duty_to_message(kept)
