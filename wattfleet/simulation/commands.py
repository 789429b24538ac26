"""`wattfleet simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wattfleet.core.errors import InvalidInputError
from wattfleet.simulation.devices import DEFAULT_FLEET

_ROUNDS, _MODES = 3, 50
SITE_BUDGET_W = 70.0
_DAYS, _PANEL_W, _BATTERY = 30, 35.0, "200Wh"
"""Defaults of options that only some kinds of simulation take."""


def _watts(text: str | float) -> float:
    """Read watts, such as 70, 70W or 12kW."""
    word = str(text).strip().lower().removesuffix("w")
    try:
        return 1e3 * float(word.removesuffix("k")) if word.endswith("k") else float(word)
    except ValueError:
        raise typer.BadParameter(f"{text!r} are no watts: write 70, or 12kW") from None


def _is_folder(text: str) -> bool:
    """Whether a value of `--app` names the folder of a user's app, and not one of the networks that ship."""
    return ":" not in text and ("/" in text or Path(text).is_dir())


app = typer.Typer(add_completion=False, help="Simulate a fleet and write a report.")


@app.command()
def simulate(
    devices: Annotated[
        str,
        typer.Option(
            help="Boards as kind:count; kinds are those of simulated boards (docs/simulated-board.md). May be empty."
            f" Default: {DEFAULT_FLEET}.",
            show_default=False,
        ),
    ] = DEFAULT_FLEET,
    device_csv: Annotated[
        list[Path] | None,
        typer.Option(help="Add a device that replays this CSV file of measurements. Repeatable. Default: none."),
    ] = None,
    app_: Annotated[
        list[str] | None,
        typer.Option(
            "--app",
            help="Train this network with this minibatch size in a separate run. Networks are convolutional and"
            " perceptron, for example perceptron:32, or perceptron:16/32/64 to let the plan choose the size for each"
            " board. Boards train 2 local epochs in a round; perceptron:32:2/4/8 lets the plan choose the number. Apps"
            " joined by + train at the same time. Repeatable. Or the folder of your own Flower app, such as ./my-app:"
            " it trains on up to thousands of devices, and needs Ray. Default: convolutional:16, then perceptron:32.",
            show_default=False,
        ),
    ] = None,
    own_epochs: Annotated[
        bool,
        typer.Option(
            "--own-epochs",
            help="Let the plan choose a different number of local epochs for each board of a round. Default: no.",
        ),
    ] = False,
    duty: Annotated[
        list[str] | None,
        typer.Option(
            help="Make every board answer simulated requests while it trains: network:requests per second:latency"
            " in ms, for example mobilenetv3:60:500, and :0.99 for another share than 95 % of them. Networks are"
            " mobilenetv3 and resnet. Repeatable: duties are assigned to the boards in turn. Default: none.",
            show_default=False,
        ),
    ] = None,
    run_config: Annotated[
        str,
        typer.Option(
            "--run-config",
            "-c",
            help='Change values of your own app\'s run config, as for `flwr run`: "lr=0.1". Default: none.',
            show_default=False,
        ),
    ] = "",
    metric: Annotated[
        str | None,
        typer.Option(
            help="Compare your own app's runs by this metric. Default: accuracy, or else the first metric with acc in"
            " its name.",
            show_default=False,
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Train your own app's clients on the Ray cluster at this address, such as head:6379 or auto. Default:"
            " all cores of this machine.",
            show_default=False,
        ),
    ] = None,
    gpus_per_client: Annotated[
        float,
        typer.Option(
            help="Give each client of your own app so many GPUs, such as 0.1 for a tenth. Default: 0.",
            show_default=False,
        ),
    ] = 0.0,
    rounds: Annotated[
        int, typer.Option(help="Run this many federated rounds of each app. Default: 3.", show_default=False)
    ] = _ROUNDS,
    site_budget_w: Annotated[
        float | None,
        typer.Option(
            help="Limit the whole fleet to this many watts, including idle devices; 12kW is 12000. Default: 70, too few"
            " for the default fleet's fast boards to train together at their highest clocks; with --sun, no limit.",
            show_default=False,
            parser=_watts,
            metavar="WATTS",
        ),
    ] = None,
    energy_budget: Annotated[
        str | None,
        typer.Option(
            help="Let the trainings of each run draw at most this energy above the idle power of their boards, such as"
            " 20kJ or 5Wh. The run ends when it is used up. Default: no energy budget.",
            show_default=False,
        ),
    ] = None,
    sun: Annotated[
        str | None,
        typer.Option(
            help="Simulate boards with batteries and solar panels in virtual time, without an app: under the clear"
            " sky of a place, as latitude,longitude; or typical: a typical year of measurements. Needs pvlib. Default:"
            " none.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(help="With --sun: simulate this many days. Default: 30.", show_default=False)
    ] = _DAYS,
    panel_w: Annotated[
        float, typer.Option(help="With --sun: rated watts of each board's panel. Default: 35.", show_default=False)
    ] = _PANEL_W,
    battery: Annotated[
        str, typer.Option(help="With --sun: capacity of each board's battery. Default: 200Wh.", show_default=False)
    ] = _BATTERY,
    modes: Annotated[
        int, typer.Option(help="Profile at most this many power modes on each device. Default: 50.", show_default=False)
    ] = _MODES,
    policy: Annotated[
        str,
        typer.Option(
            help="Client-selection policy: fastest-k, all, random, deadline, tiers, oort, fair, progress. Default:"
            " progress.",
            show_default=False,
        ),
    ] = "progress",
    clients: Annotated[
        int | None,
        typer.Option(
            help="Devices to select per round. Default: half of the devices; with progress: as many as useful."
        ),
    ] = None,
    deadline_s: Annotated[
        float | None,
        typer.Option(
            help="Limit a round's training to this many seconds, for the policy deadline, which needs it. Default:"
            " none.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of boards, noise, data split, profiles and training. Default: 0.", min=0, show_default=False
        ),
    ] = 0,
    reference: Annotated[
        str,
        typer.Option(
            help="Reference predictor: the name of one that ships with Wattfleet, or a directory. Default:"
            " agx_orin_resnet18.",
            show_default=False,
        ),
    ] = "agx_orin_resnet18",
    metrics_port: Annotated[
        int,
        typer.Option(
            help="Serve Prometheus' /metrics on this port during the run; port 0 picks a free port. Default: 0.",
            show_default=False,
        ),
    ] = 0,
    out: Annotated[
        Path,
        typer.Option(
            help="Write report.json, report.html and the logs to this folder. Default: out/simulate.",
            show_default=False,
        ),
    ] = Path("out/simulate"),
    json_: Annotated[bool, typer.Option("--json", help="Print report.json instead of tables.")] = False,
) -> None:
    """Simulate a fleet and write a report.

    Runs federated rounds on this machine under one power budget. Only the boards are simulated.
    """
    if sun is not None:
        ignored = {
            "--device-csv": device_csv,
            "--app": app_,
            "--own-epochs": own_epochs,
            "--duty": duty,
            "--run-config": run_config,
            "--metric": metric,
            "--ray-address": ray_address,
            "--gpus-per-client": gpus_per_client,
            "--rounds": rounds != _ROUNDS,
            "--energy-budget": energy_budget,
            "--modes": modes != _MODES,
            "--metrics-port": metrics_port,
        }
        if wrong := [option for option, value in ignored.items() if value]:
            raise InvalidInputError(
                f"--sun simulates boards without an app, and takes no {', '.join(wrong)}: leave it out"
            )
        from coordinator.references.published import open_reference
        from wattfleet.core.budgets import joules_of
        from wattfleet.core.planning.policies import policy_named
        from wattfleet.simulation.app_simulation import kinds_named
        from wattfleet.simulation.solar import SolarSettings, simulate_sun

        settings = SolarSettings(
            kinds_named(devices),
            days,
            panel_w,
            joules_of("--battery", battery),
            site_budget_w=site_budget_w,
            seed=seed,
        )
        chosen = policy_named(policy, count=clients, seed=seed, deadline_s=deadline_s)
        simulate_sun(settings, sun, chosen, open_reference(reference).artefact, json_)
        return
    if days != _DAYS or panel_w != _PANEL_W or battery != _BATTERY:
        raise InvalidInputError("--days, --panel-w and --battery are for boards with batteries: add --sun")
    limit_w = SITE_BUDGET_W if site_budget_w is None else site_budget_w
    if folders := [text for text in app_ or () if _is_folder(text)]:
        refused = {
            "a second --app": len(app_ or ()) > 1,
            "--device-csv": device_csv,
            "--duty": duty,
            "--own-epochs": own_epochs,
            "--metrics-port": metrics_port,
            "--energy-budget": energy_budget,
        }
        if wrong := [option for option, value in refused.items() if value]:
            raise InvalidInputError(
                f"--app {folders[0]} is your own app, which takes no {', '.join(wrong)}: leave it out"
            )
        from wattfleet.simulation.app_simulation import simulate_app

        simulate_app(
            folder=Path(folders[0]),
            kinds=devices,
            rounds=rounds,
            run_config=run_config,
            site_budget_w=limit_w,
            modes=modes,
            policy=policy,
            clients=clients,
            deadline_s=deadline_s,
            seed=seed,
            reference=reference,
            metric=metric,
            ray_address=ray_address,
            gpus_per_client=gpus_per_client,
            out=out,
            as_json=json_,
        )
        return
    if run_config or metric or ray_address or gpus_per_client:
        raise InvalidInputError(
            "--run-config, --metric, --ray-address and --gpus-per-client are for your own app: name its folder as"
            " --app DIR"
        )
    from wattfleet.simulation.settings import DEFAULT_APPS, apps_named
    from wattfleet.simulation.simulate import run_simulation

    run_simulation(
        kinds=devices,
        csv_files=device_csv or [],
        apps=[apps_named(text) for text in app_] if app_ else DEFAULT_APPS,
        rounds=rounds,
        site_budget_w=limit_w,
        profile_modes=modes,
        policy=policy,
        clients=clients,
        deadline_s=deadline_s,
        seed=seed,
        reference=reference,
        metrics_port=metrics_port,
        own_epochs=own_epochs,
        duties=duty or (),
        out=out,
        as_json=json_,
        energy_budget=energy_budget,
    )
