"""Options that several commands share, and the device that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import click
import typer

from edge_agent.workloads.loading import SHIPPED, Processor

if TYPE_CHECKING:
    from edge_agent.devices.device import Device

DEVICES = (
    "auto, sysfs, sysfs:<folder>, nvpmodel, jtop, host, simulated:<kind> or replay:<file>.csv; see docs/devices.md"
)

DeviceOption = Annotated[str, typer.Option("--device", help=f"The device: {DEVICES}.")]
StateDirOption = Annotated[
    Path,
    # Whether it can be read is for each command to say, with what to do about it.
    typer.Option("--state-dir", readable=False, help="Where profile, reference and predictor are kept."),
]
SeedOption = Annotated[
    int, typer.Option("--seed", help="Seed of the modes to profile, and of a simulated board.", min=0)
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(
        "--workload", help=f"What real hardware is measured with: {', '.join(SHIPPED)}, or your own module:function."
    ),
]
MinibatchOption = Annotated[int, typer.Option("--minibatch", help="Samples in a minibatch of the workload.", min=1)]
ProcessorOption = Annotated[
    Processor,
    typer.Option("--processor", help="Where the workload computes.", click_type=click.Choice(get_args(Processor))),
]
ToleranceOption = Annotated[
    float,
    typer.Option(
        "--tolerance",
        help="Stop measuring once no choice of a mode promises to get faster by more than this share; 0 never does.",
    ),
]
USUAL_TOLERANCE = 0.01
"""That of `wattfleet.choosing.sampling.SamplingSettings`, which takes long to import for a default."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def open_named(spec: str, state_directory: Path, seed: int = 0) -> Device:
    """The device that `--device` names; it is closed when the command ends.

    Args:
        spec: what the command line says.
        state_directory: where a device may write what it needs.
        seed: of a soft board; what its noise is like matters to few commands.

    Raises:
        InvalidInputError: no such device, or none that can be used.
        ModeNotAppliedError: a device does not say which mode is in force.
    """
    from edge_agent.devices.jtop import JtopDevice
    from edge_agent.devices.selection import open_device

    device = open_device(spec, seed=seed, state_directory=state_directory)
    if isinstance(device, JtopDevice):
        click.get_current_context().call_on_close(device.close)
    return device


def print_json(content: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(content, indent=2))
