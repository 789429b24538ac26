"""`wattfleet coordinator init`, `rotate-authority` and `browser-certificate`."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import OPERATOR_OR_USER, ClientCommand, JsonOption, connected, own_identity
from wattfleet.common.addresses import IDENTITY_VARIABLE
from wattfleet.common.console import count_of, print_json, print_line

# --- Authority --------------------------------------------------------------------------------------------------------
# `wattfleet coordinator init` and `rotate-authority`: create the fleet's certificate authority, and replace it.


app = typer.Typer(no_args_is_help=True, help="Replace the fleet's certificate authority without a gap.")

_MAX_SHOWN = 20


def init(
    identity: Annotated[
        Path, typer.Option(help="Create the authority in this folder; `serve --identity` uses it.")
    ] = Path("wattfleet-identity"),
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or IP address of this machine, for clients that check it, such as Prometheus. Repeatable."
            " Default: none; agents and commands do not need it."
        ),
    ] = None,
    fleet: Annotated[str | None, typer.Option(help="Name of the fleet. Default: a random one.")] = None,
    json_: JsonOption = False,
) -> None:
    """Create the fleet's certificate authority and the identity of its first operator, on the coordinator's machine."""
    from coordinator.identity.authority_folder import AuthorityFolder, folder_of, make_operator
    from wattfleet.common.clock import utc_now
    from wattfleet.core.errors import InvalidInputError

    now, is_new = utc_now(), not AuthorityFolder.exists(identity)
    authority = AuthorityFolder.create(identity, host or (), now, fleet) if is_new else AuthorityFolder.open(identity)
    if fleet not in (None, authority.authority.fleet):
        raise InvalidInputError(
            f"{identity} has the authority of the fleet {authority.authority.fleet!r}: leave out --fleet, or choose"
            " another folder"
        )
    try:
        make_operator(authority, now)
    except OSError as error:
        raise InvalidInputError(f"cannot write to {folder_of(identity)}: {error.strerror}") from None
    if json_:
        content = {"identity": str(identity), "operator": str(folder_of(identity)), "new": is_new}
        print_json({"fleet": authority.authority.fleet, **content})
        return
    already = "" if is_new else "already "
    print_line(f"the authority of the fleet {authority.authority.fleet} is {already}in {identity}")
    print_line("keep a backup of this folder, and let nobody else read it: whoever has it can issue certificates")
    print_line(f"the operator's identity is in {folder_of(identity)}")


@app.command("begin", cls=ClientCommand)
def begin(json_: JsonOption = False) -> None:
    """Create a new authority. It issues all further certificates, and machines trust it after their next renewal."""
    from wattfleet.core.errors import WattfleetError
    from wattfleet_proto.v1 import identity_pb2

    with connected() as client:
        answer = client.administer("BeginRotation", identity_pb2.BeginRotationRequest())
        try:
            renewed = client.renew_certificate()  # only commands renew this certificate
        except WattfleetError as error:
            renewed = ""
            print_line(f"warning: the certificate of this command could not be renewed: {error}", to_stderr=True)
    names = [f"{each.role} {each.name}" for each in answer.to_renew]
    names = [name for name in names if name != renewed]
    if json_:
        print_json({"to_renew": names})
        return
    print_line(f"a new authority issues certificates; {count_of(len(names), 'owner')} have to renew theirs")
    for name in names[:_MAX_SHOWN]:
        print_line(f"  {name}")
    if len(names) > _MAX_SHOWN:
        print_line(f"  and {len(names) - _MAX_SHOWN:,} more")
    print_line("agents renew by themselves; then run: wattfleet coordinator rotate-authority finish")


@app.command("finish", cls=ClientCommand)
def finish(json_: JsonOption = False) -> None:
    """Remove the old authority once every certificate was renewed. This closes invites that are still open."""
    from wattfleet_proto.v1 import identity_pb2

    with connected() as client:
        client.administer("FinishRotation", identity_pb2.FinishRotationRequest())
    if json_:
        print_json({"finished": True})
    else:
        print_line("the old authority is removed; its certificates are no longer accepted")
        print_line("open invites referred to it and are closed: create new ones")


# --- Browser certificate ----------------------------------------------------------------------------------------------
# `wattfleet coordinator browser-certificate`: the file with which a browser may open the page over TLS.


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
    from wattfleet.common.atomic_files import replace_file
    from wattfleet.common.identity.channels import require_identity
    from wattfleet.common.identity.http_access import browser_bundle
    from wattfleet.common.identity.identity_folder import SECRET_MODE, TRUSTED
    from wattfleet.core.errors import InvalidInputError

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
