"""Metric families of individual devices: properties, grants, predictions and observations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from coordinator.state.fleet import Fleet
from coordinator.state.live_samples import LiveSamples
from coordinator.state.records import DeviceRecord
from coordinator.state.rounds.grants import Grants
from coordinator.state.rounds.latest_results import LatestResults
from wattfleet.errors import InvalidInputError
from wattfleet_proto.device_state import DeviceState


def device_families(fleet: Fleet, devices: Sequence[DeviceRecord], live_runs: Set[str]) -> Iterator[Metric]:
    """All families with one device per sample.

    Args:
        fleet: the fleet.
        devices: the devices that are exported individually.
        live_runs: ids of the runs that have not ended.
    """
    ids = [device.device_id for device in devices]
    yield from _state_families(fleet, devices)
    yield from _grant_families(fleet.rounds.grants, ids)
    yield from _result_families(fleet.rounds.latest_results, ids, live_runs)
    yield from _live_families(fleet.samples, devices)
    energy = CounterMetricFamily(
        "wattfleet_device_training_energy_joules",
        "Observed joules of the device's trainings in rounds since the coordinator started",
        labels=["device"],
    )
    for device_id in ids:
        if (joules := fleet.rounds.statistics.device_j.get(device_id)) is not None:
            energy.add_metric([device_id], joules)
    yield energy


def _state_families(fleet: Fleet, devices: Sequence[DeviceRecord]) -> Iterator[GaugeMetricFamily]:
    """The properties, the supply and the state of each device."""
    info = GaugeMetricFamily(
        "wattfleet_device_info",
        "Always 1; the labels say what the device is. Each tag has a comma before and after it",
        labels=["device", "board", "provenance", "site", "supply", "tags"],
    )
    # One sample per device, for its current state: zeros for the other states would be 50,000 samples for 10,000.
    state = GaugeMetricFamily(
        "wattfleet_device_state",
        "Always 1; the label is the device's current state",
        labels=["device", "board", "state"],
    )
    modes = GaugeMetricFamily(
        "wattfleet_device_profiled_modes", "Number of power modes measured on the device", labels=["device"]
    )
    idle = GaugeMetricFamily("wattfleet_device_idle_watts", "Power of the idle device in watts", labels=["device"])
    trust = GaugeMetricFamily(
        "wattfleet_device_trust",
        "1 if no recent observation contradicts the device's predictions, 0 if all do",
        labels=["device"],
    )
    left_out = GaugeMetricFamily(
        "wattfleet_device_left_out", "1 for each device that its own reports keep out of rounds", labels=["device"]
    )
    claims = fleet.agents.claims
    for device in devices:
        site, supply = _place_of(fleet, device.device_id)
        tags = ",".join(sorted(fleet.operator.tags_of(device.device_id)))
        info.add_metric(
            [device.device_id, device.board, device.provenance, site, supply, f",{tags}," if tags else ""], 1.0
        )
        state.add_metric([device.device_id, device.board, device.state.value], 1.0)
        modes.add_metric([device.device_id], device.profiled_modes)
        if device.idle_w is not None:
            idle.add_metric([device.device_id], device.idle_w)
        if (share := claims.trust_of(device.device_id)) is not None:
            trust.add_metric([device.device_id], share)
        if claims.exclusion_reason(device) is not None:
            left_out.add_metric([device.device_id], 1.0)
    yield from (info, state, modes, idle, trust, left_out)


def _place_of(fleet: Fleet, device_id: str) -> tuple[str, str]:
    """The site and the supply that a device is behind; empty if the site file does not place it."""
    try:
        supply = fleet.operator.supply_of(device_id)
    except InvalidInputError:
        return "", ""
    return fleet.operator.allowance.supplies.path(supply)[-1], supply


def _grant_families(grants: Grants, device_ids: Sequence[str]) -> Iterator[GaugeMetricFamily]:
    """The watts that devices may draw beyond idle power, and the watts that they have confirmed."""
    granted = GaugeMetricFamily(
        "wattfleet_device_granted_watts", "Watts that the device's newest grant allows", labels=["device"]
    )
    confirmed = GaugeMetricFamily(
        "wattfleet_device_confirmed_watts", "Watts that the device has confirmed to keep to", labels=["device"]
    )
    counted = GaugeMetricFamily(
        "wattfleet_device_counted_watts",
        "Watts that count against the budget: the highest limit that the device may still act on",
        labels=["device"],
    )
    for device_id in device_ids:
        grant = grants.of(device_id)
        if grant is None or grant.is_over:
            continue
        granted.add_metric([device_id], grant.granted_w)
        counted.add_metric([device_id], grant.counted_w)
        if grant.confirmed_w is not None:
            confirmed.add_metric([device_id], grant.confirmed_w)
    yield from (granted, confirmed, counted)


def _result_families(newest: LatestResults, ids: Sequence[str], live_runs: Set[str]) -> Iterator[GaugeMetricFamily]:
    """The watts planned in each device's newest round, and predictions and observations of its last observed one.

    They disappear when the run ends.
    """
    families = {
        name: GaugeMetricFamily(f"wattfleet_device_{name}", text, labels=["device"])
        for name, text in (
            ("budget_watts", "Watts planned for the device in its newest round"),
            ("predicted_epoch_seconds", "Predicted seconds per epoch of the last reported training"),
            ("observed_epoch_seconds", "Last reported seconds per epoch"),
            ("predicted_power_watts", "Predicted watts of the last reported training"),
            ("observed_power_watts", "Last reported watts while training"),
        )
    }
    for device_id in ids:
        chosen = newest.assignments.get(device_id)
        if chosen is not None and newest.assigned_in.get(device_id) in live_runs:
            families["budget_watts"].add_metric([device_id], chosen.power_limit_w)
        predicted, seen = newest.predictions.get(device_id), newest.observations.get(device_id)
        if predicted is not None and seen is not None and newest.observed_in.get(device_id) in live_runs:
            families["predicted_epoch_seconds"].add_metric([device_id], predicted.epoch_s)
            families["predicted_power_watts"].add_metric([device_id], predicted.power_w)
            families["observed_epoch_seconds"].add_metric([device_id], seen.epoch_s)
            families["observed_power_watts"].add_metric([device_id], seen.power_w)
    yield from families.values()


def _live_families(samples: LiveSamples, devices: Sequence[DeviceRecord]) -> Iterator[Metric]:
    """The latest sensor readings of the boards; a sensor that a board lacks has no sample."""
    gauges = {
        name: GaugeMetricFamily(f"wattfleet_device_{name}", text, labels=["device"])
        for name, text in (
            ("power_watts", "Power of the board now, in watts"),
            ("power_readable", "1 while the board's power can be read, else 0"),
            ("temperature_celsius", "Temperature of the hottest part of the chip"),
            ("online_cores", "Number of CPU cores that are online"),
            ("cpu_clock_hertz", "CPU clock of the mode in force"),
            ("gpu_clock_hertz", "GPU clock of the mode in force"),
            ("memory_clock_hertz", "Memory clock of the mode in force"),
            ("fan_ratio", "Speed of the fan, 0 to 1"),
            ("gpu_use_ratio", "Use of the GPU in the last moments, 0 to 1"),
        )
    }
    energy = CounterMetricFamily(
        "wattfleet_device_energy_joules", "Joules that the board has drawn since its agent started", labels=["device"]
    )
    throttled = CounterMetricFamily(
        "wattfleet_device_throttle_events", "Times the board has throttled itself since it booted", labels=["device"]
    )
    for device in devices:
        sample = samples.of(device.device_id)
        if sample is None or device.state is DeviceState.OFFLINE:
            continue
        mode = sample.mode
        for name, value in (
            ("power_watts", sample.power_w),
            ("power_readable", float(sample.power_w is not None)),
            ("temperature_celsius", sample.temperature_c),
            ("online_cores", None if mode is None else mode.cores),
            ("cpu_clock_hertz", None if mode is None else mode.cpu_khz * 1e3),
            ("gpu_clock_hertz", None if mode is None else mode.gpu_hz),
            ("memory_clock_hertz", None if mode is None else mode.mem_hz),
            ("fan_ratio", sample.fan_share),
            ("gpu_use_ratio", sample.gpu_use_share),
        ):
            if value is not None:
                gauges[name].add_metric([device.device_id], value)
        if sample.energy_j is not None:
            energy.add_metric([device.device_id], sample.energy_j)
        if sample.throttle_events is not None:
            throttled.add_metric([device.device_id], sample.throttle_events)
    yield from (*gauges.values(), energy, throttled)
