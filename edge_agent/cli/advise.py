"""`wattfleet advise`: which profiling method takes the least time on a board."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.cli.options import DEFAULT_REFERENCE, JsonOption, WorkloadChangesOption
from wattfleet.choosing import WorkloadChanges
from wattfleet_io.console import print_json, terminal

if TYPE_CHECKING:
    from wattfleet.choosing import Advice, MethodCost

app = typer.Typer(add_completion=False)


@app.command()
def advise(
    board: Annotated[
        str,
        typer.Option(help="Name the kind of board: agx-orin, orin-nano, orin-nx or xavier-agx.", show_default=False),
    ],
    training_hours: Annotated[
        float,
        typer.Option(help="Set the total hours that the board will train.", show_default=False),
    ],
    workload_changes: WorkloadChangesOption = WorkloadChanges.RARELY,
    reference: Annotated[
        str,
        typer.Option(help="Predict the times with this reference predictor: a shipped one, or a directory."),
    ] = DEFAULT_REFERENCE,
    minibatch_ms: Annotated[
        float | None,
        typer.Option(
            help="State how long a minibatch of your workload takes in the board's highest mode, in milliseconds. By"
            " default, use the reference's workload."
        ),
    ] = None,
    budgets: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="State the number of power budgets that are known in advance. Binary search measures more modes for "
            "each. By default, they are unknown, as in a fleet, and binary search is not recommended.",
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Compare the profiling methods: how long each measures, how much slower it trains, and the total time.

    Nothing is measured: the measuring times are predicted by a reference.
    """
    from edge_agent.learning.method_advice import board_figures
    from edge_agent.learning.reference_choice import named_reference
    from wattfleet.choosing import compare_methods
    from wattfleet.modes import board_named

    known = board_named(board)
    source = named_reference(reference)
    figures = board_figures(source, known.kind, known.space.array(), minibatch_ms)
    advice = compare_methods(figures, training_hours, workload_changes, budgets)
    workload = source.details.workload.name if minibatch_ms is None else f"{minibatch_ms:g} ms in the highest mode"
    content = _content(advice, known.kind, training_hours, workload_changes, reference, workload)
    if json_:
        print_json(content)
    else:
        _print(content)


def _content(
    advice: Advice, board: str, training_h: float, changes: WorkloadChanges, reference: str, workload: str
) -> dict[str, Any]:
    from wattfleet.choosing import LOSS_SOURCE

    return {
        "board": board,
        "training_hours": training_h,
        "workload_changes": str(changes),
        "workloads": changes.workloads,
        "workload": workload,
        "measuring_source": f"predicted by the reference {reference}: one warm-up minibatch and 20 that count, or until"
        " power has settled",
        "loss_source": LOSS_SOURCE,
        "methods": [_row(cost) for cost in advice.costs],
        "recommended": _row(advice.recommended),
        "reason": advice.reason,
    }


def _row(cost: MethodCost) -> dict[str, Any]:
    return {
        "method": str(cost.method),
        "modes": cost.modes,
        "measuring_s": cost.measuring_s,
        "penalty_pct": cost.penalty_pct,
        "over_1w_pct": cost.over_1w_pct,
        "total_s": cost.total_s,
    }


def _print(content: dict[str, Any]) -> None:
    from wattfleet_io.console import count_of, duration_text
    from wattfleet_io.tables import FittingTable, columns, numbers

    console = terminal()
    figures = ("modes", "measuring", "slower by", "over by > 1 W", "total")
    table = FittingTable(
        columns("method", *map(numbers, figures)),
        title=f"{content['board']}, {content['workload']}, {content['training_hours']:g} h of training",
        has_lines=True,
    )
    for row in content["methods"]:
        table.add(
            row["method"],
            f"{row['modes']:,}",
            duration_text(row["measuring_s"]) if row["modes"] else "-",
            f"{row['penalty_pct']:.1f} %",
            f"{row['over_1w_pct']:.1f} %",
            duration_text(row["total_s"]),
            style="bold" if row == content["recommended"] else "",
        )
    console.print(table)
    workloads = count_of(content["workloads"], "workload")
    for line in (
        f"measuring: time for one workload, {content['measuring_source']}",
        f"slower by, over by > 1 W: mean time penalty and share of choices over the budget; {content['loss_source']}",
        f"total: measuring of {workloads} (the workload changes {content['workload_changes']}), and training",
    ):
        console.print(line, style="dim", soft_wrap=True)
    console.print(f"Recommended: {content['reason']}.", soft_wrap=True)
    if content["recommended"]["modes"]:
        console.print(f"Measure with: wattfleet agent profile {_arguments(content['recommended'])}", soft_wrap=True)


def _arguments(row: dict[str, Any]) -> str:
    from wattfleet.choosing import ProfilingMethod

    by_method = {
        ProfilingMethod.TRANSFER: f" --modes {row['modes']}",
        ProfilingMethod.SCRATCH: f" --modes {row['modes']}",
        ProfilingMethod.BINARY_SEARCH: " --budget-w ...",
        ProfilingMethod.BRUTE_FORCE: "",
    }
    return f"--method {row['method']}{by_method[ProfilingMethod(row['method'])]}"
