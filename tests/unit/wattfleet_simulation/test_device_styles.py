"""Colours and marks of devices in the report's figures."""

from __future__ import annotations

from wattfleet_simulation.report_figures import device_styles


def test_every_device_of_a_large_fleet_looks_different() -> None:
    assert len(set(device_styles(f"device-{k}" for k in range(64)).values())) == 64
