"""`wattfleet agent apply` and `restore`: a mode in force, and what was in force before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_agent.cli.options import DeviceOption, JsonOption, StateDirOption, open_named, print_json
from edge_agent.runtime.paths import DEFAULT_STATE_DIRECTORY


def apply(
    mode: Annotated[str, typer.Argument(help="cores,CPU kHz,GPU Hz,memory Hz, or the name of a preset.")],
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Put a power mode in force and keep it, until `restore` or the agent's next start puts back what was before."""
    from edge_agent.cli.mode_names import written
    from edge_agent.devices.selection import folder_of_device
    from edge_agent.training.mode_change import apply_kept
    from wattfleet_io.stop_signals import StoppedBySignal, StopSignals

    board = open_named(device, state_dir)
    try:
        with StopSignals.held() as signals:
            found = apply_kept(board, mode, folder_of_device(device, state_dir), signals.interrupting())
    except StoppedBySignal as stopped:
        typer.echo("stopped half-way; the device is as its owner left it", err=True)
        raise typer.Exit(stopped.exit_code) from None
    if json_:
        print_json({"board": board.board_kind, "mode": found._asdict(), "argument": written(found)})
    else:
        print(f"{board.board_kind}: {written(found)} is in force ({found.label()})")
        print("`wattfleet agent restore` puts back what was before")


def restore(
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Put back what was in force before the device was first changed; nothing happens where nothing was."""
    from edge_agent.cli.mode_names import written
    from edge_agent.devices.selection import folder_of_device
    from edge_agent.training.mode_change import is_kept, restore_kept
    from wattfleet_io.stop_signals import StopSignals

    folder = folder_of_device(device, state_dir)
    if not is_kept(folder):
        # Not even a device is needed: the service's stop hook runs on every end.
        if json_:
            print_json({"restored": False})
        else:
            print(f"nothing to restore: {folder} holds nothing")
        return
    board = open_named(device, state_dir)
    with StopSignals.held():
        # Half of what was before is no use to anyone.
        restored = restore_kept(board, folder)
    found = board.current_mode()
    if json_:
        print_json({"restored": restored, "board": board.board_kind, "mode": found._asdict()})
    else:
        print(f"{board.board_kind}: as it was before, {written(found)} ({found.label()})")
