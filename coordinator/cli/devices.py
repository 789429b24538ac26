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
from coordinator.display.wording import moment, number, watts
from wattfleet_io.clock import unix_now_s
from wattfleet_io.console import MODE_LEGEND, count_of, duration_text, print_json, terminal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from coordinator.display.run_words import RunNames

_STATES = ("enrolled", "profiling", "ready", "training", "degraded", "offline")
_STYLES = {"ready": "green", "training": "bold green", "degraded": "bold red", "offline": "red", "profiling": "yellow"}
_WATTS = {"granted W": "granted_w", "confirmed W": "confirmed_w", "observed W": "observed_w"}
_FRONT_ROWS = 12
WorkloadOption = Annotated[
    str | None,
    typer.Option("--workload", help="Show the predictions for this workload. Default: for each device's latest one."),
]
_MIN_TEXT_WIDTH = 10
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


def _table(found: Sequence[dict[str, Any]], is_filtered: bool = False) -> RenderableType:
    from rich.text import Text

    from coordinator.cli.output.layout import Fitting, Layout, columns

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

    def table(more: Sequence[str]) -> Table:
        """A table of the fleet with the given additional columns."""
        left = ("left",) if is_profiling else ()
        table = columns(("device", "board", "state"), ("since", "modes", *left, "idle W", "1 epoch"))
        for name in more:
            table.add_column(name, overflow="fold", justify="right" if name in _WATTS else "left")
        for each in found:
            words = {
                **{name: Text(number(each[key])) for name, key in _WATTS.items()},
                "tags": Text(" ".join(each["tags"])),
                "detail": _detail(each),
            }
            table.add_row(
                Text(each["device_id"]),
                Text(each["board"]),
                _state(each),
                in_state_for(each, now_unix_s),
                measured_modes(each),
                *([profiling_left(each)] if is_profiling else []),
                number(each["idle_w"]),
                duration_text(each["fastest_epoch_s"]),
                *(words[name] for name in more),
            )
        return table

    def layout(*more: str, note: str = "") -> Layout:
        legend = MODE_LEGEND if shows_modes and "detail" in more else ""
        notes = [Text(each, style="dim") for each in (legend, note) if each]
        return Layout(table(()), _MIN_TEXT_WIDTH * len(more), [table(more), Text(line, style="bold"), *notes])

    return Fitting(
        lambda: layout(*_WATTS, "tags", "detail"),
        lambda: layout("tags", "detail", note="widen the terminal to see granted watts"),
        lambda: layout("detail", note="widen the terminal to see tags"),
        lambda: layout(note="widen the terminal to see tags and details"),
    )


def _print(content: dict[str, Any], runs: RunNames) -> None:
    from datetime import datetime, timezone

    from rich.table import Table
    from rich.text import Text

    from wattfleet.duties import KeptDuty

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("how it stands", overflow="fold")
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
    for what, text in lines.items():
        table.add_row(what, Text(text, style=_STYLES.get(content["state"], "") if what == "state" else ""))
    console = terminal()
    console.print(table)
    _print_workloads(console, content["workloads"])
    _print_front(console, content["front"], content["workload"])


def _print_workloads(console: Any, workloads: Sequence[dict[str, Any]]) -> None:
    from rich.text import Text

    from coordinator.cli.output.layout import columns

    if not any(each["workload"] for each in workloads):
        return
    table = columns((), ("batch", "modes", "minibatches", "1 epoch"))
    table.add_column("workload", overflow="fold")
    for each in reversed(workloads):
        unknown = "unknown" if each["workload"] is not None else "-"
        minibatches = each["minibatches_per_epoch"]
        table.add_row(
            "-" if each["batch"] is None else f"{each['batch']:,}",
            f"{each['profiled_modes']:,}",
            unknown if minibatches is None else f"{minibatches:,}",
            duration_text(each["fastest_epoch_s"]),
            Text((each["workload"] or "any") + (f" (left out: {each['left_out']})" if each["left_out"] else "")),
        )
    console.print("\nworkloads, the latest first")
    console.print(table)


def _print_front(console: Any, front: Sequence[dict[str, Any]] | None, workload: str | None) -> None:
    import numpy as np

    from coordinator.cli.output.layout import columns
    from wattfleet.modes import PowerMode

    if front is None:
        of = "" if workload is None else f" for the workload {workload}"
        console.print(f"\nno front{of} yet: the device reports one when a run has started", style="dim", markup=False)
        return
    shown = np.unique(np.linspace(0, len(front) - 1, _FRONT_ROWS).round().astype(int)).tolist()
    has_batches = front[0]["batch"] is not None
    table = columns(("mode",), (*(("batch",) if has_batches else ()), "warm-up s", "s/epoch", "W", "W planned"))
    for index in shown:
        point = front[index]
        table.add_row(
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
    console.print(MODE_LEGEND, style="dim")
