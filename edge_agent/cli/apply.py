"""`wattfleet agent apply` and `restore`: set a power mode, and undo it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_agent.cli.options import DeviceOption, JsonOption, StateDirOption, open_named
from edge_agent.paths import DEFAULT_STATE_DIRECTORY
from wattfleet_io.console import print_json


def apply(
    mode: Annotated[
        str, typer.Argument(help="Apply this mode: cores,CPU kHz,GPU Hz,memory Hz, or the name of a preset.")
    ],
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Apply a power mode. `wattfleet agent restore`, or the next start of the agent, undoes it.

    List modes and presets with `wattfleet agent modes`.
    """
    from edge_agent.devices.mode_names import mode_argument
    from edge_agent.devices.selection import folder_of_device
    from edge_agent.training.mode_change import apply_with_backup
    from wattfleet_io.stop_signals import StoppedBySignal, StopSignals

    board = open_named(device, state_dir)
    try:
        with StopSignals.held() as signals:
            found = apply_with_backup(board, mode, folder_of_device(device, state_dir), signals.interrupting())
    except StoppedBySignal as stopped:
        typer.echo("stopped before the mode was applied; the device was restored", err=True)
        raise typer.Exit(stopped.exit_code) from None
    if json_:
        print_json({"board": board.board_kind, "mode": found._asdict(), "argument": mode_argument(found)})
    else:
        print(f"{board.board_kind}: applied {mode_argument(found)} ({found.label()})")
        print("Undo with: wattfleet agent restore")


def restore(
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Restore the settings from before `apply`. If the device was not changed, do nothing."""
    from edge_agent.devices.mode_names import mode_argument
    from edge_agent.devices.selection import folder_of_device
    from edge_agent.training.mode_change import has_backup, restore_backup
    from wattfleet_io.stop_signals import StopSignals

    folder = folder_of_device(device, state_dir)
    if not has_backup(folder):
        # Does not open the device: the service's stop hook runs this every time, even if the device cannot be opened.
        if json_:
            print_json({"restored": False})
        else:
            print(f"nothing to restore: no backup in {folder}")
        return
    board = open_named(device, state_dir)
    with StopSignals.held():
        # Signals wait: a half-restored device would be in an unknown mode.
        restored = restore_backup(board, folder)
    found = board.current_mode()
    if json_:
        print_json({"restored": restored, "board": board.board_kind, "mode": found._asdict()})
    else:
        print(f"{board.board_kind}: restored {mode_argument(found)} ({found.label()})")
