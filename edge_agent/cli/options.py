"""Options shared by several commands, and opening the device named by `--device`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import click
import typer
from click.core import ParameterSource

from edge_agent.workloads.loading import SHIPPED, Processor
from wattfleet.core.choosing import WorkloadChanges
from wattfleet.core.modes import LARGEST_COUNT

if TYPE_CHECKING:
    from edge_agent.devices.device import Device

DEVICE_HELP = (
    "Select the device: auto (detect), sysfs, sysfs:<folder>, nvpmodel, jtop, host, description:<file>.toml,"
    " simulated:<kind> or replay:<file>.csv. See docs/devices.md."
)

DeviceOption = Annotated[str, typer.Option("--device", help=DEVICE_HELP)]
StateDirOption = Annotated[
    Path,
    # Each command reports an unreadable directory itself, with a remedy.
    typer.Option("--state-dir", readable=False, help="Use the profile, reference and predictor in this directory."),
]
IdentityOption = Annotated[
    Path | None,
    typer.Option(
        "--identity",
        readable=False,
        help="Use the key and the certificate in this folder. Default: the folder identity in the state directory.",
        show_default=False,
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", help="Set the random seed for choosing modes and for a simulated board.", min=0)
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(
        "--workload",
        help=f"Set the workload to train while measuring: {', '.join(SHIPPED)}, or your own module:function. Required"
        " on real hardware; virtual boards need none.",
    ),
]
StoredWorkloadOption = Annotated[
    str | None,
    typer.Option(
        "--workload",
        help="Use the profile and predictor of this workload; `wattfleet agent status` lists all. Required if there are"
        " several.",
        show_default=False,
    ),
]
MinibatchOption = Annotated[
    int, typer.Option("--minibatch", help="Set the workload's minibatch size, in samples.", min=1, max=LARGEST_COUNT)
]
ProcessorOption = Annotated[
    Processor,
    typer.Option("--processor", help="Set where the workload computes.", click_type=click.Choice(get_args(Processor))),
]
ToleranceOption = Annotated[
    float,
    typer.Option(
        "--tolerance",
        help="Stop early if no further mode is expected to shorten a training step by more than this share, under any"
        " budget. 0 never stops early.",
    ),
]
DEFAULT_TOLERANCE = 0.01
"""Equals `wattfleet.core.choosing.SamplingSettings.tolerance`, which would be slow to import just for a default."""

DEFAULT_REFERENCE = "agx_orin_resnet18"

WorkloadChangesOption = Annotated[
    WorkloadChanges,
    typer.Option(
        "--workload-changes",
        help="State how often the board gets another workload, which has to be measured again. Counted as 1 workload"
        " in all hours of training (never), 3 (rarely) or 20 (often).",
    ),
]
SocketOption = Annotated[Path, typer.Option("--socket", help="Query the agent that serves this unix socket.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def repeated_options() -> str:
    """Return `--device` and `--state-dir` as they were typed, for a hint to the next command; empty without them."""
    ctx = click.get_current_context()
    typed = [
        f" {option} {shlex.quote(str(ctx.params[name]))}"
        for name, option in (("device", "--device"), ("state_dir", "--state-dir"))
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    return "".join(typed)


def open_named(spec: str, state_directory: Path, seed: int = 0) -> Device:
    """Open the device that `--device` names; it is closed when the command ends.

    Args:
        spec: value of `--device`.
        state_directory: directory where a device may keep files.
        seed: random seed of a virtual board.

    Raises:
        InvalidInputError: the device is unknown or cannot be used.
        ModeNotAppliedError: the device does not report its current mode.
    """
    from edge_agent.devices.jtop import JtopDevice
    from edge_agent.devices.selection import open_device

    device = open_device(spec, seed=seed, state_directory=state_directory)
    if isinstance(device, JtopDevice):
        click.get_current_context().call_on_close(device.close)
    return device
