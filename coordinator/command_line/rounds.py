"""`wattfleet coordinator rounds`: what was planned, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.command_line.options import (
    DEFAULT_ADDRESS,
    CoordinatorOption,
    JsonOption,
    WatchOption,
    connected,
    duration,
    number,
    show,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wattfleet_proto.v1 import view_pb2

_SHOWN_METRICS = 3

RunOption = Annotated[str | None, typer.Option("--run", help="Flower's id of the run.  [default: the newest]")]


def rounds(
    run: RunOption = None,
    watch: WatchOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    json_: JsonOption = False,
) -> None:
    """Show the rounds of a run: who took part, watts and seconds as planned and observed, and how it learns."""
    from wattfleet.errors import InvalidInputError

    with connected(coordinator) as client:

        def content() -> dict[str, Any]:
            runs = client.runs()
            chosen = [each for each in runs if run is None or each.run_id == run][-1:]
            if run is not None and not chosen:
                known = ", ".join(each.run_id for each in runs[-5:]) or "none"
                raise InvalidInputError(f"run {run!r} never started; the newest are {known}")
            if not chosen:
                return {"run_id": None, "rounds": []}
            views = client.rounds(chosen[0].run_id, with_devices=False)
            return {**run_content(chosen[0]), "rounds": [round_content(view) for view in views]}

        show(content, _table, json_, watch)


def run_content(view: view_pb2.RunView) -> dict[str, Any]:
    """What is known of a run."""
    return {
        "run_id": view.run_id,
        "strategy": view.strategy,
        "rounds_asked_for": view.rounds,
        "initial_metrics": dict(sorted(view.initial_metrics.items())),
        "finished": view.finished,
        "error": view.error,
    }


def round_content(view: view_pb2.RoundView) -> dict[str, Any]:
    """What is known of a round, but for its single devices."""

    def known(name: str) -> Any:
        return getattr(view, name) if view.HasField(name) else None  # type: ignore[arg-type]

    return {
        "round": view.round,
        "plan_id": view.plan_id,
        "epochs": view.epochs,
        "devices": view.device_count,
        "failed": list(view.failed_device_ids),
        "site_budget_w": view.plan.site_budget_w,
        "planned_w": view.plan.planned_w,
        "observed_site_w": known("observed_site_w"),
        "planned_s": view.plan.duration_s,
        "observed_s": known("observed_duration_s"),
        "wall_s": known("wall_s"),
        "metrics": dict(sorted(view.metrics.items())),
    }


def _table(content: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if content["run_id"] is None:
        return Text("no run ever started")
    done = "over" if content["finished"] else "running"
    title = f"run {content['run_id']}: {content['strategy']}, {content['rounds_asked_for']} rounds asked for, {done}"
    lines: list[RenderableType] = [Text(title, style="bold")]
    if content["error"]:
        lines.append(Text(content["error"], style="red"))
    table = Table(box=None, pad_edge=False)
    for name in ("round", "devices", "failed", "W allowed", "W planned", "W observed", "planned", "observed"):
        table.add_column(name, justify="right", no_wrap=True)
    names = sorted({name for each in content["rounds"] for name in each["metrics"]})
    for name in names[:_SHOWN_METRICS]:
        table.add_column(Text(name), justify="right")
    for each in content["rounds"]:
        table.add_row(
            str(each["round"]),
            f"{each['devices']:,}",
            Text(str(len(each["failed"])), style="bold red") if each["failed"] else "0",
            number(each["site_budget_w"]),
            number(each["planned_w"]),
            number(each["observed_site_w"]),
            duration(each["planned_s"]),
            duration(each["observed_s"]) if each["wall_s"] is not None or each["observed_s"] else "running",
            *(number(each["metrics"].get(name), 3) for name in names[:_SHOWN_METRICS]),
        )
    lines.append(table if content["rounds"] else Text("no round was planned yet"))
    if names[_SHOWN_METRICS:]:
        lines.append(Text(f"--json has {', '.join(names[_SHOWN_METRICS:])}, too", style="dim"))
    return Group(*lines)
