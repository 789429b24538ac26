"""`wattfleet coordinator certificates`, `certificate`, `revoke`, `invite` and `invites`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import JsonOption, connected, show
from wattfleet.common.console import count_of, print_json, print_line
from wattfleet.common.parsing import seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wattfleet_proto.v1 import identity_pb2


# --- Certificates -----------------------------------------------------------------------------------------------------
# `wattfleet coordinator certificates`, `certificate` and `revoke`: list, issue and revoke certificates.


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
            show(
                lambda: [_certificate_content(each) for each in client.certificates()],
                _certificates_table,
                json_,
                watch=False,
            )
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
    from wattfleet.common.identity.certificates import new_key, request_certificate
    from wattfleet.common.identity.identity_folder import Identity, read_identity, write_identity
    from wattfleet.core.errors import InvalidInputError
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
        print_json([_certificate_content(each) for each in answer.certificates])
        return
    for each in answer.certificates:
        print_line(f"the certificate {each.serial} of {each.role} {each.name} is revoked")
    if answer.ended_sessions:
        print_line(f"{count_of(answer.ended_sessions, 'session')} ended")


def _confirm_roles(name: str, views: Sequence[identity_pb2.CertificateView]) -> None:
    """Ask for confirmation if a name has certificates of several roles, whose owners may be unrelated."""
    roles = sorted({each.role for each in views if each.name == name and not each.HasField("revoked_unix_s")})
    if len(roles) < 2:
        return
    print_line(f"{name} has certificates of several roles: {', '.join(roles)}", to_stderr=True)
    if not typer.confirm("Revoke all of them?", default=True, err=True):
        print_line(f"nothing was revoked: repeat the command with --role {' or --role '.join(roles)}", to_stderr=True)
        raise typer.Exit(2)


def _write_keys(folder: Path, views: Sequence[identity_pb2.CertificateView]) -> dict[str, Path]:
    """Write the SuperNodes' public keys, and return the file of each device."""
    from urllib.parse import quote

    from wattfleet.common.atomic_files import replace_file
    from wattfleet.core.errors import InvalidInputError

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


def _certificate_content(view: identity_pb2.CertificateView) -> dict[str, Any]:
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


def _certificates_table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from datetime import datetime

    from rich.text import Text

    from coordinator.display.words import moment
    from wattfleet.common.tables import Column, FittingTable, columns

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


# --- Invites ----------------------------------------------------------------------------------------------------------
# `wattfleet coordinator invite`, `invites` and `cancel-invite`: let machines into the fleet.


def invite(
    device: Annotated[
        str | None,
        typer.Option(
            help="Id of the device, which replaces any enrolled device of this id. Default: the device names itself."
        ),
    ] = None,
    role: Annotated[
        str,
        typer.Option(
            allow_from_autoenv=False, help="Role of the machine: device, flower, superlink, operator or viewer."
        ),
    ] = "device",
    name: Annotated[
        str | None,
        typer.Option(help="Name of the Flower app, SuperLink, operator or viewer. Default: none, as for devices."),
    ] = None,
    site: Annotated[
        str | None, typer.Option(help="Put the device behind this supply. Default: as the site file says.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Give the device this tag. Repeatable. Default: none.")] = None,
    ttl: Annotated[str, typer.Option(help="Let the invite expire after this long, such as 30m or 2d.")] = "1h",
    uses: Annotated[int, typer.Option(allow_from_autoenv=False, help="Let this many machines enrol with it.")] = 1,
    json_: JsonOption = False,
) -> None:
    """Print a line with which a machine enrols. Whoever has the line can enrol, so keep it secret."""
    from wattfleet.core.errors import InvalidInputError
    from wattfleet_proto.v1 import identity_pb2

    if device and (name or role != "device"):
        raise InvalidInputError("--device names a device: leave it out, or leave out --role and --name")
    if uses < 1:
        raise InvalidInputError(f"an invite can be used once or more, not {uses} times")
    request = identity_pb2.InviteRequest(
        role=role, name=device or name or "", site=site or "", tags=tag, uses=uses, ttl_s=seconds(ttl)
    )
    with connected() as client:
        answer = client.administer("Invite", request)
    command = "wattfleet agent join" if role == "device" else "wattfleet join"
    if json_:
        print_json({"line": answer.line, "command": command, **_invite_content(answer.invite)})
        return
    print_line(f"1. On the machine that enrols, run: {command}")
    print_line("2. Paste this line there:")
    print(answer.line)  # longer than a terminal's line, and must not be broken
    print_line(f"It can be used {'once' if uses == 1 else f'{uses:,} times'} within {ttl}. Keep it secret.")


def invites(json_: JsonOption = False) -> None:
    """List the invites that can still be used."""
    from wattfleet_proto.v1 import identity_pb2

    def content() -> list[dict[str, Any]]:
        answer = client.administer("ListInvites", identity_pb2.ListInvitesRequest())
        return [_invite_content(each) for each in answer.invites]

    with connected() as client:
        show(content, _invites_table, json_, watch=False)


def cancel_invite(
    number: Annotated[str, typer.Argument(help="Number of the invite, as `invites` lists it.")],
    json_: JsonOption = False,
) -> None:
    """Close the invite NUMBER, such as one whose line was seen by others."""
    from wattfleet_proto.v1 import identity_pb2

    with connected() as client:
        answer = client.administer("CancelInvite", identity_pb2.CancelInviteRequest(number=number))
    if json_:
        print_json(_invite_content(answer.invite))
    else:
        print_line(f"{answer.invite.number}: this invite can no longer be used")


def _invite_content(view: identity_pb2.InviteView) -> dict[str, Any]:
    from datetime import datetime, timezone

    return {
        "number": view.number,
        "role": view.role,
        "name": view.name or None,
        "site": view.site or None,
        "tags": list(view.tags),
        "made_by": view.made_by,
        "expires": datetime.fromtimestamp(view.expires_unix_s, timezone.utc).isoformat(timespec="seconds"),
        "uses_left": view.uses_left,
    }


def _invites_table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from datetime import datetime

    from rich.text import Text

    from coordinator.display.words import moment
    from wattfleet.common.tables import Column, FittingTable, columns, numbers

    if not found:
        return Text("no open invites: create one with `wattfleet coordinator invite`")
    table = FittingTable(
        columns("number", "role", "name", numbers("uses"), "expires", Column("made by", rank=1)),
        below=lambda shown: [Text(count_of(len(found), "open invite"), style="bold")],
    )
    for each in found:
        expires = moment(datetime.fromisoformat(each["expires"]))
        name, made_by = Text(each["name"] or "-"), Text(each["made_by"])
        table.add(each["number"], each["role"], name, f"{each['uses_left']:,}", expires, made_by)
    return table
