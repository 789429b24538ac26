"""`wattfleet coordinator budget`: the watts of every supply, and how the operator overrides them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.command_line.options import (
    DEFAULT_ADDRESS,
    CoordinatorOption,
    JsonOption,
    WatchOption,
    connected,
    number,
    print_json,
    show,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wattfleet_proto.v1 import operator_pb2

app = typer.Typer(no_args_is_help=True, help="The watts of every supply.")

_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")

SupplyArgument = Annotated[str, typer.Argument(help="Name of the supply; `site` where there is only one.")]


@app.command("show")
def show_budgets(
    watch: WatchOption = False, coordinator: CoordinatorOption = DEFAULT_ADDRESS, json_: JsonOption = False
) -> None:
    """Show the watts in force at every supply, where they come from, and what is set aside."""
    from wattfleet_proto.v1 import operator_pb2

    with connected(coordinator) as client:

        def content() -> list[dict[str, Any]]:
            answer = client.operate("GetBudgets", operator_pb2.GetBudgetsRequest())
            return [_content(budget) for budget in answer.supplies]

        show(content, _table, json_, watch)


@app.command("set")
def set_budget(
    supply: SupplyArgument,
    watts: Annotated[float, typer.Argument(help="Watts that it may give, above zero.")],
    for_: Annotated[
        str | None, typer.Option("--for", help="For so long, such as 45m or 1h30m.  [default: until cleared]")
    ] = None,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    json_: JsonOption = False,
) -> None:
    """Put watts in force in place of what a supply's source says; rounds in flight are trimmed to them."""
    from wattfleet_proto.v1 import operator_pb2

    for_s = None if for_ is None else seconds(for_)
    with connected(coordinator) as client:
        answer = client.operate("SetBudget", operator_pb2.SetBudgetRequest(supply=supply, watts=watts, for_s=for_s))
    _print_changed(answer, json_)


@app.command("clear")
def clear_budget(
    supply: SupplyArgument, coordinator: CoordinatorOption = DEFAULT_ADDRESS, json_: JsonOption = False
) -> None:
    """Give a supply back to its source."""
    from wattfleet_proto.v1 import operator_pb2

    with connected(coordinator) as client:
        answer = client.operate("ClearBudget", operator_pb2.ClearBudgetRequest(supply=supply))
    _print_changed(answer, json_)


def seconds(span: str) -> float:
    """The seconds of a span of time as people write it: 90s, 45m, 2h, 1d, 1h30m.

    Raises:
        InvalidInputError: it is none, or is zero.
    """
    from wattfleet.errors import InvalidInputError

    total_s = sum(float(amount) * _UNIT_S[unit] for amount, unit in _PART.findall(span))
    if not (_SPAN.fullmatch(span) and total_s > 0):
        raise InvalidInputError(f"{span!r} is no span of time: write 90s, 45m, 2h, 1d or 1h30m")
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


def _local(time: str) -> str:
    """A time as the operator's clock shows it; with the date where it is not today."""
    from datetime import datetime

    local = datetime.fromisoformat(time).astimezone()
    is_today = local.date() == datetime.now().astimezone().date()
    return local.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M")


def _table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    behind = {each["supply"]: each["parent"] for each in found}

    def depth(supply: str) -> int:
        return 0 if behind[supply] is None else 1 + depth(behind[supply])

    def path(supply: str) -> tuple[str, ...]:
        return (*(() if behind[supply] is None else path(behind[supply])), supply)

    table = Table(box=None, pad_edge=False)
    table.add_column("supply", overflow="fold")
    for name in ("W in force", "W set aside"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("source", "since", "until"):
        table.add_column(name, no_wrap=True)
    table.add_column("why", overflow="fold")
    for each in sorted(found, key=lambda one: path(one["supply"])):
        style = "bold red" if each["fallback"] else "yellow" if each["source"] == "operator" else ""
        over = each["set_aside_w"] > each["watts"] * (1 + 1e-9)
        table.add_row(
            Text("  " * depth(each["supply"]) + each["supply"]),
            number(each["watts"]),
            Text(number(each["set_aside_w"]), style="bold red" if over else ""),
            Text(each["source"] + (", fallback" if each["fallback"] else ""), style=style),
            _local(each["since"]),
            "-" if each["until"] is None else _local(each["until"]),
            Text(each["reason"], style="dim"),
        )
    return table


def _print_changed(answer: Any, json_: bool) -> None:
    content = {**_content(answer.budget), "trimmed_rounds": answer.trimmed_rounds}
    if json_:
        print_json(content)
        return
    until = "" if content["until"] is None else f", until {_local(content['until'])}"
    print(f"{content['supply']}: {content['watts']:g} W in force ({content['source']}{until})")
    if answer.trimmed_rounds:
        rounds = "round" if answer.trimmed_rounds == 1 else "rounds"
        print(f"{answer.trimmed_rounds} {rounds} in flight trimmed to it")
