"""`wattfleet coordinator tag` and `drain`: override which devices can be selected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import JsonOption, connected
from wattfleet_io.console import print_json, print_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wattfleet_proto.v1 import operator_pb2

DevicesArgument = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of the devices.")]


def tag(
    devices: DevicesArgument,
    add: Annotated[
        list[str] | None, typer.Option(allow_from_autoenv=False, help="Add this tag. Repeatable. Default: none.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(allow_from_autoenv=False, help="Remove this tag. Repeatable. Default: none.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Add tags to devices, or remove tags that were added by this command.

    `serve --include tag:NAME` and `--exclude tag:NAME` use tags. Tags of the site file can only be changed there.
    """
    from wattfleet.errors import InvalidInputError
    from wattfleet_proto.v1 import operator_pb2

    if not add and not remove:
        raise InvalidInputError("pass at least one of --add, --remove")
    request = operator_pb2.TagDevicesRequest(device_ids=devices, add=add, remove=remove)
    with connected() as client:
        answer = client.operate("TagDevices", request)
    if json_:
        print_json(_content(answer.devices))
        return
    for override in answer.devices:
        print_line(f"{override.device_id}: {' '.join(override.tags) or 'no tags from this command'}")


def drain(
    devices: DevicesArgument,
    undo: Annotated[
        bool,
        typer.Option(
            "--undo", allow_from_autoenv=False, help="Let the devices be selected again. Default: drain them."
        ),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Exclude devices from new rounds. Devices that are training finish first."""
    from wattfleet_proto.v1 import operator_pb2

    request = operator_pb2.DrainDevicesRequest(device_ids=devices, undo=undo)
    with connected() as client:
        answer = client.operate("DrainDevices", request)
    if json_:
        print_json(_content(answer.devices))
        return
    for override in answer.devices:
        print_line(f"{override.device_id}: {'drained' if override.drained else 'can be selected again'}")


def _content(overrides: Iterable[operator_pb2.DeviceOverrides]) -> list[dict[str, Any]]:
    return [
        {"device_id": override.device_id, "operator_tags": list(override.tags), "drained": override.drained}
        for override in overrides
    ]
