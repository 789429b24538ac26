"""`wattfleet coordinator certificates`, `certificate` and `revoke`: list, issue and revoke certificates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.budget import seconds
from coordinator.cli.options import JsonOption, connected, show
from wattfleet_io.console import count_of, print_json, print_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wattfleet_proto.v1 import identity_pb2


def certificates(
    supernodes: Annotated[
        Path | None,
        typer.Option(
            help="Write the public keys of the devices' SuperNodes to this folder, for `flwr supernode register`."
            " Default: none."
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """List the certificates that have not expired, the newest of each owner first."""
    with connected() as client:
        if supernodes is None:
            show(lambda: [_content(each) for each in client.certificates()], _table, json_, watch=False)
            return
        views = client.certificates()
    written = _write_keys(supernodes, views)
    if json_:
        print_json([{"device_id": name, "file": str(file)} for name, file in written.items()])
        return
    for name, file in written.items():
        print(f"flwr supernode register {file} CONNECTION --name {name}")
    if not written:
        print_line("no device has enrolled with the key of a SuperNode")


def certificate(
    name: Annotated[str, typer.Argument(help="Name of the program or person that uses the certificate.")],
    out: Annotated[Path, typer.Option(help="Write the key and the certificate to this folder.")],
    role: Annotated[
        str,
        typer.Option(
            allow_from_autoenv=False, help="Role of the program or person: flower, superlink, operator or viewer."
        ),
    ] = "viewer",
    lifetime: Annotated[
        str | None,
        typer.Option(help="Let it expire after this long, such as 365d. Default: as the coordinator's setting says."),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Create a certificate for NAME on this machine, for example for Prometheus."""
    from wattfleet.errors import InvalidInputError
    from wattfleet_identity.certificates import new_key, request_certificate
    from wattfleet_identity.identity_folder import Identity, read_identity, write_identity
    from wattfleet_proto.v1 import identity_pb2

    if read_identity(out) is not None:
        raise InvalidInputError(f"{out} has a certificate already: choose another folder, or remove it first")
    key_pem = new_key()
    request = identity_pb2.IssueCertificateRequest(
        request_pem=request_certificate(key_pem),
        role=role,
        name=name,
        lifetime_s=0.0 if lifetime is None else seconds(lifetime),
    )
    with connected() as client:
        answer = client.administer("IssueCertificate", request)
    identity = Identity(
        key_pem, answer.certificate_pem, answer.trusted_pem, answer.coordinator, answer.server_name, answer.superlink
    )
    try:
        write_identity(out, identity)
    except OSError as error:
        raise InvalidInputError(f"cannot write to {out}: {error.strerror}") from None
    expires = identity.certificate.not_after
    if json_:
        print_json({"folder": str(out), "serial": identity.certificate.serial, "expires": expires.isoformat()})
    else:
        print_line(f"the certificate of {identity.peer} is in {out}; it expires on {expires:%Y-%m-%d}")


def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME|SERIAL", help="Name of its owner, or its serial number.")],
    reason: Annotated[
        str, typer.Option(allow_from_autoenv=False, help="Reason to show in the list of certificates. Default: none.")
    ] = "",
    role: Annotated[
        str | None,
        typer.Option(
            allow_from_autoenv=False,
            help="Revoke only the certificates of this role, such as device. Default: those of every role, after a"
            " confirmation if there are several and the command runs on a terminal.",
            show_default=False,
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Revoke the certificates of a name, or a single one. Sessions that began with them end."""
    from wattfleet_proto.v1 import identity_pb2

    owner = name if role is None else f"{role} {name}"
    request = identity_pb2.RevokeCertificatesRequest(name_or_serial=owner, reason=reason)
    with connected() as client:
        if role is None and sys.stdin.isatty():
            _confirm_roles(name, client.certificates())
        answer = client.administer("RevokeCertificates", request)
    if json_:
        print_json([_content(each) for each in answer.certificates])
        return
    for each in answer.certificates:
        print_line(f"the certificate {each.serial} of {each.role} {each.name} is revoked")
    if answer.ended_sessions:
        print_line(f"{count_of(answer.ended_sessions, 'session')} ended")


def _confirm_roles(name: str, views: Sequence[identity_pb2.CertificateView]) -> None:
    """Ask for confirmation if a name has certificates of several roles, whose owners may be unrelated.

    Raises:
        typer.Exit: the user declines; the exit code is 2.
    """
    roles = sorted({each.role for each in views if each.name == name and not each.HasField("revoked_unix_s")})
    if len(roles) < 2:
        return
    print_line(f"{name} has certificates of several roles: {', '.join(roles)}", to_stderr=True)
    if not typer.confirm("Revoke all of them?", default=True, err=True):
        print_line(f"nothing was revoked: repeat the command with --role {' or --role '.join(roles)}", to_stderr=True)
        raise typer.Exit(2)


def _write_keys(folder: Path, views: Sequence[identity_pb2.CertificateView]) -> dict[str, Path]:
    """Write the SuperNodes' public keys, and return the file of each device.

    Raises:
        InvalidInputError: the folder cannot be written.
    """
    from urllib.parse import quote

    from wattfleet.errors import InvalidInputError
    from wattfleet_io.atomic_files import replace_file

    written: dict[str, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each in views:  # the newest certificate of each device comes first
            if each.flower_public_key and not each.HasField("revoked_unix_s") and each.name not in written:
                file = folder / f"{quote(each.name, safe='')}.pub"
                replace_file(file, f"{each.flower_public_key} {quote(each.name)}\n".encode())
                written[each.name] = file
    except OSError as error:
        raise InvalidInputError(f"cannot write to {folder}: {error.strerror}") from None
    return written


def _content(view: identity_pb2.CertificateView) -> dict[str, Any]:
    from datetime import datetime, timezone

    def time(unix_s: float) -> str:
        return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec="seconds")

    return {
        "serial": view.serial,
        "role": view.role,
        "name": view.name,
        "board": view.board or None,
        "installation": view.installation or None,
        "renewed": time(view.issued_unix_s),
        "expires": time(view.expires_unix_s),
        "revoked": time(view.revoked_unix_s) if view.HasField("revoked_unix_s") else None,
        "reason": view.reason,
        "flower_public_key": view.flower_public_key or None,
    }


def _table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from datetime import datetime

    from rich.text import Text

    from coordinator.display.wording import moment
    from wattfleet_io.tables import Column, FittingTable, columns

    if not found:
        return Text("no certificates: a machine gets one with an invite from `wattfleet coordinator invite`")
    table = FittingTable(
        columns("name", "role", "serial", Column("renewed", rank=2), "expires", Column("revoked", rank=1))
    )
    for each in found:
        renewed, expires = (moment(datetime.fromisoformat(each[name])) for name in ("renewed", "expires"))
        revoked = "-" if each["revoked"] is None else moment(datetime.fromisoformat(each["revoked"]))
        style = "" if each["revoked"] is None else "bold red"
        table.add(Text(each["name"]), each["role"], each["serial"][:12], renewed, expires, Text(revoked, style=style))
    return table
