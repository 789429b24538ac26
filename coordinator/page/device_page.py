"""The page of one device: its front with presets and the mode in force, and its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from coordinator.display.device_words import front_assumption
from coordinator.display.round_details import round_details
from coordinator.display.run_words import RunNames
from coordinator.display.view_values import (
    Values,
    device_workload_values,
    front_values,
    preset_values,
    round_values,
    run_values,
    tagged_device_values,
)
from coordinator.display.wording import watts
from coordinator.page.drawing import drawn
from coordinator.page.front_plot import FrontPlot
from coordinator.page.history_plot import HistoryPlot
from coordinator.page.queries import Queries
from coordinator.page.snapshots import Snapshots
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, board_named
from wattfleet_io.console import count_of
from wattfleet_proto.v1 import view_pb2

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
    content = {
        "device": values,
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
        "names": RunNames(map(run_values, runs)),
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
