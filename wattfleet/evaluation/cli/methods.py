"""Commands that judge methods of choosing modes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattfleet.core.choosing import InterleavingObjective, Objective
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Task
from wattfleet.evaluation.cli.options import (
    ArrivalOption,
    BudgetsOption,
    InferenceOption,
    JsonOption,
    ReferenceOption,
    SeedOption,
    fit_named,
    parse_range,
    print_figures,
    problems_of,
    require_measurements,
    require_task,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wattfleet.core.choosing import ServiceLimits
    from wattfleet.core.modes import Profile, WorkloadFacts
    from wattfleet.core.prediction import Predictor
    from wattfleet.evaluation.methods import Fit, PairCorpora


# --- Choice -----------------------------------------------------------------------------------------------------------
# `wattfleet evaluate choice ...`.


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

    from wattfleet.core.modes import board_with_modes, read_profile, require_one_training, stated_facts
    from wattfleet.core.prediction import DEFAULT_PREDICTOR
    from wattfleet.evaluation.judging.choices import (
        ChoiceCases,
        Report,
        ServingCases,
        evaluate_choice,
        evaluate_serving,
    )
    from wattfleet.evaluation.judging.sources import audited, find_reference, references_of
    from wattfleet.evaluation.methods import choice_method_named, serving_method_named

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
    evaluate: Callable[[Report, NDArray[np.bool_] | None], ChoiceCases | ServingCases]
    if task is Task.INFERENCE:
        limits = problems(latency_ms, arrival_per_s, budgets_w)
        serving = serving_method_named(method, partial(fit_of, DEFAULT_PREDICTOR))
        goal = objective or Objective.LEAST_POWER

        def evaluate(report: Report, trusted: NDArray[np.bool_] | None) -> ServingCases:
            return evaluate_serving(corpus, serving, modes, limits, goal, runs, seed, report, trusted)
    else:
        require_one_training(str(target), corpus)
        choosing = choice_method_named(method, fit_of, target_board)

        def evaluate(report: Report, trusted: NDArray[np.bool_] | None) -> ChoiceCases:
            return evaluate_choice(corpus, choosing, modes, budgets_w, runs, seed, report, trusted)

    for_audit = next(iter(references(DEFAULT_PREDICTOR)), None)
    with console.status(f"auditing {target.name}"):
        audit = audited(corpus, for_audit)
    if method == "wattfleet" and modes == 0:
        raise InvalidInputError("the choice method 'wattfleet' needs measurements: give --modes 1 or more")
    with Progress(console=console, transient=True) as progress:
        shown = progress.add_task(f"{method}, {runs} runs", total=1)
        cases = evaluate(lambda done: progress.update(shown, completed=done), audit.trusted)
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
    """The function that fits a kind of predictor with the references from the command line."""
    from reference_models import shipped
    from wattfleet.core.prediction import fit_from, predictor_class

    fitted, known = predictor_class(predictor), references(predictor)
    if fitted.transfers and not known:
        raise InvalidInputError(
            f"this method transfers from a reference: give --reference, the CSV of a corpus or one of"
            f" {', '.join(shipped())}"
        )
    return lambda profile: fit_from(fitted, profile, known, facts)


# --- Serving ----------------------------------------------------------------------------------------------------------
# The options of `wattfleet evaluate choice` that are for inference.


def problems(
    latencies_ms: Sequence[float] | None, arrivals_per_s: Sequence[float] | None, budgets_w: Sequence[float]
) -> list[ServiceLimits]:
    """All combinations of latency, arrival rate and power budget.

    Raises:
        InvalidInputError: no latency or no arrival rate is given, or one is not finite and above 0.
    """
    from wattfleet.core.choosing import ServiceLimits

    if not latencies_ms or not arrivals_per_s:
        raise InvalidInputError(
            "--task inference needs the latency and the arrival rate: give --latency-ms and --arrival-per-s"
        )
    return [
        ServiceLimits(latency_ms, arrival_per_s, 1e3 * budget_w)
        for latency_ms in latencies_ms
        for arrival_per_s in arrivals_per_s
        for budget_w in budgets_w
    ]


def require_inference(
    task: Task,
    latencies_ms: Sequence[float] | None,
    arrivals_per_s: Sequence[float] | None,
    objective: Objective | None,
) -> None:
    """Check that options for inference are given only with its task.

    Raises:
        InvalidInputError: one is given for training.
    """
    given = [
        name
        for name, value in (
            ("--latency-ms", latencies_ms),
            ("--arrival-per-s", arrivals_per_s),
            ("--objective", objective),
        )
        if value
    ]
    if given and task is not Task.INFERENCE:
        raise InvalidInputError(f"{given[0]} is for inference: add --task inference, or leave it out")


# --- Interleave -------------------------------------------------------------------------------------------------------
# `wattfleet evaluate interleave ...`.


def interleave(
    training: Annotated[Path, typer.Option(help="Train the workload whose measured modes are in this CSV.")],
    inference: InferenceOption,
    latency_s: Annotated[
        str,
        typer.Option(
            help="Evaluate all latency limits FIRST:LAST:STEP, in seconds. Default: 0.5:2:0.1.", show_default=False
        ),
    ] = "0.5:2:0.1",
    arrival_per_s: ArrivalOption = "30:120:10",
    budgets: BudgetsOption = "10:50:1",
    measure: Annotated[
        int,
        typer.Option(
            help="Let the strategy make at most this many measurements for a problem. A measurement is a mode of"
            " training, or a mode and batch of inference. Default: 15.",
            show_default=False,
        ),
    ] = 15,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared", help="Let one set of measurements serve all problems. By default, each starts from none."
        ),
    ] = False,
    strategy: Annotated[
        str,
        typer.Option(
            help="Evaluate this strategy: wattfleet, gradient, binary-search, random, network or brute-force. Default:"
            " wattfleet.",
            show_default=False,
        ),
    ] = "wattfleet",
    objective: Annotated[
        InterleavingObjective,
        typer.Option(
            help="Choose by the most training minibatches in a window, as published, or in a second. Default:"
            " most-per-window.",
            show_default=False,
        ),
    ] = InterleavingObjective.MOST_PER_WINDOW,
    reference: ReferenceOption = None,
    seed: SeedOption = 0,
    json_: JsonOption = False,
) -> None:
    """Choose a power mode and an inference batch for a board that trains and answers requests.

    There is a problem for each latency, arrival rate and budget. A problem is solvable if a mode and batch in the files
    keeps all three. Shares of the training compare the choice with the best such mode and batch.
    """
    from rich.console import Console
    from rich.progress import Progress

    from wattfleet.core.modes import Task, read_profile
    from wattfleet.evaluation.judging.choices import evaluate_interleaving
    from wattfleet.evaluation.methods import PairCorpora, interleaving_method_named

    require_measurements(measure, seed, fewest=2)
    latencies_ms = [1e3 * limit_s for limit_s in parse_range("--latency-s", latency_s, 0.1)]
    problems = problems_of(latencies_ms, arrival_per_s, budgets)
    files = {Task.TRAINING: (training, read_profile(training)), Task.INFERENCE: (inference, read_profile(inference))}
    for task, (_, profile) in files.items():
        require_task(f"--{task}", profile, task)
    profiles = [profile for _, profile in files.values()]
    corpora = PairCorpora.of(*profiles)
    console = Console(stderr=True)
    method = interleaving_method_named(strategy, lambda task: fit_named(*files[task], reference))
    with console.status("auditing the files"):
        trusted = _trusted(corpora, *profiles)
    with Progress(console=console, transient=True) as progress:
        shown = progress.add_task(f"{strategy}, {len(problems):,} problems", total=1)
        cases = evaluate_interleaving(
            corpora,
            method,
            measure,
            problems,
            objective,
            seed,
            shared,
            lambda done: progress.update(shown, completed=done),
            trusted,
        )
    if json_:
        print(json.dumps(cases.figures()))
    else:
        print_figures(cases.figures(), f"{strategy}: {training.name} beside {inference.name}")


def _trusted(corpora: PairCorpora, training: Profile, inference: Profile) -> NDArray[np.bool_] | None:
    """`[m]` rows of inference that pass an audit together with the training in their mode; None without an audit."""
    import numpy as np

    from wattfleet.evaluation.judging.sources import audited

    of_training, of_inference = (audited(each, None).trusted for each in (training, inference))
    if of_training is None or of_inference is None:
        return None
    trains = of_training[corpora.training_rows][corpora.measured.mode_of]
    return np.asarray(of_inference[corpora.inference_rows] & trains)


# --- Duty -------------------------------------------------------------------------------------------------------------
# `wattfleet evaluate duty ...`.


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

    from wattfleet.core.modes import Task, read_profile
    from wattfleet.evaluation.judging.choices import evaluate_serving
    from wattfleet.evaluation.judging.sources import audited
    from wattfleet.evaluation.methods import serving_method_named

    require_measurements(measure, seed, fewest=1)
    problems = problems_of(parse_range("--latency-ms", latency_ms, 50), arrival_per_s, budgets)
    corpus = read_profile(inference)
    require_task("--inference", corpus, Task.INFERENCE)
    method = serving_method_named(strategy, lambda: fit_named(inference, corpus, reference), chooses_measured=True)
    with Console(stderr=True).status(f"{strategy}, {len(problems):,} problems"):
        trusted = audited(corpus, None).trusted
        cases = evaluate_serving(
            corpus, method, measure, problems, objective, 1, seed, trusted=trusted, shares_budgets=False
        )
    figures = cases.duty_figures()
    if json_:
        print(json.dumps(figures))
    else:
        print_figures(figures, f"{strategy}: {inference.name}")


# --- Report -----------------------------------------------------------------------------------------------------------
# `wattfleet evaluate report ...`.


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

    from wattfleet.core.errors import InvalidInputError
    from wattfleet.evaluation.reports.cases import Extent, build_report, read_folder

    try:
        from wattfleet.evaluation.reports.page import write_html
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

    from wattfleet.common.tables import FittingTable, columns, numbers

    table = FittingTable(
        columns("target", "reference", "predictor", *map(numbers, ("modes", "time %", "power %"))), title="Median MAPE"
    )
    for row in figures["transfers"]:
        errors = (f"{row[quantity]['median']:.2f}" for quantity in ("time_mape", "power_mape"))
        table.add(row["target"], row["reference"] or "-", row["name"], str(row["modes"]), *errors)
    console = Console()
    console.print(table)
    console.print(f"wrote {out / 'report.html'} and report.json", highlight=False)
