"""`wattfleet evaluate ...`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from wattfleet_evaluation.cli.choice import choice
from wattfleet_evaluation.cli.report import report

app = typer.Typer(no_args_is_help=True, help="Measure predictors and choices on measured modes.")


@app.callback()
def group() -> None:
    """Measure predictors and choices on measured modes."""


app.command()(choice)
app.command()(report)


@app.command()
def transfer(
    reference: Annotated[
        str, typer.Option(help="Name of a shipped reference, or CSV of the corpus to train the reference on.")
    ],
    target: Annotated[Path, typer.Option(help="CSV of measured modes of the workload and device to transfer to.")],
    modes: Annotated[int, typer.Option(help="Modes that are drawn at random and fitted in each run.")] = 50,
    runs: Annotated[int, typer.Option(help="Number of runs.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the first run; the following count up.")] = 0,
    predictor: Annotated[str, typer.Option(help="roofline, powertrain or scratch.")] = "roofline",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Fit some modes of a target, again and again, and print the errors over all its other modes.

    Beside them, the errors over those of the other modes that pass the audit of the target, where it can be audited.
    """
    import json
    from time import perf_counter

    from rich.console import Console
    from rich.progress import track

    from wattfleet.modes import board_with_modes, read_profile
    from wattfleet.prediction import predictor_class
    from wattfleet_evaluation.audited_target import audited
    from wattfleet_evaluation.evaluated_reference import source_of
    from wattfleet_evaluation.transfer import evaluate_transfer

    fitted = predictor_class(predictor)
    measured = read_profile(target)
    console = Console(stderr=True)
    with console.status(f"reference {reference}"):
        known = source_of(reference, measured).predictor(predictor, board_with_modes(measured.modes))
    with console.status(f"auditing {target.name}"):
        audit = audited(measured, known)
    scores = evaluate_transfer(
        fitted,
        known,
        measured,
        modes,
        runs,
        seed,
        perf_counter,
        audit.trusted,
        track=lambda numbers: track(numbers, f"{predictor}, {modes} modes", total=runs, console=console),
    )
    summary = scores.summary() | {"suspect_rows": audit.suspect_rows, "no_audit": audit.why_not}
    if json_:
        print(json.dumps(summary, indent=2))
    else:
        print_table(summary, f"{predictor} from {modes} modes of {target.name}, {runs} runs")


def print_table(summary: Mapping[str, Any], title: str) -> None:
    """Print quartiles, a row each, the coverage, and how many rows are suspect or why that is not known."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("", "median", "q1", "q3"):
        table.add_column(name, justify="right" if name else "left")
    titles = {
        "time_mape": "time, MAPE %",
        "power_mape": "power, MAPE %",
        "time_mape_passing": "time, rows that pass the audit, MAPE %",
        "power_mape_passing": "power, rows that pass the audit, MAPE %",
        "fit_seconds": "fit, s",
    }
    for key, text in titles.items():
        if key in summary:
            table.add_row(text, *(f"{summary[key][name]:.2f}" for name in ("median", "q1", "q3")))
    coverage = summary["coverage_90"]
    console = Console()
    console.print(table)
    console.print(
        f"the 90 % interval holds {coverage['time']:.1f} % of the times and {coverage['power']:.1f} % of the powers",
        highlight=False,
    )
    if summary["no_audit"] is not None:
        audit = f"no audit of the target: {summary['no_audit']}"
    else:
        audit = f"the audit finds {summary['suspect_rows']} suspect rows in the target (wattfleet reference audit)"
    console.print(audit, highlight=False, markup=False)
