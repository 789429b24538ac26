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

    from wattfleet_proto.v1 import operator_pb2

app = typer.Typer(no_args_is_help=True, help="Show and override the power budgets of the supplies.")

_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")

SupplyArgument = Annotated[str, typer.Argument(help="Name of the supply. With `serve --site-budget-w`, it is `site`.")]


@app.command("show", cls=ClientCommand)
def show_budgets(watch: WatchOption = False, json_: JsonOption = False) -> None:
    """Show each supply's budget in force, its source, and the watts set aside for devices."""
    from wattfleet_proto.v1 import operator_pb2

    with connected() as client:

        def content() -> list[dict[str, Any]]:
            answer = client.operate("GetBudgets", operator_pb2.GetBudgetsRequest())
            return [_content(budget) for budget in answer.supplies]

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


def _content(budget: operator_pb2.SupplyBudget) -> dict[str, Any]:
    return {
        "supply": budget.supply,
        "parent": budget.parent or None,
        "watts": budget.watts,
        "set_aside_w": budget.set_aside_w,
        "source": budget.source,
        "fallback": budget.fallback,
        "reason": budget.reason,
        "since": _time(budget.since_unix_s),
        "until": _time(budget.until_unix_s) if budget.HasField("until_unix_s") else None,
    }


def _time(unix_s: float) -> str:
    from datetime import datetime, timezone

    return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec="seconds")


def _table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from wattfleet_io.tables import Column, FittingTable, columns, numbers

    behind = {each["supply"]: each["parent"] for each in found}

    def depth(supply: str) -> int:
        return 0 if behind[supply] is None else 1 + depth(behind[supply])

    def path(supply: str) -> tuple[str, ...]:
        return (*(() if behind[supply] is None else path(behind[supply])), supply)

    table = FittingTable(
        columns("supply", numbers("W in\nforce"), numbers("W set\naside"), "source", Column("since", rank=1), "until")
    )
    reasons: list[RenderableType] = []
    for each in sorted(found, key=lambda one: path(one["supply"])):
        style = "bold red" if each["fallback"] else "yellow" if each["source"] == "operator" else ""
        over = each["set_aside_w"] > each["watts"] * (1 + 1e-9)
        table.add(
            Text("  " * depth(each["supply"]) + each["supply"]),
            number(each["watts"]),
            Text(number(each["set_aside_w"]), style="bold red" if over else ""),
            Text("fallback" if each["fallback"] else each["source"], style=style),
            _moment(each["since"]),
            "-" if each["until"] is None else _moment(each["until"]),
        )
        if each["fallback"] or each["source"] == "operator":
            fallback = f"fallback of its {each['source']} in force: " if each["fallback"] else ""
            reasons.append(Text(f"{each['supply']}: {fallback}{each['reason']}", style="dim"))
    return Group(table, *reasons)


def _moment(time: str) -> str:
    from datetime import datetime

    return moment(datetime.fromisoformat(time))


def _print_changed(answer: Any, json_: bool) -> None:
    content = {**_content(answer.budget), "trimmed_rounds": answer.trimmed_rounds, "told_devices": answer.told_devices}
    if json_:
        print_json(content)
        return
    until = "" if content["until"] is None else f", until {_moment(content['until'])}"
    print_line(f"{content['supply']}: {wording.watts(content['watts'])} in force ({content['source']}{until})")
    if answer.trimmed_rounds:
        print_line(f"{count_of(answer.trimmed_rounds, 'round')} in flight trimmed")
    if answer.told_devices:
        print_line(f"{count_of(answer.told_devices, 'device')} ordered to draw less")
    if content["set_aside_w"] > content["watts"] * (1 + 1e-9):
        is_told = bool(answer.told_devices)
        why = "until devices confirm, or their grants lapse" if is_told else "for idle and offline devices"
        print_line(f"{wording.watts(content['set_aside_w'])} are still set aside {why}")
