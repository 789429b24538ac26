"""Options that several commands share, and the device that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from edge_agent.devices.device import Device

DEVICES = (
    "auto, sysfs, sysfs:<folder>, nvpmodel, jtop, host, simulated:<kind> or replay:<file>.csv; see docs/devices.md"
)

DeviceOption = Annotated[str, typer.Option("--device", help=f"The device: {DEVICES}.")]
StateDirOption = Annotated[
    Path,
    # Whether it can be read is for each command to say, with what to do about it.
    typer.Option(
        "--state-dir", readable=False, help="Where profile, predictor and the device's restore file are kept."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def open_named(spec: str, state_directory: Path) -> Device:
    """The device that `--device` names.

    Raises:
        InvalidInputError: no such device, or none that can be used.
        ModeNotAppliedError: a device does not say which mode is in force.
    """
    from edge_agent.devices.selection import open_device

    # What a soft board's noise is like matters to none of the commands.
    return open_device(spec, seed=0, state_directory=state_directory)


def print_json(content: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(content, indent=2))
