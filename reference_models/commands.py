"""`wattfleet reference ...`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from wattfleet.prediction import SuspectRow

app = typer.Typer(no_args_is_help=True, help="Reference predictors, from which devices transfer.")


@app.callback()
def group() -> None:
    """Reference predictors, from which devices transfer."""


@app.command()
def train(
    corpus: Annotated[Path, typer.Option(help="CSV of measured modes of one workload on one board.")],
    out: Annotated[Path, typer.Option(help="Directory of the reference; a reference that is there is replaced.")],
    board: Annotated[
        str,
        typer.Option(
            help="Kind of board the corpus was measured on; a name of your own where no known one has its modes."
        ),
    ],
    workload: Annotated[str, typer.Option(help="Network and data, such as resnet18-imagenet.")],
    minibatch: Annotated[int, typer.Option(help="Samples in a minibatch.")],
    minibatches_per_epoch: Annotated[int, typer.Option(help="Minibatches in an epoch.")],
    source: Annotated[str, typer.Option(help="Where the measurements come from, for the model card.")] = "not stated",
    target: Annotated[
        list[Path] | None, typer.Option(help="Also measure transfers to this CSV file; may be repeated.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the manifest instead of a table.")] = False,
) -> None:
    """Fit a reference predictor to a corpus, measure it, and store it with a model card."""
    import shlex

    from rich.console import Console

    from reference_models.training import ensure_offers, model_card
    from reference_models.training import train as train_reference
    from wattfleet.modes import Workload, read_profile
    from wattfleet.prediction import ensure_replaceable, write_artefact

    ensure_replaceable(out)
    trained = Workload(workload, minibatch, minibatches_per_epoch)
    targets = {path.stem: read_profile(path) for path in target or []}
    measured = read_profile(corpus)
    ensure_offers(board, measured)
    console = Console(stderr=True)
    with console.status("reading") as status:
        artefact = train_reference(
            measured,
            trained,
            board,
            {"measurements": source, "corpus": corpus.name},
            targets,
            report=lambda step: status.update(step),
        )
    options = [f"--corpus data/{corpus.name}", f"--out {out.name}"]
    options += [f"--board {shlex.quote(board)}", f"--workload {shlex.quote(workload)}"]
    options += [f"--minibatch {minibatch}", f"--minibatches-per-epoch {minibatches_per_epoch}"]
    options += [f"--target data/{path.name}" for path in target or []] + [f"--source {shlex.quote(source)}"]
    card = model_card(artefact, out.name, "wattfleet reference train \\\n      " + " \\\n      ".join(options))
    write_artefact(artefact, out, card)
    if json_:
        print(artefact.manifest.decode(), end="")
    else:
        _print_table(artefact.details.figures, out, artefact.digest)


@app.command()
def audit(
    csv: Annotated[Path, typer.Argument(help="CSV of measured modes of one workload on one device.")],
    reference: Annotated[
        str | None, typer.Option(help="Shipped reference to help the fit where fewer than 400 modes were measured.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the rows whose time and power are not those of the mode they name, with the reason."""
    import json

    from rich.console import Console

    from reference_models import load
    from wattfleet.errors import InvalidInputError
    from wattfleet.modes import board_with_modes, read_profile
    from wattfleet.prediction import RooflinePredictor, audit_rows, restore_predictor

    profile = read_profile(csv)
    known = None if reference is None else restore_predictor(load(reference), board_with_modes(profile.modes))
    if known is not None and not isinstance(known, RooflinePredictor):
        raise InvalidInputError(f"the reference {reference!r} is of the kind {known.name!r}: an audit needs 'roofline'")
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
    from rich.table import Table

    table = Table(title=f"{len(suspects)} of {rows} rows are suspect; rows count from 0", title_justify="left")
    table.add_column("row", justify="right")
    for name in ("cores, CPU, GPU, memory MHz", "reason", "looks like"):
        table.add_column(name)
    for found in suspects:
        cores, cpu_khz, gpu_hz, mem_hz = found.mode
        clocks = ", ".join(f"{clock:g}" for clock in (cpu_khz / 1e3, gpu_hz / 1e6, mem_hz / 1e6))
        table.add_row(str(found.row), f"{cores}, {clocks}", found.reason, found.looks_like)
    Console().print(table)


def _print_table(figures: Mapping[str, Any], out: Path, digest: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Absolute percentage error, mean / median", title_justify="left")
    for name in ("on", "time %", "power %"):
        table.add_column(name, justify="left" if name == "on" else "right")
    for name, value in figures.items():
        if isinstance(value, Mapping):
            table.add_row(
                name.replace("_", " "),
                f"{value['time_mape_pct']} / {value['time_median_ape_pct']}",
                f"{value['power_mape_pct']} / {value['power_median_ape_pct']}",
            )
    console = Console()
    console.print(table)
    console.print(f"stored in {out}, digest {digest[:12]}...", highlight=False)
