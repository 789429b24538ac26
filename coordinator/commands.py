"""`wattfleet coordinator ...`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="The server that plans a fleet's rounds.")


@app.callback()
def group() -> None:
    """The server that plans a fleet's rounds."""


@app.command()
def serve(
    site_budget_w: Annotated[float, typer.Option(help="Watts for all devices of the site together.")],
    address: Annotated[str, typer.Option(help="host:port of the gRPC service; port 0 takes a free one.")] = (
        "127.0.0.1:7070"
    ),
    metrics_address: Annotated[str, typer.Option(help="host:port of Prometheus' /metrics.")] = "127.0.0.1:9464",
    store: Annotated[Path, typer.Option(help="Database file; created where there is none.")] = Path(
        "wattfleet-coordinator.db"
    ),
    reference: Annotated[
        str, typer.Option(help="Reference predictor: the name of a shipped one, or a directory.")
    ] = "agx_orin_resnet18",
    policy: Annotated[str, typer.Option(help="Who is chosen: fastest-k, all or random.")] = "fastest-k",
    clients: Annotated[
        int | None, typer.Option(help="Devices in a round, for the policies that take a number.  [default: half]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random policy.", min=0)] = 0,
    profile_modes: Annotated[int, typer.Option(help="Power modes that each agent measures at most.")] = 50,
    announce: Annotated[
        Path | None, typer.Option(help="Write the addresses that were bound to this file, as JSON.")
    ] = None,
) -> None:
    """Serve agents, Flower's server and Prometheus until stopped."""
    import logging

    from coordinator.server import BoundAddresses, CoordinatorConfig
    from coordinator.server import serve as run_server
    from wattfleet.errors import InvalidInputError
    from wattfleet.planning.policies.registry import policy as policy_named

    if announce and not announce.parent.is_dir():
        raise InvalidInputError(f"--announce {announce}: {announce.parent} is no directory")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    config = CoordinatorConfig(
        address=address,
        metrics_address=metrics_address,
        store=store,
        reference=reference,
        site_budget_w=site_budget_w,
        policy=policy_named(policy, count=clients, seed=seed),
        profile_modes=profile_modes,
    )

    def on_ready(bound: BoundAddresses) -> None:
        typer.echo(f"coordinator serves {bound.address}, metrics on http://{bound.metrics_address}/metrics")
        if announce:
            bound.announce(announce)

    asyncio.run(run_server(config, on_ready))
