"""`wattfleet coordinator ...`."""

from __future__ import annotations

import asyncio

import typer

from coordinator.cli.authority import app as rotation_commands
from coordinator.cli.authority import browser_certificate, init
from coordinator.cli.certificates import cancel_invite, certificate, certificates, invite, invites, revoke
from coordinator.cli.devices import delete, device, devices, drain, forget, nodes, profile, tag, workloads
from coordinator.cli.events import audit_log, events
from coordinator.cli.export.command import export
from coordinator.cli.options import ClientCommand
from coordinator.cli.plan import app as budget_commands
from coordinator.cli.plan import battery_app as battery_commands
from coordinator.cli.plan import plan
from coordinator.cli.reference import app as reference_commands
from coordinator.cli.runs import energy, forecast, round_, rounds, runs
from coordinator.cli.service import install, uninstall
from coordinator.cli.store import app as store_commands
from wattfleet.common.settings.command import SettingsCommand, effective

_MACHINE, _FLEET, _RUNS, _IDENTITIES = "This machine", "Fleet", "Runs", "Identities"

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Run the coordinator, and operate a running one.")


@app.callback()
def group() -> None:
    """Run the coordinator, and operate a running one."""


class ServeCommand(SettingsCommand):
    """`serve`, with an option for each setting that has one."""

    model = "coordinator.settings:CoordinatorSettings"


@app.command(cls=ServeCommand, rich_help_panel=_MACHINE)
def serve(ctx: typer.Context) -> None:
    """Serve agents, Flower's server and Prometheus until stopped."""
    import logging

    from coordinator.listeners import exposed_plaintext
    from coordinator.server import BoundAddresses, serve_many
    from coordinator.server import serve as run_server
    from coordinator.settings import CoordinatorSettings
    from wattfleet.common.addresses import split_address
    from wattfleet.common.identity.channels import PLAINTEXT_WARNING, is_loopback
    from wattfleet.common.logs import logs_json, start_logging
    from wattfleet.core.errors import InvalidInputError

    settings: CoordinatorSettings = effective(ctx)
    announce = settings.server.announce
    if announce and not announce.parent.is_dir():
        raise InvalidInputError(f"--announce {announce}: {announce.parent} is not a directory")
    start_logging(settings.log.format, settings.log.level)

    def on_ready(bound: BoundAddresses) -> None:
        security = "plaintext" if bound.enrolment_address is None else "mutual TLS"
        further = [
            f"{what} on {address}"
            for what, address in (
                ("enrolment", bound.enrolment_address),
                ("operators", bound.operator_address),
                ("plaintext", bound.plaintext_address),
            )
            if address is not None
        ]

        def url(address: str) -> str:
            is_plain = security == "plaintext" or is_loopback(split_address(address)[0])
            return f"{'http' if is_plain else 'https'}://{address}/"

        http = f"page on {url(bound.http_address)}, metrics on {url(bound.http_address)}metrics"
        served = ", ".join([f"coordinator serves {bound.address} ({security})", *further, http])
        exposed = exposed_plaintext(settings, has_authority=bound.enrolment_address is not None)
        warning = f"{' and '.join(exposed)}: {PLAINTEXT_WARNING}"
        if logs_json():  # where both outputs are read as one log, every line must be JSON
            logging.getLogger(__name__).info("%s", served)
            if exposed:
                logging.getLogger(__name__).warning("%s", warning)
        else:
            typer.echo(served)
            if exposed:
                typer.echo(f"warning: {warning}", err=True)
        if announce:
            bound.announce(announce)

    serve_many()
    asyncio.run(run_server(settings, on_ready))


# In the order in which an operator needs them.
for command in (devices, device, nodes, workloads, profile, tag, drain, forget):
    app.command(command.__name__, cls=ClientCommand, rich_help_panel=_FLEET)(command)
app.add_typer(budget_commands, name="budget", rich_help_panel=_FLEET)
app.add_typer(battery_commands, name="battery", rich_help_panel=_FLEET)
app.add_typer(reference_commands, name="reference", rich_help_panel=_FLEET)
for run_command in (runs, rounds, round_, forecast, energy, events, plan, delete, export):
    app.command(run_command.__name__.rstrip("_"), cls=ClientCommand, rich_help_panel=_RUNS)(run_command)
for identity_command in (invite, invites, cancel_invite, certificate, certificates, revoke, audit_log):
    name = identity_command.__name__.replace("_", "-")
    app.command(name, cls=ClientCommand, rich_help_panel=_IDENTITIES)(identity_command)
app.command("browser-certificate", rich_help_panel=_IDENTITIES)(browser_certificate)
app.add_typer(rotation_commands, name="rotate-authority", rich_help_panel=_IDENTITIES)
for local_command in (init, install, uninstall):
    app.command(local_command.__name__, rich_help_panel=_MACHINE)(local_command)
app.add_typer(store_commands, name="store", rich_help_panel=_MACHINE)
