"""`wattfleet reference ...`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Reference predictors, from which devices transfer.")


@app.callback()
def group() -> None:
    """Reference predictors, from which devices transfer."""


@app.command()
def train(
    corpus: Annotated[Path, typer.Option(help="CSV of measured modes of one workload on one board.")],
    out: Annotated[Path, typer.Option(help="Directory of the reference; a reference that is there is replaced.")],
    board: Annotated[str, typer.Option(help="Kind of board the corpus was measured on.")] = "agx-orin",
    workload: Annotated[str, typer.Option(help="Network and data.")] = "resnet18-imagenet",
    minibatch: Annotated[int, typer.Option(help="Samples in a minibatch.")] = 16,
    minibatches_per_epoch: Annotated[int, typer.Option(help="Minibatches in an epoch.")] = 3125,
    source: Annotated[str, typer.Option(help="Where the measurements come from, for the model card.")] = "not stated",
    target: Annotated[
        list[Path] | None, typer.Option(help="Also measure transfers to this CSV file; may be repeated.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the manifest instead of a table.")] = False,
) -> None:
    """Fit a reference predictor to a corpus, measure it, and store it with a model card."""
    import shlex

    from rich.console import Console

    from reference_models.training import model_card
    from reference_models.training import train as train_reference
    from wattfleet.artefact import ensure_replaceable, write_directory
    from wattfleet.boards import board as board_of_kind
    from wattfleet.profile import read_csv
    from wattfleet.workload import Workload

    ensure_replaceable(out)
    board_of_kind(board)
    trained = Workload(workload, minibatch, minibatches_per_epoch)
    targets = {path.stem: read_csv(path) for path in target or []}
    measured = read_csv(corpus)
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
    options = [f"--corpus data/{corpus.name}", f"--out {out.name}", f"--board {board}", f"--workload {workload}"]
    options += [f"--minibatch {minibatch}", f"--minibatches-per-epoch {minibatches_per_epoch}"]
    options += [f"--target data/{path.name}" for path in target or []] + [f"--source {shlex.quote(source)}"]
    card = model_card(artefact, out.name, "wattfleet reference train \\\n      " + " \\\n      ".join(options))
    write_directory(artefact, out, card)
    if json_:
        print(artefact.manifest.decode(), end="")
    else:
        _print_table(artefact.details.figures, out, artefact.digest)


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
