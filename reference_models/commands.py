"""`wattfleet reference ...`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reference_models.proxy.command import proxy
from wattfleet.core.modes import Task

if TYPE_CHECKING:
    from wattfleet.core.prediction import SuspectRow

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Train reference predictors, import logs, audit measured profiles, and compare batches on a proxy data set.",
)


@app.callback()
def group() -> None:
    """Train reference predictors, from which devices transfer, audit profiles, and compare batches."""


app.command()(proxy)


@app.command()
def train(
    corpus: Annotated[
        Path,
        typer.Option(
            help="Read the measured modes of one workload on one board from this CSV, or from an agent's journal"
            " (profile.jsonl)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Write the reference to this directory. A reference in it is replaced.")],
    minibatches_per_epoch: Annotated[int, typer.Option(help="Set the number of minibatches in an epoch.")],
    board: Annotated[
        str | None,
        typer.Option(
            help="Name the board of the corpus. If no known board offers the corpus's modes, use a name of your own."
            " A journal states it.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="Name the network and data, such as resnet18-imagenet. A journal states it.", show_default=False
        ),
    ] = None,
    minibatch: Annotated[
        int | None,
        typer.Option(help="Set the number of samples in a minibatch. A journal states it.", show_default=False),
    ] = None,
    task: Annotated[
        Task | None,
        typer.Option(help="State what was measured. By default, it follows from the name of the file's time column."),
    ] = None,
    loader_workers: Annotated[
        int | None,
        typer.Option(
            help="State the number of processes that load data, 0 if the training process loads. By default, it is"
            " unknown."
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="State where the measurements come from, for the model card. By default, what a journal states of its"
            " figures.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        list[Path] | None, typer.Option(help="Also score transfers to the modes in this CSV. Repeatable.")
    ] = None,
    population: Annotated[
        Path | None,
        typer.Option(
            help="Learn the prior of transfers from the corpora that this TOML file lists, the reference's own among"
            " them. Their CSV files are read from the folder of --corpus. By default, the corpus alone is used."
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON instead of a table.")] = False,
) -> None:
    """Train a reference predictor on a corpus, score it, and store it with a model card."""
    import shlex

    from rich.console import Console

    from reference_models.training import model_card, read_population, require_board_offers
    from reference_models.training import train as train_reference
    from wattfleet.core.errors import InvalidInputError
    from wattfleet.core.modes import JOURNAL_SUFFIX, FittedWorkload, read_journal, read_profile, stated_facts
    from wattfleet.core.prediction import ensure_replaceable, write_artefact

    ensure_replaceable(out)
    provenance = {"measurements": source or "not stated", "corpus": corpus.name}
    if corpus.suffix == JOURNAL_SUFFIX:
        origin, measured = read_journal(corpus)
        if minibatch not in (None, origin.minibatch):
            raise InvalidInputError(f"{corpus}: states minibatches of {origin.minibatch} samples: omit --minibatch")
        board, workload, minibatch = board or origin.board_kind, workload or origin.workload, origin.minibatch
        provenance["measurements"] = source or f"an agent's journal, {origin.provenance} figures"
        if origin.basis:
            provenance["figures of"] = origin.basis
    else:
        measured = read_profile(corpus)
    for option, given in (("--board", board), ("--workload", workload), ("--minibatch", minibatch)):
        if given is None:
            raise InvalidInputError(f"{corpus}: a CSV file does not state this: pass {option}")
    assert board is not None and workload is not None and minibatch is not None
    trained = FittedWorkload(workload, minibatch, minibatches_per_epoch)
    targets = {path.stem: read_profile(path) for path in target or []}
    require_board_offers(board, measured)
    # The minibatch describes the workload; a corpus of several batch sizes states them itself.
    batch = minibatch if len(measured.batches) < 2 else None
    facts = stated_facts(str(corpus), measured, task, batch, loader_workers)
    console = Console(stderr=True)
    with console.status("reading") as status:
        artefact = train_reference(
            measured,
            trained,
            board,
            provenance,
            targets,
            report=lambda step: status.update(step),
            facts=facts,
            population=[] if population is None else read_population(population, corpus.parent),
        )
    options = [f"--corpus data/{corpus.name}", f"--out {out.name}"]
    options += [f"--board {shlex.quote(board)}", f"--workload {shlex.quote(workload)}"]
    options += [f"--minibatch {minibatch}", f"--minibatches-per-epoch {minibatches_per_epoch}"]
    options += [f"--task {task}"] if task is not None else []
    options += [f"--loader-workers {loader_workers}"] if loader_workers is not None else []
    options += [f"--population {population}"] if population is not None else []
    options += [f"--target data/{path.name}" for path in target or []] + (
        [f"--source {shlex.quote(source)}"] if source else []
    )
    card = model_card(artefact, out.name, "wattfleet reference train \\\n      " + " \\\n      ".join(options))
    write_artefact(artefact, out, card)
    if json_:
        print(artefact.manifest.decode(), end="")
    else:
        _print_table(artefact.details.figures, out, artefact.digest)


@app.command(name="import")
def import_logs(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Read the logs of the folders pm_<cores>_<cpu kHz>_<gpu Hz>_<memory Hz> in this folder, one for each"
            " mode: minibatch.csv, and jtop.csv or tegrastats.log."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Write the measured modes to this CSV file. A file is replaced.")],
    rail: Annotated[
        list[str] | None,
        typer.Option(
            help="Count this rail as a part of the board's power. Repeatable. By default, use the rail of the board's"
            " input.",
            show_default=False,
        ),
    ] = None,
    interval_s: Annotated[
        float,
        typer.Option(
            help="Set the seconds between lines of tegrastats that state no time. Default: 1.", show_default=False
        ),
    ] = 1.0,
) -> None:
    """Make a profile from logs of jtop or tegrastats, and of a training loop's minibatches."""
    from reference_models.logs import read_run_logs
    from wattfleet.core.errors import InvalidInputError
    from wattfleet.core.modes import Profile, write_profile

    if not 0 < interval_s < float("inf"):
        raise InvalidInputError(f"--interval-s must be finite and above 0, not {interval_s:g}")
    rows = []
    for run in read_run_logs(folder, rail or (), interval_s):
        row, why = run.measurement(), run.contradiction()
        if why is None and row is None:
            why = "it has too few power samples after the power has settled; train for longer"
        if why is not None:
            typer.echo(f"left out {run.mode.label()}: {why}", err=True)
        elif row is not None:
            rows.append(row)
    if not rows:
        raise InvalidInputError(f"{folder}: no mode is left to import: see the lines above")
    try:
        write_profile(Profile.of(rows), out)
    except OSError as error:
        raise InvalidInputError(f"{out}: cannot be written: {error.strerror or error}") from None
    print(f"imported {len(rows)} modes to {out}")


@app.command()
def audit(
    csv: Annotated[
        Path,
        typer.Argument(help="Read the measured modes of one workload on one device from this CSV, or from a journal."),
    ],
    reference: Annotated[
        str | None,
        typer.Option(
            help="Fit with this shipped reference. Use it if fewer than 400 modes were measured. By default, use none."
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List suspect rows, whose time and power do not match their mode, with the reason for each."""
    import json

    from rich.console import Console

    from reference_models import load
    from wattfleet.core.errors import InvalidInputError
    from wattfleet.core.modes import board_with_modes, read_profile
    from wattfleet.core.prediction import RooflinePredictor, audit_rows, restore_predictor

    profile = read_profile(csv)
    known = None if reference is None else restore_predictor(load(reference), board_with_modes(profile.modes))
    if known is not None and not isinstance(known, RooflinePredictor):
        raise InvalidInputError(
            f"the reference {reference!r} is a {known.name!r} predictor: give --reference a 'roofline' one"
        )
    with Console(stderr=True).status(f"fitting {len(profile)} modes"):
        suspects = audit_rows(profile, known)
    if json_:
        print(json.dumps({"rows": len(profile), "suspects": [_suspect_json(found) for found in suspects]}, indent=2))
    else:
        _print_suspects(suspects, len(profile))


def _suspect_json(found: SuspectRow) -> dict[str, Any]:
    return asdict(found) | {
        "mode": found.mode._asdict(),
        "applied": None if found.applied is None else found.applied._asdict(),
    }


def _print_suspects(suspects: Sequence[SuspectRow], rows: int) -> None:
    from rich.console import Console

    from wattfleet.common.tables import FittingTable, columns, numbers, texts

    stated = any(found.batch is not None for found in suspects)
    table = FittingTable(
        columns(
            numbers("row"),
            *([numbers("batch")] if stated else []),
            texts("cores, CPU, GPU, memory MHz"),
            texts("reason"),
            texts("looks like"),
        ),
        title=f"{len(suspects)} of {rows} rows are suspect (row 0 is the first)",
        has_lines=True,
    )
    for found in suspects:
        cores, cpu_khz, gpu_hz, mem_hz = found.mode
        clocks = ", ".join(f"{clock:g}" for clock in (cpu_khz / 1e3, gpu_hz / 1e6, mem_hz / 1e6))
        batch = [str(found.batch)] if stated else []
        table.add(str(found.row), *batch, f"{cores}, {clocks}", found.reason, found.looks_like)
    Console().print(table)


def _print_table(figures: Mapping[str, Any], out: Path, digest: str) -> None:
    from rich.console import Console

    from wattfleet.common.tables import FittingTable, columns, numbers

    table = FittingTable(
        columns("on", numbers("time %"), numbers("power %")),
        title="Absolute percentage error, mean / median",
        has_lines=True,
    )
    for name, value in figures.items():
        if isinstance(value, Mapping):
            table.add(
                name.replace("_", " "),
                f"{value['time_mape_pct']} / {value['time_median_ape_pct']}",
                f"{value['power_mape_pct']} / {value['power_median_ape_pct']}",
            )
    console = Console()
    console.print(table)
    console.print(f"stored in {out}, digest {digest[:12]}...", highlight=False)
