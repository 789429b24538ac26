"""`wattfleet coordinator plan --dry-run`: preview the next round, with reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import (
    JsonOption,
    connected,
)
from coordinator.cli.run_names import RUN_HELP, run_id_of
from coordinator.display.wording import ASSUMED_NOTE, number
from wattfleet_io.console import MODE_LEGEND, count_of, duration_text, print_json, terminal

if TYPE_CHECKING:
    from coordinator.display.run_words import RunNames


def plan(
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            allow_from_autoenv=False,
            help="Preview the round without starting it. Required: only Flower's server can start a round.",
        ),
    ] = False,
    run: Annotated[
        str | None,
        typer.Option("--run", help=f"Plan for this run: {RUN_HELP}. Default: the newest active run, or a new one."),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(help="Plan for this many local epochs. Default: as in the run's last round; 1 before its first."),
    ] = None,
    all_devices: Annotated[bool, typer.Option("--all-devices", help="Include devices without a SuperNode.")] = False,
    workload: Annotated[
        str | None,
        typer.Option(help="Preview the first round of a new run of this workload. Default: that of the newest run."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            metavar="SUPPLY=WATTS",
            help="Preview with these watts at a supply. Repeatable. Default: the budgets in force.",
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Preview with this client-selection policy. Default: the one in force.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Number of devices that --policy selects. Default: the policy's.")
    ] = None,
    deadline_s: Annotated[float | None, typer.Option(help="Deadline of the --policy, in seconds.")] = None,
    json_: JsonOption = False,
) -> None:
    """Preview the next round: selected devices, their modes and the reasons. Changes nothing.

    If the run has a round in flight, the preview assumes that it has ended.
    """
    from coordinator.cli.run_names import names_of
    from coordinator.display.plan_values import preview_values
    from coordinator.display.run_words import RunNames
    from coordinator.display.view_values import run_values
    from wattfleet.errors import InvalidInputError
    from wattfleet_proto.v1 import operator_pb2

    if not dry_run:
        raise InvalidInputError("this command only previews a round, and Flower's server starts it: pass --dry-run")
    if epochs is not None and not 0 < epochs < float("inf"):
        raise InvalidInputError(f"--epochs must be above 0 and finite, not {epochs:g}")
    budgets_w = dict(map(_assumed, budget or ()))
    with connected() as client:
        runs = client.runs()
        request = operator_pb2.PreviewPlanRequest(
            run_id=run_id_of(names_of(runs), run) if run else "",
            epochs=epochs or 0.0,
            all_devices=all_devices,
            workload=workload or "",
            policy=policy or "",
            clients=clients,
            deadline_s=deadline_s,
            budgets_w=budgets_w,
        )
        content = preview_values(client.operate("PreviewPlan", request))
    if json_:
        print_json(content)
    else:
        _print(content, RunNames(map(run_values, runs)))


def _assumed(text: str) -> tuple[str, float]:
    """Read an assumed budget.

    Raises:
        InvalidInputError: it is not SUPPLY=WATTS.
    """
    from wattfleet.errors import InvalidInputError

    supply, equals, watts = text.rpartition("=")
    try:
        return supply, float(watts if equals and supply else "")
    except ValueError:
        raise InvalidInputError(f"--budget is written as SUPPLY=WATTS, such as site=60, not {text!r}") from None


def _print(content: dict[str, Any], runs: RunNames) -> None:
    from rich.text import Text

    from coordinator.display.plan_values import assumption
    from wattfleet.modes import PowerMode
    from wattfleet_io.tables import FittingTable, columns, grouped, numbers

    console = terminal()
    run = "a new run" if content["run_id"] is None else f"run {runs.of(content['run_id'])}"
    selected = [each for each in content["devices"] if each["selected"]]
    epochs = "1 epoch" if content["epochs"] == 1 else f"{content['epochs']:g} epochs"
    console.print(Text(f"round {content['round']} of {run}, {epochs}, if planned now:"))
    if (assumed := assumption(content, runs)) is not None:
        console.print(Text(assumed, style="dim"))
    console.print(
        Text(
            f"{len(selected)} of {count_of(len(content['devices']), 'device')} selected, finished within"
            f" {duration_text(content['duration_s'])},"
            f" {number(content['planned_w'])} of {number(content['site_budget_w'])} W set aside",
            style="bold",
        )
    )
    table = FittingTable(
        columns(
            "selected",
            "mode",
            numbers("batch", rank=2),
            numbers("epochs", rank=1),
            numbers("warm-up s", rank=3),
            numbers("s/epoch"),
            numbers("W"),
            numbers("W planned"),
        )
    )
    for each in selected:
        table.add(
            Text(each["device_id"], style="green"),
            PowerMode(**each["mode"]).label(),
            number(each["batch"], 0),
            f"{each['epochs']:g}",
            number(each["warmup_s"]),
            f"{'~' if each['length_assumed'] else ''}{number(each['epoch_s'])}",
            number(each["power_w"]),
            number(each["power_limit_w"]),
        )
    others = [each for each in content["devices"] if not each["selected"]]
    console.print()
    console.print(table)
    console.print()
    console.print(grouped((each["device_id"], each["reason"]) for each in selected))
    if others:
        console.print(Text("\nnot selected"))
        console.print(grouped(((each["device_id"], each["reason"]) for each in others), style="dim"))
    if content["not_looked_at"]:
        console.print(Text(f"\n{count_of(len(content['not_looked_at']), 'device')} not considered"))
        reasons = ((each["device_id"], each["reason"]) for each in content["not_looked_at"])
        console.print(grouped(reasons, style="dim"))
    if len(content["supplies"]) > 1:
        supplies = FittingTable(columns("supply", numbers("W allowed"), numbers("W planned")))
        for use in content["supplies"]:
            supplies.add(Text(use["supply"]), number(use["budget_w"]), number(use["planned_w"]))
        console.print()
        console.print(supplies)
    if content["only_devices_with_a_node"]:
        text = "considered: ready devices with a SuperNode; --all-devices adds those without"
    else:
        text = "considered: ready devices"
    console.print()
    console.print(MODE_LEGEND, style="dim")
    if any(each["length_assumed"] for each in selected):
        console.print(ASSUMED_NOTE, style="dim")
    console.print(text, style="dim")
