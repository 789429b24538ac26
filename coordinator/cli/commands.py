"""`wattfleet coordinator ...`."""

from __future__ import annotations

import asyncio

import typer

from coordinator.cli.budget import app as budget_commands
from coordinator.cli.devices import device, devices
from coordinator.cli.export.command import export
from coordinator.cli.options import ClientCommand
from coordinator.cli.overrides import drain, tag
from coordinator.cli.plan import plan
from coordinator.cli.reference import app as reference_commands
from coordinator.cli.removal import delete, forget
from coordinator.cli.rounds import rounds
from coordinator.cli.store import app as store_commands
from coordinator.cli.workloads import profile, workloads
from wattfleet_io.settings.command import SettingsCommand, effective

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Run the coordinator, and operate a running one.")


@app.callback()
def group() -> None:
    """Run the coordinator, and operate a running one."""


class ServeCommand(SettingsCommand):
    """`serve`, with an option for each setting that names one."""

    model = "coordinator.settings:CoordinatorSettings"
    prefix = "WATTFLEET_COORDINATOR_"


@app.command(cls=ServeCommand)
def serve(ctx: typer.Context) -> None:
    """Serve agents, Flower's server and Prometheus until stopped."""
    import logging

    from coordinator.interpreter import serve_many
    from coordinator.server import BoundAddresses
    from coordinator.server import serve as run_server
    from coordinator.settings import CoordinatorSettings
    from wattfleet.errors import InvalidInputError
    from wattfleet_io.logs import start_logging

    settings: CoordinatorSettings = effective(ctx)
    announce = settings.server.announce
    if announce and not announce.parent.is_dir():
        raise InvalidInputError(f"--announce {announce}: {announce.parent} is not a directory")
    start_logging()
    logging.getLogger("alembic").setLevel(logging.WARNING)  # the store logs its own migrations

    def on_ready(bound: BoundAddresses) -> None:
        typer.echo(f"coordinator serves {bound.address}, metrics on http://{bound.metrics_address}/metrics")
        if announce:
            bound.announce(announce)

    serve_many()
    asyncio.run(run_server(settings, on_ready))


# `serve` first, then commands in the order in which an operator meets them.
for command in (devices, device, workloads, rounds, plan, profile, tag, drain, forget, delete, export):
    app.command(cls=ClientCommand)(command)
app.add_typer(budget_commands, name="budget")
app.add_typer(reference_commands, name="reference")
app.add_typer(store_commands, name="store")
