"""`wattfleet coordinator devices` and `device`: the fleet, and one device of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import (
    DEFAULT_ADDRESS,
    CoordinatorOption,
    JsonOption,
    WatchOption,
    connected,
    print_json,
    show,
)
from coordinator.cli.wording import counted, duration, moment, number, watts

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from wattfleet_proto.v1 import view_pb2

_STATES = ("enrolled", "profiling", "ready", "training", "degraded", "offline")
_STYLES = {"ready": "green", "training": "bold green", "degraded": "bold red", "offline": "red", "profiling": "yellow"}
_FRONT_ROWS = 12
_LEAST_FOR_WORDS = 10


def devices(
    state: Annotated[
        list[str] | None, typer.Option(help=f"Only devices in this state: {', '.join(_STATES)}; may be repeated.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only devices with this tag; may be repeated.")] = None,
    watch: WatchOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    json_: JsonOption = False,
) -> None:
    """Show all devices: what they are doing, how far they are measured, what they offer."""
    from wattfleet.errors import InvalidInputError

    states, tags = set(state or _STATES), set(tag or ())
    if unknown := states - set(_STATES):
        raise InvalidInputError(f"no state {sorted(unknown)[0]!r}: choose of {', '.join(_STATES)}")
    with connected(coordinator) as client:

        def content() -> list[dict[str, Any]]:
            found = [_content(view) for view in client.devices()]
            return [each for each in found if each["state"] in states and (not tags or tags & set(each["tags"]))]

        show(content, _table, json_, watch)


def device(
    device_id: Annotated[str, typer.Argument(metavar="ID", help="The device.")],
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    json_: JsonOption = False,
) -> None:
    """Show all that is known of one device, with its front."""
    with connected(coordinator) as client:
        (view,) = client.devices(device_id, with_fronts=True, with_times=True)
    content = {**_content(view), "front": _front_content(view)}
    if json_:
        print_json(content)
    else:
        _print(content)


def _content(view: view_pb2.DeviceView) -> dict[str, Any]:
    from coordinator.cli.view_values import device_values

    values = device_values(view)
    return {**values, "tags": sorted({*values["site_tags"], *values["operator_tags"]})}


def _front_content(view: view_pb2.DeviceView) -> list[dict[str, Any]] | None:
    from wattfleet_proto.convert import front_from_message

    if not view.HasField("front"):
        return None
    front = front_from_message(view.front)
    return [
        {
            "mode": front.mode(k)._asdict(),
            "warmup_s": float(front.warmup_s[k]),
            "epoch_s": float(front.epoch_s[k]),
            "power_w": float(front.power_w[k]),
            "planned_w": float(front.planned_w[k]),
        }
        for k in range(len(front))
    ]


def _state(content: dict[str, Any]) -> Any:
    from rich.text import Text

    text = Text(content["state"], style=_STYLES.get(content["state"], ""))
    if content["drained"]:
        text.append("\ndrained", style="yellow")
    return text


def _table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from rich.text import Text

    from coordinator.cli.layout import Fitting, Way, columns

    if not found:
        return Text("no devices")
    counts = {state: sum(each["state"] == state for each in found) for state in _STATES}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    drained = sum(each["drained"] for each in found)
    line = f"{counted(len(found), 'device')}: {told}" + (f"; {drained} drained" if drained else "")

    def table(more: Sequence[str]) -> Table:
        """The fleet; of what a device says itself as much as there is room for."""
        table = columns(("device", "board", "state"), ("modes", "idle W", "1 epoch"))
        for name in more:
            table.add_column(name, overflow="fold")
        for each in found:
            words = {"tags": Text(" ".join(each["tags"])), "detail": Text(each["detail"], style="dim")}
            table.add_row(
                Text(each["device_id"]),
                Text(each["board"]),
                _state(each),
                f"{each['profiled_modes']:,}",
                number(each["idle_w"]),
                duration(each["fastest_epoch_s"]),
                *(words[name] for name in more),
            )
        return table

    def way(*more: str, note: str = "") -> Way:
        notes = [Text(note, style="dim")] if note else []
        return Way(table(()), _LEAST_FOR_WORDS * len(more), [table(more), Text(line, style="bold"), *notes])

    return Fitting(
        lambda: way("tags", "detail"),
        lambda: way("detail", note="a wider terminal shows tags, too"),
        lambda: way(note="a wider terminal shows tags and details, too"),
    )


def _print(content: dict[str, Any]) -> None:
    from datetime import datetime, timezone

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("how it stands", overflow="fold")
    given, limit_w, seen = set(content["operator_tags"]), content["limit_w"], content["last_seen_unix_s"]
    tags = [f"{tag} (by command)" if tag in given else tag for tag in content["tags"]]
    lines = {
        "device": f"{content['device_id']}: {content['board']} ({content['provenance']})",
        "state": content["state"] + (f": {content['detail']}" if content["detail"] else ""),
        "rounds": "drained: it is chosen for no new one" if content["drained"] else "may be chosen",
        "supply": content["supply"] or "none; the site file attaches it to none, or to several",
        "own limit": "none" if limit_w is None else watts(limit_w),
        "tags": ", ".join(tags) or "none",
        "measured": f"{content['profiled_modes']:,} of {content['mode_count']:,} modes",
        "idle": "not measured yet" if content["idle_w"] is None else f"{content['idle_w']:.1f} W",
        "reference": content["reference_digest"] or "none yet",
        "last word": "not known" if seen is None else moment(datetime.fromtimestamp(seen, timezone.utc)),
    }
    for what, text in lines.items():
        table.add_row(what, Text(text, style=_STYLES.get(content["state"], "") if what == "state" else ""))
    console = Console(highlight=False)
    console.print(table)
    _print_front(console, content["front"])


def _print_front(console: Any, front: Sequence[dict[str, Any]] | None) -> None:
    import numpy as np

    from coordinator.cli.layout import columns
    from wattfleet.modes import PowerMode

    if front is None:
        console.print("\nno front yet: it is reported when the device is measured", style="dim")
        return
    shown = np.unique(np.linspace(0, len(front) - 1, _FRONT_ROWS).round().astype(int)).tolist()
    table = columns(("front: mode",), ("start s", "s/epoch", "W", "W planned"))
    for index in shown:
        point = front[index]
        table.add_row(
            PowerMode(**point["mode"]).label(),
            number(point["warmup_s"]),
            number(point["epoch_s"]),
            number(point["power_w"]),
            number(point["planned_w"]),
        )
    console.print()
    console.print(table)
    if len(shown) < len(front):
        console.print(f"{len(shown)} of {len(front)} modes; --json has all", style="dim")
