"""`wattfleet agent install`: run the agent as a systemd service."""

from __future__ import annotations

from typing import Annotated

import typer

from edge_agent.cli.options import (
    DEVICE_HELP,
    JsonOption,
    MinibatchOption,
    ProcessorOption,
)
from edge_agent.workloads.loading import SHIPPED
from wattfleet_io.systemd.steps import (
    THIS_MACHINE,
    AllowWritableOption,
    DryRunOption,
    ImageToWriteOption,
    YesOption,
    show_installation,
)
from wattfleet_io.systemd.steps import install as carry_out


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
            help="Let the service connect in plaintext, even to another machine, while the device has no identity. "
            "Anybody on the network can then read and change everything.",
        ),
    ] = False,
    metrics_address: Annotated[
        str | None,
        typer.Option(
            help="Serve Prometheus metrics of this device on this host:port, such as 127.0.0.1:9466. On an address "
            "that other machines can reach, viewers and operators read them over TLS. By default, serve none.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    root: ImageToWriteOption = THIS_MACHINE,
    allow_writable: AllowWritableOption = False,
    json_: JsonOption = False,
) -> None:
    """Show every file and command, ask for confirmation, and install the agent as a systemd service."""
    import platform

    from edge_agent.systemd.installation import ServiceSettings, installation
    from wattfleet_identity.channels import PLAINTEXT_WARNING
    from wattfleet_io.systemd.ownership import running_code

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
    show_installation(plan, root, json_)
    if is_exposed:
        typer.echo(f"warning: the connection to {coordinator} is {PLAINTEXT_WARNING}", err=True)
    if not dry_run:
        carry_out(plan, root, yes, "installed; check it with: systemctl status wattfleet-agent")
