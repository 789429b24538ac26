"""`wattfleet coordinator ...`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.budget import app as budget_commands
from coordinator.cli.devices import device, devices
from coordinator.cli.export import export
from coordinator.cli.overrides import drain, tag
from coordinator.cli.plan import plan
from coordinator.cli.reference import app as reference_commands
from coordinator.cli.rounds import rounds

if TYPE_CHECKING:
    from coordinator.budgets.site_file import SiteFile

app = typer.Typer(no_args_is_help=True, help="The server that plans a fleet's rounds.")


@app.callback()
def group() -> None:
    """The server that plans a fleet's rounds."""


for command in (devices, device, rounds, plan, tag, drain, export):
    app.command()(command)
app.add_typer(budget_commands, name="budget")
app.add_typer(reference_commands, name="reference")


@app.command()
def serve(
    site_budget_w: Annotated[
        float | None, typer.Option(help="Watts for all devices together; for more than that, --site-file.")
    ] = None,
    site_file: Annotated[
        Path | None, typer.Option(help="Supplies, their budgets and the devices behind them (docs/budgets.md).")
    ] = None,
    address: Annotated[str, typer.Option(help="host:port of the gRPC service; port 0 takes a free one.")] = (
        "127.0.0.1:7070"
    ),
    metrics_address: Annotated[str, typer.Option(help="host:port of Prometheus' /metrics.")] = "127.0.0.1:9464",
    store: Annotated[
        str, typer.Option(help="Database: an SQLite file, created where there is none, or a URL (docs/coordinator.md).")
    ] = "wattfleet-coordinator.db",
    standby: Annotated[
        bool, typer.Option("--standby", help="While another coordinator serves from the store, wait, then take over.")
    ] = False,
    keep_days: Annotated[
        float | None, typer.Option(help="Days that runs are kept after their end.  [default: for ever]")
    ] = None,
    reference: Annotated[
        str, typer.Option(help="Reference predictor: the name of a shipped one, or a directory.")
    ] = "agx_orin_resnet18",
    policy: Annotated[
        str, typer.Option(help="Who is chosen: fastest-k, all, random, deadline, tiers, oort, fair or progress.")
    ] = "progress",
    clients: Annotated[
        int | None,
        typer.Option(
            help="Devices in a round, for the policies that take a number.  [default: half; progress: any number]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of policies that draw.", min=0)] = 0,
    deadline_s: Annotated[
        float | None, typer.Option(help="Seconds that a round's training may take, for the policy deadline.")
    ] = None,
    utility: Annotated[
        str | None, typer.Option(help="What the policy deadline takes the most of: equal (devices) or loss.")
    ] = None,
    tiers: Annotated[int | None, typer.Option(help="Number of tiers, for the policy tiers.  [default: 5]")] = None,
    floor: Annotated[
        float | None,
        typer.Option(help="Share of the rounds that every device takes part in, for the policy fair."),
    ] = None,
    half_devices: Annotated[
        float | None,
        typer.Option(
            help="Devices with which a round makes half the progress of one with all, for the policy progress: fewer"
            " the more alike their data.  [default: 3]"
        ),
    ] = None,
    overhead_s: Annotated[
        float | None,
        typer.Option(help="Seconds of a round beside its training, for the policy progress.  [default: 10]"),
    ] = None,
    over_selection: Annotated[
        float,
        typer.Option(help="Share by which more devices are chosen than the number that the policy wants, 0 to 10."),
    ] = 0.0,
    include: Annotated[
        list[str] | None, typer.Option(help="Choose only these: id:NAME, tag:NAME or site:NAME; may be repeated.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Never choose these: as for --include; may be repeated.")
    ] = None,
    profile_modes: Annotated[int, typer.Option(help="Power modes that each agent measures at most.")] = 50,
    announce: Annotated[
        Path | None, typer.Option(help="Write the addresses that were bound to this file, as JSON.")
    ] = None,
) -> None:
    """Serve agents, Flower's server and Prometheus until stopped."""
    import logging
    from datetime import timedelta

    from coordinator.interpreter import serve_many
    from coordinator.server import BoundAddresses, CoordinatorConfig
    from coordinator.server import serve as run_server
    from coordinator.store.database import database_url
    from wattfleet.errors import InvalidInputError
    from wattfleet.planning import Selection
    from wattfleet.planning.policies import policy_named as policy_named

    if announce and not announce.parent.is_dir():
        raise InvalidInputError(f"--announce {announce}: {announce.parent} is no directory")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)  # the store says itself what is done to its tables
    config = CoordinatorConfig(
        address=address,
        metrics_address=metrics_address,
        store=database_url(store),
        reference=reference,
        site=_site(site_budget_w, site_file),
        policy=policy_named(
            policy,
            count=clients,
            seed=seed,
            deadline_s=deadline_s,
            utility=utility,
            tiers=tiers,
            floor=floor,
            half_devices=half_devices,
            overhead_s=overhead_s,
        ),
        profile_modes=profile_modes,
        selection=Selection(tuple(include or ()), tuple(exclude or ()), over_selection),
        stands_by=standby,
        keep=None if keep_days is None else timedelta(days=keep_days),
    )

    def on_ready(bound: BoundAddresses) -> None:
        typer.echo(f"coordinator serves {bound.address}, metrics on http://{bound.metrics_address}/metrics")
        if announce:
            bound.announce(announce)

    serve_many()
    asyncio.run(run_server(config, on_ready))


def _site(site_budget_w: float | None, site_file: Path | None) -> SiteFile:
    """What a site allows, by either option.

    Raises:
        InvalidInputError: neither or both are given, or what is given cannot be used.
    """
    from coordinator.budgets.site_file import SiteFile, read_site_file
    from wattfleet.errors import InvalidInputError

    if site_file is not None and site_budget_w is None:
        return read_site_file(site_file)
    if site_budget_w is not None and site_file is None:
        return SiteFile.of_site(site_budget_w)
    raise InvalidInputError("say what the site allows: either --site-budget-w or --site-file")
