"""`wattfleet coordinator devices`, `device`, `nodes` and `workloads`, and what an operator changes about devices."""

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
from coordinator.cli.runs import run_ids_of
from coordinator.display.words import (
    ASSUMED_NOTE,
    device_facts,
    expected_time,
    flags,
    front_assumption,
    in_state_for,
    measured_modes,
    moment,
    number,
    profiling_left,
    worst_first,
)
from wattfleet.common.clock import unix_now_s
from wattfleet.common.console import MODE_LEGEND, count_of, print_json, print_line, terminal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from coordinator.display.words import RunNames
    from wattfleet_proto.v1 import operator_pb2


# --- Devices ----------------------------------------------------------------------------------------------------------
# `wattfleet coordinator devices` and `device`: the whole fleet, and one device.


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
    from coordinator.display.values import tagged_device_values
    from wattfleet.core.errors import InvalidInputError

    states, tags = set(state or _STATES), set(tag or ())
    if unknown := states - set(_STATES):
        raise InvalidInputError(f"unknown state {sorted(unknown)[0]!r}: choose from {', '.join(_STATES)}")
    with connected() as client:

        def content() -> list[dict[str, Any]]:
            found = [tagged_device_values(view) for view in client.devices(workload=workload, with_times=True)]
            chosen = [each for each in found if each["state"] in states and (not tags or tags & set(each["tags"]))]
            return worst_first(chosen, unix_now_s())

        show(content, partial(_devices_table, is_filtered=bool(state or tag)), json_, watch)


def device(
    device: Annotated[str, typer.Argument(metavar="ID", help="Id of the device.")],
    workload: WorkloadOption = None,
    json_: JsonOption = False,
) -> None:
    """Show one device: its state, supply, limit, tags, workloads and Pareto front."""
    from coordinator.display.values import device_workload_values, front_values, run_values, tagged_device_values
    from coordinator.display.words import RunNames

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
    for flag in flags(content, unix_now_s()):
        text.append(f"\n{flag.word}", style="bold red" if flag.is_bad else "yellow")
    return text


def _detail(content: dict[str, Any]) -> Any:
    from rich.text import Text

    return Text(content["left_out"], style="red") if content["left_out"] else Text(content["detail"], style="dim")


def _is_assumed(device: dict[str, Any]) -> bool:
    return bool(device["epoch_length_assumed"]) and device["fastest_epoch_s"] is not None


def _devices_table(found: Sequence[dict[str, Any]], is_filtered: bool = False) -> RenderableType:
    from rich.text import Text

    from wattfleet.common.tables import Column, FittingTable, columns, numbers, texts

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

    from wattfleet.common.tables import facts
    from wattfleet.core.duties import KeptDuty

    given, seen = set(content["operator_tags"]), content["last_seen_unix_s"]
    tags = [f"{tag} (by command)" if tag in given else tag for tag in content["tags"]]
    words = device_facts(content, runs)
    lines = {
        "device": f"{content['device_id']}: {content['board']} ({content['provenance']})",
        "state": content["state"] + (f": {content['detail']}" if content["detail"] else ""),
        **{name: words[name] for name in ("rounds", "trust", "predictions", "now", "supply", "own limit")},
        "tags": ", ".join(tags) or "none",
        "measured": f"{content['profiled_modes']:,} of {content['mode_count']:,} modes",
        **{name: words[name] for name in ("granted", "observed", "idle")},
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
    from wattfleet.common.tables import FittingTable, columns, numbers, texts

    if not workloads:
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
        minibatches = each["minibatches_per_epoch"]
        table.add(
            "-" if each["batch"] is None else f"{each['batch']:,}",
            f"{each['profiled_modes']:,}",
            "unknown" if minibatches is None else f"{minibatches:,}",
            expected_time(each["fastest_epoch_s"], each["epoch_length_assumed"]),
            each["workload"] + (f" (left out: {each['left_out']})" if each["left_out"] else ""),
        )
    console.print("\nworkloads, the latest first")
    console.print(table)
    if any(map(_is_assumed, workloads)):
        console.print(ASSUMED_NOTE, style="dim")


def _print_front(
    console: Any, front: Sequence[dict[str, Any]] | None, workload: str | None, is_length_assumed: bool
) -> None:
    import numpy as np

    from wattfleet.common.tables import FittingTable, columns, numbers
    from wattfleet.core.modes import PowerMode

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


# --- Overrides --------------------------------------------------------------------------------------------------------
# `wattfleet coordinator tag` and `drain`: override which devices can be selected.

DevicesArgument = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of the devices.")]


def tag(
    devices: DevicesArgument,
    add: Annotated[
        list[str] | None, typer.Option(allow_from_autoenv=False, help="Add this tag. Repeatable. Default: none.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(allow_from_autoenv=False, help="Remove this tag. Repeatable. Default: none.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Add tags to devices, or remove tags that were added by this command.

    `serve --include tag:NAME` and `--exclude tag:NAME` use tags. Tags of the site file can only be changed there.
    """
    from wattfleet.core.errors import InvalidInputError
    from wattfleet_proto.v1 import operator_pb2

    if not add and not remove:
        raise InvalidInputError("pass at least one of --add, --remove")
    request = operator_pb2.TagDevicesRequest(device_ids=devices, add=add, remove=remove)
    with connected() as client:
        answer = client.operate("TagDevices", request)
    if json_:
        print_json(_content(answer.devices))
        return
    for override in answer.devices:
        print_line(f"{override.device_id}: {' '.join(override.tags) or 'no tags from this command'}")


def drain(
    devices: DevicesArgument,
    undo: Annotated[
        bool,
        typer.Option(
            "--undo", allow_from_autoenv=False, help="Let the devices be selected again. Default: drain them."
        ),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Exclude devices from new rounds. Devices that are training finish first."""
    from wattfleet_proto.v1 import operator_pb2

    request = operator_pb2.DrainDevicesRequest(device_ids=devices, undo=undo)
    with connected() as client:
        answer = client.operate("DrainDevices", request)
    if json_:
        print_json(_content(answer.devices))
        return
    for override in answer.devices:
        print_line(f"{override.device_id}: {'drained' if override.drained else 'can be selected again'}")


def _content(overrides: Iterable[operator_pb2.DeviceOverrides]) -> list[dict[str, Any]]:
    return [
        {"device_id": override.device_id, "operator_tags": list(override.tags), "drained": override.drained}
        for override in overrides
    ]


# --- Removal ----------------------------------------------------------------------------------------------------------
# `wattfleet coordinator forget` and `delete`: remove devices and runs.


def forget(
    devices: DevicesArgument,
    json_: JsonOption = False,
) -> None:
    """Remove disconnected devices with their tags and Flower nodes. A device may enrol again later."""
    from wattfleet_proto.v1 import operator_pb2

    with connected() as client:
        answer = client.operate("ForgetDevices", operator_pb2.ForgetDevicesRequest(device_ids=devices))
    if json_:
        print_json([{"device_id": device_id, "forgotten": True} for device_id in answer.device_ids])
        return
    for device_id in answer.device_ids:
        print(f"{device_id}: forgotten")


def delete(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Names or Flower's ids of the runs, or their beginnings.")
    ],
    end: Annotated[
        bool,
        typer.Option(
            "--end",
            allow_from_autoenv=False,
            help="End the runs that are running first, and stop their trainings. Default: refuse them.",
        ),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Delete finished runs with their rounds."""
    deleted = []
    with connected() as client:
        names = run_ids_of(client, runs)
        for run_id in client.deleted_runs(names, end):
            deleted.append(run_id)
            if not json_:
                print_line(f"run {names[run_id]}: deleted")
    if json_:
        print_json([{"run_id": run_id, "name": names[run_id], "deleted": True} for run_id in deleted])


# --- Nodes ------------------------------------------------------------------------------------------------------------
# `wattfleet coordinator nodes`: Flower's nodes, and whether each can train on the device that it names.

_UNKNOWN = "no agent ever connected with this id: correct the SuperNode's device-id, or start the device's agent"
_UNCHECKED = "not checked: the SuperNode has not reported whether it reaches the device's agent"


def nodes(
    all_: Annotated[
        bool, typer.Option("--all", help="Show also nodes that a later node of the same device has replaced.")
    ] = False,
    watch: WatchOption = False,
    json_: JsonOption = False,
) -> None:
    """List Flower's nodes with their devices, and what to fix if a node cannot train on its device."""
    from coordinator.display.values import node_values

    with connected() as client:

        def content() -> list[dict[str, Any]]:
            found = [node_values(view) for view in client.nodes()]
            found = found if all_ else _current(found)
            return [{**each, "status": _status(each), "remedy": _remedy(each)} for each in found]

        show(content, _nodes_table, json_, watch)


def _current(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out nodes that were replaced: a SuperNode that was restarted has a new node id."""

    def age(node: dict[str, Any]) -> tuple[float, float]:
        return node["connected_unix_s"] or 0.0, node["bound_unix_s"] or 0.0

    newest: dict[str, dict[str, Any]] = {}
    for node in found:
        if node["device_id"] not in newest or age(node) > age(newest[node["device_id"]]):
            newest[node["device_id"]] = node

    def is_current(node: dict[str, Any]) -> bool:
        latest = newest[node["device_id"]]
        connected_s = node["connected_unix_s"]
        return node is latest or (connected_s is not None and connected_s == latest["connected_unix_s"])

    return [node for node in found if is_current(node)]


def _status(node: dict[str, Any]) -> str:
    if node["pairing_problem"]:
        return "cannot train"
    if node["device_state"] is None:
        return "unknown device"
    return "not checked" if node["pairing_problem"] is None else "paired"


def _remedy(node: dict[str, Any]) -> str | None:
    """What is wrong and the remedy; None if nothing is wrong."""
    if node["pairing_problem"]:
        return str(node["pairing_problem"])
    return {"unknown device": _UNKNOWN, "not checked": _UNCHECKED}.get(_status(node))


def _nodes_table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from datetime import datetime, timezone

    from rich.console import Group
    from rich.text import Text

    from coordinator.display.words import moment
    from wattfleet.common.tables import Column, FittingTable, columns

    if not found:
        return Text(
            "no Flower node has reported its device yet: start the SuperNodes, each with its device-id, and a run "
            "(docs/flower.md). Nodes are queried before its first plan"
        )
    styles = {"paired": "green", "not checked": "dim"}
    table = FittingTable(
        columns("device", Column("its agent", rank=1), "pairing", Column("connected", rank=2), Column("node", rank=3))
    )
    for each in found:
        seen = each["connected_unix_s"]
        table.add(
            Text(each["device_id"]),
            each["device_state"] or "unknown",
            Text(each["status"], style=styles.get(each["status"], "bold red")),
            "-" if seen is None else moment(datetime.fromtimestamp(seen, timezone.utc)),
            str(each["node_id"]),
        )
    unpaired = sum(each["status"] not in styles for each in found)
    summary = f"{count_of(len(found), 'node')}: " + (f"{unpaired} to fix" if unpaired else "nothing to fix")
    problems = [
        Text(f"{each['device_id']}: {each['remedy']}", style="" if each["status"] in styles else "red")
        for each in found
        if each["remedy"]
    ]
    return Group(table, Text(summary, style="bold"), *problems)


# --- Workloads --------------------------------------------------------------------------------------------------------
# `wattfleet coordinator workloads` and `profile`: list workloads, and measure one ahead of a run.

_PROFILE_MODES = 30
_KINDS = ("id:", "tag:", "site:")


def workloads(watch: WatchOption = False, json_: JsonOption = False) -> None:
    """List the workloads of runs and devices: which have predictions and measurements, and when they were used."""
    from coordinator.display.values import known_workload_values

    with connected() as client:
        show(lambda: [known_workload_values(view) for view in client.workloads()], _workloads_table, json_, watch)


def profile(
    workload: Annotated[str, typer.Option(help="Measure for the workload of this name.")],
    devices: Annotated[
        list[str],
        typer.Option(help="Order these devices: a device's id, id:NAME, tag:NAME or site:NAME, separated by commas."),
    ],
    synthetic: Annotated[
        str | None,
        typer.Option(help="Train this workload that agents ship, such as resnet18. Default: the one named --workload."),
    ] = None,
    modes: Annotated[int, typer.Option(help="Measure at most this many modes on each device.")] = _PROFILE_MODES,
    json_: JsonOption = False,
) -> None:
    """Order devices to measure a workload now, ahead of its first run. They use their full power meanwhile."""
    from wattfleet.common.console import terminal
    from wattfleet.common.tables import grouped
    from wattfleet.core.modes import require_workload_name
    from wattfleet_proto.v1 import operator_pb2, power_pb2

    require_workload_name(workload)
    request = operator_pb2.ProfileWorkloadRequest(
        workload=power_pb2.Workload(name=workload),
        synthetic=synthetic or "",
        modes=modes,
        devices=[each if each.startswith(_KINDS) else f"id:{each}" for some in devices for each in some.split(",")],
    )
    with connected() as client:
        answer = client.operate("ProfileWorkload", request)
    not_told = {each.device_id: each.reason for each in answer.not_told}
    if json_:
        print_json({"device_ids": list(answer.device_ids), "not_told": not_told})
        return
    print_line(f"{count_of(len(answer.device_ids), 'device')} ordered to measure {workload}")
    if answer.device_ids:
        print_line("progress: `devices --watch`; an agent that cannot measure it logs why")
    if not_told:
        terminal().print(grouped(((each, f"not ordered: {reason}") for each, reason in not_told.items()), "yellow"))


def _workloads_table(found: Sequence[dict[str, Any]]) -> RenderableType:
    from datetime import datetime, timezone

    from rich.text import Text

    from wattfleet.common.tables import Column, FittingTable, columns, numbers, texts

    if not found:
        return Text(
            "no workloads yet: start a run, which states its workload, or measure one ahead with `wattfleet "
            "coordinator profile`"
        )
    table = FittingTable(
        columns(
            Column("task", rank=2),
            numbers("devices"),
            numbers("measured"),
            numbers("modes", rank=1),
            numbers("live runs", rank=3),
            Column("last run", rank=4),
            texts("workload"),
        )
    )
    for each in found:
        used = each["last_used_unix_s"]
        table.add(
            each["task"],
            f"{each['devices']:,}",
            f"{each['measured_devices']:,}",
            number(each["median_modes"], 0),
            f"{len(each['live_run_ids']):,}",
            "-" if used is None else moment(datetime.fromtimestamp(used, timezone.utc)),
            Text(each["workload"]),
        )
    return table
