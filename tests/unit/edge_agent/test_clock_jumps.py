"""Measurements are unaffected by jumps of the wall clock, as on boards that have no clock battery."""

import ast
import time
from pathlib import Path

import pytest

import edge_agent
from edge_agent.devices.meters import PolledMeter
from wattfleet_io.clock import SystemClock

WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


@pytest.fixture
def jumping(monkeypatch):
    jumps = iter(range(0, 10**9, 86_400))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))


def test_what_is_timed_while_the_wall_clock_jumps_by_days_took_what_it_took(jumping):
    clock = SystemClock()
    begun_s = clock.now_s()
    meter = PolledMeter(lambda: 9000.0, clock, interval_s=0.001)
    clock.sleep_s(0.01)
    trace = meter.stop()
    assert 0.01 <= clock.now_s() - begun_s < 60
    assert trace.at_s[0] >= begun_s and trace.at_s[-1] <= clock.now_s()


def test_nothing_in_the_agent_asks_the_wall_clock():
    asked = [
        f"{path.name}:{node.lineno}"
        for path in Path(edge_agent.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in WALL_CLOCKS
    ]
    assert asked == []
