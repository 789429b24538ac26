"""`wattfleet coordinator plan --dry-run`: what the next round would be, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.command_line.options import (
    DEFAULT_ADDRESS,
    CoordinatorOption,
    JsonOption,
    connected,
    duration,
    number,
    print_json,
)

if TYPE_CHECKING:
    from wattfleet_proto.v1 import operator_pb2


def plan(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Required: rounds are planned when Flower's server asks for them.")
    ] = False,
    run: Annotated[str | None, typer.Option("--run", help="Flower's id of the run.  [default: the newest]")] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Local epochs.  [default: as in the run's last round, 1 before its first]")
    ] = None,
    all_devices: Annotated[
        bool, typer.Option("--all-devices", help="Count with devices that have no SuperNode, too.")
    ] = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    json_: JsonOption = False,
) -> None:
    """Show whom the next round would take, in which mode, and why; nothing is reserved or stored."""
    from wattfleet.errors import InvalidInputError
    from wattfleet_proto.v1 import operator_pb2

    if not dry_run:
        raise InvalidInputError("only with --dry-run: a round is planned when Flower's server asks for it")
    if epochs is not None and not 0 < epochs < float("inf"):
        raise InvalidInputError(f"a round needs epochs above zero, not {epochs:g}")
    request = operator_pb2.PreviewPlanRequest(run_id=run or "", epochs=epochs or 0.0, all_devices=all_devices)
    with connected(coordinator) as client:
        content = _content(client.operate("PreviewPlan", request))
    if json_:
        print_json(content)
    else:
        _print(content)


def _content(answer: operator_pb2.PreviewPlanResponse) -> dict[str, Any]:
    from wattfleet_proto.convert import plan_from_message

    found = plan_from_message(answer.plan)
    parts = {assignment.device_id: assignment for assignment in found.assignments}
    return {
        "run_id": answer.run_id or None,
        "round": answer.round,
        "epochs": answer.epochs,
        "only_devices_with_a_node": not answer.all_devices,
        "duration_s": found.duration_s,
        "deadline_s": found.deadline_s,
        "planned_w": found.planned_w,
        "site_budget_w": found.site_budget_w,
        "supplies": [
            {"supply": use.supply, "budget_w": use.budget_w, "planned_w": use.planned_w} for use in found.supplies
        ],
        "devices": [
            {
                "device_id": decision.device_id,
                "selected": decision.selected,
                "reason": decision.reason,
                "mode": part.mode._asdict() if part else None,
                "start_s": part.start_s if part else None,
                "epoch_s": part.epoch_s if part else None,
                "power_w": part.power_w if part else None,
                "power_limit_w": part.power_limit_w if part else None,
            }
            for decision in found.decisions
            for part in [parts.get(decision.device_id)]
        ],
    }


def _print(content: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from wattfleet.modes import PowerMode

    console = Console(highlight=False)
    run = "a new run" if content["run_id"] is None else f"run {content['run_id']}"
    chosen = [each for each in content["devices"] if each["selected"]]
    epochs = "1 epoch" if content["epochs"] == 1 else f"{content['epochs']:g} epochs"
    console.print(Text(f"round {content['round']} of {run}, {epochs}, if it were planned now:"))
    console.print(
        Text(
            f"{len(chosen)} of {len(content['devices'])} devices, done within {duration(content['duration_s'])},"
            f" {number(content['planned_w'])} of {number(content['site_budget_w'])} W set aside",
            style="bold",
        )
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("device", overflow="fold")
    table.add_column("mode", no_wrap=True)
    for name in ("s/epoch", "W", "W planned"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for each in sorted(content["devices"], key=lambda one: not one["selected"]):
        mode = each["mode"]
        table.add_row(
            Text(each["device_id"], style="green" if each["selected"] else ""),
            "-" if mode is None else PowerMode(**mode).label(),
            number(each["epoch_s"]),
            number(each["power_w"]),
            number(each["power_limit_w"]),
            Text(each["reason"], style="" if each["selected"] else "dim"),
        )
    console.print()
    console.print(table)
    if len(content["supplies"]) > 1:
        supplies = Table(box=None, pad_edge=False)
        supplies.add_column("supply", overflow="fold")
        for name in ("W allowed", "W planned"):
            supplies.add_column(name, justify="right", no_wrap=True)
        for use in content["supplies"]:
            supplies.add_row(Text(use["supply"]), number(use["budget_w"]), number(use["planned_w"]))
        console.print()
        console.print(supplies)
    if content["only_devices_with_a_node"]:
        text = "looked at: devices that are ready and have a SuperNode; --all-devices: without one, too"
    else:
        text = "looked at: devices that are ready"
    console.print()
    console.print(text, style="dim")
