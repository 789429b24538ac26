"""`wattfleet coordinator events` and `audit`: what happened, and what operators asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import JsonOption, WatchOption, connected, show
from coordinator.cli.runs import RUN_HELP, names_of, run_id_of
from coordinator.display.words import EVENT_KINDS, date_and_time, subject
from wattfleet.common.console import print_json, print_line
from wattfleet.common.parsing import seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


# --- Events -----------------------------------------------------------------------------------------------------------
# `wattfleet coordinator events`: what happened to devices, runs, rounds and budgets.


_SHOWN = 50


def events(
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Show only events of this kind: {', '.join(EVENT_KINDS)}. Repeatable. Default: all.",
            autocompletion=lambda: EVENT_KINDS,
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Show only events of this device. Default: all.")] = None,
    run: Annotated[str | None, typer.Option("--run", help=f"Show only this run: {RUN_HELP}. Default: all.")] = None,
    supply: Annotated[
        str | None,
        typer.Option(help="Show only this supply, and the supplies and devices behind it. Default: all."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Show only events of this last period, such as 12h or 7d. Default: all.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many events, the newest.")] = _SHOWN,
    watch: WatchOption = False,
    json_: JsonOption = False,
) -> None:
    """List what happened to devices, runs, rounds and budgets, the newest last."""
    import time

    from coordinator.display.values import event_values, run_values
    from coordinator.display.words import RunNames
    from wattfleet_proto.v1 import view_pb2

    since_s = None if since is None else seconds(since)
    with connected() as client:

        def content() -> list[dict[str, Any]]:
            runs = client.runs()
            names = RunNames(map(run_values, runs))
            request = view_pb2.ListEventsRequest(
                kinds=kind or (),
                device_id=device or "",
                run_id="" if run is None else run_id_of(names_of(runs), run),
                supply=supply or "",
                since_unix_s=None if since_s is None else time.time() - since_s,
                limit=limit,
            )
            found = [event_values(each) for each in client.events(request)]
            return [{**each, "subject": subject(each, names)} for each in reversed(found)]

        show(content, _table, json_, watch)


def _table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from rich.text import Text

    from wattfleet.common.tables import Column, FittingTable, columns, texts

    if not found:
        return Text("nothing has happened that is an event, or nothing matches the options")
    table = FittingTable(columns("when", Column("kind", rank=1), "who", texts("what")))
    for each in found:
        text = Text(each["text"], style="red" if each["needs_attention"] else "")
        if each["caller"]:
            text.append(f" (by {each['caller']})", style="dim")
        table.add(date_and_time(each["at"]), each["kind"], Text(each["subject"]), text)
    return table


# --- Audit log --------------------------------------------------------------------------------------------------------
# `wattfleet coordinator audit-log`: what operators changed.


def audit_log(
    since: Annotated[
        str | None, typer.Option(help="List only requests of this last period, such as 7d. Default: all that are kept.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """List what operators changed or tried to change: when, who, and what. At most the newest 10,000 are listed."""
    import time
    from datetime import datetime, timezone

    since_unix_s = None if since is None else time.time() - seconds(since)
    with connected() as client:
        entries = client.audit_log(since_unix_s)
    content = [
        {
            "at": datetime.fromtimestamp(each.at_unix_s, timezone.utc).isoformat(timespec="seconds"),
            "caller": each.caller,
            "method": each.method,
            "request": each.request,
            "outcome": each.outcome or None,
        }
        for each in entries
    ]
    if json_:
        print_json(content)
        return
    for each in content:
        print_line(" ".join(filter(None, (each["at"], f"{each['caller']}:", each["method"], each["request"]))))
        if each["outcome"]:
            print_line(f"  {each['outcome']}")
    if not content:
        print_line("no operator has changed anything")
