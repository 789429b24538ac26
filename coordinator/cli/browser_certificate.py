"""`wattfleet coordinator browser-certificate`: the file with which a browser may open the page over TLS."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import OPERATOR_OR_USER, own_identity
from wattfleet_io.connection_variables import IDENTITY_VARIABLE
from wattfleet_io.console import print_line


def browser_certificate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Write this new file, such as wattfleet.p12.", dir_okay=False)
    ],
    identity: Annotated[
        Path | None,
        typer.Option(
            envvar=IDENTITY_VARIABLE,
            help="Use the key and the certificate in this folder, of an operator or a viewer. Default:"
            f" {OPERATOR_OR_USER}.",
        ),
    ] = None,
) -> None:
    """Write the file that a browser imports to open the coordinator's page over TLS, and print its new password."""
    from wattfleet.errors import InvalidInputError
    from wattfleet_identity.browser_bundle import browser_bundle
    from wattfleet_identity.endpoint import require_identity
    from wattfleet_identity.identity_folder import SECRET_MODE, TRUSTED
    from wattfleet_io.atomic_files import replace_file

    if os.path.lexists(file):
        raise InvalidInputError(f"{file} exists already: remove it, or name another file")
    folder = own_identity(identity)
    if folder is None:
        raise InvalidInputError("there is no identity: enrol with `wattfleet join`, or name a folder with --identity")
    found, password = require_identity(folder), secrets.token_urlsafe(15)
    try:
        replace_file(file, browser_bundle(found, password), mode=SECRET_MODE)
    except OSError as error:
        raise InvalidInputError(f"cannot write {file}: {error.strerror}") from None
    print_line(f"{file} has the certificate of {found.peer}, valid until {found.certificate.not_after:%Y-%m-%d}")
    print_line(f"password for the import: {password}")
    print_line(
        f'Create a browser profile only for the page. Import {file} there under "Your certificates", and'
        f' {folder / TRUSTED} under "Authorities", to trust it for websites.'
    )
    print_line(
        "Do not visit other websites with it: anyone who steals the key of the fleet's authority could pose as any of "
        "them."
    )
    print_line(f"Then delete {file}, because it contains a private key.")
