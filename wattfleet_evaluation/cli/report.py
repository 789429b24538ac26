"""`wattfleet evaluate report ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def report(
    data: Annotated[Path, typer.Option(help="Folder of CSV files of measured modes, one a workload and device.")],
    out: Annotated[Path, typer.Option(help="Folder for report.json and report.html; made where it is missing.")],
    runs: Annotated[int, typer.Option(help="Runs of everything that is quick to fit.")] = 5,
    network_runs: Annotated[
        int, typer.Option(help="Runs of the published networks, many seconds a fit; 0 leaves them out.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the first run; the following count up.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Also print what report.json holds.")] = False,
) -> None:
    """Evaluate all predictors and strategies over every file, beside the published figures, as one page."""
    import json

    from rich.console import Console
    from rich.progress import Progress

    from wattfleet.errors import InvalidInputError
    from wattfleet_evaluation.reports.all_cases import Extent, build_report, read_folder

    try:
        from wattfleet_evaluation.reports.page import write_html
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"the page needs {error.name}: pip install 'wattfleet[simulation]'") from None
    extent = Extent(runs, network_runs, seed)
    profiles = read_folder(data)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"{out}: cannot be made a folder: {error.strerror}") from None
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading", total=None)
        figures = build_report(
            profiles,
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
    from rich.table import Table

    table = Table(title="Median MAPE", title_justify="left")
    for name in ("target", "reference", "predictor", "modes", "time %", "power %"):
        table.add_column(name, justify="right" if name in ("modes", "time %", "power %") else "left", overflow="fold")
    for row in figures["transfers"]:
        errors = (f"{row[quantity]['median']:.2f}" for quantity in ("time_mape", "power_mape"))
        table.add_row(row["target"], row["reference"] or "-", row["name"], str(row["modes"]), *errors)
    console = Console()
    console.print(table)
    console.print(f"{out / 'report.html'} and report.json written", highlight=False)
