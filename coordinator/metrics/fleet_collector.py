"""The fleet's metrics, read from its state by one collector.

An unknown value has no sample; it is never exported as zero.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.metrics.device_families import device_families
from coordinator.metrics.duty_families import duty_families
from coordinator.metrics.round_families import in_flight_family, round_families, run_info_family, statistics_families
from coordinator.metrics.workload_families import workload_families
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceRecord, RoundRecord
from wattfleet.planning import Selection
from wattfleet_proto.device_state import DeviceState


class FleetCollector(Collector):
    """Exports the fleet as metric families."""

    def __init__(
        self, fleet: Fleet, single_devices: Sequence[str] = (), now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Read from one fleet.

        Args:
            fleet: the fleet.
            single_devices: patterns such as `tag:lab` of the devices that are exported individually; empty for all.
            now_s: the clock by which rounds are planned.

        Raises:
            InvalidInputError: a pattern has another form.
        """
        self._fleet = fleet
        self._single = Selection(tuple(single_devices))
        self._now_s = now_s

    def collect(self) -> Iterator[Metric]:
        """All families, from the current state."""
        # Copies, because the scrape runs in the HTTP server's thread beside the event loop.
        devices = list(self._fleet.agents.devices.values())
        live_records = [run for run in reversed(list(self._fleet.flower.runs.values())) if not run.finished]
        live = [run.run_id for run in live_records]
        live_runs = set(live)
        rounds = [record for record in list(self._fleet.rounds.records.values()) if record.run_id in live_runs]

        count = GaugeMetricFamily("wattfleet_devices", "Number of devices in each state", labels=["state"])
        in_state = Counter(device.state for device in devices)
        for possible in DeviceState:
            count.add_metric([possible.value], in_state[possible])
        yield count
        yield from _live_totals(self._fleet, devices)
        single = self._exported(devices)
        yield from device_families(self._fleet, single, live_runs)
        newest = self._fleet.rounds.latest_results
        yield from round_families(rounds, newest, self._fleet.operator.site_budget_w, live_runs)
        yield run_info_family(live_records)
        yield in_flight_family(rounds, self._fleet.rounds.since_s.copy(), self._now_s())
        yield from statistics_families(self._fleet.rounds.statistics, live)
        yield from _supply_families(self._fleet, rounds)
        yield from workload_families(self._fleet)
        yield from duty_families(self._fleet.duties, [device.device_id for device in single])
        unplanned = GaugeMetricFamily(
            "wattfleet_unplanned_rounds",
            "Number of stored rounds that trained without a plan, so that no budget was kept",
        )
        unplanned.add_metric([], len(self._fleet.unplanned))
        yield unplanned

    def _exported(self, devices: Sequence[DeviceRecord]) -> list[DeviceRecord]:
        """The devices that are exported individually."""
        if not self._single.include:
            return list(devices)
        selected = set(self._fleet.operator.matching(self._single))
        return [device for device in devices if device.device_id in selected]


def _live_totals(fleet: Fleet, devices: Sequence[DeviceRecord]) -> Iterator[GaugeMetricFamily]:
    """The watts that all boards draw now, as far as they report them."""
    reported = [
        sample.power_w
        for device in devices
        if (sample := fleet.samples.of(device.device_id)) is not None and sample.power_w is not None
    ]
    yield GaugeMetricFamily("wattfleet_reporting_devices", "Number of devices that report their power", len(reported))
    power = GaugeMetricFamily("wattfleet_live_power_watts", "Power now of all devices that report it, in watts")
    if reported:
        power.add_metric([], sum(reported))
    yield power


def _supply_families(fleet: Fleet, rounds: Sequence[RoundRecord]) -> Iterator[GaugeMetricFamily]:
    """Each supply's budget in force, and its watts: planned, reserved, drawn, and not trimmed although possible."""
    power = GaugeMetricFamily(
        "wattfleet_supply_power_watts",
        "Power behind each supply in watts, including idle devices",
        labels=["supply", "kind"],
    )
    fallback = GaugeMetricFamily(
        "wattfleet_supply_fallback", "1 while the supply's fallback budget is in force, else 0", labels=["supply"]
    )
    untrimmed = GaugeMetricFamily(
        "wattfleet_supply_untrimmed_watts",
        "Watts above the supply's budget that a trim would save; above 0 only until the next check",
        labels=["supply"],
    )
    for supply, in_force in list(fleet.operator.budgets_in_force.items()):
        power.add_metric([supply, "allowed"], in_force.watts)
        fallback.add_metric([supply], float(in_force.fallback))
    if rounds:
        for use in rounds[-1].plan.supplies:
            power.add_metric([use.supply, "planned"], use.planned_w)
    if any(device.idle_w is not None for device in list(fleet.agents.devices.values())):
        for supply, reserved_w in fleet.draw.reserved_w().items():
            power.add_metric([supply, "reserved"], reserved_w)
        for supply, untrimmed_w in fleet.untrimmed_w().items():
            untrimmed.add_metric([supply], untrimmed_w)
        for supply, measured in fleet.measured_draw().items():
            power.add_metric([supply, "drawn"], measured.drawn_w)
    yield from (power, fallback, untrimmed)
