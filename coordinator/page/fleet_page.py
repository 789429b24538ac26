"""The fleet at a glance: its devices, the worst first, and the site's watts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.display.device_words import STATES, worst_first
from coordinator.display.view_values import Values
from coordinator.page.drawing import drawn
from coordinator.page.paging import page_of
from coordinator.page.snapshots import Snapshot, Snapshots


@dataclass(frozen=True)
class DeviceFilter:
    """Which devices are listed.

    Attributes:
        text: part of an id, board or detail.
        state: a state, "left out" or "drained"; empty for all.
        supply: name of a supply; empty for all.
        tag: a tag; empty for all.
    """

    text: str = ""
    state: str = ""
    supply: str = ""
    tag: str = ""

    @classmethod
    def of(cls, request: Request) -> DeviceFilter:
        """What a request asks for."""
        asked = request.query_params
        return cls(*(asked.get(name, "").strip() for name in ("text", "state", "supply", "tag")))

    def keeps(self, device: Values) -> bool:
        """Whether a device is listed."""
        words = f"{device['device_id']} {device['board']} {device['detail']}".lower()
        return (
            self.text.lower() in words
            and (not self.state or self.state in (device["state"], _exclusion(device)))
            and (not self.supply or self.supply == device["supply"])
            and (not self.tag or self.tag in device["tags"])
        )

    def query(self, page: int) -> str:
        """The query of one page of the list."""
        asked = {name: text for name, text in asdict(self).items() if text}
        return "?" + urlencode({**asked, **({"page": page} if page > 1 else {})})


async def fleet(request: Request) -> Response:
    """The page of the whole fleet."""
    snapshots: Snapshots = request.app.state.snapshots
    snapshot, wanted = await snapshots.newest(), DeviceFilter.of(request)
    found = worst_first([each for each in snapshot.devices if wanted.keeps(each)])
    page = page_of(found, request)
    content = {
        "snapshot": snapshot,
        "counts": _counts(snapshot),
        "wanted": wanted,
        "page": page,
        "states": STATES,
        "supplies": sorted({each["supply"] for each in snapshot.devices if each["supply"]}),
        "tags": sorted({tag for each in snapshot.devices for tag in each["tags"]}),
        "profiled_modes": request.app.state.profiled_modes,
    }
    return await drawn(request, "fleet.html", content)


async def watts_history(request: Request) -> Response:
    """The site's watts of the last minutes, oldest first."""
    snapshots: Snapshots = request.app.state.snapshots
    await snapshots.newest()
    return JSONResponse([asdict(each) for each in snapshots.history])


def _exclusion(device: Values) -> str:
    if device["left_out"] is not None:
        return "left out"
    return "drained" if device["drained"] else ""


def _counts(snapshot: Snapshot) -> dict[str, int]:
    """How many devices need somebody, and how many are in each state."""
    states = snapshot.states
    left_out = sum(each["left_out"] is not None for each in snapshot.devices)
    drained = sum(bool(each["drained"]) for each in snapshot.devices)
    counts = {**{state: states[state] for state in STATES}, "left out": left_out, "drained": drained}
    return {name: count for name, count in counts.items() if count}
