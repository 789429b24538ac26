"""`wattfleet evaluate interleave ...`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wattfleet.choosing import InterleavingObjective
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

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wattfleet.modes import Profile
    from wattfleet_evaluation.interleaving_methods.session import PairCorpora


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

    from wattfleet.modes import Task, read_profile
    from wattfleet_evaluation.interleaving_methods.registry import interleaving_method_named
    from wattfleet_evaluation.interleaving_methods.session import PairCorpora
    from wattfleet_evaluation.judging.interleaving import evaluate_interleaving

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
        shown = progress.add_task(f"{strategy}, {len(problems):,} problems", total=len(problems))
        cases = evaluate_interleaving(
            corpora,
            method,
            measure,
            problems,
            objective,
            seed,
            shared,
            lambda number: progress.update(shown, completed=number),
            trusted,
        )
    if json_:
        print(json.dumps(cases.figures()))
    else:
        print_figures(cases.figures(), f"{strategy}: {training.name} beside {inference.name}")


def _trusted(corpora: PairCorpora, training: Profile, inference: Profile) -> NDArray[np.bool_] | None:
    """`[m]` rows of inference that pass an audit together with the training in their mode; None without an audit."""
    import numpy as np

    from wattfleet_evaluation.judging.audited_target import audited

    of_training, of_inference = (audited(each, None).trusted for each in (training, inference))
    if of_training is None or of_inference is None:
        return None
    trains = of_training[corpora.training_rows][corpora.measured.mode_of]
    return np.asarray(of_inference[corpora.inference_rows] & trains)
