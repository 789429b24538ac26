"""`wattfleet coordinator budget`: show and override the power budgets of the supplies."""

from __future__ import annotations

import re
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
from coordinator.display import wording
from coordinator.display.wording import moment, number
from wattfleet_io.console import count_of, print_json, print_line

if TYPE_CHECKING:
    from rich.console import RenderableType


app = typer.Typer(no_args_is_help=True, help="Show and override the power budgets of the supplies.")

_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")

SupplyArgument = Annotated[str, typer.Argument(help="Name of the supply. With `serve --site-budget-w`, it is `site`.")]


@app.command("show", cls=ClientCommand)
def show_budgets(watch: WatchOption = False, json_: JsonOption = False) -> None:
    """Show each supply's budget in force, its source, and the watts that are set aside and drawn behind it."""
    from coordinator.display.view_values import budget_values
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
    watts: Annotated[float, typer.Argument(metavar="WATTS", help="Budget in watts, above 0.")],
    for_: Annotated[
        str | None,
        typer.Option(
            "--for", help="Clear the override after this long, such as 45m or 1h30m. Default: keep it until cleared."
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Set the budget of SUPPLY to WATTS until cleared, and trim rounds in flight to it."""
    from wattfleet_proto.v1 import operator_pb2

    for_s = None if for_ is None else seconds(for_)
    with connected() as client:
        answer = client.operate("SetBudget", operator_pb2.SetBudgetRequest(supply=supply, watts=watts, for_s=for_s))
    _print_changed(answer, json_)


@app.command("clear", cls=ClientCommand)
def clear_budget(supply: SupplyArgument, json_: JsonOption = False) -> None:
    """Clear the override of SUPPLY; its configured budget takes effect again."""
    from wattfleet_proto.v1 import operator_pb2

    with connected() as client:
        answer = client.operate("ClearBudget", operator_pb2.ClearBudgetRequest(supply=supply))
    _print_changed(answer, json_)


def seconds(span: str) -> float:
    """Convert a duration such as 90s, 45m, 2h, 1d or 1h30m to seconds.

    Raises:
        InvalidInputError: the text is not a duration, or it is zero.
    """
    from wattfleet.errors import InvalidInputError

    total_s = sum(float(amount) * _UNIT_S[unit] for amount, unit in _PART.findall(span))
    if not (_SPAN.fullmatch(span) and total_s > 0):
        raise InvalidInputError(f"{span!r} is not a duration: write 90s, 45m, 2h, 1d or 1h30m")
    return total_s


def _table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from rich.text import Text

    from coordinator.display.supply_words import as_tree, is_exceeded, source_word, why_in_force
    from wattfleet_io.tables import Column, FittingTable, columns, numbers

    tree = as_tree(found)
    reasons = [f"{each['supply']}: {why}" for each in tree if (why := why_in_force(each)) is not None]
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
    from coordinator.display.supply_words import is_exceeded
    from coordinator.display.view_values import budget_values

    content = {
        **budget_values(answer.budget),
        "trimmed_rounds": answer.trimmed_rounds,
        "told_devices": answer.told_devices,
    }
    if json_:
        print_json(content)
        return
    until = "" if content["until"] is None else f", until {_moment(content['until'])}"
    print_line(f"{content['supply']}: {wording.watts(content['watts'])} in force ({content['source']}{until})")
    if answer.trimmed_rounds:
        print_line(f"{count_of(answer.trimmed_rounds, 'round')} in flight trimmed")
    if answer.told_devices:
        print_line(f"{count_of(answer.told_devices, 'device')} ordered to draw less")
    if is_exceeded(content):
        is_told = bool(answer.told_devices)
        why = "until devices confirm, or their grants lapse" if is_told else "for idle and offline devices"
        print_line(f"{wording.watts(content['set_aside_w'])} are still set aside {why}")
