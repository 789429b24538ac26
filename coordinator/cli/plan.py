"""`wattfleet coordinator budget`, `battery` and `plan --dry-run`: watts, energy, and a preview of the next round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import (
    ClientCommand,
    JsonOption,
    WatchOption,
    connected,
    show,
)
from coordinator.cli.runs import RUN_HELP, run_id_of
from coordinator.display import words
from coordinator.display.words import ASSUMED_NOTE, moment, number
from wattfleet.common.console import MODE_LEGEND, count_of, duration_text, print_json, print_line, terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coordinator.display.words import RunNames


# --- Budget -----------------------------------------------------------------------------------------------------------
# `wattfleet coordinator budget`: show and override the power budgets of the supplies, and set their energy budgets.


app = typer.Typer(no_args_is_help=True, help="Show and set the power and energy budgets of the supplies.")


SupplyArgument = Annotated[str, typer.Argument(help="Name of the supply. With `serve --site-budget-w`, it is `site`.")]


@app.command("show", cls=ClientCommand)
def show_budgets(watch: WatchOption = False, json_: JsonOption = False) -> None:
    """Show each supply's budget in force, its source, and the watts that are set aside and drawn behind it."""
    from coordinator.display.values import budget_values
    from wattfleet_proto.v1 import operator_pb2

    with connected() as client:

        def content() -> list[dict[str, Any]]:
            answer = client.operate("GetBudgets", operator_pb2.GetBudgetsRequest())
            return [budget_values(budget) for budget in answer.supplies]

        show(content, _table, json_, watch)


# So that the coordinator receives a negative number, and explains what is wrong with it.
@app.command("set", cls=ClientCommand, context_settings={"ignore_unknown_options": True})
def set_budget(
    supply: SupplyArgument,
    amount: Annotated[
        str,
        typer.Argument(
            metavar="WATTS|ENERGY", help="Budget in watts, above 0; or an energy, such as 5kWh, with --per."
        ),
    ],
    for_: Annotated[
        str | None,
        typer.Option(
            "--for", help="Clear the override after this long, such as 45m or 1h30m. Default: keep it until cleared."
        ),
    ] = None,
    per: Annotated[
        str | None,
        typer.Option(
            help="Let all trainings behind the supply draw this energy above idle in each day, week or month. Default:"
            " none, for watts.",
            show_default=False,
        ),
    ] = None,
    timezone: Annotated[
        str | None,
        typer.Option(
            help="Begin each day, week or month at midnight in this time zone, such as Europe/Berlin. Default: UTC.",
            show_default=False,
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Set the budget of SUPPLY until cleared: watts, or an energy --per day.

    Rounds in flight are trimmed to watts. An energy budget limits the rounds that are planned from now on.
    """
    from wattfleet.common.parsing import seconds
    from wattfleet.core.budgets import joules_of
    from wattfleet.core.errors import InvalidInputError
    from wattfleet_proto.v1 import operator_pb2

    for_s = None if for_ is None else seconds(for_)
    request = operator_pb2.SetBudgetRequest(supply=supply, for_s=for_s, per=per or "", timezone=timezone or "")
    try:
        request.watts = float(amount)
    except ValueError:
        if per is None:
            raise InvalidInputError(
                f"{amount!r} are no watts: write a number; or an energy such as 5kWh, with --per day"
            ) from None
        request.energy_j = joules_of("an energy budget", amount)
    with connected() as client:
        answer = client.operate("SetBudget", request)
    _print_changed(answer, json_)


@app.command("clear", cls=ClientCommand)
def clear_budget(
    supply: SupplyArgument,
    energy: Annotated[
        bool, typer.Option("--energy", help="Remove the energy budget, and keep the watts. Default: no.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Clear the override of SUPPLY; its configured budget takes effect again."""
    from wattfleet_proto.v1 import operator_pb2

    with connected() as client:
        answer = client.operate("ClearBudget", operator_pb2.ClearBudgetRequest(supply=supply, energy=energy))
    if energy and not json_:
        print_line(f"{supply}: no energy budget")
    else:
        _print_changed(answer, json_)


def _table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from rich.text import Text

    from coordinator.display.words import as_tree, is_exceeded, source_word, why_in_force
    from wattfleet.common.tables import Column, FittingTable, columns, numbers

    tree = as_tree(found)
    reasons = [f"{each['supply']}: {why}" for each in tree if (why := why_in_force(each)) is not None]
    reasons += [f"{each['supply']}: {words.energy_budget(each)}" for each in tree if each["energy_per"]]
    table = FittingTable(
        columns(
            "supply",
            numbers("W in\nforce"),
            numbers("W set\naside"),
            numbers("W\ndrawn", rank=2),
            numbers("devices", rank=3),
            "source",
            Column("since", rank=1),
            "until",
        ),
        below=lambda shown: [Text(each, style="dim") for each in reasons],
    )
    for each in tree:
        style = "bold red" if each["fallback"] else "yellow" if each["source"] == "operator" else ""
        table.add(
            Text("  " * each["depth"] + each["supply"]),
            number(each["watts"]),
            Text(number(each["set_aside_w"]), style="bold red" if is_exceeded(each) else ""),
            number(each["drawn_w"]),
            f"{each['devices']:,}",
            Text(source_word(each), style=style),
            _moment(each["since"]),
            "-" if each["until"] is None else _moment(each["until"]),
        )
    return table


def _moment(time: str) -> str:
    from datetime import datetime

    return moment(datetime.fromisoformat(time))


def _print_changed(answer: Any, json_: bool) -> None:
    from coordinator.display.values import budget_values
    from coordinator.display.words import is_exceeded

    content = {
        **budget_values(answer.budget),
        "trimmed_rounds": answer.trimmed_rounds,
        "told_devices": answer.told_devices,
    }
    if json_:
        print_json(content)
        return
    until = "" if content["until"] is None else f", until {_moment(content['until'])}"
    print_line(f"{content['supply']}: {words.watts(content['watts'])} in force ({content['source']}{until})")
    if content["energy_per"]:
        terminal().print(f"{content['supply']}: {words.energy_budget(content)}", highlight=False)
    if answer.trimmed_rounds:
        print_line(f"{count_of(answer.trimmed_rounds, 'round')} in flight trimmed")
    if answer.told_devices:
        print_line(f"{count_of(answer.told_devices, 'device')} ordered to draw less")
    if is_exceeded(content):
        is_told = bool(answer.told_devices)
        why = "until devices confirm, or their grants lapse" if is_told else "for idle and offline devices"
        print_line(f"{words.watts(content['set_aside_w'])} are still set aside {why}")


# --- Battery ----------------------------------------------------------------------------------------------------------
# `wattfleet coordinator battery`: show the batteries of devices and supplies, and state the charge of one.


battery_app = typer.Typer(no_args_is_help=True, help="Show batteries, and state the charge of one.")


@battery_app.command("show", cls=ClientCommand)
def show_batteries(watch: WatchOption = False, json_: JsonOption = False) -> None:
    """Show each battery's estimated energy, its reserve, and what it leaves for the trainings of an hour."""
    from coordinator.display.values import battery_values
    from wattfleet_proto.v1 import operator_pb2

    with connected() as client:

        def content() -> list[dict[str, Any]]:
            answer = client.operate("GetBatteries", operator_pb2.GetBatteriesRequest())
            return [battery_values(battery) for battery in answer.batteries]

        show(content, _battery_table, json_, watch)


# So that the coordinator receives a negative number, and explains what is wrong with it.
@battery_app.command("set", cls=ClientCommand, context_settings={"ignore_unknown_options": True})
def set_charge(
    name: Annotated[str, typer.Argument(help="The device or the supply that has the battery.")],
    percent: Annotated[str, typer.Argument(metavar="PERCENT", help="Its charge now, 0 to 100.")],
    json_: JsonOption = False,
) -> None:
    """State the charge of the battery of NAME, which nothing measures."""
    from coordinator.display.values import battery_values
    from wattfleet.core.errors import InvalidInputError
    from wattfleet_proto.v1 import operator_pb2

    try:
        share = float(percent.removesuffix("%")) / 100
    except ValueError:
        raise InvalidInputError(f"{percent!r} is no charge: write 0 to 100 percent") from None
    with connected() as client:
        answer = client.operate("SetCharge", operator_pb2.SetChargeRequest(name=name, share=share))
    content = battery_values(answer.battery)
    if json_:
        print_json(content)
    else:
        terminal().print(_battery_table([content]))


def _battery_table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from rich.text import Text

    from wattfleet.common.tables import Column, FittingTable, columns, numbers

    if not found:
        return Text("no batteries: declare them in [batteries] of the site file", style="dim")
    table = FittingTable(
        columns(
            "battery of",
            numbers("charge"),
            numbers("Wh"),
            numbers("Wh\nreserve"),
            numbers("Wh\nspare"),
            numbers("W\nharvest", rank=1),
            numbers("W\nidle", rank=2),
            "source",
            Column("read", rank=3),
        ),
        below=lambda shown: [
            Text(f"{each['name']}: {each['problem']}", style="bold red") for each in found if each["problem"]
        ],
    )
    for each in found:
        is_low = each["energy_j"] < each["reserve_j"]
        table.add(
            Text(each["name"]),
            Text(f"{each['share']:.0%}", style="bold red" if is_low else ""),
            *(number(each[key] / 3600) for key in ("energy_j", "reserve_j", "spare_j")),
            number(each["harvest_w"]),
            number(each["idle_w"]),
            Text(each["source"]),
            "-" if each["measured"] is None else _moment(each["measured"]),
        )
    return table


# --- Plan -------------------------------------------------------------------------------------------------------------
# `wattfleet coordinator plan --dry-run`: preview the next round, with reasons.


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
    from coordinator.cli.runs import names_of
    from coordinator.display.values import preview_values, run_values
    from coordinator.display.words import RunNames
    from wattfleet.core.errors import InvalidInputError
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
    """Read an assumed budget."""
    from wattfleet.core.errors import InvalidInputError

    supply, equals, watts = text.rpartition("=")
    try:
        return supply, float(watts if equals and supply else "")
    except ValueError:
        raise InvalidInputError(f"--budget is written as SUPPLY=WATTS, such as site=60, not {text!r}") from None


def _print(content: dict[str, Any], runs: RunNames) -> None:
    from rich.text import Text

    from coordinator.display.values import assumption
    from wattfleet.common.tables import FittingTable, columns, grouped, numbers
    from wattfleet.core.modes import PowerMode

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
