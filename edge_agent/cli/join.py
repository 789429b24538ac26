"""`wattfleet agent join`: enrol the device with a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_agent.cli.options import DeviceOption, StateDirOption, open_named, repeated_options
from edge_agent.paths import DEFAULT_STATE_DIRECTORY, IDENTITY_DIRECTORY, INSTALLATION_FILE, SUPERNODE_DIRECTORY
from wattfleet_identity.invite_input import ArgumentsGiven, read_invite
from wattfleet_io.console import print_line


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
    from edge_agent.runtime.installation import installation_name
    from wattfleet_identity.joining import Applicant, enrol

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
