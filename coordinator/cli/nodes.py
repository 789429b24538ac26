"""`wattfleet coordinator nodes`: Flower's nodes, and whether each can train on the device that it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import JsonOption, WatchOption, connected, show
from wattfleet_io.console import count_of

if TYPE_CHECKING:
    from rich.console import RenderableType

_UNKNOWN = "no agent ever connected with this id: correct the SuperNode's device-id, or start the device's agent"
_UNCHECKED = "not checked: the SuperNode or the device's agent is older than protocol 2.7"


def nodes(
    all_: Annotated[
        bool, typer.Option("--all", help="Show also nodes that a later node of the same device has replaced.")
    ] = False,
    watch: WatchOption = False,
    json_: JsonOption = False,
) -> None:
    """List Flower's nodes with their devices, and what to fix if a node cannot train on its device."""
    from coordinator.display.view_values import node_values

    with connected() as client:

        def content() -> list[dict[str, Any]]:
            found = [node_values(view) for view in client.nodes()]
            found = found if all_ else _current(found)
            return [{**each, "status": _status(each), "remedy": _remedy(each)} for each in found]

        show(content, _table, json_, watch)


def _current(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out nodes that were replaced: a SuperNode that was restarted has a new node id."""

    def age(node: dict[str, Any]) -> tuple[float, float]:
        return node["connected_unix_s"] or 0.0, node["bound_unix_s"] or 0.0

    newest: dict[str, dict[str, Any]] = {}
    for node in found:
        if node["device_id"] not in newest or age(node) > age(newest[node["device_id"]]):
            newest[node["device_id"]] = node

    def is_current(node: dict[str, Any]) -> bool:
        latest = newest[node["device_id"]]
        connected_s = node["connected_unix_s"]
        return node is latest or (connected_s is not None and connected_s == latest["connected_unix_s"])

    return [node for node in found if is_current(node)]


def _status(node: dict[str, Any]) -> str:
    if node["pairing_problem"]:
        return "cannot train"
    if node["device_state"] is None:
        return "unknown device"
    return "not checked" if node["pairing_problem"] is None else "paired"


def _remedy(node: dict[str, Any]) -> str | None:
    """What is wrong and the remedy; None if nothing is wrong."""
    if node["pairing_problem"]:
        return str(node["pairing_problem"])
    return {"unknown device": _UNKNOWN, "not checked": _UNCHECKED}.get(_status(node))


def _table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from datetime import datetime, timezone

    from rich.console import Group
    from rich.text import Text

    from coordinator.display.wording import moment
    from wattfleet_io.tables import Column, FittingTable, columns

    if not found:
        return Text(
            "no Flower node has reported its device yet: start the SuperNodes, each with its device-id, and a run "
            "(docs/flower.md). Nodes are queried before its first plan"
        )
    styles = {"paired": "green", "not checked": "dim"}
    table = FittingTable(
        columns("device", Column("its agent", rank=1), "pairing", Column("connected", rank=2), Column("node", rank=3))
    )
    for each in found:
        seen = each["connected_unix_s"]
        table.add(
            Text(each["device_id"]),
            each["device_state"] or "unknown",
            Text(each["status"], style=styles.get(each["status"], "bold red")),
            "-" if seen is None else moment(datetime.fromtimestamp(seen, timezone.utc)),
            str(each["node_id"]),
        )
    unpaired = sum(each["status"] not in styles for each in found)
    summary = f"{count_of(len(found), 'node')}: " + (f"{unpaired} to fix" if unpaired else "nothing to fix")
    problems = [
        Text(f"{each['device_id']}: {each['remedy']}", style="" if each["status"] in styles else "red")
        for each in found
        if each["remedy"]
    ]
    return Group(table, Text(summary, style="bold"), *problems)
