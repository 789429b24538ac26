"""`wattfleet coordinator tag` and `drain`: the operator's say in which devices take part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import DEFAULT_ADDRESS, CoordinatorOption, JsonOption, connected, print_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wattfleet_proto.v1 import operator_pb2

DevicesArgument = Annotated[list[str], typer.Argument(metavar="ID...", help="The devices.")]


def tag(
    device_ids: DevicesArgument,
    add: Annotated[list[str] | None, typer.Option(help="A tag to give them; may be repeated.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="A tag to take from them; may be repeated.")] = None,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    json_: JsonOption = False,
) -> None:
    """Tag devices, beside the tags of the site file, for `serve --include tag:NAME` and `--exclude tag:NAME`."""
    from wattfleet.errors import InvalidInputError
    from wattfleet_proto.v1 import operator_pb2

    if not add and not remove:
        raise InvalidInputError("say which tags to --add or to --remove")
    request = operator_pb2.TagDevicesRequest(device_ids=device_ids, add=add, remove=remove)
    with connected(coordinator) as client:
        answer = client.operate("TagDevices", request)
    if json_:
        print_json(_content(answer.devices))
        return
    for say in answer.devices:
        print(f"{say.device_id}: {' '.join(say.tags) or 'no tags by command'}")


def drain(
    device_ids: DevicesArgument,
    undo: Annotated[bool, typer.Option("--undo", help="Choose them again.")] = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    json_: JsonOption = False,
) -> None:
    """Choose devices for no new round; what they train now they finish."""
    from wattfleet_proto.v1 import operator_pb2

    request = operator_pb2.DrainDevicesRequest(device_ids=device_ids, undo=undo)
    with connected(coordinator) as client:
        answer = client.operate("DrainDevices", request)
    if json_:
        print_json(_content(answer.devices))
        return
    for say in answer.devices:
        print(f"{say.device_id}: {'drained' if say.drained else 'may be chosen again'}")


def _content(says: Iterable[operator_pb2.DeviceOverrides]) -> list[dict[str, Any]]:
    return [{"device_id": say.device_id, "operator_tags": list(say.tags), "drained": say.drained} for say in says]
