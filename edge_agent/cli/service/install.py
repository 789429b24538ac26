"""`wattfleet agent install`: run the agent as a systemd service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.cli.options import (
    DEVICE_HELP,
    JsonOption,
    MinibatchOption,
    ProcessorOption,
)
from edge_agent.workloads.loading import SHIPPED
from wattfleet_io.console import print_json, terminal

if TYPE_CHECKING:
    from edge_agent.systemd.installation import InstallationPlan

_THIS_MACHINE = Path("/")


def install(
    coordinator: Annotated[str, typer.Option(help="Connect to the coordinator at this address, host:port.")],
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
    device_id: Annotated[
        str | None, typer.Option(help="Set the device's unique name in the fleet. By default, use the host name.")
    ] = None,
    minibatches_per_epoch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Assume this number of minibatches in one pass over the device's data. Only needed with a coordinator"
            " older than protocol 2.1.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help=f"Measure modes with this workload before the first round: {', '.join(SHIPPED)}, or your own"
            " module:function. Only needed with a coordinator older than protocol 2.1.",
            show_default=False,
        ),
    ] = None,
    minibatch: MinibatchOption = 16,
    processor: ProcessorOption = "cuda",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            allow_from_autoenv=False,
            help="Let the service connect in plaintext while the device has no identity, also to another machine."
            " Anybody on the network can then read and change everything.",
        ),
    ] = False,
    metrics_address: Annotated[
        str | None,
        typer.Option(
            help="Serve Prometheus metrics of this device on this host:port, such as 127.0.0.1:9466. On an address that"
            " other machines reach, viewers and operators read them over TLS. By default, serve none.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", allow_from_autoenv=False, help="Show the planned steps without doing them.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", allow_from_autoenv=False, help="Skip the confirmation prompt.")] = False,
    root: Annotated[
        Path,
        typer.Option(
            allow_from_autoenv=False,
            help="Write the files below this folder and run no commands, to prepare a disk image.",
        ),
    ] = _THIS_MACHINE,
    allow_writable: Annotated[
        bool,
        typer.Option(
            "--allow-writable",
            allow_from_autoenv=False,
            help="Install even if users other than root can modify the service's code, and so become root.",
        ),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Show every file and command, ask for confirmation, and install the agent as a systemd service."""
    import platform

    from edge_agent.devices.jetson.programs import run_program
    from edge_agent.systemd.installation import ServiceSettings, installation
    from edge_agent.systemd.ownership import running_code
    from wattfleet_identity.channels import PLAINTEXT_WARNING

    settings = ServiceSettings(
        device,
        device_id or platform.node(),
        coordinator,
        minibatches_per_epoch,
        workload,
        minibatch,
        processor,
        insecure,
        metrics_address,
    )
    is_exposed = settings.is_exposed(root)
    plan = installation(settings, running_code(), allow_writable=allow_writable)
    if json_:
        print_json(_content(plan, root))
    else:
        _print(plan, root)
    if plan.writable is not None:
        typer.echo(f"warning: users other than root can write {plan.writable}, and so become root", err=True)
    if is_exposed:
        typer.echo(f"warning: the connection to {coordinator} is {PLAINTEXT_WARNING}", err=True)
    if dry_run:
        return
    if not yes:
        typer.confirm("Proceed?", abort=True, err=True)
    plan.write_files(root)
    if root == _THIS_MACHINE:
        plan.run_commands(run_program)
        typer.echo("installed; check it with: systemctl status wattfleet-agent", err=True)
    else:
        typer.echo(f"files written below {root}; run the commands on the device itself", err=True)


def _content(plan: InstallationPlan, root: Path) -> dict[str, Any]:
    from edge_agent.systemd.installation import changes

    return {
        "files": [
            {"path": path, "change": change, "content": plan.files[path]} for path, change in changes(plan, root)
        ],
        "commands": [list(command) for command in plan.commands],
    }


def _print(plan: InstallationPlan, root: Path) -> None:

    from edge_agent.systemd.installation import SETTINGS_PATH, changes

    console = terminal()
    for path, change in changes(plan, root):
        console.print(f"{change} {root / path.lstrip('/')}", style="bold", soft_wrap=True)
        if path == SETTINGS_PATH:
            console.print("".join(f"    {line}\n" for line in plan.files[path].splitlines()), end="", soft_wrap=True)
    for command in plan.commands:
        console.print(f"run {' '.join(command)}", style="bold", soft_wrap=True)
    console.print("show the whole unit file with --json", style="dim")
