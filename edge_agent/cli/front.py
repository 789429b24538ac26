"""`wattfleet agent front`: the device's Pareto front of time against power."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_agent.cli.options import DeviceOption, JsonOption, StateDirOption, StoredWorkloadOption, open_named
from edge_agent.paths import DEFAULT_STATE_DIRECTORY
from wattfleet.common.console import MODE_LEGEND, print_json, terminal

if TYPE_CHECKING:
    from edge_agent.cli.front_plots.view import FrontView

_ROWS = 12
_WIDEST = 120


def front(
    html: Annotated[Path | None, typer.Option(help="Also write the plot as an HTML page that works offline.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also write the plot as a PNG image.")] = None,
    device: DeviceOption = "auto",
    workload: StoredWorkloadOption = None,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Plot the Pareto front: the fastest measured or predicted mode for every power."""
    from edge_agent.profiling.stored_profile import read_fitted

    board = open_named(device, state_dir)
    with terminal(to_stderr=True).status(f"predicting {len(board.modes):,} modes"):
        from edge_agent.cli.front_plots.view import FrontView

        view = FrontView.of(read_fitted(state_dir, board, workload))
    if html is not None:
        _write_file(html, lambda path: _write_page(view, path))
    if png is not None:
        _write_file(png, lambda path: _write_image(view, path))
    if json_:
        print_json(view.content())
    else:
        _print(view)


def _write_page(view: FrontView, path: Path) -> None:
    from edge_agent.cli.front_plots.html import write_front_page

    write_front_page(view, path)


def _write_image(view: FrontView, path: Path) -> None:
    from edge_agent.cli.front_plots.png import write_front_image

    write_front_image(view, path)


def _write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file, and confirm it on standard error."""
    from wattfleet.core.errors import InvalidInputError

    try:
        write(path)
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        raise InvalidInputError(f"{path}: {library} is not installed; run pip install 'wattfleet[plots]'") from None
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {path}", err=True)


def _print(view: FrontView) -> None:
    import numpy as np
    from rich.text import Text

    from edge_agent.cli.front_plots.terminal import front_text
    from edge_agent.devices.sysfs import mode_argument
    from edge_agent.learning.transfer import assumed_length
    from wattfleet.common.tables import Column, FittingTable, columns, numbers

    console, front = terminal(), view.front
    console.print(view.title, style="bold")
    plot = front_text(view, min(console.width, _WIDEST), colours=console.color_system is not None)
    console.print(Text.from_ansi(plot), no_wrap=True, crop=True)
    shown = np.unique(np.linspace(0, len(front) - 1, _ROWS).round().astype(int))
    several = front.batch is not None and len(np.unique(front.batch)) > 1
    figures = (*(["batch"] if several else []), "s/epoch", "W", "W planned")
    table = FittingTable(columns("mode", Column("argument of `apply`", rank=1), *map(numbers, figures)))
    for index in shown.tolist():
        mode = front.mode(index)
        table.add(
            mode.label() + (" x" if view.is_measured[index] else ""),
            mode_argument(mode),
            *([str(front.batch[index])] if several and front.batch is not None else []),
            f"{view.epoch_s[index]:.1f}",
            f"{view.power_w[index]:.1f}",
            f"{front.planned_w[index]:.1f}",
        )
    console.print(table)
    if len(shown) < len(front):
        console.print(f"{len(shown)} of {len(front)} modes shown; --json and --html list all", style="dim")
    console.print("x: measured; the others are predicted", style="dim")
    console.print(MODE_LEGEND, style="dim")
    if view.is_length_assumed:
        console.print(assumed_length(view.minibatches_per_epoch), style="dim", soft_wrap=True)
