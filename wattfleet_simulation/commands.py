"""`wattfleet simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wattfleet_simulation.devices import DEFAULT_FLEET

app = typer.Typer(help="Run a whole fleet on this machine; only the boards are simulated.")


@app.command()
def simulate(
    devices: Annotated[
        str,
        typer.Option(help="Boards as kind:count; kinds are agx-orin, orin-nano, orin-nx, xavier-agx. May be empty."),
    ] = DEFAULT_FLEET,
    device_csv: Annotated[
        list[Path] | None, typer.Option(help="Add a device that replays this CSV file of measurements. Repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Run this many federated rounds.")] = 3,
    site_budget_w: Annotated[
        float, typer.Option(help="Limit the whole fleet to this many watts, including idle devices.")
    ] = 100.0,
    modes: Annotated[int, typer.Option(help="Profile at most this many power modes on each device.")] = 50,
    policy: Annotated[
        str, typer.Option(help="Client-selection policy: fastest-k, all, random, tiers, oort, fair, progress.")
    ] = "progress",
    clients: Annotated[
        int | None, typer.Option(help="Select this many devices a round. Default: half of them; progress: any number.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of boards, noise, data split, profiles and training.", min=0)] = 0,
    reference: Annotated[
        str, typer.Option(help="Reference predictor: the name of one that ships with Wattfleet, or a directory.")
    ] = "agx_orin_resnet18",
    metrics_port: Annotated[
        int, typer.Option(help="Serve Prometheus' /metrics on this port meanwhile; 0 takes a free one.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Write report.json, report.html and the logs to this folder.")] = Path(
        "out/simulate"
    ),
    json_: Annotated[
        bool, typer.Option("--json", help="Print report.json instead of tables. Default: tables.")
    ] = False,
) -> None:
    """Run federated rounds over a simulated fleet under one power budget, and write a report."""
    from wattfleet_simulation.simulate import run_simulation

    run_simulation(
        kinds=devices,
        csv_files=device_csv or [],
        rounds=rounds,
        site_budget_w=site_budget_w,
        profile_modes=modes,
        policy=policy,
        clients=clients,
        seed=seed,
        reference=reference,
        metrics_port=metrics_port,
        out=out,
        as_json=json_,
    )
