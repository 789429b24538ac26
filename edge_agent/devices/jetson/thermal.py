"""Temperatures and throttle counters."""

from __future__ import annotations

import re

from edge_agent.devices.device import Conditions
from edge_agent.devices.tree import Tree

_HOTTEST = "tj-thermal"
# Zones on the chip. Other zones measure the carrier board, the regulators or the fan's own estimate.
_ON_CHIP = re.compile(r"(TJ|CPU|GPU|SOC\d|CV\d|AO|AUX|PLL)-therm", re.IGNORECASE)
_SWITCHED_OFF_BELOW_MC = -40_000


def read_conditions(tree: Tree) -> Conditions:
    """Return the current temperature and throttle count."""
    return Conditions(_junction_c(tree), _throttle_events(tree))


def read_zones(tree: Tree) -> dict[str, float | None]:
    """Return the temperature of every thermal zone, degrees Celsius; None if the zone is switched off or unreadable."""
    zones: dict[str, float | None] = {}
    for zone in tree.glob("/sys/class/thermal/thermal_zone*"):
        try:
            kind = tree.read(f"{zone}/type")
        except OSError:
            continue
        try:
            millidegrees = int(tree.read(f"{zone}/temp"))
        except (OSError, ValueError):
            # EAGAIN: this part of the chip is switched off.
            zones[kind] = None
            continue
        zones[kind] = millidegrees / 1e3 if millidegrees > _SWITCHED_OFF_BELOW_MC else None
    return zones


def read_throttle_counters(tree: Tree) -> dict[str, int]:
    """Return over-current and undervoltage events since boot by counter, such as `oc1`; empty without counters.

    Raises:
        OSError: a counter cannot be read.
        ValueError: it does not contain a number.
    """
    return {
        counter.rpartition("/")[2].removesuffix("_event_cnt"): int(tree.read(counter))
        for name in tree.glob("/sys/class/hwmon/hwmon*/name")
        if tree.read(name) == "soctherm_oc"
        for counter in tree.glob(f"{name.removesuffix('/name')}/oc*_event_cnt")
    }


def _junction_c(tree: Tree) -> float | None:
    on_chip = {
        kind: degrees
        for kind, degrees in read_zones(tree).items()
        if degrees is not None and (kind == _HOTTEST or _ON_CHIP.match(kind))
    }
    return on_chip.get(_HOTTEST, max(on_chip.values(), default=None))


def _throttle_events(tree: Tree) -> int | None:
    """Return the sum of all counters; None unless all can be read."""
    try:
        counts = read_throttle_counters(tree)
    except (OSError, ValueError):
        return None
    return sum(counts.values()) if counts else None
