"""`wattfleet evaluate ...`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from wattfleet.core.modes import Task
from wattfleet.evaluation.cli.methods import choice, duty, interleave, report

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Evaluate predictors and choice methods on measured modes."
)


@app.callback()
def group() -> None:
    """Evaluate predictors and choice methods on measured modes."""


app.command()(choice)
app.command()(duty)
app.command()(interleave)
app.command()(report)


@app.command()
def transfer(
    reference: Annotated[
        list[str],
        typer.Option(
            help="Transfer from this shipped reference, from one in this directory, or train one on the corpus in this"
            " CSV or journal. Repeatable: roofline mixes several references, by how well each explains the fitted"
            " modes."
        ),
    ],
    target: Annotated[
        Path, typer.Option(help="Transfer to the workload and device whose measured modes are in this CSV.")
    ],
    modes: Annotated[
        int,
        typer.Option(
            help="Set the number of randomly drawn modes to fit in each run. If the file has a column batch, rows are"
            " drawn over modes and batches. Default: 50.",
            show_default=False,
        ),
    ] = 50,
    runs: Annotated[int, typer.Option(help="Set the number of runs. Default: 20.", show_default=False)] = 20,
    seed: Annotated[
        int,
        typer.Option(help="Set the seed of the first run; each further run adds 1. Default: 0.", show_default=False),
    ] = 0,
    predictor: Annotated[
        str,
        typer.Option(
            help="Evaluate this predictor: roofline, a published one (powertrain, scratch) or a regression (linear,"
            " tree, forest, boosting). Default: roofline.",
            show_default=False,
        ),
    ] = "roofline",
    task: Annotated[
        Task | None,
        typer.Option(help="State what was measured. By default, it follows from the name of the file's time column."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="State the samples in a batch, if the file does not. By default, it is unknown.")
    ] = None,
    loader_workers: Annotated[
        int | None,
        typer.Option(
            help="State the number of processes that load data, 0 if the training process loads. By default, it is"
            " unknown."
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Fit a predictor to randomly drawn modes of a target, and print its errors over all other modes.

    If the target can be audited, also print the errors over the other modes that pass the audit.
    """
    import json
    from time import perf_counter

    from rich.console import Console
    from rich.progress import track

    from wattfleet.core.modes import board_with_modes, read_profile, stated_facts
    from wattfleet.core.prediction import predictor_class
    from wattfleet.evaluation.judging.sources import audited, find_reference, references_of
    from wattfleet.evaluation.judging.transfer import evaluate_transfer

    fitted = predictor_class(predictor)
    measured = read_profile(target)
    facts = stated_facts(str(target), measured, task, batch, loader_workers)
    console = Console(stderr=True)
    with console.status(f"reference {', '.join(reference)}"):
        sources = [find_reference(name, measured) for name in dict.fromkeys(reference)]
        known = references_of(sources, predictor, board_with_modes(measured.modes))
    with console.status(f"auditing {target.name}"):
        audit = audited(measured, next(iter(known), None))
    scores = evaluate_transfer(
        fitted,
        known,
        measured,
        modes,
        runs,
        seed,
        perf_counter,
        audit.trusted,
        facts,
        track=lambda numbers: track(numbers, f"{predictor}, {modes} modes", total=runs, console=console),
    )
    left_out = ", ".join(dict.fromkeys(source.left_out for source in sources if source.left_out is not None)) or None
    if left_out is not None and known:
        console.print(f"the reference's prior is learned without {left_out}, which the target runs", highlight=False)
    summary = scores.summary() | {
        "left_out_network": left_out,
        "suspect_rows": audit.suspect_rows,
        "no_audit": audit.no_audit_reason,
    }
    if json_:
        print(json.dumps(summary, indent=2))
    else:
        print_table(summary, f"{predictor} from {modes} modes of {target.name}, {runs} runs")


def print_table(summary: Mapping[str, Any], title: str) -> None:
    """Print the quartiles, the coverage, and the number of suspect rows or why it is unknown."""
    from rich.console import Console

    from wattfleet.common.tables import FittingTable, columns, numbers, texts

    table = FittingTable(columns(texts("figure"), *map(numbers, ("median", "q1", "q3"))), title=title, has_lines=True)
    titles = {
        "time_mape": "time, MAPE %",
        "power_mape": "power, MAPE %",
        "time_mape_passing": "time, rows that pass the audit, MAPE %",
        "power_mape_passing": "power, rows that pass the audit, MAPE %",
        "fit_seconds": "fit, s",
    }
    for key, text in titles.items():
        if key in summary:
            table.add(text, *(f"{summary[key][name]:.2f}" for name in ("median", "q1", "q3")))
    coverage = summary["coverage_90"]
    console = Console()
    console.print(table)
    console.print(
        f"the 90 % intervals contain {coverage['time']:.1f} % of the times and {coverage['power']:.1f} % of the powers",
        highlight=False,
    )
    if summary["no_audit"] is not None:
        audit = f"the target could not be audited: {summary['no_audit']}"
    else:
        audit = f"the target has {summary['suspect_rows']} suspect rows; list them with wattfleet reference audit"
    console.print(audit, highlight=False, markup=False)
