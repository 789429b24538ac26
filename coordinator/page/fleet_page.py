"""The page of the fleet, or of the devices behind one supply: devices, worst first, budgets and watts."""

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

from coordinator.display.device_words import STATES, TROUBLES, troubles, worst_first
from coordinator.display.supply_words import behind
from coordinator.display.view_values import Values
from coordinator.page.drawing import drawn
from coordinator.page.paging import page_of
from coordinator.page.snapshots import WHOLE_FLEET, Snapshot, Snapshots

EXCLUSIONS = ("left out", "drained")

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
        state: a state, or one of `TROUBLES` and `EXCLUSIONS`; empty for all.
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
        "labels": (*STATES, *EXCLUSIONS, *TROUBLES),
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
    """The labels with which a device can be selected: its state, its exclusions and its troubles."""
    exclusions = (device["left_out"] is not None, bool(device["drained"]))
    return [
        str(device["state"]),
        *(name for name, applies in zip(EXCLUSIONS, exclusions, strict=True) if applies),
        *troubles(device, now_unix_s),
    ]


def _counts(devices: Sequence[Values], now_unix_s: float) -> dict[str, int]:
    """The number of devices with each label, those that need attention first."""
    counted = Counter(label for each in devices for label in _labels(each, now_unix_s))
    order = (*STATES[:2], EXCLUSIONS[0], *TROUBLES, *STATES[2:], EXCLUSIONS[1])
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
