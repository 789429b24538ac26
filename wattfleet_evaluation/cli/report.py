"""`wattfleet evaluate report ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def report(
    data: Annotated[
        Path,
        typer.Option(
            help="Read measured modes from the CSV files in this folder, one per workload and device, and raw logs from"
            " its folders FILE_telemetry."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Write report.json and report.html to this folder; create it if missing.")],
    runs: Annotated[
        int,
        typer.Option(
            help="Set the number of runs of all methods except the networks. Default: 10.", show_default=False
        ),
    ] = 10,
    network_runs: Annotated[
        int,
        typer.Option(
            help="Set the number of runs of the networks, which take many seconds per fit; 0 skips them. Default: 10.",
            show_default=False,
        ),
    ] = 10,
    seed: Annotated[
        int,
        typer.Option(help="Set the seed of the first run; each further run adds 1. Default: 0.", show_default=False),
    ] = 0,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Evaluate one run without networks, at two sizes: 3 minutes instead of 35."),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the content of report.json instead of a table.")] = False,
) -> None:
    """Evaluate all predictors and choice methods on every file, and write a report with the published figures."""
    import json
    import os

    from rich.console import Console
    from rich.progress import Progress

    from wattfleet.errors import InvalidInputError
    from wattfleet_evaluation.reports.all_cases import build_report
    from wattfleet_evaluation.reports.cases import Extent, read_folder

    try:
        from wattfleet_evaluation.reports.page import write_html
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"the report needs {error.name}: install it with pip install 'wattfleet[simulation]'"
        ) from None
    extent = Extent.quick(seed) if quick else Extent(runs, network_runs, seed)
    folder = read_folder(data)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot create the folder {out}: {error.strerror}") from None
    for file in (out / "report.json", out / "report.html"):
        # The evaluation takes long, so this is checked before it.
        if file.is_dir() or not os.access(file if file.exists() else out, os.W_OK):
            raise InvalidInputError(f"{file}: cannot be written: give another --out")
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading", total=None)
        figures = build_report(
            folder,
            extent,
            report=lambda step, done, total: progress.update(task, description=step, completed=done, total=total),
        )
    text = json.dumps(figures, indent=1, allow_nan=False)
    (out / "report.json").write_text(text + "\n", encoding="utf-8")
    write_html(figures, out / "report.html")
    if json_:
        print(text)
    else:
        _print_table(figures, out)


def _print_table(figures: dict[str, Any], out: Path) -> None:
    from rich.console import Console

    from wattfleet_io.tables import FittingTable, columns, numbers

    table = FittingTable(
        columns("target", "reference", "predictor", *map(numbers, ("modes", "time %", "power %"))), title="Median MAPE"
    )
    for row in figures["transfers"]:
        errors = (f"{row[quantity]['median']:.2f}" for quantity in ("time_mape", "power_mape"))
        table.add(row["target"], row["reference"] or "-", row["name"], str(row["modes"]), *errors)
    console = Console()
    console.print(table)
    console.print(f"wrote {out / 'report.html'} and report.json", highlight=False)
