"""`wattfleet agent join`: enrol the device with a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_agent.cli.options import DeviceOption, StateDirOption, open_named
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

    from edge_agent.runtime.installation import installation_name
    from wattfleet_identity.invite_input import plausible_time
    from wattfleet_identity.joining import Applicant, join_and_store, require_writable
    from wattfleet_identity.renewal import expiry_text
    from wattfleet_io.clock import utc_now

    invite = read_invite(arguments, "wattfleet agent join")
    folder = identity or state_dir / IDENTITY_DIRECTORY
    now = plausible_time(invite, utc_now())
    require_writable(folder)
    board = open_named(device, state_dir).board_kind
    installation = installation_name(state_dir / INSTALLATION_FILE)
    applicant = Applicant(device_id or platform.node(), board, installation)
    supernode = state_dir / SUPERNODE_DIRECTORY
    found = join_and_store(invite, applicant, folder, now, supernode)
    print_line(f"{found.peer} is enrolled in {found.peer.fleet}; the certificate {expiry_text(found.certificate, now)}")
    print_line(f"identity: {folder}; coordinator: {found.coordinator}")
    print_line(f"SuperNode: {supernode}; SuperLink: {found.superlink or 'the coordinator was not told its address'}")
    print_line(
        f"next: wattfleet agent install --coordinator {found.coordinator}"
        + ("" if found.peer.name == platform.node() else f" --device-id {found.peer.name}")
        + ", or restart the agent if it is installed"
    )
