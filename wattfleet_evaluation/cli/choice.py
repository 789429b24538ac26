"""`wattfleet evaluate choice ...`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wattfleet.errors import InvalidInputError

if TYPE_CHECKING:
    from wattfleet.modes import Board
    from wattfleet_evaluation.choice_methods.random_then_predict import Fit
    from wattfleet_evaluation.evaluated_reference import Source


def choice(
    target: Annotated[Path, typer.Option(help="CSV of all measured modes of the workload to choose modes for.")],
    reference: Annotated[
        str | None,
        typer.Option(
            help="Name of a shipped reference, or CSV of the corpus to train the reference on; wattfleet, roofline and"
            " powertrain need one."
        ),
    ] = None,
    modes: Annotated[int, typer.Option(help="Modes that the strategy may measure in all.")] = 50,
    budgets: Annotated[str, typer.Option(help="Budgets in whole watts, first and last.")] = "17:50",
    runs: Annotated[int, typer.Option(help="Runs, each with another seed.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the first run.")] = 0,
    strategy: Annotated[
        str,
        typer.Option(help="wattfleet, a baseline (maxn, presets, random, binary-search, brute-force) or a predictor."),
    ] = "wattfleet",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Judge how a strategy chooses modes under power budgets, against the best measured mode of the target.

    The time penalty of a case is how much longer a step takes than at the best mode within the budget. A case over
    its budget counts in the penalty with at least 0: being faster than allowed earns nothing, and its excess is
    counted by the figures beside it. A strategy that knows no mode within a budget leaves the device in its lowest.
    Figures that end in `passing` are over the rows that pass the audit of the target.
    """
    from rich.console import Console
    from rich.progress import Progress

    from wattfleet.modes import board_with_modes, read_profile
    from wattfleet.prediction import DEFAULT_PREDICTOR
    from wattfleet_evaluation.audited_target import audited
    from wattfleet_evaluation.choice import evaluate_choice
    from wattfleet_evaluation.choice_methods.registry import strategy_named
    from wattfleet_evaluation.evaluated_reference import source_of

    budgets_w = parse_budgets(budgets)
    corpus = read_profile(target)
    on = board_with_modes(corpus.modes)
    console = Console(stderr=True)
    with console.status(f"reference {reference}"):
        source = None if reference is None else source_of(reference, corpus)
        judged = strategy_named(strategy, partial(_fit_after, source, on), on)
    with console.status(f"auditing {target.name}"):
        audit = audited(corpus, None if source is None else source.predictor(DEFAULT_PREDICTOR, on))
    if strategy == "wattfleet" and modes == 0:
        raise InvalidInputError("the strategy 'wattfleet' chooses by what it measures: give --modes 1 or more")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{strategy}, {runs} runs", total=runs)
        cases = evaluate_choice(
            corpus,
            judged,
            modes,
            budgets_w,
            runs,
            seed,
            report=lambda run: progress.update(task, completed=run),
            trusted=audit.trusted,
        )
    figures = cases.figures() | {"suspect_rows": audit.suspect_rows}
    if audit.why_not is not None:
        figures["no_audit"] = audit.why_not
    if json_:
        print(json.dumps(figures))
    else:
        _print_table(figures, strategy)


def parse_budgets(text: str) -> list[float]:
    """The whole watts from `first:last`, both included; a single number stands for itself.

    Raises:
        InvalidInputError: not two whole numbers above zero in rising order.
    """
    first, _, last = text.partition(":")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= 10_000):
        raise InvalidInputError(f"budgets {text!r}: give the first and the last in whole watts, such as 17:50")
    return [float(watts) for watts in range(int(first), int(last) + 1)]


def _fit_after(source: Source | None, target: Board | None, predictor: str) -> Fit:
    """How a kind of predictor is fitted after the reference that the command line names.

    Raises:
        InvalidInputError: it names none, or one that does not suit the kind.
    """
    from reference_models import shipped
    from wattfleet.prediction import predictor_class

    fitted = predictor_class(predictor)
    if fitted.transfers and source is None:
        raise InvalidInputError(
            f"this strategy transfers from a reference: give --reference, the CSV of a corpus or one of"
            f" {', '.join(shipped())}"
        )
    known = None if source is None else source.predictor(predictor, target)
    return lambda profile: fitted.fit(profile, known)


def _print_table(figures: Mapping[str, object], strategy: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Choice by {strategy}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        parts = value if isinstance(value, Mapping) else {"": value}
        for part, number in parts.items():
            shown = f"{number:g}" if isinstance(number, (int, float)) else str(number or "-")
            table.add_row(f"{name} {part}".strip().replace("_", " "), shown)
    Console().print(table)
