"""`wattfleet agent explain`: what limits the speed of a training step in a mode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_agent.cli.options import DeviceOption, JsonOption, StateDirOption, StoredWorkloadOption, open_named
from edge_agent.paths import DEFAULT_STATE_DIRECTORY
from wattfleet_io.console import MODE_LEGEND, print_json, terminal

_BAR_CELLS = 30


def explain(
    mode: Annotated[
        str, typer.Argument(help="Explain this mode: cores,CPU kHz,GPU Hz,memory Hz, or the name of a preset.")
    ],
    device: DeviceOption = "auto",
    workload: StoredWorkloadOption = None,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Explain which part of the device limits training in a mode, and which setting would speed it up.

    List modes and presets with `wattfleet agent modes`.
    """
    from edge_agent.devices.mode_names import mode_argument, parse_mode
    from edge_agent.learning.expectation import expectation_of
    from edge_agent.profiling.stored_profile import read_fitted
    from wattfleet.errors import InvalidInputError
    from wattfleet.prediction import RooflinePredictor

    board = open_named(device, state_dir)
    wanted = parse_mode(board, mode)
    with terminal(to_stderr=True).status(f"predicting {len(board.modes):,} modes"):
        fitted = read_fitted(state_dir, board, workload)
    if not isinstance(fitted.predictor, RooflinePredictor):
        raise InvalidInputError(
            f"the fitted predictor is {fitted.predictor.name!r}, which cannot explain its predictions; fit a 'roofline'"
            " predictor with `wattfleet agent fit --reference`"
        )
    explanation = fitted.predictor.explain(wanted)
    content = {
        "mode": wanted._asdict(),
        "argument": mode_argument(wanted),
        "label": wanted.label(),
        "bound": explanation.bound,
        "words": explanation.words(),
        "shares": dict(explanation.shares),
        "measured_data_wait": fitted.measured.data_waits.get(wanted),
        **expectation_of(fitted, wanted).content(),
    }
    if json_:
        print_json(content)
    else:
        _print(content)


def _print(content: Mapping[str, Any]) -> None:
    from rich.text import Text

    from edge_agent.learning.expectation import lines_of
    from wattfleet_io.tables import Column, FittingTable, columns, numbers

    console = terminal()
    console.print(f"{content['argument']} ({content['label']})", style="bold")
    console.print(content["words"])
    shares = FittingTable(columns("part", numbers("share"), Column("bar", rank=1)), has_headings=False)
    for name, share in content["shares"].items():
        shares.add(name, f"{share:.0%}", Text("█" * round(share * _BAR_CELLS), style="cyan"))
    console.print()
    console.print(shares)
    console.print()
    wait = content["measured_data_wait"]
    if wait is not None:
        console.print(f"Measured in this mode: a minibatch waits {wait:.0%} of its time for data.")
    lines = lines_of(content)
    console.print(f"{lines['epoch']} per epoch, {lines['power']}: {lines['source']}")
    console.print(MODE_LEGEND, style="dim")
