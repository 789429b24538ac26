"""`wattfleet coordinator devices` and `device`: the whole fleet, and one device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import (
    JsonOption,
    WatchOption,
    connected,
    show,
)
from coordinator.display.device_words import (
    front_assumption,
    granted,
    in_state_for,
    last_training,
    live_line,
    measured_modes,
    prediction_errors,
    profiling_left,
    troubles,
    trust,
    worst_first,
)
from coordinator.display.wording import ASSUMED_NOTE, expected_time, moment, number, watts
from wattfleet_io.clock import unix_now_s
from wattfleet_io.console import MODE_LEGEND, count_of, print_json, terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coordinator.display.run_words import RunNames

_STATES = ("enrolled", "profiling", "ready", "training", "degraded", "offline")
_STYLES = {"ready": "green", "training": "bold green", "degraded": "bold red", "offline": "red", "profiling": "yellow"}
_WATTS = {"granted W": "granted_w", "confirmed W": "confirmed_w", "observed W": "observed_w"}
_FRONT_ROWS = 12
WorkloadOption = Annotated[
    str | None,
    typer.Option("--workload", help="Show the predictions for this workload. Default: for each device's latest one."),
]
_NO_DEVICES = (
    "no devices yet: enrol a board with `wattfleet coordinator invite`, or try a simulated fleet with `wattfleet "
    "simulate`"
)
_NO_SUCH_DEVICE = "no device has this state and tag: leave out --state and --tag to list all"


def devices(
    state: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Show only devices in this state: {', '.join(_STATES)}. Repeatable. Default: all.",
            autocompletion=lambda: _STATES,
        ),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="Show only devices with this tag. Repeatable. Default: all.")
    ] = None,
    workload: WorkloadOption = None,
    watch: WatchOption = False,
    json_: JsonOption = False,
) -> None:
    """List devices with their state, profiling progress and fastest epoch."""
    from coordinator.display.view_values import tagged_device_values
    from wattfleet.errors import InvalidInputError

    states, tags = set(state or _STATES), set(tag or ())
    if unknown := states - set(_STATES):
        raise InvalidInputError(f"unknown state {sorted(unknown)[0]!r}: choose from {', '.join(_STATES)}")
    with connected() as client:

        def content() -> list[dict[str, Any]]:
            found = [tagged_device_values(view) for view in client.devices(workload=workload, with_times=True)]
            chosen = [each for each in found if each["state"] in states and (not tags or tags & set(each["tags"]))]
            return worst_first(chosen, unix_now_s())

        show(content, partial(_table, is_filtered=bool(state or tag)), json_, watch)


def device(
    device: Annotated[str, typer.Argument(metavar="ID", help="Id of the device.")],
    workload: WorkloadOption = None,
    json_: JsonOption = False,
) -> None:
    """Show one device: its state, supply, limit, tags, workloads and Pareto front."""
    from coordinator.display.run_words import RunNames
    from coordinator.display.view_values import device_workload_values, front_values, run_values, tagged_device_values

    with connected() as client:
        (view,) = client.devices(device, with_fronts=True, with_times=True, workload=workload)
        runs = RunNames(map(run_values, client.runs()))
    workloads = [device_workload_values(each) for each in view.workloads]
    content = {**tagged_device_values(view), "workloads": workloads, "front": front_values(view)}
    if json_:
        print_json(content)
    else:
        _print(content, runs)


def _state(content: dict[str, Any]) -> Any:
    from rich.text import Text

    text = Text(content["state"], style=_STYLES.get(content["state"], ""))
    if content["drained"]:
        text.append("\ndrained", style="yellow")
    if content["left_out"]:
        text.append("\nleft out", style="bold red")
    for trouble in troubles(content, unix_now_s()):
        text.append(f"\n{trouble}", style="bold red")
    return text


def _detail(content: dict[str, Any]) -> Any:
    from rich.text import Text

    return Text(content["left_out"], style="red") if content["left_out"] else Text(content["detail"], style="dim")


def _rounds(content: dict[str, Any]) -> str:
    if content["drained"]:
        return "drained: excluded from new rounds"
    return f"left out: {content['left_out']}" if content["left_out"] else "can be selected"


def _is_assumed(device: dict[str, Any]) -> bool:
    return bool(device["epoch_length_assumed"]) and device["fastest_epoch_s"] is not None


def _table(found: Sequence[dict[str, Any]], is_filtered: bool = False) -> RenderableType:
    from rich.text import Text

    from wattfleet_io.tables import Column, FittingTable, columns, numbers, texts

    if not found:
        return Text(_NO_SUCH_DEVICE if is_filtered else _NO_DEVICES)
    now_unix_s = unix_now_s()
    is_profiling = any(each["profiling_left_s"] is not None for each in found)
    shows_modes = any(each["state"] in ("training", "profiling") for each in found)
    counts = {state: sum(each["state"] == state for each in found) for state in _STATES}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    drained = sum(each["drained"] for each in found)
    left_out = sum(each["left_out"] is not None for each in found)
    line = f"{count_of(len(found), 'device')}: {summary}" + (f"; {drained} drained" if drained else "")
    line += f"; {left_out} left out because of their reports" if left_out else ""

    def below(shown: Sequence[str]) -> Sequence[Text]:
        legend = MODE_LEGEND if shows_modes and "detail" in shown else ""
        assumed = ASSUMED_NOTE if any(map(_is_assumed, found)) else ""
        return [Text(line, style="bold"), *(Text(each, style="dim") for each in (legend, assumed) if each)]

    # The narrower the terminal, the more it is left to why a device does not train.
    table = FittingTable(
        columns(
            "device",
            Column("board", rank=4),
            "state",
            numbers("since", rank=3),
            numbers("modes"),
            *([numbers("left", rank=1)] if is_profiling else []),
            numbers("idle W", rank=5),
            numbers("1 epoch", rank=2),
            *(numbers(name, rank=7) for name in _WATTS),
            Column("tags", folds=True, rank=6),
            texts("detail", rank=1),
        ),
        below=below,
    )
    for each in found:
        table.add(
            each["device_id"],
            each["board"],
            _state(each),
            in_state_for(each, now_unix_s),
            measured_modes(each),
            *([profiling_left(each)] if is_profiling else []),
            number(each["idle_w"]),
            expected_time(each["fastest_epoch_s"], each["epoch_length_assumed"]),
            *(number(each[key]) for key in _WATTS.values()),
            " ".join(each["tags"]),
            _detail(each),
        )
    return table


def _print(content: dict[str, Any], runs: RunNames) -> None:
    from datetime import datetime, timezone

    from rich.text import Text

    from wattfleet.duties import KeptDuty
    from wattfleet_io.tables import facts

    given, limit_w, seen = set(content["operator_tags"]), content["limit_w"], content["last_seen_unix_s"]
    tags = [f"{tag} (by command)" if tag in given else tag for tag in content["tags"]]
    lines = {
        "device": f"{content['device_id']}: {content['board']} ({content['provenance']})",
        "state": content["state"] + (f": {content['detail']}" if content["detail"] else ""),
        "rounds": _rounds(content),
        "trust": trust(content),
        "predictions": prediction_errors(content),
        "now": live_line(content["sample"]),
        "supply": content["supply"] or "none: the site file attaches the device to no supply, or to several",
        "own limit": "none" if limit_w is None else watts(limit_w),
        "tags": ", ".join(tags) or "none",
        "measured": f"{content['profiled_modes']:,} of {content['mode_count']:,} modes",
        "granted": granted(content, runs),
        "observed": last_training(content, runs),
        "idle": "not measured yet" if content["idle_w"] is None else f"{content['idle_w']:.1f} W",
        "reference": content["reference_digest"] or "none yet",
        "last report": "unknown" if seen is None else moment(datetime.fromtimestamp(seen, timezone.utc)),
    }
    if content["duty"] is not None:
        lines |= KeptDuty(**content["duty"]).lines()
    console = terminal()
    console.print(facts({**lines, "state": Text(lines["state"], style=_STYLES.get(content["state"], ""))}))
    _print_workloads(console, content["workloads"])
    _print_front(console, content["front"], content["workload"], content["epoch_length_assumed"])


def _print_workloads(console: Any, workloads: Sequence[dict[str, Any]]) -> None:
    from wattfleet_io.tables import FittingTable, columns, numbers, texts

    if not any(each["workload"] for each in workloads):
        return
    table = FittingTable(
        columns(
            numbers("batch", rank=2),
            numbers("modes"),
            numbers("minibatches", rank=1),
            numbers("1 epoch"),
            texts("workload"),
        )
    )
    for each in reversed(workloads):
        unknown = "unknown" if each["workload"] is not None else "-"
        minibatches = each["minibatches_per_epoch"]
        table.add(
            "-" if each["batch"] is None else f"{each['batch']:,}",
            f"{each['profiled_modes']:,}",
            unknown if minibatches is None else f"{minibatches:,}",
            expected_time(each["fastest_epoch_s"], each["epoch_length_assumed"]),
            (each["workload"] or "any") + (f" (left out: {each['left_out']})" if each["left_out"] else ""),
        )
    console.print("\nworkloads, the latest first")
    console.print(table)
    if any(map(_is_assumed, workloads)):
        console.print(ASSUMED_NOTE, style="dim")


def _print_front(
    console: Any, front: Sequence[dict[str, Any]] | None, workload: str | None, is_length_assumed: bool
) -> None:
    import numpy as np

    from wattfleet.modes import PowerMode
    from wattfleet_io.tables import FittingTable, columns, numbers

    if front is None:
        of = "" if workload is None else f" for the workload {workload}"
        console.print(f"\nno front{of} yet: the device reports one when a run has started", style="dim", markup=False)
        return
    shown = np.unique(np.linspace(0, len(front) - 1, _FRONT_ROWS).round().astype(int)).tolist()
    has_batches = front[0]["batch"] is not None
    figures = (numbers("warm-up s", rank=1), numbers("s/epoch"), numbers("W"), numbers("W planned"))
    table = FittingTable(columns("mode", *([numbers("batch")] if has_batches else []), *figures))
    for index in shown:
        point = front[index]
        table.add(
            PowerMode(**point["mode"]).label(),
            *((str(point["batch"]),) if has_batches else ()),
            number(point["warmup_s"]),
            number(point["epoch_s"]),
            number(point["power_w"]),
            number(point["planned_w"]),
        )
    console.print("\nPareto front" if workload is None else f"\nPareto front of {workload}", markup=False)
    console.print(table)
    if len(shown) < len(front):
        console.print(f"{len(shown)} of {len(front)} modes; --json prints all", style="dim")
    if is_length_assumed:
        console.print(front_assumption(), style="dim")
    console.print(MODE_LEGEND, style="dim")
