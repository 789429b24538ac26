"""`wattfleet simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wattfleet_simulation.devices import DEFAULT_FLEET

app = typer.Typer(help="A whole fleet on this machine; only the boards are simulated.")


@app.command()
def simulate(
    devices: Annotated[
        str, typer.Option(help="Boards as kind:count: agx-orin, orin-nano, orin-nx, xavier-agx. May be empty.")
    ] = DEFAULT_FLEET,
    device_csv: Annotated[
        list[Path] | None, typer.Option(help="Add a device that replays a measured CSV file; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Federated rounds.")] = 3,
    site_budget_w: Annotated[float, typer.Option(help="Watts for the whole fleet, idling devices included.")] = 100.0,
    modes: Annotated[int, typer.Option(help="Power modes that each device profiles at most.")] = 50,
    policy: Annotated[
        str, typer.Option(help="Who is chosen: fastest-k, all, random, tiers, oort, fair or progress.")
    ] = "fastest-k",
    clients: Annotated[
        int | None, typer.Option(help="Devices in a round, for fastest-k and random.  [default: half]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of boards, noise, data split, profiles and training.", min=0)] = 0,
    reference: Annotated[
        str, typer.Option(help="Reference predictor: the name of a shipped one, or a directory.")
    ] = "agx_orin_resnet18",
    metrics_port: Annotated[
        int, typer.Option(help="Serve Prometheus' /metrics on this port while it runs; 0 takes a free one.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Directory for report.json, report.html and the logs.")] = Path(
        "out/simulate"
    ),
    json_: Annotated[bool, typer.Option("--json", help="Print report.json instead of tables.")] = False,
) -> None:
    """Run federated rounds over a simulated fleet under one site budget, and report what they took."""
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
