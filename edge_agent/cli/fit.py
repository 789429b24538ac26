"""`wattfleet agent fit`: fit the predictor again to the measured modes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.cli.options import DeviceOption, JsonOption, StateDirOption, StoredWorkloadOption, open_named
from edge_agent.paths import DEFAULT_STATE_DIRECTORY, PREDICTOR_DIRECTORY
from wattfleet_io.console import print_json, terminal

if TYPE_CHECKING:
    from edge_agent.devices.device import Device
    from edge_agent.learning.refit import Refit


def fit(
    reference: Annotated[
        str | None,
        typer.Option(
            help="Set the reference predictor to transfer from: a shipped one, or a directory. By default, reuse the"
            " reference of the stored predictor."
        ),
    ] = None,
    minibatches_per_epoch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Set the number of minibatches in one pass over the device's data. By default, keep the stored"
            " number.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    workload: StoredWorkloadOption = None,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Fit the predictor to the modes measured so far, store it, and report its error on each of them."""
    from edge_agent.learning.refit import refit
    from edge_agent.profiling.stored_profile import chosen_workload, read_profile, require_profile_of

    board = open_named(device, state_dir)
    if (measured := read_profile(chosen_workload(state_dir, workload).folder)) is not None:
        require_profile_of(board, measured, state_dir)
    with terminal(to_stderr=True).status("fitting"):
        fitted = refit(state_dir, workload, reference, minibatches_per_epoch)
    content = _content(fitted, board)
    if json_:
        print_json(content)
    else:
        _print(content)


def _content(fitted: Refit, board: Device) -> dict[str, Any]:
    import numpy as np

    from edge_agent.devices.mode_names import mode_argument
    from wattfleet.choosing import descending_modes
    from wattfleet.modes import array_to_modes
    from wattfleet.prediction import RooflinePredictor

    highest = array_to_modes(descending_modes(board.modes)[:1])[0]
    left_out, explanation = None, None
    if fitted.left_out is not None:
        left_out = {
            "median_time_error": float(np.median([abs(mode.time_error) for mode in fitted.left_out])),
            "median_power_error": float(np.median([abs(mode.power_error) for mode in fitted.left_out])),
            "modes": [
                {
                    "argument": mode_argument(mode.mode),
                    "label": mode.mode.label(),
                    "minibatch_ms": mode.minibatch_ms,
                    "time_error": mode.time_error,
                    "power_w": mode.power_w,
                    "power_error": mode.power_error,
                }
                for mode in fitted.left_out
            ],
        }
    if isinstance(fitted.predictor, RooflinePredictor):
        explained = fitted.predictor.explain(highest)
        explanation = {"bound": explained.bound, "words": explained.words(), "shares": dict(explained.shares)}
    details = fitted.artefact.details
    return {
        "device_id": fitted.measured.header.device_id,
        "board": details.board,
        "provenance": fitted.measured.header.provenance,
        "workload": details.workload.name,
        "fitted_to_modes": len(fitted.measured.profile),
        "predictor": {"kind": details.predictor, "digest": fitted.artefact.digest},
        "predictor_directory": str(fitted.folder / PREDICTOR_DIRECTORY),
        "left_out": left_out,
        "highest_mode": {"argument": mode_argument(highest), "label": highest.label(), "explanation": explanation},
    }


def _print(content: dict[str, Any]) -> None:
    from wattfleet_io.console import count_of
    from wattfleet_io.tables import FittingTable, columns, numbers

    console = terminal()
    left_out, highest = content["left_out"], content["highest_mode"]
    if left_out is not None:
        table = FittingTable(
            columns("mode", *map(numbers, ("ms measured", "time error", "W measured", "power error"))),
            title="Error in each measured mode when predicted from all other modes",
            has_lines=True,
        )
        for row in left_out["modes"]:
            table.add(
                row["label"],
                f"{row['minibatch_ms']:.1f}",
                f"{row['time_error']:+.1%}",
                f"{row['power_w']:.1f}",
                f"{row['power_error']:+.1%}",
            )
        console.print(table)
        console.print(
            f"Median error: {left_out['median_time_error']:.1%} in time, {left_out['median_power_error']:.1%} in power."
        )
    if highest["explanation"] is not None:
        console.print(f"The highest mode, {highest['label']}: {highest['explanation']['words']}")
    predictor = content["predictor"]
    console.print(
        f"Stored the {predictor['kind']} predictor for {content['workload']}, fitted to"
        f" {count_of(content['fitted_to_modes'], 'mode')}, in {content['predictor_directory']}"
        f" (digest {predictor['digest'][:12]}...)",
        soft_wrap=True,
    )
