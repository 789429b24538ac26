"""The metrics that an agent exports: all documented names, known values, and no sample where a value is unknown."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from edge_agent.exporter import AgentCollector, AgentFigures, DeviceFacts
from tests.fakes.documented_metrics import DocumentedMetric, documented_metrics_of_agents
from tests.fakes.promtool import promtool
from wattfleet.duties import KeptDuty
from wattfleet.modes import PowerMode
from wattfleet_proto.device_state import BoardSample, DeviceState

HOT = BoardSample(42.5, 71.0, PowerMode(4, 1_036_800, 510_000_000, 2_133_000_000), 3, 0.5, 0.9, 1_200.0)
KEPT = KeptDuty("camera", 500, 0.95, 29.5, 12, 2, (*[1] * 11, *[0] * 6), 1500.0, 350.0, 4, 0.5, 1)
BUSY = AgentFigures(HOT, DeviceState.PROFILING, 7, 20, True, 2, 5, 30.0, KEPT)
IDLE = AgentFigures(None, DeviceState.ENROLLED, 0, None, False, 0, 0, None, None)
EXPIRES = datetime(2026, 5, 1, tzinfo=timezone.utc)


def registry_of(figures: AgentFigures, expires_at: datetime | None = EXPIRES) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(AgentCollector(DeviceFacts("orin", "agx-orin", "hardware"), lambda: figures, lambda: expires_at))
    return registry


def exported(figures: AgentFigures, expires_at: datetime | None = EXPIRES) -> dict[str, float]:
    text = generate_latest(registry_of(figures, expires_at)).decode()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return {each.name: each.value for each in samples if "le" not in each.labels}


def test_the_documentation_lists_every_metric_of_an_agent_as_it_is_exported() -> None:
    found = [
        DocumentedMetric(
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            frozenset(family.samples[0].labels) - {"le"},
            family.documentation,
        )
        for family in registry_of(BUSY).collect()
    ]
    in_order = sorted(found, key=lambda each: each.name)
    assert sorted(documented_metrics_of_agents(), key=lambda each: each.name) == in_order


def test_prometheus_finds_no_fault_with_an_agents_metrics() -> None:
    for figures in (BUSY, IDLE):
        promtool("check", "metrics", text=generate_latest(registry_of(figures)).decode())


def test_every_sensor_is_exported_in_base_units() -> None:
    found = exported(BUSY)
    assert found["wattfleet_board_power_watts"] == 42.5
    assert found["wattfleet_board_temperature_celsius"] == 71
    assert found["wattfleet_board_online_cores"] == 4
    assert found["wattfleet_board_cpu_clock_hertz"] == 1_036_800_000
    assert found["wattfleet_board_gpu_clock_hertz"] == 510_000_000
    assert found["wattfleet_board_memory_clock_hertz"] == 2_133_000_000
    assert (found["wattfleet_board_fan_ratio"], found["wattfleet_board_gpu_use_ratio"]) == (0.5, 0.9)
    assert found["wattfleet_board_energy_joules_total"] == 1_200
    assert found["wattfleet_board_throttle_events_total"] == 3
    assert found["wattfleet_board_power_readable"] == 1


def test_the_agents_own_state_is_exported() -> None:
    found = exported(BUSY)
    assert found["wattfleet_agent_connected"] == 1
    assert (found["wattfleet_agent_profiled_modes"], found["wattfleet_agent_modes_to_measure"]) == (7, 20)
    assert (found["wattfleet_agent_granted_watts"], found["wattfleet_agent_trainings_total"]) == (30, 5)
    assert found["wattfleet_agent_waiting_reports"] == 2
    assert found["wattfleet_agent_certificate_expiry_timestamp_seconds"] == EXPIRES.timestamp()
    [state] = [
        each.labels
        for family in registry_of(BUSY).collect()
        if family.name == "wattfleet_agent_state"
        for each in family.samples
    ]
    assert state == {"state": "profiling"}
    assert found["wattfleet_agent_duty_requests_total"] == 12 and found["wattfleet_agent_duty_missed_total"] == 2
    assert found["wattfleet_agent_duty_latency_seconds_count"] == 11


def test_what_is_unknown_has_no_sample_and_is_no_zero() -> None:
    known = {
        *("wattfleet_agent_info", "wattfleet_build_info", "wattfleet_agent_state", "wattfleet_agent_connected"),
        *("wattfleet_agent_waiting_reports", "wattfleet_agent_profiled_modes", "wattfleet_agent_trainings_total"),
        "wattfleet_board_power_readable",
    }
    found = exported(IDLE, None)
    assert set(found) == known
    assert found["wattfleet_board_power_readable"] == found["wattfleet_agent_connected"] == 0
    blind = exported(replace(BUSY, sample=replace(HOT, power_w=None, gpu_use_share=0.0)))
    assert "wattfleet_board_power_watts" not in blind and blind["wattfleet_board_gpu_use_ratio"] == 0
