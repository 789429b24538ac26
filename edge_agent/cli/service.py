"""`wattfleet agent join`, `trust-references`, `install`, `run` and `uninstall`: the agent as a member and a service."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from edge_agent.cli.options import (
    DEVICE_HELP,
    DeviceOption,
    JsonOption,
    ProcessorOption,
    StateDirOption,
    open_named,
    repeated_options,
)
from edge_agent.paths import (
    DEFAULT_STATE_DIRECTORY,
    IDENTITY_DIRECTORY,
    INSTALLATION_FILE,
    SUPERNODE_DIRECTORY,
    TRUST_DIRECTORY,
)
from wattfleet.common import systemd
from wattfleet.common.console import print_json, print_line
from wattfleet.common.identity.invites import ArgumentsGiven, read_invite
from wattfleet.common.settings.command import SettingsCommand, effective
from wattfleet.common.systemd import (
    THIS_MACHINE,
    AllowWritableOption,
    DryRunOption,
    ImageToCleanOption,
    ImageToWriteOption,
    YesOption,
)

# --- Join -------------------------------------------------------------------------------------------------------------
# `wattfleet agent join`: enrol the device with a coordinator.


def join(
    arguments: ArgumentsGiven = None,
    device: DeviceOption = "auto",
    device_id: Annotated[
        str | None, typer.Option(help="Set the device's unique name in the fleet. By default, use the host name.")
    ] = None,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    identity: Annotated[
        Path | None,
        typer.Option(
            help=f"Store the key and the certificate in this folder. Default: the folder {IDENTITY_DIRECTORY} in the"
            " state directory.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Enrol the device and its SuperNode, with the line of `wattfleet coordinator invite` from standard input."""
    import platform

    from edge_agent.devices.selection import is_virtual
    from edge_agent.runtime.agent import installation_name
    from wattfleet.common.identity.joining import Applicant, enrol

    def applicant() -> Applicant:
        board = open_named(device, state_dir).board_kind
        return Applicant(device_id or platform.node(), board, installation_name(state_dir / INSTALLATION_FILE))

    invite = read_invite(arguments, "wattfleet agent join")
    supernode = state_dir / SUPERNODE_DIRECTORY
    found = enrol(invite, applicant, identity or state_dir / IDENTITY_DIRECTORY, supernode)
    print_line(f"SuperNode: {supernode}; SuperLink: {found.superlink or 'the coordinator was not told its address'}")
    name = "" if found.peer.name == platform.node() else f" --device-id {found.peer.name}"
    if is_virtual(device):
        print_line(f"next: wattfleet agent run --device-id {found.peer.name}{repeated_options()}")
    else:
        print_line(
            f"next: wattfleet agent install --coordinator {found.coordinator}{name}, or restart the agent if it is"
            " installed"
        )


# --- Trust ------------------------------------------------------------------------------------------------------------
# `wattfleet agent trust-references`: which operator's references the device accepts.


def trust_references(
    root: Annotated[Path, typer.Argument(help="The newest N.root.json from the operator's folder of keys.")],
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Accept only references signed by the keys of ROOT, and those that ship with Wattfleet.

    Restart the agent afterwards.
    """
    from edge_agent.session.references import trust_root
    from wattfleet.common.atomic_files import read_regular_file, require_own_folder
    from wattfleet.common.clock import unix_now_s
    from wattfleet.core.errors import InvalidInputError

    try:
        content = read_regular_file(root)
        require_own_folder(state_dir)
    except OSError as error:
        raise InvalidInputError(f"{error.filename}: cannot be used: {error.strerror}") from None
    digest = trust_root(state_dir / TRUST_DIRECTORY, content, unix_now_s())
    if json_:
        print_json({"sha256": digest})
    else:
        print_line(f"trusted: the root with the SHA-256 {digest}")
        print_line("restart the agent to put it in force")


# --- Install ----------------------------------------------------------------------------------------------------------
# `wattfleet agent install`: run the agent as a systemd service.


def install(
    coordinator: Annotated[str, typer.Option(help="Connect to the coordinator at this address, host:port.")],
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
    device_id: Annotated[
        str | None, typer.Option(help="Set the device's unique name in the fleet. By default, use the host name.")
    ] = None,
    processor: ProcessorOption = "cuda",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            allow_from_autoenv=False,
            help="Let the service connect in plaintext, even to another machine, while the device has no identity. "
            "Anybody on the network can then read and change everything.",
        ),
    ] = False,
    metrics_address: Annotated[
        str | None,
        typer.Option(
            help="Serve Prometheus metrics of this device on this host:port, such as 127.0.0.1:9466. On an address "
            "that other machines can reach, viewers and operators read them over TLS. By default, serve none.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    root: ImageToWriteOption = THIS_MACHINE,
    allow_writable: AllowWritableOption = False,
    json_: JsonOption = False,
) -> None:
    """Show every file and command, ask for confirmation, and install the agent as a systemd service."""
    import platform

    from edge_agent.systemd.installation import ServiceSettings, installation
    from wattfleet.common.identity.channels import PLAINTEXT_WARNING

    settings = ServiceSettings(
        device,
        device_id or platform.node(),
        coordinator,
        processor,
        insecure,
        metrics_address,
    )
    is_exposed = settings.is_exposed(root)
    plan = installation(settings, systemd.running_code(), allow_writable=allow_writable)
    warning = f"the connection to {coordinator} is {PLAINTEXT_WARNING}" if is_exposed else None
    systemd.install(plan, root, dry_run, yes, json_, warning=warning)


# --- Run --------------------------------------------------------------------------------------------------------------
# `wattfleet agent run`: the agent itself, as the service starts it.


class RunCommand(SettingsCommand):
    """The command `run`, with an option for each setting that defines one."""

    model = "edge_agent.settings:AgentSettings"


def run(ctx: typer.Context) -> None:
    """Run the agent: profile the device, report its front, and serve training until stopped."""
    from edge_agent.devices.selection import folder_of_device
    from edge_agent.exporter import is_exposed
    from edge_agent.profiling.profiled_workload import daemon_workload
    from edge_agent.runtime.agent import run_agent
    from edge_agent.settings import AgentSettings
    from wattfleet.common.logs import start_logging
    from wattfleet.common.stop_signals import handled_signals
    from wattfleet.common.version import give_memory_back_early

    settings: AgentSettings = effective(ctx)
    give_memory_back_early()
    start_logging(settings.log.format, settings.log.level)
    settings.endpoint()  # before the device is opened, and likewise the next
    if settings.metrics.address is not None:
        is_exposed(settings.metrics.address, settings.identity_folder, settings.session.insecure)
    spec, state_dir = settings.device.spec, settings.device.state_dir
    board = open_named(spec, state_dir, settings.device.seed)
    workload = settings.workload
    profiled = daemon_workload(board, workload.name, workload.minibatch, workload.processor)

    async def until_stopped() -> None:
        stop = asyncio.Event()
        for number in handled_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run_agent(settings, board, profiled, folder_of_device(spec, state_dir), stop)

    asyncio.run(until_stopped())


# --- Uninstall --------------------------------------------------------------------------------------------------------
# `wattfleet agent uninstall`: remove the systemd service.


def uninstall(
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    root: ImageToCleanOption = THIS_MACHINE,
    json_: JsonOption = False,
) -> None:
    """Stop the service, which restores the device, and remove its files. Profile and predictor are kept."""
    from edge_agent.systemd.installation import SETTINGS_PATH, UNIT_FILE, UNIT_PATH

    kept = f"{DEFAULT_STATE_DIRECTORY} with profile and predictor, and the group"
    systemd.uninstall(UNIT_FILE, [UNIT_PATH, SETTINGS_PATH], kept, root, dry_run, yes, json_)
