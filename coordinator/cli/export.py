"""`wattfleet coordinator export`: all that was planned and observed, as tables."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import DEFAULT_ADDRESS, CoordinatorOption, JsonOption, connected, print_json
from coordinator.cli.wording import counted


class Format(str, Enum):
    """What tables are written as."""

    csv = "csv"
    parquet = "parquet"


def export(
    out: Annotated[Path, typer.Option(help="Folder to write to; tables that are there are replaced.")],
    format_: Annotated[Format, typer.Option("--format", help="Parquet needs the extra `parquet`.")] = Format.csv,
    run: Annotated[
        list[str] | None, typer.Option("--run", help="Only this run; may be repeated.  [default: all]")
    ] = None,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    json_: JsonOption = False,
) -> None:
    """Write devices, fronts, runs, rounds, assignments, decisions, observations and results, a table each."""
    from rich.console import Console

    from coordinator.cli.exporting import Tables, require_format, write
    from wattfleet.errors import InvalidInputError

    require_format(format_.value)
    tables = Tables()
    with connected(coordinator) as client, Console(stderr=True).status("asking the coordinator") as status:
        runs = client.runs(with_times=True)
        if unknown := sorted(set(run or ()) - {each.run_id for each in runs}):
            raise InvalidInputError(f"run {unknown[0]!r} never started, or is forgotten")
        tables.add_devices(client.devices(with_fronts=True, with_times=True))
        for each in runs:
            if not run or each.run_id in run:
                status.update(f"run {each.run_id}")
                tables.add_run(each, client.rounds(each.run_id, with_times=True))
        status.update(f"writing {out}")
        written = write(tables, out, format_.value)
    counts = {path: len(tables.rows[path.stem]) for path in written}
    if json_:
        print_json([{"file": str(path), "rows": count} for path, count in counts.items()])
    else:
        for path, count in counts.items():
            print(f"{path}: {counted(count, 'row')}")
