"""`wattfleet coordinator events`: what happened to devices, runs, rounds and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.budget import seconds
from coordinator.cli.options import JsonOption, WatchOption, connected, show
from coordinator.cli.run_names import RUN_HELP, names_of, run_id_of
from coordinator.display.event_words import EVENT_KINDS, subject
from coordinator.display.wording import date_and_time

if TYPE_CHECKING:
    from rich.console import RenderableType

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

    from coordinator.display.run_words import RunNames
    from coordinator.display.view_values import event_values, run_values
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

    from wattfleet_io.tables import Column, FittingTable, columns, texts

    if not found:
        return Text("nothing has happened that is an event, or nothing matches the options")
    table = FittingTable(columns("when", Column("kind", rank=1), "who", texts("what")))
    for each in found:
        text = Text(each["text"], style="red" if each["needs_attention"] else "")
        if each["caller"]:
            text.append(f" (by {each['caller']})", style="dim")
        table.add(date_and_time(each["at"]), each["kind"], Text(each["subject"]), text)
    return table
