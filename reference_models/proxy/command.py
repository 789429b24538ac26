"""`wattfleet reference proxy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wattfleet.common.atomic_files import replace_file
from wattfleet.core.errors import InvalidInputError

if TYPE_CHECKING:
    from reference_models.proxy.proxy_runs import ProxyPlan, ProxyRun, ReportSamples
    from reference_models.proxy.proxy_task import ProxyTask
    from wattfleet.core.choosing import BatchEfficiency

JOURNAL_FILE = "runs.jsonl"
RESULT_FILE = "batch-efficiency.json"

_INTERRUPTED = 130
"""The exit code of a command that Ctrl+C ended."""


def proxy(
    task: Annotated[
        str,
        typer.Option(
            help="Train this: 'digits', or package.module:function, which takes no arguments and returns a ProxyTask."
            " Add the folder of your own package to PYTHONPATH.",
        ),
    ],
    batches: Annotated[str, typer.Option(help="Train with these batches, separated by commas, such as 8,16,32.")],
    target_accuracy: Annotated[float, typer.Option(help="Train until this accuracy, such as 0.85.")],
    max_samples: Annotated[
        int,
        typer.Option(
            help="Give up a run before it trains more samples than this. A sample counts each time it is trained."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Write the journal and the result to this folder. Runs that are already in its journal are not"
            " trained again."
        ),
    ],
    seeds: Annotated[int, typer.Option(help="Set the number of runs of each batch, each with another seed.")] = 3,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            help="Set the number of trained samples between two tests. By default, it is read from the journal in"
            " --out; for a new journal, it is a tenth of the training data, rounded up to a multiple of the largest"
            " batch."
        ),
    ] = None,
    lr_scaling: Annotated[
        bool,
        typer.Option(
            help="Scale the learning rate with the batch: with its square root for Adam and AdamW, in proportion for"
            " SGD."
        ),
    ] = True,
) -> None:
    """Train a model with every batch on a proxy data set, and count the samples needed to reach a target accuracy.

    Run it on a server. It trains on a CUDA GPU if there is one, otherwise on the CPU.

    A run has reached the accuracy once the mean of its last 3 tests has.

    After an interruption, the same command continues with the next run.
    """
    import torch

    from reference_models.proxy.proxy_runs import (
        ProxyPlan,
        RunEnd,
        RunLimits,
        RunsJournal,
        default_evaluate_every,
        efficiency_of,
        require_batches,
        samples_to_target,
        stored_evaluate_every,
        train_runs,
    )
    from reference_models.proxy.proxy_task import load_task

    sizes = _parsed(batches)
    trained = load_task(task)
    samples = len(trained.train[0])
    require_batches(sizes, samples)
    if evaluate_every is None:
        evaluate_every = stored_evaluate_every(out / JOURNAL_FILE) or default_evaluate_every(sizes, samples)
    plan = ProxyPlan(trained, sizes, seeds, RunLimits(target_accuracy, evaluate_every, max_samples), lr_scaling)

    from reference_models.proxy.proxy_task import TorchLearner, default_device

    device = default_device()

    def train(batch: int, seed: int, report: ReportSamples) -> RunEnd:
        try:
            return samples_to_target(TorchLearner(trained, batch, seed, lr_scaling, device), batch, plan.limits, report)
        except torch.cuda.OutOfMemoryError:
            raise InvalidInputError(
                f"the batch {batch} does not fit into the GPU's memory: leave it out of --batches. The finished runs"
                f" are kept in {out / JOURNAL_FILE}"
            ) from None

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"{out}: cannot be created: {error.strerror}; give another --out") from None
    with RunsJournal(out / JOURNAL_FILE, plan.header) as journal:
        try:
            with _progress(plan, journal.runs, device.type) as (begun, finished):
                train_runs(plan, journal, train, device.type, begun, finished)
        except KeyboardInterrupt:
            typer.echo(
                f"Interrupted. {out / JOURNAL_FILE} keeps the finished runs: run the same command to continue", err=True
            )
            raise typer.Exit(_INTERRUPTED) from None
        result = journal.samples_by_batch(sizes, seeds)
    _print_table(trained, plan, result)
    efficiency = efficiency_of(plan, result)
    try:
        replace_file(out / RESULT_FILE, efficiency.to_json().encode())
    except OSError as error:
        raise InvalidInputError(f"{out / RESULT_FILE}: cannot be written: {error.strerror}") from None
    _print_efficiency(efficiency, out / RESULT_FILE)


def _parsed(batches: str) -> list[int]:
    try:
        return [int(part) for part in batches.split(",")]
    except ValueError:
        raise InvalidInputError(
            f"--batches {batches!r} is not a list of whole numbers: give batches such as 8,16,32"
        ) from None


@contextmanager
def _progress(
    plan: ProxyPlan, known: Sequence[ProxyRun], device: str
) -> Iterator[tuple[Callable[[int, int], ReportSamples], Callable[[ProxyRun], None]]]:
    """Show the finished runs, and the samples and accuracy of the current one; also one line for each finished run."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from wattfleet.common.console import count_of, duration_text, terminal

    console = terminal(to_stderr=True)
    total = len(plan.runs)
    already = len(set(plan.runs) & {(run.batch, run.seed) for run in known})
    if already:
        console.print(f"{count_of(already, 'run')} of {total} already finished")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        all_runs = bar.add_task(f"runs on {device}", total=total, completed=already)
        current = bar.add_task("", total=plan.limits.max_samples, visible=False)

        def begun(batch: int, seed: int) -> ReportSamples:
            bar.reset(current, description=f"batch {batch}, seed {seed}", visible=True)

            def report(samples: int, accuracy: float) -> None:
                bar.update(
                    current,
                    completed=samples,
                    description=f"batch {batch}, seed {seed}: accuracy {accuracy:.3f}, samples",
                )

            return report

        def finished(run: ProxyRun) -> None:
            bar.advance(all_runs)
            console.print(f"batch {run.batch}, seed {run.seed}: {_outcome(run)}, {duration_text(run.seconds)}")

        yield begun, finished


def _outcome(run: ProxyRun) -> str:
    if run.samples is not None:
        return f"{run.samples:,} samples"
    return "diverged" if run.accuracy is None else f"target not reached, accuracy {run.accuracy:.3f}"


def _print_table(task: ProxyTask, plan: ProxyPlan, samples_by_batch: Mapping[int, Sequence[int | None]]) -> None:
    from statistics import median

    from wattfleet.common.console import terminal
    from wattfleet.common.tables import FittingTable, columns, numbers

    figures = ("batch", "learning rate", "median", "lowest", "highest", "runs that reached it")
    table = FittingTable(
        columns(*map(numbers, figures)),
        title=f"{task.name}: samples to an accuracy of {plan.limits.target_accuracy:g}, up to"
        f" {plan.limits.max_samples:,}",
        has_lines=True,
    )
    for batch, samples in samples_by_batch.items():
        reached = [count for count in samples if count is not None]
        counts = [f"{each(reached):,.0f}" for each in (median, min, max)] if reached else ["never", "", ""]
        rate = f"{task.learning_rate(batch, plan.lr_scaling):.3g}"
        table.add(str(batch), rate, *counts, f"{len(reached)} of {len(samples)}")
    terminal().print(table)


def _print_efficiency(efficiency: BatchEfficiency, stored: Path) -> None:
    from wattfleet.common.console import terminal

    console = terminal()
    console.print("Samples relative to the largest batch that reached the accuracy:")
    for batch, relative, spread in zip(efficiency.batches, efficiency.relative_samples, efficiency.spread, strict=True):
        console.print(f"  batch {batch}: {relative:.3f} (runs spread by {spread:.1%})")
    console.print(f"stored in {stored}", soft_wrap=True)
