"""The command `wattfleet coordinator export`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import JsonOption, connected
from coordinator.cli.runs import RUN_HELP, names_of, run_id_of
from wattfleet.common.console import count_of, print_json, print_line, terminal


class Format(str, Enum):
    """File formats of the tables."""

    csv = "csv"
    parquet = "parquet"


def export(
    out: Annotated[Path, typer.Option(help="Write the tables to this folder; existing ones are replaced.")],
    format_: Annotated[
        Format,
        typer.Option(
            "--format",
            help="Set the file format. Parquet needs the extra `parquet`. Default: csv.",
            show_default=False,
        ),
    ] = Format.csv,
    run: Annotated[
        list[str] | None,
        typer.Option("--run", help=f"Export only this run: {RUN_HELP}. Repeatable. Default: all runs."),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Export the fleet and its history as tables, one file each.

    Tables: devices, workloads, fronts, runs, rounds, metrics, supplies, assignments, decisions, observations, results.
    """
    from coordinator.cli.export.tables import Tables, require_format, write

    require_format(format_.value)
    tables = Tables()
    with connected() as client, terminal(to_stderr=True).status("asking the coordinator") as status:
        runs = client.runs(with_times=True)
        names = names_of(runs)
        wanted = {run_id_of(names, given) for given in run or ()}
        tables.add_devices(client.devices(with_fronts=True, with_times=True))
        for each in runs:
            if not wanted or each.run_id in wanted:
                status.update(f"run {names[each.run_id]}")
                tables.add_run(each, client.rounds(each.run_id, with_times=True))
        status.update(f"writing {out}")
        written = write(tables, out, format_.value)
    counts = {path: len(tables.rows[path.stem]) for path in written}
    if json_:
        print_json([{"file": str(path), "rows": count} for path, count in counts.items()])
    else:
        for path, count in counts.items():
            print_line(f"{path}: {count_of(count, 'row')}")
