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
    from wattfleet_evaluation.judging.reference_source import ReferenceSource


def choice(
    target: Annotated[Path, typer.Option(help="Choose among the measured modes of the workload in this CSV.")],
    reference: Annotated[
        str | None,
        typer.Option(
            help="Transfer from this shipped reference, or train one on the corpus in this CSV. Required by the methods"
            " wattfleet, roofline and powertrain; powertrain needs a CSV."
        ),
    ] = None,
    modes: Annotated[
        int,
        typer.Option(help="Let the method measure at most this many modes in a run. Default: 50.", show_default=False),
    ] = 50,
    budgets: Annotated[
        str, typer.Option(help="Evaluate all budgets FIRST:LAST, in whole watts. Default: 17:50.", show_default=False)
    ] = "17:50",
    runs: Annotated[
        int, typer.Option(help="Set the number of runs, each with another seed. Default: 20.", show_default=False)
    ] = 20,
    seed: Annotated[
        int,
        typer.Option(help="Set the seed of the first run; each further run adds 1. Default: 0.", show_default=False),
    ] = 0,
    method: Annotated[
        str,
        typer.Option(
            help="Evaluate this choice method: wattfleet, a baseline (maxn, presets, random, binary-search,"
            " brute-force) or a predictor (roofline, powertrain, scratch, linear, tree, forest, boosting)."
            " Default: wattfleet.",
            show_default=False,
        ),
    ] = "wattfleet",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """For each power budget, compare the mode that a choice method chooses with the best mode in the file.

    The time penalty is how much longer a step takes than in the best mode within the budget. A mode over the budget
    may be faster; its penalty is then 0. The over-budget figures show such cases. If the method finds no mode within
    a budget, the device's lowest mode is evaluated. Figures that end in `passing` use only the rows that pass the
    target's audit.
    """
    from rich.console import Console
    from rich.progress import Progress

    from wattfleet.modes import board_with_modes, read_profile
    from wattfleet.prediction import DEFAULT_PREDICTOR
    from wattfleet_evaluation.choice_methods.registry import choice_method_named
    from wattfleet_evaluation.judging.audited_target import audited
    from wattfleet_evaluation.judging.choice import evaluate_choice
    from wattfleet_evaluation.judging.reference_source import find_reference

    budgets_w = parse_budgets(budgets)
    corpus = read_profile(target)
    target_board = board_with_modes(corpus.modes)
    console = Console(stderr=True)
    with console.status(f"reference {reference}"):
        source = None if reference is None else find_reference(reference, corpus)
        evaluated = choice_method_named(method, partial(_fit_with, source, target_board), target_board)
    with console.status(f"auditing {target.name}"):
        audit = audited(corpus, None if source is None else source.predictor(DEFAULT_PREDICTOR, target_board))
    if method == "wattfleet" and modes == 0:
        raise InvalidInputError("the choice method 'wattfleet' needs measurements: give --modes 1 or more")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{method}, {runs} runs", total=runs)
        cases = evaluate_choice(
            corpus,
            evaluated,
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
        _print_table(figures, method)


def parse_budgets(text: str) -> list[float]:
    """The whole watts from `first:last`, both included; a single number is one budget.

    Raises:
        InvalidInputError: the text is not two whole numbers from 1 to 10,000 in ascending order.
    """
    first, _, last = text.partition(":")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= 10_000):
        raise InvalidInputError(f"invalid budgets {text!r}: give the first and the last in whole watts, such as 17:50")
    return [float(watts) for watts in range(int(first), int(last) + 1)]


def _fit_with(source: ReferenceSource | None, target: Board | None, predictor: str) -> Fit:
    """The function that fits a kind of predictor with the reference from the command line.

    Raises:
        InvalidInputError: the kind needs a reference and none is given, or the reference is of another kind.
    """
    from reference_models import shipped
    from wattfleet.prediction import predictor_class

    fitted = predictor_class(predictor)
    if fitted.transfers and source is None:
        raise InvalidInputError(
            f"this method transfers from a reference: give --reference, the CSV of a corpus or one of"
            f" {', '.join(shipped())}"
        )
    known = None if source is None else source.predictor(predictor, target)
    return lambda profile: fitted.fit(profile, known)


def _print_table(figures: Mapping[str, object], method: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Choices of the method {method}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        parts = value if isinstance(value, Mapping) else {"": value}
        for part, number in parts.items():
            shown = f"{number:g}" if isinstance(number, (int, float)) else str(number or "-")
            table.add_row(f"{name} {part}".strip().replace("_", " "), shown)
    Console().print(table)
