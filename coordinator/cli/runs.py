"""`wattfleet coordinator runs`: all runs, and the cost of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import JsonOption, WatchOption, connected, show
from coordinator.cli.run_names import NO_RUNS, RUN_STYLES
from coordinator.display.wording import moment_of
from wattfleet_io.console import count_of, duration_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coordinator.cli.client import CoordinatorClient

_SHOWN = 20
_NO_SUCH_RUN = "no run has these labels: leave out --label to list all"


def runs(
    limit: Annotated[int, typer.Option("--limit", min=1, help="Show at most this many runs, the newest.")] = _SHOWN,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="KEY=VALUE",
            help="Show only runs with this label. Repeatable: runs with all. Default: all.",
        ),
    ] = None,
    watch: WatchOption = False,
    json_: JsonOption = False,
) -> None:
    """List runs, the newest last, with their workload, progress and cost."""
    from wattfleet_proto.run_names import label_of

    labels = dict(map(label_of, label or ()))
    with connected() as client:
        show(lambda: newest_runs(client, limit, labels), partial(_table, is_filtered=bool(labels)), json_, watch)


def newest_runs(
    client: CoordinatorClient, limit: int, labels: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The newest runs with the totals of their rounds.

    Args:
        client: the coordinator.
        limit: the most runs.
        labels: only runs with all of these labels.

    Returns:
        `runs`: a dictionary for each run, the newest last; `older`: the number of runs that are left out.
    """
    from coordinator.display.run_totals import run_totals
    from coordinator.display.run_words import has_labels
    from coordinator.display.view_values import run_values

    views = [view for view in client.runs(with_times=True) if has_labels(run_values(view), labels)]
    found = [run_totals(view, client.rounds(view.run_id, with_devices=False)) for view in views[-limit:]]
    return {"runs": found, "older": max(0, len(views) - limit)}


def _table(content: dict[str, Any], is_filtered: bool = False) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from coordinator.display.run_totals import ENERGY_NOTE, energy_words, is_in_part
    from coordinator.display.run_words import labels_text
    from wattfleet_io.tables import Column, FittingTable, columns, numbers, texts

    found: Sequence[dict[str, Any]] = content["runs"]
    if not found:
        return Text(_NO_SUCH_RUN if is_filtered else NO_RUNS)
    has_labels = any(each["labels"] for each in found)
    table = FittingTable(
        columns(
            "run",
            "state",
            numbers("rounds"),
            numbers("time", rank=3),
            numbers("energy", rank=2),
            numbers("failed", rank=4),
            Column("started", rank=1),
            Column("id", rank=6),
            *([texts("labels", rank=5)] if has_labels else []),
            texts("workload"),
        )
    )
    for each in found:
        table.add(
            Text(each["name"]),
            Text(each["state"], style=RUN_STYLES.get(each["state"], "")),
            f"{each['rounds_done']:,} of {each['rounds_asked_for']:,}",
            duration_text(each["wall_s"] or None),
            energy_words(each),
            f"{each['failed_trainings']:,}",
            moment_of(each["started_unix_s"]),
            Text(each["run_id"]),
            *([Text(labels_text(each["labels"]))] if has_labels else []),
            Text(each["workload"] or "-"),
        )
    parts: list[RenderableType] = [table]
    if any(map(is_in_part, found)):
        parts.append(Text(ENERGY_NOTE, style="dim"))
    if content["older"]:
        older = count_of(content["older"], "older run")
        parts.append(Text(f"{older} not shown: --limit {len(found) + content['older']} shows all", style="dim"))
    parts += [
        Text(f"run {each['name']}: {each['error']}", style=RUN_STYLES[each["state"]], overflow="fold")
        for each in found
        if each["error"]
    ]
    parts.append(
        Text("next: `rounds --run RUN`, then `round RUN N`; the beginning of a run's name is enough", style="dim")
    )
    return Group(*parts)
