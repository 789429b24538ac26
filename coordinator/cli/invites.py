"""`wattfleet coordinator invite`, `invites` and `cancel-invite`: let machines into the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.budget import seconds
from coordinator.cli.options import JsonOption, connected, show
from wattfleet_io.console import count_of, print_json, print_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wattfleet_proto.v1 import identity_pb2


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
    from wattfleet.errors import InvalidInputError
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
        print_json({"line": answer.line, "command": command, **_content(answer.invite)})
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
        return [_content(each) for each in answer.invites]

    with connected() as client:
        show(content, _table, json_, watch=False)


def cancel_invite(
    number: Annotated[str, typer.Argument(help="Number of the invite, as `invites` lists it.")],
    json_: JsonOption = False,
) -> None:
    """Close the invite NUMBER, such as one whose line was seen by others."""
    from wattfleet_proto.v1 import identity_pb2

    with connected() as client:
        answer = client.administer("CancelInvite", identity_pb2.CancelInviteRequest(number=number))
    if json_:
        print_json(_content(answer.invite))
    else:
        print_line(f"{answer.invite.number}: this invite can no longer be used")


def _content(view: identity_pb2.InviteView) -> dict[str, Any]:
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


def _table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from datetime import datetime

    from rich.text import Text

    from coordinator.display.wording import moment
    from wattfleet_io.tables import Column, FittingTable, columns, numbers

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
