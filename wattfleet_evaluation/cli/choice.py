"""`wattfleet evaluate choice ...`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wattfleet.choosing import Objective
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Task
from wattfleet_evaluation.cli.figures_table import print_figures
from wattfleet_evaluation.cli.serving import problems, require_inference

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wattfleet.modes import WorkloadFacts
    from wattfleet.prediction import Predictor
    from wattfleet_evaluation.corpus_predictions import Fit

    Mask = NDArray[np.bool_]
    Report = Callable[[int], None]


def choice(
    target: Annotated[Path, typer.Option(help="Choose among the measured modes of the workload in this CSV.")],
    reference: Annotated[
        list[str] | None,
        typer.Option(
            help="Transfer from this shipped reference, or train one on the corpus in this CSV. Required by the methods"
            " wattfleet, roofline and powertrain; powertrain needs a CSV. Repeatable: wattfleet and roofline mix"
            " several references, by how well each explains the measured modes.",
            show_default=False,
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
            " brute-force) or a predictor (roofline, powertrain, scratch, linear, tree, forest, boosting). For"
            " inference: wattfleet, roofline, or a baseline (binary-search, gradient, network, largest-batch, batch-1,"
            " random, brute-force). Default: wattfleet.",
            show_default=False,
        ),
    ] = "wattfleet",
    task: Annotated[
        Task,
        typer.Option(
            help="Choose a mode for training, or a mode and a batch size for inference. Default: training.",
            show_default=False,
        ),
    ] = Task.TRAINING,
    latency_ms: Annotated[
        list[float] | None,
        typer.Option(
            help="For inference, allow this many milliseconds from the arrival of a sample to its result. Repeatable.",
            show_default=False,
        ),
    ] = None,
    arrival_per_s: Annotated[
        list[float] | None,
        typer.Option(help="For inference, let this many samples arrive each second. Repeatable.", show_default=False),
    ] = None,
    objective: Annotated[
        Objective | None,
        typer.Option(
            help="For inference, choose by the least power or the most samples a second. Default: least-power.",
            show_default=False,
        ),
    ] = None,
    loader_workers: Annotated[
        int | None,
        typer.Option(
            help="State the number of processes that load data, 0 if the working process loads. By default, it is"
            " unknown."
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """For each power budget, compare the mode that a choice method chooses with the best mode in the file.

    The time penalty is how much longer a step takes than in the best mode within the budget. A mode over the budget
    may be faster; its penalty is then 0. The over-budget figures show such cases. If the method finds no mode within
    a budget, the device's lowest mode is evaluated. Figures that end in `passing` use only the rows that pass the
    target's audit.

    With --task inference, a mode and a batch size are chosen for each power budget, latency and arrival rate. The loss
    is how many more watts the choice draws than the best row that keeps all limits, or how many fewer samples it
    answers each second.
    """
    from rich.console import Console
    from rich.progress import Progress

    from wattfleet.modes import board_with_modes, read_profile, require_one_training, stated_facts
    from wattfleet.prediction import DEFAULT_PREDICTOR
    from wattfleet_evaluation.choice_methods.registry import choice_method_named
    from wattfleet_evaluation.judging.audited_target import audited
    from wattfleet_evaluation.judging.choice import ChoiceCases, evaluate_choice
    from wattfleet_evaluation.judging.reference_source import find_reference, references_of
    from wattfleet_evaluation.judging.serving import ServingCases, evaluate_serving
    from wattfleet_evaluation.serving_methods.registry import serving_method_named

    require_inference(task, latency_ms, arrival_per_s, objective)
    budgets_w = parse_budgets(budgets)
    corpus = read_profile(target)
    facts = stated_facts(str(target), corpus, task, loader_workers=loader_workers)
    target_board = board_with_modes(corpus.modes)
    console = Console(stderr=True)
    named = dict.fromkeys(reference or [])
    sources = [find_reference(name, corpus) for name in named]

    @cache
    def references(kind: str) -> list[Predictor]:
        with console.status(f"reference {', '.join(named)}"):
            return references_of(sources, kind, target_board)

    fit_of = partial(_fit_with, references, facts)
    evaluate: Callable[[Report, Mask | None], ChoiceCases | ServingCases]
    if task is Task.INFERENCE:
        limits = problems(latency_ms, arrival_per_s, budgets_w)
        serving = serving_method_named(method, partial(fit_of, DEFAULT_PREDICTOR))
        goal = objective or Objective.LEAST_POWER

        def evaluate(report: Report, trusted: Mask | None) -> ServingCases:
            return evaluate_serving(corpus, serving, modes, limits, goal, runs, seed, report, trusted)
    else:
        require_one_training(str(target), corpus)
        choosing = choice_method_named(method, fit_of, target_board)

        def evaluate(report: Report, trusted: Mask | None) -> ChoiceCases:
            return evaluate_choice(corpus, choosing, modes, budgets_w, runs, seed, report, trusted)

    for_audit = next(iter(references(DEFAULT_PREDICTOR)), None)
    with console.status(f"auditing {target.name}"):
        audit = audited(corpus, for_audit)
    if method == "wattfleet" and modes == 0:
        raise InvalidInputError("the choice method 'wattfleet' needs measurements: give --modes 1 or more")
    with Progress(console=console, transient=True) as progress:
        shown = progress.add_task(f"{method}, {runs} runs", total=runs)
        cases = evaluate(lambda run: progress.update(shown, completed=run), audit.trusted)
    figures = cases.figures() | {"suspect_rows": audit.suspect_rows}
    if audit.no_audit_reason is not None:
        figures["no_audit"] = audit.no_audit_reason
    if json_:
        print(json.dumps(figures))
    else:
        print_figures(figures, f"Choices of the method {method}")


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


def _fit_with(references: Callable[[str], list[Predictor]], facts: WorkloadFacts, predictor: str) -> Fit:
    """The function that fits a kind of predictor with the references from the command line.

    Raises:
        InvalidInputError: the kind needs a reference and none is given, or a reference is of another kind.
    """
    from reference_models import shipped
    from wattfleet.prediction import fit_from, predictor_class

    fitted, known = predictor_class(predictor), references(predictor)
    if fitted.transfers and not known:
        raise InvalidInputError(
            f"this method transfers from a reference: give --reference, the CSV of a corpus or one of"
            f" {', '.join(shipped())}"
        )
    return lambda profile: fit_from(fitted, profile, known, facts)
