"""Temperature, and how often the board has throttled itself."""

from __future__ import annotations

import re

from edge_agent.devices.device import Conditions
from edge_agent.devices.jetson.tree import Tree

_HOTTEST = "tj-thermal"
# Zones on the chip; what is left out measures the carrier board, the regulators or the fan's own estimate.
_ON_CHIP = re.compile(r"(TJ|CPU|GPU|SOC\d|CV\d|AO|AUX|PLL)-therm", re.IGNORECASE)
_SWITCHED_OFF_BELOW_MC = -40_000


def read_conditions(tree: Tree) -> Conditions:
    """How the board fares now."""
    return Conditions(_junction_c(tree), _throttle_events(tree))


def _junction_c(tree: Tree) -> float | None:
    on_chip = {}
    for zone in tree.glob("/sys/class/thermal/thermal_zone*"):
        try:
            kind, millidegrees = tree.read(f"{zone}/type"), int(tree.read(f"{zone}/temp"))
        except (OSError, ValueError):
            # EAGAIN: the zone's part of the chip is switched off.
            continue
        if millidegrees > _SWITCHED_OFF_BELOW_MC and (kind == _HOTTEST or _ON_CHIP.match(kind)):
            on_chip[kind] = millidegrees / 1e3
    return on_chip.get(_HOTTEST, max(on_chip.values(), default=None))


def _throttle_events(tree: Tree) -> int | None:
    """The over-current and undervoltage events since the start; None unless every counter answers."""
    try:
        counts = [
            int(tree.read(counter))
            for name in tree.glob("/sys/class/hwmon/hwmon*/name")
            if tree.read(name) == "soctherm_oc"
            for counter in tree.glob(f"{name.removesuffix('/name')}/oc*_event_cnt")
        ]
    except (OSError, ValueError):
        return None
    return sum(counts) if counts else None
