"""The agent daemon: composes the session with the coordinator and the service of one device."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edge_agent.devices.device import Device
from edge_agent.devices.virtual.simulated import SpanFile, record_work
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from edge_agent.exporter import AgentFigures, DeviceFacts
from edge_agent.paths import (
    INSTALLATION_FILE,
    OUTBOX_FILE,
    REVOKED_FILE,
    SERVED_FILE,
    SESSION_FILE,
    SUPERNODE_DIRECTORY,
    WELCOME_FILE,
    WORK_FILE,
)
from edge_agent.profiling.profiled_workload import ProfiledWorkload
from edge_agent.runtime.app_trainings import AppTrainings
from edge_agent.runtime.device_service import DeviceService
from edge_agent.runtime.states import BoardSampler, StateReporter
from edge_agent.runtime.unix_socket import require_own_socket, serve_socket
from edge_agent.serving.device_turns import DeviceTurns, ServedSpan
from edge_agent.serving.duty_figures import DutyFile
from edge_agent.serving.duty_planning import DutyPlanning, InferenceMeasuring
from edge_agent.serving.duty_process import keep_duty_in_process
from edge_agent.serving.duty_service import DutyServicer
from edge_agent.serving.inference import InferenceRows
from edge_agent.serving.serving_board import (
    SWITCH_MS,
    DutyDevice,
    ServingBoard,
    measure_inference,
    require_simulated,
    simulated_duty,
)
from edge_agent.serving.turns import TurnPurpose
from edge_agent.session.certificate_keeper import CertificateKeeper, RevokedCertificates, connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.outbox import Outbox, OutboxFile
from edge_agent.session.status import LatestWelcome, SessionNews, WelcomeFile
from edge_agent.settings import AgentSettings, DeviceSettings
from edge_agent.training.mode_change import backed_up
from wattfleet.common.atomic_files import (
    make_state_folder,
    read_regular_file,
    replace_file,
    require_own_folder,
)
from wattfleet.common.clock import VirtualClock
from wattfleet.common.identity.identity_folder import read_identity
from wattfleet.common.identity.supernode_folder import update_supernode
from wattfleet.common.tasks import run_until_first
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.convert import kept_duty_to_message, provenance_to_message
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import duty_pb2, session_pb2

_log = logging.getLogger(__name__)


# --- Own metrics ------------------------------------------------------------------------------------------------------
# Serves the agent's own metrics if the settings name an address for them.


_ANSWER_S = 5.0
"""A scrape fails if the agent's event loop does not answer within this time."""


@dataclass(frozen=True)
class OwnMetrics:
    """The metrics of one running agent; all of its parts belong to one event loop."""

    settings: AgentSettings
    device: Device
    session: CoordinatorSession
    outbox: Outbox
    sampler: BoardSampler
    turns: DeviceTurns
    reporter: StateReporter
    revoked: RevokedCertificates

    def served(self) -> AbstractAsyncContextManager[str | None]:
        """Serve the metrics within this context. Yields their URL, or None if the settings name no address.

        Raises:
            InvalidInputError: the address is in use or does not exist, or would be served as plaintext where that is
                not allowed.
        """
        address = self.settings.metrics.address
        if address is None:
            return nullcontext()
        # Imported here, since the HTTP and Prometheus libraries take memory.
        from edge_agent.exporter import metrics_served

        facts = DeviceFacts(self.settings.device.id, self.device.board_kind, self.device.provenance)
        loop = asyncio.get_running_loop()
        return metrics_served(
            self.settings,
            address,
            facts,
            lambda: asyncio.run_coroutine_threadsafe(self._figures(), loop).result(_ANSWER_S),
            self.revoked.is_revoked,
        )

    async def _figures(self) -> AgentFigures:
        reporter, session = self.reporter, self.session
        return AgentFigures(
            self.sampler.latest,
            reporter.state,
            reporter.profiled_modes,
            reporter.modes_to_measure,
            session.connected,
            self.outbox.waiting,
            reporter.trainings,
            session.grants.training_w,
            self.turns.kept_duty(),
        )


# --- Installation -----------------------------------------------------------------------------------------------------
# The random name of this installation, which distinguishes it from another one with the same device id.

_NAME = re.compile(r"[0-9a-f]{32}")


def installation_name(path: Path) -> str:
    """Read the name from a file; if there is none, create one and store it.

    If the name cannot be stored, the agent uses it for this run only. After a restart, the coordinator then takes the
    agent for another device with the same id, until the old session has expired.

    Other users may not enter the folder.

    Args:
        path: the file; its folder is created.
    """
    try:
        stored = read_regular_file(path).decode("ascii").strip()
        if _NAME.fullmatch(stored):
            return stored
        _log.error("%s: holds no installation name; creating a new one", path)
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        _log.error("%s: cannot be read (%s); creating a new installation name", path, error)
    name = uuid.uuid4().hex
    try:
        make_state_folder(path.parent)
        replace_file(path, f"{name}\n".encode())
    except OSError as error:
        _log.error("%s: cannot be written: %s", path, error.strerror)
    return name


# --- Supernode update -------------------------------------------------------------------------------------------------
# Keeps the folder of the device's SuperNode up to date: its certificates and the addresses of SuperLink and agent.


def update_supernode_folder(settings: AgentSettings) -> None:
    """Update the SuperNode's folder, after the agent's start or after a renewal of its certificate.

    If that fails, the failure is logged and the SuperNode continues with the old contents.
    """
    folder = settings.device.state_dir / SUPERNODE_DIRECTORY
    try:
        identity = read_identity(settings.identity_folder)
        if identity is not None:
            update_supernode(folder, identity, str(settings.device.socket.absolute()))
    except (OSError, WattfleetError) as error:
        _log.warning("the folder of Flower's SuperNode, %s, is not up to date: %s", folder, error)


# --- Agent ------------------------------------------------------------------------------------------------------------


async def run_agent(
    settings: AgentSettings, device: Device, profiled: ProfiledWorkload, device_folder: Path, stop: asyncio.Event
) -> None:
    """Serve one device until `stop` is set, then restore its knobs.

    Whatever the coordinator answers, the agent goes on.

    Args:
        settings: the agent's settings.
        device: the board.
        profiled: the workload that is trained while modes are measured.
        device_folder: the folder for the device's lock and knob backup; the same for all agents of the device.
        stop: stops the agent once it is set.

    Raises:
        InvalidInputError: the socket or the metrics cannot be served, the state directory is another user's or
            device's, or a connection would be unencrypted where that is not allowed.
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
    duty_file, rows = DutyFile(state_directory), InferenceRows(state_directory)
    serving = await asyncio.to_thread(_simulated_serving, settings.device, device, rows)
    turns = DeviceTurns() if serving is None else serving.turns
    board = DutyDevice(device, turns) if serving is None else serving
    planning = DutyPlanning(turns, rows, device.modes)
    turns.judge, turns.plan_batching = planning.judge, planning.batching
    planning.keep = partial(keep_duty_in_process, lambda: turns.measuring_has_ended)
    endpoint = settings.endpoint()
    if endpoint.warning is not None:
        _log.warning("%s", endpoint.warning)
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
    outbox = Outbox(OutboxFile(state_directory / OUTBOX_FILE))
    news = SessionNews(endpoint.address, state_directory / SESSION_FILE, is_exposed=endpoint.is_exposed)
    revoked = RevokedCertificates(state_directory / REVOKED_FILE)
    session = CoordinatorSession(connect, hello, welcome.receive, outbox, settings.session, news, revoked)
    update_supernode_folder(settings)
    if isinstance(device, VirtualBoard):
        record_work(device, state_directory / WORK_FILE, lambda: session.grants.granted_w)

    def renewed() -> None:
        update_supernode_folder(settings)
        session.reconnect()

    keeper = CertificateKeeper(endpoint, renewed)
    trainings = AppTrainings(settings.device.id, lambda: welcome.refuses_unplanned, session.report_unplanned)
    session.duty_figures = partial(_duty_figures, turns)
    sampler = BoardSampler(device)
    session.board_sample = lambda: sampler.latest
    if device.built_in_workload() is None:
        profiled = profiled.in_turns(partial(turns.from_thread, TurnPurpose.MINIBATCH))
    servicer = DutyServicer(device, turns, duty_file, rows)
    # On a virtual clock, no time passes while a server answers a batch.
    modes = 0 if isinstance(device.clock, VirtualClock) else settings.profile.inference_modes
    measuring = InferenceMeasuring(board, turns, planning, rows, servicer, modes)
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
        measuring,
    )
    metrics = OwnMetrics(settings, device, session, outbox, sampler, turns, service.reporter, revoked)
    turns.serve_here()
    if serving is None:
        restore_duty(turns, duty_file, device)
    else:
        serving.begin()
    socket, group = settings.device.socket, settings.device.socket_group
    async with AsyncExitStack() as served:
        await served.enter_async_context(metrics.served())
        await served.enter_async_context(serve_socket(socket, trainings, servicer, group))
        works: dict[str, Coroutine[Any, Any, Any]] = {}
        if serving is not None:
            works["simulated requests"] = serving.serve_at_rest(lambda: service.is_resting)
        try:
            works |= {"session": session.run(), "device": service.run(), "certificate": keeper.run()}
            works["board samples"] = sampler.run()
            await run_until_first(works | {"stop": stop.wait()})
        finally:
            turns.stop()


def _simulated_serving(settings: DeviceSettings, device: Device, rows: InferenceRows) -> ServingBoard | None:
    """Return the board that answers the simulated requests of `--simulated-duty`; None without the option."""
    if settings.simulated_duty is None:
        return None
    duty, simulated = simulated_duty(settings.simulated_duty), require_simulated(device)
    measure_inference(simulated, duty.workload, rows, settings.seed)
    turns = DeviceTurns(simulated.clock.now_s, switch_ms=SWITCH_MS)
    return ServingBoard(simulated, turns, duty, settings.seed, SpanFile(settings.state_dir / SERVED_FILE, ServedSpan))


def restore_duty(turns: DeviceTurns, duty_file: DutyFile, device: Device) -> None:
    """Restore the stored duty and note the current mode; if one cannot be read, still do the other."""
    try:
        turns.in_mode(device.current_mode())
    except WattfleetError as error:
        _log.error("the current power mode cannot be read: %s", error)
    try:
        turns.duty = duty_file.read()
    except WattfleetError as error:
        _log.error("the stored duty cannot be restored: %s", error)


def _duty_figures(turns: DeviceTurns) -> duty_pb2.DutyFigures | None:
    kept = turns.kept_duty()
    return None if kept is None else kept_duty_to_message(kept)
