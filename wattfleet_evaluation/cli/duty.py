"""`wattfleet evaluate duty ...`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from wattfleet.choosing import Objective
from wattfleet_evaluation.cli.figures_table import print_figures
from wattfleet_evaluation.cli.pair_options import (
    ArrivalOption,
    BudgetsOption,
    InferenceOption,
    JsonOption,
    ReferenceOption,
    SeedOption,
    fit_named,
    problems_of,
    require_measurements,
    require_task,
)
from wattfleet_evaluation.cli.ranges import parse_range


def duty(
    inference: InferenceOption,
    latency_ms: Annotated[
        str,
        typer.Option(
            help="Evaluate all latency limits FIRST:LAST:STEP, in milliseconds. The step is 50 unless stated. Default:"
            " 50:2000:50.",
            show_default=False,
        ),
    ] = "50:2000:50",
    arrival_per_s: ArrivalOption = "30:120:10",
    budgets: BudgetsOption = "10:50:1",
    measure: Annotated[
        int,
        typer.Option(
            help="Let the strategy measure at most this many modes with a batch for each problem. Default: 15.",
            show_default=False,
        ),
    ] = 15,
    strategy: Annotated[
        str,
        typer.Option(
            help="Evaluate this strategy: wattfleet, roofline, gradient, binary-search, network, largest-batch,"
            " batch-1, random or brute-force. Default: wattfleet.",
            show_default=False,
        ),
    ] = "wattfleet",
    objective: Annotated[
        Objective,
        typer.Option(
            help="Choose by the least power or the most samples a second. Default: least-power.", show_default=False
        ),
    ] = Objective.LEAST_POWER,
    reference: ReferenceOption = None,
    seed: SeedOption = 0,
    json_: JsonOption = False,
) -> None:
    """Choose a power mode and a batch for a board that answers requests within a latency and a power budget.

    There is a problem for each latency, arrival rate and budget, and each starts without measurements. A problem is
    solvable if a mode and batch in the file keeps all three. The loss compares the choice with the best of these.
    """
    from rich.console import Console

    from wattfleet.modes import Task, read_profile
    from wattfleet_evaluation.judging.audited_target import audited
    from wattfleet_evaluation.judging.serving import evaluate_serving
    from wattfleet_evaluation.serving_methods.registry import serving_method_named

    require_measurements(measure, seed, fewest=1)
    problems = problems_of(parse_range("--latency-ms", latency_ms, 50), arrival_per_s, budgets)
    corpus = read_profile(inference)
    require_task("--inference", corpus, Task.INFERENCE)
    method = serving_method_named(strategy, lambda: fit_named(inference, corpus, reference), chooses_measured=True)
    limit = len(corpus) if strategy == "brute-force" else measure
    with Console(stderr=True).status(f"{strategy}, {len(problems):,} problems"):
        trusted = audited(corpus, None).trusted
        cases = evaluate_serving(
            corpus, method, limit, problems, objective, 1, seed, trusted=trusted, shares_budgets=False
        )
    figures = cases.duty_figures()
    if json_:
        print(json.dumps(figures))
    else:
        print_figures(figures, f"{strategy}: {inference.name}")
