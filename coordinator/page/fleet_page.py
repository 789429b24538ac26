"""The pages of the fleet, of one device and of events."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.display.values import (
    device_workload_values,
    event_values,
    front_values,
    preset_values,
    round_details,
    round_values,
    run_values,
    tagged_device_values,
)
from coordinator.display.words import (
    EVENT_KINDS,
    EXCLUSIONS,
    NOTES,
    STATES,
    TROUBLES,
    RunNames,
    Values,
    behind,
    device_facts,
    flags,
    front_assumption,
    subject,
    watts,
    worst_first,
)
from coordinator.page.plots import FrontPlot, HistoryPlot, drawn
from coordinator.page.queries import Queries, device_link, page_of, run_link
from coordinator.page.snapshots import WHOLE_FLEET, Snapshot, Snapshots
from wattfleet.common.console import count_of
from wattfleet.common.identity.http_server import caller_of
from wattfleet.common.identity.peers import Role
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import PowerMode, board_named
from wattfleet_proto.v1 import view_pb2

# --- Fleet page -------------------------------------------------------------------------------------------------------
# The page of the fleet, or of the devices behind one supply: devices, worst first, budgets and watts.


ORDERS = {
    "": "worst first",
    "temperature": "hottest first",
    "watts": "most watts first",
    "training": "farthest over its watts first",
    "epoch": "slowest first",
    "name": "by name",
}
"""The possible orders of the list."""


@dataclass(frozen=True)
class DeviceFilter:
    """The selection and the order of the listed devices.

    Attributes:
        text: part of an id, board or detail.
        state: a state, or one of `EXCLUSIONS`, `TROUBLES` and `NOTES`; empty for all.
        supply: name of a supply, for the devices behind it and behind the supplies that it feeds; empty for all.
        tag: a tag; empty for all.
        order: one of `ORDERS`.
    """

    text: str = ""
    state: str = ""
    supply: str = ""
    tag: str = ""
    order: str = ""

    @classmethod
    def of(cls, request: Request) -> DeviceFilter:
        """Read the filter from a request; an unknown order counts as none."""
        asked = request.query_params
        text, state, supply, tag, order = (
            asked.get(name, "").strip() for name in ("text", "state", "supply", "tag", "order")
        )
        return cls(text, state, supply, tag, order if order in ORDERS else "")

    def keeps(self, device: Values, now_unix_s: float, supplies: Container[str]) -> bool:
        """Whether a device is listed, given the supplies that the filter selects."""
        words = f"{device['device_id']} {device['board']} {device['detail']}".lower()
        return (
            self.text.lower() in words
            and (not self.state or self.state in _labels(device, now_unix_s))
            and (not self.supply or device["supply"] in supplies)
            and (not self.tag or self.tag in device["tags"])
        )

    def listed(self, snapshot: Snapshot) -> list[Values]:
        """The devices to list, in order."""
        now_unix_s, supplies = snapshot.at_unix_s, behind(self.supply, snapshot.supplies)
        found = worst_first([each for each in snapshot.devices if self.keeps(each, now_unix_s, supplies)], now_unix_s)
        return sorted(found, key=_KEYS[self.order]) if self.order else found

    def query(self, page: int) -> str:
        """The URL query of one page of the list."""
        asked = {name: text for name, text in asdict(self).items() if text}
        return "?" + urlencode({**asked, **({"page": page} if page > 1 else {})})

    def ordered_by(self, order: str) -> str:
        """The URL query of the same devices in another order."""
        return replace(self, order=order).query(1)

    def in_state(self, state: str) -> str:
        """The URL query of all devices behind the same supply that are in a state."""
        return DeviceFilter(state=state, supply=self.supply).query(1)

    def at_supply(self, supply: str) -> str:
        """The URL query of all devices behind another supply."""
        return DeviceFilter(supply=supply).query(1)


async def fleet(request: Request) -> Response:
    """Answer with the page of the whole fleet, or of the devices behind a supply."""
    snapshots: Snapshots = request.app.state.snapshots
    snapshot, wanted = await snapshots.newest(), DeviceFilter.of(request)
    page = page_of(await asyncio.to_thread(wanted.listed, snapshot), request)
    here = await asyncio.to_thread(DeviceFilter(supply=wanted.supply).listed, snapshot)
    sites = [each for each in snapshot.supplies if each["parent"] is None]
    content = {
        "snapshot": snapshot,
        "device_count": len(here),
        "counts": _counts(here, snapshot.at_unix_s),
        "bad": ("offline", "degraded", "left out", *TROUBLES),
        "wanted": wanted,
        "page": page,
        "labels": (*STATES, *EXCLUSIONS, *TROUBLES, *NOTES),
        "orders": ORDERS,
        "is_known_supply": wanted.supply in snapshot.watts,
        "watts": snapshot.watts.get(wanted.supply, snapshot.watts[WHOLE_FLEET]),
        "budgets": [each for each in snapshot.supplies if each["supply"] == wanted.supply] if wanted.supply else sites,
        "fallbacks": [each for each in snapshot.supplies if each["fallback"]],
        "tags": sorted({tag for each in snapshot.devices for tag in each["tags"]}),
    }
    return await drawn(request, "fleet.html", content)


async def watts_history(request: Request) -> Response:
    """The watts of a supply, or of the whole fleet, over the last minutes, oldest first."""
    snapshots: Snapshots = request.app.state.snapshots
    await snapshots.newest()
    supply = request.query_params.get("supply", WHOLE_FLEET)
    return JSONResponse([asdict(each) for each in snapshots.history.of(supply)])


def _labels(device: Values, now_unix_s: float) -> list[str]:
    """The labels with which a device can be selected: its state, and what is shown beside it."""
    return [str(device["state"]), *(flag.word for flag in flags(device, now_unix_s))]


def _counts(devices: Sequence[Values], now_unix_s: float) -> dict[str, int]:
    """The number of devices with each label, those that need attention first."""
    counted = Counter(label for each in devices for label in _labels(each, now_unix_s))
    order = (*STATES[:2], EXCLUSIONS[0], *TROUBLES, *STATES[2:], EXCLUSIONS[1], *NOTES)
    return {label: counted[label] for label in order if counted[label]}


def _descending(value: Callable[[Values], float | None]) -> Callable[[Values], float]:
    """A sort key that puts the largest values first, and unknown values last."""

    def key(device: Values) -> float:
        found = value(device)
        return math.inf if found is None else -found

    return key


def _sensed(name: str) -> Callable[[Values], float | None]:
    return lambda device: None if device["sample"] is None else device["sample"][name]


def _over_limit(device: Values) -> float | None:
    """The watts of a device's last training divided by those that the plan allowed."""
    return None if device["observed_limit_w"] is None else device["observed_w"] / device["observed_limit_w"]


_KEYS: dict[str, Callable[[Values], Any]] = {
    "temperature": _descending(_sensed("temperature_c")),
    "watts": _descending(_sensed("power_w")),
    "training": _descending(_over_limit),
    "epoch": _descending(lambda device: device["fastest_epoch_s"]),
    "name": lambda device: device["device_id"],
}


# --- Device page ------------------------------------------------------------------------------------------------------
# The page of one device: its front with presets and the mode in force, and its rounds.

_ROUNDS = 20


@dataclass(frozen=True)
class _DeviceRound:
    """A device's part in one round.

    Attributes:
        number: the number of the round.
        part: the values of its training; None if it was not selected.
        reason: why it was selected or not; None if the round did not consider it.
    """

    number: int
    part: Values | None
    reason: str | None


async def device(request: Request) -> Response:
    """Answer with the page of one device."""
    device_id = request.path_params["device_id"]
    snapshots: Snapshots = request.app.state.snapshots
    queries: Queries = snapshots.queries
    view = await queries.device(device_id)
    values, front = tagged_device_values(view), front_values(view)
    runs = await queries.runs()
    run_id, rounds = await _newest_rounds(queries, runs, values)
    in_force = None
    if values["granted_plan_id"] is not None:
        in_force = _mode_in_force(rounds, f"{run_id}/", values["granted_plan_id"])
    presets = preset_values(view) or _presets_on(front or [], values["board"])
    names = RunNames(map(run_values, runs))
    content = {
        "device": values,
        "facts": device_facts(values, names),
        "workloads": [device_workload_values(each) for each in reversed(view.workloads)],
        "front": front,
        "front_assumption": front_assumption(),
        "presets": presets,
        "missing_presets": sorted(_presets_of(values["board"]).keys() - {each["preset"] for each in presets}),
        "plot": None if not front else FrontPlot.of(front, presets, in_force),
        "in_force": in_force,
        "run_id": run_id,
        "rounds": rounds,
        "histories": _histories(rounds),
        "bounds": _bounds(values, front, rounds),
        "names": names,
    }
    return await drawn(request, "device.html", content)


def _histories(rounds: Sequence[_DeviceRound]) -> list[HistoryPlot]:
    """The plots of predicted and observed seconds and watts over rounds; empty if the device was never selected."""
    parts = [(each.number, each.part) for each in reversed(rounds) if each.part is not None]
    return [HistoryPlot.seconds(parts), HistoryPlot.watts(parts)] if parts else []


def _bounds(device: Values, front: Sequence[Values] | None, rounds: Sequence[_DeviceRound]) -> list[str]:
    """The reasons that keep the device from its fastest mode, or out of rounds."""
    found = []
    if device["drained"]:
        found.append("It is drained, so that no round selects it.")
    if device["left_out"] is not None:
        found.append(f"Its reports keep it out of rounds: {device['left_out']}.")
    if device["state"] in ("offline", "degraded", "profiling", "enrolled"):
        found.append(f"It is {device['state']}: only ready devices are selected.")
    limit_w = device["limit_w"]
    if front and limit_w is not None and (over := sum(each["planned_w"] > limit_w for each in front)):
        found.append(
            f"Its own limit of {watts(limit_w)} excludes {over} of {count_of(len(front), 'mode')} of its front."
        )
    newest = next((each for each in rounds if each.part is not None), None)
    if front and newest is not None and newest.part is not None:
        fastest = min(front, key=lambda each: float(each["warmup_s"] + each["epoch_s"]))
        planned_w = newest.part["planned_w"]
        if fastest["planned_w"] > planned_w:
            found.append(
                f"In round {newest.number}, the plan allowed it {watts(planned_w)}; its fastest mode needs"
                f" {watts(fastest['planned_w'])}."
            )
        elif newest.part["became"] != "stopped":
            found.append(f"In round {newest.number}, nothing limited it: it had the watts of its fastest mode.")
    return found


def _mode_in_force(rounds: Sequence[_DeviceRound], run_prefix: str, plan_id: str) -> Values | None:
    """The mode of the round whose grant is in force; None if that round is not among the given ones."""
    for each in rounds:
        if each.part is not None and plan_id == f"{run_prefix}{each.number}":
            mode: Values = each.part["mode"]
            return mode
    return None


async def _newest_rounds(
    queries: Queries, runs: Sequence[view_pb2.RunView], device: Values
) -> tuple[str | None, list[_DeviceRound]]:
    """The run that a device trains or has trained for, or else the newest; and its newest rounds, newest first."""
    if not runs:
        return None, []
    device_id, known = device["device_id"], {each.run_id for each in runs}
    granted = (device["granted_plan_id"] or "").rpartition("/")[0]
    run_id = next((each for each in (granted, device["observed_run_id"]) if each in known), runs[-1].run_id)
    planned = [round_values(each)["round"] for each in await queries.rounds(run_id) if not each.unplanned]
    views = [await queries.round(run_id, number, device_id) for number in planned[: -_ROUNDS - 1 : -1]]
    return run_id, [_part_of(view) for view in views]


def _part_of(view: view_pb2.RoundView) -> _DeviceRound:
    """The part of the only device in a view."""
    details = round_details(view)
    part = next(iter(details["selected"]), None)
    considered = [part, *details["not_selected"]] if part else details["not_selected"]
    return _DeviceRound(view.round, part, considered[0]["reason"] if considered else None)


def _presets_on(front: Sequence[Values], board: str) -> list[Values]:
    """The presets of a board that are modes of a front, for agents that do not report presets."""
    modes = {PowerMode(**each["mode"]): each for each in front}
    return [
        {**modes[mode], "preset": name, "is_measured": False}
        for name, mode in _presets_of(board).items()
        if mode in modes
    ]


def _presets_of(board: str) -> dict[str, PowerMode]:
    """NVIDIA's preset modes of a board by name; none for a board without them."""
    try:
        return dict(board_named(board).presets)
    except InvalidInputError:
        return {}


# --- Events page ------------------------------------------------------------------------------------------------------
# The page of events: what happened to devices, runs, rounds and budgets, and the audit log.

_EVENTS = 2_000
_AUDIT_ENTRIES = 200
_OFFERED_RUNS = 50
_FILTERS = ("kind", "device", "run", "supply")


async def events(request: Request) -> Response:
    """Answer with the page of events; as with the commands, the audit log is only for operators."""
    snapshots: Snapshots = request.app.state.snapshots
    snapshot = await snapshots.newest()
    asked = {name: request.query_params.get(name, "").strip() for name in _FILTERS}
    names = RunNames(snapshot.runs)
    may_read = caller_of(request.scope).role() is Role.OPERATOR if request.app.state.has_authority else True
    entries = (await snapshots.queries.audit_log())[:_AUDIT_ENTRIES] if may_read else []
    found: list[Values] = []
    problem = ""
    try:
        found = await _found(snapshots, asked, names)
    except WattfleetError as error:
        problem = str(error)
    content = {
        "page": page_of(found, request),
        "asked": asked,
        "problem": problem,
        "kinds": EVENT_KINDS,
        "runs": _offered_runs(snapshot.runs, asked["run"]),
        "supplies": snapshot.supplies,
        "is_filtered": any(asked.values()),
        "query": lambda number: "?" + urlencode({**{k: v for k, v in asked.items() if v}, "page": number}),
        "most_events": _EVENTS,
        "may_read_audit_log": may_read,
        "entries": entries,
        "most_entries": _AUDIT_ENTRIES,
    }
    return await drawn(request, "events.html", content)


async def _found(snapshots: Snapshots, asked: dict[str, str], names: RunNames) -> list[Values]:
    """The events that a filter keeps, newest first."""
    wanted = view_pb2.ListEventsRequest(
        kinds=[asked["kind"]] if asked["kind"] else (),
        device_id=asked["device"],
        run_id=asked["run"],
        supply=asked["supply"],
        limit=_EVENTS,
    )
    values = [event_values(each) for each in await snapshots.queries.events(wanted)]
    return [{**each, "subject": subject(each, names), "link": _link(each)} for each in values]


def _link(event: Values) -> str | None:
    """The address of the page that shows what an event is about; None if there is none."""
    if event["kind"] == "device":
        return device_link(event["device_id"])
    if event["kind"] in ("run", "round"):
        return run_link(event["run_id"], event["round"] or None)
    if event["kind"] == "budget":
        return "/?" + urlencode({"supply": event["supply"]})
    return None


def _offered_runs(runs: Any, asked: str) -> list[Values]:
    """The newest runs, newest first, and the one that is asked for."""
    newest = list(runs[: -_OFFERED_RUNS - 1 : -1])
    return newest + [each for each in runs[:-_OFFERED_RUNS] if each["run_id"] == asked]
