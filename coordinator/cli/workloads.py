"""`wattfleet coordinator workloads` and `profile`: list workloads, and measure one ahead of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import (
    JsonOption,
    WatchOption,
    connected,
    show,
)
from coordinator.display.wording import moment, number
from wattfleet_io.console import count_of, print_json, print_line

if TYPE_CHECKING:
    from rich.console import RenderableType

_PROFILE_MODES = 30
_KINDS = ("id:", "tag:", "site:")


def workloads(watch: WatchOption = False, json_: JsonOption = False) -> None:
    """List the workloads of runs and devices: which have predictions and measurements, and when they were used."""
    from coordinator.display.view_values import known_workload_values

    with connected() as client:
        show(lambda: [known_workload_values(view) for view in client.workloads()], _table, json_, watch)


def profile(
    workload: Annotated[str, typer.Option(help="Measure for the workload of this name.")],
    devices: Annotated[
        list[str],
        typer.Option(help="Order these devices: a device's id, id:NAME, tag:NAME or site:NAME, separated by commas."),
    ],
    synthetic: Annotated[
        str | None,
        typer.Option(help="Train this workload that agents ship, such as resnet18. Default: the one named --workload."),
    ] = None,
    modes: Annotated[int, typer.Option(help="Measure at most this many modes on each device.")] = _PROFILE_MODES,
    json_: JsonOption = False,
) -> None:
    """Order devices to measure a workload now, ahead of its first run. They use their full power meanwhile."""
    from wattfleet.modes import require_workload_name
    from wattfleet_io.console import terminal
    from wattfleet_io.tables import grouped
    from wattfleet_proto.v1 import operator_pb2, power_pb2

    require_workload_name(workload)
    request = operator_pb2.ProfileWorkloadRequest(
        workload=power_pb2.Workload(name=workload),
        synthetic=synthetic or "",
        modes=modes,
        devices=[each if each.startswith(_KINDS) else f"id:{each}" for some in devices for each in some.split(",")],
    )
    with connected() as client:
        answer = client.operate("ProfileWorkload", request)
    not_told = {each.device_id: each.reason for each in answer.not_told}
    if json_:
        print_json({"device_ids": list(answer.device_ids), "not_told": not_told})
        return
    print_line(f"{count_of(len(answer.device_ids), 'device')} ordered to measure {workload}")
    if answer.device_ids:
        print_line("progress: `devices --watch`; an agent that cannot measure it logs why")
    if not_told:
        terminal().print(grouped(((each, f"not ordered: {reason}") for each, reason in not_told.items()), "yellow"))


def _table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from datetime import datetime, timezone

    from rich.text import Text

    from wattfleet_io.tables import Column, FittingTable, columns, numbers, texts

    if not found:
        return Text(
            "no workloads yet: start a run, which states its workload, or measure one ahead with `wattfleet "
            "coordinator profile`"
        )
    table = FittingTable(
        columns(
            Column("task", rank=2),
            numbers("devices"),
            numbers("measured"),
            numbers("modes", rank=1),
            numbers("live runs", rank=3),
            Column("last run", rank=4),
            texts("workload"),
        )
    )
    for each in found:
        used = each["last_used_unix_s"]
        table.add(
            each["task"],
            f"{each['devices']:,}",
            f"{each['measured_devices']:,}",
            number(each["median_modes"], 0),
            f"{len(each['live_run_ids']):,}",
            "-" if used is None else moment(datetime.fromtimestamp(used, timezone.utc)),
            Text(each["workload"]),
        )
    return table
