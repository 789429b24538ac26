"""`wattfleet join`: enrol a Flower app, a SuperLink, an operator or a viewer with a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wattfleet.common.addresses import IDENTITY_VARIABLE
from wattfleet.common.identity.invites import ArgumentsGiven, InviteCommand, read_invite
from wattfleet.common.settings.user_file import in_home, user_folder

app = typer.Typer(add_completion=False)


@app.command(cls=InviteCommand)
def join(
    arguments: ArgumentsGiven = None,
    identity: Annotated[
        Path | None,
        typer.Option(
            envvar=IDENTITY_VARIABLE,
            help=f"Store the key and the certificate in this folder. Default: {in_home(user_folder())}.",
        ),
    ] = None,
) -> None:
    """Enrol this user with a coordinator.

    Reads the invite, the line that `wattfleet coordinator invite` prints, from standard input.

    On a device, use `wattfleet agent join`.
    """
    from wattfleet.common.identity.joining import Applicant, enrol

    enrol(read_invite(arguments, "wattfleet join"), Applicant, (identity or user_folder()).expanduser())
