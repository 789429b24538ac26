"""`wattfleet agent explain`: what bounds a training step at a mode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_agent.cli.options import DeviceOption, JsonOption, StateDirOption, open_named, print_json
from edge_agent.runtime.paths import DEFAULT_STATE_DIRECTORY

_BAR_CELLS = 30


def explain(
    mode: Annotated[str, typer.Argument(help="cores,CPU kHz,GPU Hz,memory Hz, or the name of a preset.")],
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Say which part of the device a training step waits for at a mode, and which knob would make it faster."""
    from rich.console import Console

    from edge_agent.cli.mode_names import mode_named, written
    from edge_agent.learning.expectation import expectation_of
    from edge_agent.profiling.profile_state import read_fitted
    from wattfleet.errors import InvalidInputError
    from wattfleet.prediction import RooflinePredictor

    board = open_named(device, state_dir)
    wanted = mode_named(board, mode)
    with Console(stderr=True).status(f"predicting {len(board.modes):,} modes"):
        fitted = read_fitted(state_dir, board)
    if not isinstance(fitted.predictor, RooflinePredictor):
        raise InvalidInputError(
            f"the predictor of this device is of the kind {fitted.predictor.name!r}, which knows no resources: an"
            " explanation needs 'roofline'"
        )
    explanation = fitted.predictor.explain(wanted)
    content = {
        "mode": wanted._asdict(),
        "argument": written(wanted),
        "label": wanted.label(),
        "bound": explanation.bound,
        "words": explanation.words(),
        "shares": dict(explanation.shares),
        **expectation_of(fitted, wanted).content(),
    }
    if json_:
        print_json(content)
    else:
        _print(content)


def _print(content: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from edge_agent.learning.expectation import lines_of

    console = Console(highlight=False)
    console.print(f"{content['argument']} ({content['label']})", style="bold")
    console.print(content["words"])
    shares = Table(box=None, pad_edge=False, show_header=False)
    shares.add_column("part", no_wrap=True)
    shares.add_column("share", justify="right", no_wrap=True)
    shares.add_column("bar", no_wrap=True, style="cyan")
    for name, share in content["shares"].items():
        shares.add_row(name, f"{share:.0%}", "█" * round(share * _BAR_CELLS))
    console.print()
    console.print(shares)
    console.print()
    lines = lines_of(content)
    console.print(f"{lines['epoch']} per epoch, {lines['power']}: {lines['known']}")
