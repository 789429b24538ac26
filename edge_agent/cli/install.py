"""`wattfleet agent install`: the agent as a service of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.cli.options import (
    DEVICES,
    JsonOption,
    MinibatchOption,
    ProcessorOption,
    WorkloadOption,
    print_json,
)

if TYPE_CHECKING:
    from edge_agent.systemd.installation import InstallationPlan

_THIS_MACHINE = Path("/")


def install(
    minibatches_per_epoch: Annotated[int, typer.Option(help="Minibatches in one pass over the device's data.")],
    coordinator: Annotated[str, typer.Option(help="host:port of the coordinator.")],
    device: Annotated[str, typer.Option(help=f"The device: {DEVICES}.")] = "auto",
    device_id: Annotated[
        str | None, typer.Option(help="The device's name, unlike any other in the fleet.  [default: the host's name]")
    ] = None,
    workload: WorkloadOption = None,
    minibatch: MinibatchOption = 16,
    processor: ProcessorOption = "cuda",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    root: Annotated[
        Path, typer.Option(help="Write the files below this folder and run nothing, to prepare an image.")
    ] = _THIS_MACHINE,
    allow_writable: Annotated[
        bool,
        typer.Option(
            "--allow-writable", help="Install what others than root may write as well, who then may become root."
        ),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Make systemd start the agent: show every file and command, ask, and then do it."""
    import platform

    from edge_agent.devices.jetson.programs import run_program
    from edge_agent.systemd.installation import ServiceSettings, installation
    from edge_agent.systemd.ownership import running_code

    settings = ServiceSettings(
        device, device_id or platform.node(), coordinator, minibatches_per_epoch, workload, minibatch, processor
    )
    plan = installation(settings, running_code(), allow_writable=allow_writable)
    if json_:
        print_json(_content(plan, root))
    else:
        _print(plan, root)
    if plan.writable is not None:
        typer.echo(f"warning: others than root may write {plan.writable}, and may become root by it", err=True)
    if dry_run:
        return
    if not yes:
        typer.confirm("Do this?", abort=True, err=True)
    plan.write_files(root)
    if root == _THIS_MACHINE:
        plan.run_commands(run_program)
        typer.echo("installed; `systemctl status wattfleet-agent` shows how it fares", err=True)
    else:
        typer.echo(f"written below {root}; run the commands on the device", err=True)


def _content(plan: InstallationPlan, root: Path) -> dict[str, Any]:
    from edge_agent.systemd.installation import changes

    return {
        "files": [
            {"path": path, "change": change, "content": plan.files[path]} for path, change in changes(plan, root)
        ],
        "commands": [list(command) for command in plan.commands],
    }


def _print(plan: InstallationPlan, root: Path) -> None:
    from rich.console import Console

    from edge_agent.systemd.installation import SETTINGS_PATH, changes

    console = Console(highlight=False)
    for path, change in changes(plan, root):
        console.print(f"{change} {root / path.lstrip('/')}", style="bold", soft_wrap=True)
        if path == SETTINGS_PATH:
            console.print("".join(f"    {line}\n" for line in plan.files[path].splitlines()), end="", soft_wrap=True)
    for command in plan.commands:
        console.print(f"run {' '.join(command)}", style="bold", soft_wrap=True)
    console.print("--json shows the whole unit", style="dim")
