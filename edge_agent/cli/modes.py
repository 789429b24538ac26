"""`wattfleet agent modes`: the power modes that a device offers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.cli.options import DeviceOption, JsonOption, StateDirOption, open_named
from edge_agent.paths import DEFAULT_STATE_DIRECTORY
from wattfleet_io.console import print_json, terminal

if TYPE_CHECKING:
    from edge_agent.devices.device import Device

_UNITS = {"cores": "", "cpu_khz": "kHz", "gpu_hz": "Hz", "mem_hz": "Hz"}
_TITLES = {"cores": "cores", "cpu_khz": "CPU", "gpu_hz": "GPU", "mem_hz": "memory"}


def modes(
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    list_: Annotated[bool, typer.Option("--list", help="Print every mode as CSV instead of tables.")] = False,
    json_: JsonOption = False,
) -> None:
    """List the values of each power setting, and the named presets."""
    board = open_named(device, state_dir)
    if list_:
        print("\n".join(_csv_lines(board)))
        return
    content = _content(board)
    if json_:
        print_json(content)
    else:
        _print_tables(content)


def _csv_lines(board: Device) -> list[str]:
    from wattfleet.modes import PowerMode

    rows = board.modes.astype(int).tolist()
    return [",".join(PowerMode._fields), *(",".join(map(str, row)) for row in rows)]


def _content(board: Device) -> dict[str, Any]:
    from edge_agent.devices.mode_names import presets_of
    from wattfleet.modes import PowerMode

    columns = zip(PowerMode._fields, board.modes.T, strict=True)
    return {
        "board": board.board_kind,
        "provenance": board.provenance,
        "modes": len(board.modes),
        "values": {knob: sorted({round(value) for value in values.tolist()}) for knob, values in columns},
        "presets": {name: mode._asdict() for name, mode in presets_of(board).items()},
    }


def _print_tables(content: dict[str, Any]) -> None:
    from edge_agent.devices.mode_names import mode_argument
    from wattfleet.modes import PowerMode
    from wattfleet_io.tables import Column, FittingTable, columns, numbers, texts

    console = terminal()
    values = FittingTable(
        columns("setting", numbers("count", rank=1), texts("values")),
        title=f"{content['board']}: {content['modes']:,} modes",
        has_lines=True,
    )
    for knob, taken in content["values"].items():
        unit = f" {_UNITS[knob]}" if _UNITS[knob] else ""
        values.add(f"{_TITLES[knob]}{unit}", str(len(taken)), " ".join(map(str, taken)))
    console.print(values)
    if content["presets"]:
        presets = FittingTable(
            columns("name", "cores,CPU kHz,GPU Hz,memory Hz", Column("cores, CPU/GPU/memory GHz", rank=1)),
            title="Presets",
            has_lines=True,
        )
        for name, knobs in content["presets"].items():
            mode = PowerMode(**knobs)
            presets.add(name, mode_argument(mode), mode.label())
        console.print(presets)
