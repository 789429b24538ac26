"""The agent daemon: from the reference predictor to a front, and then from round to round."""

from __future__ import annotations

import asyncio

from edge_agent.devices.device import Device
from edge_agent.paths import INSTALLATION_FILE, OUTBOX_FILE, WELCOME_FILE
from edge_agent.profiling.profiled_workload import ProfiledWorkload
from edge_agent.runtime.config import AgentConfig
from edge_agent.runtime.installation import installation_name
from edge_agent.runtime.serving import DeviceServing
from edge_agent.session.connection import connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.outbox import Outbox, OutboxFile
from edge_agent.session.welcomes import WelcomeFile, Welcomes
from edge_agent.training.knob_backup import backed_up
from edge_agent.training.unix_socket import require_own_socket
from wattfleet_io.tasks import run_until_first
from wattfleet_proto.convert import provenance_to_message
from wattfleet_proto.v1 import session_pb2
from wattfleet_proto.version import own_version


async def run_agent(config: AgentConfig, device: Device, profiled: ProfiledWorkload, stop: asyncio.Event) -> None:
    """Serve one device until `stop` is set; it is left as it was found.

    Args:
        config: how to run.
        device: the board.
        profiled: what is trained while modes are measured.
        stop: ends it.

    Raises:
        InvalidInputError: the coordinator refused the device, or the socket cannot be served.
        CorruptReferenceError: the reference that came is not the one that was promised.
        DeviceBusyError: another agent has the device.
        KnobBackupError: what is in force on the device cannot be put on disk; it was not touched.
        WattfleetError: the device could not be profiled; what was measured is kept.
    """
    require_own_socket(config.socket)
    with backed_up(device, config.device_folder):
        await _run_with_device(config, device, profiled, stop)


async def _run_with_device(
    config: AgentConfig, device: Device, profiled: ProfiledWorkload, stop: asyncio.Event
) -> None:
    connect = connects_to(config.coordinator)
    hello = session_pb2.Hello(
        device_id=config.device_id,
        board=device.board_kind,
        provenance=provenance_to_message(device.provenance),
        mode_count=len(device.modes),
        protocol=own_version(),
        installation=installation_name(config.state_directory / INSTALLATION_FILE),
    )
    welcomes = Welcomes(WelcomeFile(config.state_directory / WELCOME_FILE))
    link = CoordinatorSession(connect, hello, welcomes.came, Outbox(OutboxFile(config.state_directory / OUTBOX_FILE)))
    rounds = DeviceServing(config, device, profiled, link, welcomes, connect)
    await run_until_first({"session": link.run(), "rounds": rounds.run(), "stop": stop.wait()})
