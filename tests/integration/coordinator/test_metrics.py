"""The metrics that Prometheus reads: every documented name with its labels, and who may read them."""

from __future__ import annotations

import asyncio
import http.client
import re
import ssl
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol, cast

import httpx
import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from coordinator.metrics import (
    DeviceFamily,
    ExposureCollector,
    FleetCollector,
    ServiceCollector,
    coordinator_registry,
    exposition,
)
from coordinator.page.application import http_application
from coordinator.page.queries import Queries
from coordinator.service_figures import ServiceFigures
from coordinator.settings import CoordinatorSettings
from coordinator.state.fleet import Fleet
from coordinator.state.records import ObservedTraining
from coordinator.state.stores import PlacedBattery, SharedEnergy
from tests.fakes.fleets import HOT, front
from tests.fakes.prometheus import DocumentedMetric, documented_metrics, promtool
from tests.fakes.served import CertifiedFleet, certified, serving
from tests.fakes.small_fleet import NANO_NODE, NODES, ORIN_NODE, RUN, confirm_all, make_ready, small_fleet
from wattfleet.common.addresses import split_address
from wattfleet.common.identity.identity_folder import Identity
from wattfleet.common.identity.peers import Role
from wattfleet.core.budgets import Battery, InForce, Period, PeriodBudget
from wattfleet.core.duties import KeptDuty
from wattfleet.core.modes import Workload
from wattfleet.core.planning import Allowance
from wattfleet.core.planning.policies import FastestK
from wattfleet_proto.device_state import DeviceState, GrantPhase

# --- Metrics ----------------------------------------------------------------------------------------------------------
# The metrics that Prometheus reads: every documented name with its labels, and no sample for an unknown value.

KEPT = KeptDuty("camera", 500, 0.95, 29.5, 12, 2, (*[1] * 11, *[0] * 6), 1500.0, 350.0, 4, 0.5, 1)
"""One answer up to every limit of 500 ms, and one error."""

Samples = dict[tuple[str, ...], float]
"""By name, then the labels' values in the order of the labels' names."""


def parsed(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            key = (sample.name, *(value for _, value in sorted(sample.labels.items())))
            assert key not in samples, "a series appears twice"
            samples[key] = sample.value
    return samples


def scraped(fleet: Fleet) -> Samples:
    registry = CollectorRegistry()
    registry.register(FleetCollector(fleet))
    return parsed(exposition(registry, "")[0].decode())


def of(samples: Samples, name: str) -> dict[tuple[str, ...], float]:
    return {key[1:]: value for key, value in samples.items() if key[0] == name}


def trained_fleet() -> Fleet:
    """One round in which everything that can be reported was reported, and a device that was never chosen."""
    fleet = small_fleet(site_budget_w=90.0, policy=FastestK(2))
    make_ready(fleet, "slow", front((90, 12)), 2.5, 3)
    plan_id = fleet.flower.plan(RUN, 1, [*NODES, 3], 2.0).plan_id
    fleet.observe("orin", plan_id, 21.0, 31.0)
    fleet.observe("nano", plan_id, 34.0, 14.5)
    fleet.agents.refuse_front("slow", "its watts are not plausible")
    fleet.flower.report_metrics(RUN, 1, {"accuracy": 0.75})
    fleet.set_budget("site", InForce(90.0, "query", True, "the meter is gone"))
    fleet.duties.report("orin", KEPT)
    fleet.samples.report("orin", HOT)
    return fleet


def exported(fleet: Fleet) -> list[Metric]:
    """All metric families of a coordinator that has answered, stored and planned something."""
    figures = ServiceFigures()
    figures.rpc("PlanRound").add(0.2)
    registry = CollectorRegistry()
    registry.register(FleetCollector(fleet))
    registry.register(ExposureCollector(1))
    registry.register(ServiceCollector(figures, lambda: {"device": datetime(2027, 1, 1, tzinfo=timezone.utc)}))
    return list(text_string_to_metric_families(exposition(registry, "")[0].decode()))


def gauges(samples: Samples) -> Samples:
    """The samples except for counters and histograms."""
    return {
        key: value for key, value in samples.items() if not key[0].endswith(("_total", "_bucket", "_sum", "_count"))
    }


def training_fleet() -> Fleet:
    """The same fleet while it trains in the next round, with the first grant confirmed."""
    fleet = trained_fleet()
    fleet.rounds.finish(f"{RUN}/1", [], 80.0)
    plan_id = fleet.flower.plan(RUN, 2, NODES, 2.0).plan_id
    for device_id, grant in fleet.take_orders():
        fleet.rounds.grants.confirm(device_id, grant.grant_id, plan_id, GrantPhase.TRAINING, 0.0)
    fleet.rounds.since_s[plan_id] = 0.0
    return fleet


def with_limited_energy(fleet: Fleet) -> Fleet:
    """The same fleet with a battery and an energy budget at its site."""
    shed = PlacedBattery("shed", Battery(3.6e6), "operator", supply="site")
    budgets = {"site": PeriodBudget(7.2e6, Period.DAY)}
    date = datetime(2026, 6, 1, tzinfo=timezone.utc)
    fleet.stores = SharedEnergy(fleet.operator.allowance.supplies, fleet.operator, lambda: date, [shed], budgets)
    return fleet


def test_batteries_and_energy_budgets_are_exported() -> None:
    fleet = with_limited_energy(training_fleet())
    assert of(scraped(fleet), "wattfleet_battery_unknown") == {("supply/site",): 1}
    fleet.stores.state_charge("site", 0.5)
    samples = scraped(fleet)
    assert of(samples, "wattfleet_battery_unknown") == {("supply/site",): 0}
    assert of(samples, "wattfleet_battery_energy_joules")["supply/site", "estimated"] == 1.8e6
    assert of(samples, "wattfleet_battery_energy_joules")["supply/site", "reserve"] == 0.2 * 3.6e6
    assert of(samples, "wattfleet_supply_energy_joules")["allowed", "site"] == 7.2e6


def test_only_the_selected_devices_export_their_batteries() -> None:
    fleet = training_fleet()
    boards = PlacedBattery("boards", Battery(3.6e6), "agent", devices=("*",))
    shed = PlacedBattery("shed", Battery(3.6e6), "operator", supply="site")
    date = datetime(2026, 6, 1, tzinfo=timezone.utc)
    fleet.stores = SharedEnergy(fleet.operator.allowance.supplies, fleet.operator, lambda: date, [boards, shed])
    fleet.operator.tag(["orin"], {"lab"}, set())
    registry = CollectorRegistry()
    registry.register(FleetCollector(fleet, ["tag:lab"]))
    text = exposition(registry, "")[0].decode()
    holders = set(re.findall(r'wattfleet_battery_unknown{holder="([^"]*)"}', text))
    assert holders == {"supply/site", "device/orin"}


def test_the_documentation_lists_every_metric_with_its_type_labels_and_text() -> None:
    found = [
        DocumentedMetric(
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            frozenset(family.samples[0].labels) - {"le"},
            family.documentation,
        )
        for family in exported(with_limited_energy(training_fleet()))
    ]
    assert sorted(documented_metrics(), key=lambda each: each.name) == sorted(found, key=lambda each: each.name)


def test_a_round_that_goes_on_is_compared_with_its_own_prediction() -> None:
    def in_flight(fleet: Fleet, now_s: float) -> dict[tuple[str, ...], float]:
        registry = CollectorRegistry()
        registry.register(FleetCollector(fleet, now_s=lambda: now_s))
        return of(parsed(exposition(registry, "")[0].decode()), "wattfleet_round_in_flight_seconds")

    fleet = small_fleet(policy=FastestK(1))
    first = fleet.flower.plan(RUN, 1, [ORIN_NODE], 2.0)
    fleet.rounds.since_s[first.plan_id] = 1_000.0
    fleet.flower.start_run("4712", "FedAvg", 1)
    second = fleet.flower.plan("4712", 1, [NANO_NODE], 1.0)
    fleet.rounds.since_s[second.plan_id] = 1_030.0
    # Computed by hand: the Orin has 2 epochs of 10 s at 50 W, and the Nano 1 epoch of 35 s.
    assert in_flight(fleet, 1_040.0) == {
        ("elapsed", RUN): 40.0,
        ("predicted", RUN): 20.0,
        ("elapsed", "4712"): 10.0,
        ("predicted", "4712"): 35.0,
    }
    # Its observation does not end the round, since Flower's server waits for the reply.
    fleet.observe("orin", first.plan_id, 21.0, 31.0)
    assert in_flight(fleet, 1_041.0)["elapsed", RUN] == 41.0
    fleet.rounds.finish(first.plan_id, [], 42.0)
    assert set(in_flight(fleet, 1_050.0)) == {("elapsed", "4712"), ("predicted", "4712")}
    fleet.rounds.abandon(second.plan_id)
    assert in_flight(fleet, 1_060.0) == {}


def test_the_figures_of_a_round_are_those_of_the_plan_and_the_reports() -> None:
    samples = scraped(trained_fleet())
    assert of(samples, "wattfleet_device_predicted_epoch_seconds") == {("orin",): 20, ("nano",): 35}
    assert of(samples, "wattfleet_device_predicted_power_watts") == {("orin",): 30, ("nano",): 15}
    assert of(samples, "wattfleet_device_budget_watts") == {("orin",): 30, ("nano",): 15}
    assert of(samples, "wattfleet_device_observed_epoch_seconds") == {("orin",): 21, ("nano",): 34}
    assert of(samples, "wattfleet_device_observed_power_watts") == {("orin",): 31, ("nano",): 14.5}
    assert of(samples, "wattfleet_device_idle_watts") == {("orin",): 5, ("nano",): 3, ("slow",): 2.5}
    assert of(samples, "wattfleet_device_trust") == {("orin",): 1, ("nano",): 1}
    assert of(samples, "wattfleet_device_left_out") == {("slow",): 1}
    assert of(samples, "wattfleet_device_profiled_modes") == {("orin",): 50, ("nano",): 50, ("slow",): 50}
    assert of(samples, "wattfleet_round_number") == {(): 1}
    assert of(samples, "wattfleet_round_accuracy") == {(): 0.75}
    assert of(samples, "wattfleet_round_duration_seconds") == {
        ("predicted",): 2 * 35,
        ("predicted_then",): 2 * 35,
        ("observed",): 2 * 34,
    }
    assert of(samples, "wattfleet_site_power_watts") == {
        ("allowed",): 90,
        ("planned",): 30 + 15 + 2.5,
        ("observed",): 31 + 14.5 + 2.5,
        ("planned_then",): 30 + 15 + 2.5,
        ("allowed_then",): 90,
    }
    assert of(samples, "wattfleet_supply_power_watts") == {
        ("allowed", "site"): 90,
        ("planned", "site"): 30 + 15 + 2.5,
        ("reserved", "site"): 5 + 3 + 2.5,  # all devices rest
        ("drawn", "site"): HOT.power_w + 3 + 2.5,  # the Orin's board has a reading
    }
    assert of(samples, "wattfleet_supply_fallback") == {("site",): 1}
    assert of(samples, "wattfleet_supply_untrimmed_watts") == {("site",): 0}


def test_an_excess_that_no_order_ends_is_shown() -> None:
    fleet = small_fleet()
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    confirm_all(fleet)
    fleet.operator.set_budget("site", InForce(40.0, "query", False, "the meter"))  # and nobody trims
    assert of(scraped(fleet), "wattfleet_supply_untrimmed_watts") == {("site",): 30 + 15 - 40}
    fleet.trim()
    assert of(scraped(fleet), "wattfleet_supply_untrimmed_watts") == {("site",): 0}


def test_the_figures_of_a_duty_are_those_that_its_device_reported() -> None:
    fleet = trained_fleet()
    samples = scraped(fleet)
    buckets = of(samples, "wattfleet_duty_latency_seconds_bucket")
    assert len(buckets) == 17 and buckets["orin", "0.005"] == 1
    assert buckets["orin", "0.5"] == buckets["orin", "+Inf"] == 11
    assert of(samples, "wattfleet_duty_latency_seconds_sum") == {("orin",): 1.5}
    assert of(samples, "wattfleet_duty_requests_total") == {("orin",): 12}
    assert of(samples, "wattfleet_duty_missed_total") == {("orin",): 2}
    assert of(samples, "wattfleet_duty_allowed_missed_share")["orin",] == pytest.approx(0.05)
    assert of(samples, "wattfleet_duty_training_share") == {("orin",): 0.5}
    fleet.duties.report("orin", None)
    assert not [name for name, *_ in scraped(fleet) if name.startswith("wattfleet_duty")]


def test_a_device_has_the_state_that_it_is_in_and_all_states_are_counted() -> None:
    fleet = trained_fleet()
    fleet.agents.report_state("orin", DeviceState.TRAINING, 50, "")
    fleet.agents.disconnect("slow")
    samples = scraped(fleet)
    assert of(samples, "wattfleet_device_state") == {
        ("agx-orin", "orin", "training"): 1,
        ("agx-orin", "nano", "ready"): 1,
        ("agx-orin", "slow", "offline"): 1,
    }
    count = of(samples, "wattfleet_devices")
    assert count == {(state.value,): float(state.value in ("training", "ready", "offline")) for state in DeviceState}


def test_a_device_keeps_its_figures_while_rounds_go_on_without_it() -> None:
    fleet = trained_fleet()
    fleet.agents.disconnect("nano")
    fleet.rounds.finish(f"{RUN}/1", [], 80.0)
    fleet.flower.plan(RUN, 2, NODES, 1.0)
    samples = scraped(fleet)
    assert of(samples, "wattfleet_round_number") == {(): 2}
    assert of(samples, "wattfleet_device_budget_watts")[("nano",)] == 15
    assert of(samples, "wattfleet_device_observed_power_watts") == {("orin",): 31, ("nano",): 14.5}


def test_before_the_first_device_only_the_budget_is_known() -> None:
    samples = scraped(Fleet(Allowance.of_site(90.0), FastestK()))
    assert set(of(samples, "wattfleet_devices").values()) == {0}
    assert {key: value for key, value in gauges(samples).items() if key[0] != "wattfleet_devices"} == {
        ("wattfleet_site_power_watts", "allowed"): 90,
        ("wattfleet_reporting_devices",): 0,
        ("wattfleet_unplanned_rounds",): 0,
    }


def test_a_device_that_only_connected_has_no_watts_and_no_times() -> None:
    fleet = Fleet(Allowance.of_site(90.0), FastestK())
    fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)
    assert {key[0] for key in gauges(scraped(fleet))} == {
        "wattfleet_site_power_watts",
        "wattfleet_reporting_devices",
        "wattfleet_device_info",
        "wattfleet_device_state",
        "wattfleet_devices",
        "wattfleet_device_profiled_modes",
        "wattfleet_unplanned_rounds",
    }


def test_what_was_not_observed_yet_has_no_sample() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    planned = scraped(fleet)
    assert not of(planned, "wattfleet_device_observed_epoch_seconds")
    assert not of(planned, "wattfleet_device_observed_power_watts")
    assert not of(planned, "wattfleet_round_accuracy")
    assert set(of(planned, "wattfleet_site_power_watts")) == {("allowed",), ("planned",)}
    assert set(of(planned, "wattfleet_round_duration_seconds")) == {("predicted",)}

    fleet.rounds.observe(plan_id, ObservedTraining("orin", 21.0, 31.0))
    half = scraped(fleet)
    assert of(half, "wattfleet_device_observed_power_watts") == {("orin",): 31}
    # The power of half of the devices is not reported as the site's power.
    assert ("observed",) not in of(half, "wattfleet_site_power_watts")
    assert ("observed",) not in of(half, "wattfleet_round_duration_seconds")


def test_a_round_of_which_everybody_was_ended_has_a_plan_and_was_not_observed() -> None:
    fleet = small_fleet()
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.set_budget("site", InForce(0.0, "query", False, "the sun has set"))
    samples = scraped(fleet)
    assert of(samples, "wattfleet_round_number") == {(): 1}
    assert of(samples, "wattfleet_site_power_watts") == {("allowed",): 0, ("planned",): 8}
    assert set(of(samples, "wattfleet_round_duration_seconds")) == {("predicted",)}


def test_what_was_observed_has_the_prediction_of_its_own_round_beside_it() -> None:
    fleet = trained_fleet()
    fleet.agents.report_front("orin", front((5, 60)), 5.0, 50, "", minibatches_per_epoch=100)
    fleet.agents.report_state("nano", DeviceState.DEGRADED, 50, "")
    fleet.flower.plan(RUN, 2, [ORIN_NODE, NANO_NODE], 1.0)
    samples = scraped(fleet)
    assert of(samples, "wattfleet_round_number") == {(): 2}
    assert of(samples, "wattfleet_round_accuracy") == {(): 0.75}
    assert of(samples, "wattfleet_device_budget_watts") == {("orin",): 60, ("nano",): 15}
    assert of(samples, "wattfleet_device_predicted_epoch_seconds") == {("orin",): 20, ("nano",): 35}
    assert of(samples, "wattfleet_device_observed_epoch_seconds") == {("orin",): 21, ("nano",): 34}
    assert of(samples, "wattfleet_device_predicted_power_watts") == {("orin",): 30, ("nano",): 15}
    assert of(samples, "wattfleet_device_observed_power_watts") == {("orin",): 31, ("nano",): 14.5}
    assert of(samples, "wattfleet_round_duration_seconds") == {
        ("predicted",): 5,
        ("predicted_then",): 2 * 35,
        ("observed",): 2 * 34,
    }
    assert of(samples, "wattfleet_site_power_watts")[("planned",)] == 60 + 3 + 2.5


def test_workloads_of_live_runs_have_labels_and_many_share_one() -> None:
    fleet = small_fleet()
    fleet.flower.finish_run(RUN, "")
    for k in range(23):
        fleet.flower.start_run(f"run-{k}", "FedAvg", 1, workload=Workload(f"workload-{k:02}"))
    fleet.agents.report_front("nano", front((1, 2)), 3.0, 4, "", Workload("workload-22"))
    fleet.agents.report_front("nano", front((1, 2)), 3.0, 0, "", Workload("workload-21"))
    fleet.agents.connect("new", "orin-nx", "simulated", 7)
    fleet.agents.report_front("new", front((1, 2)), 3.0, 0, "", Workload("workload-21"))
    runs = of(samples := scraped(fleet), "wattfleet_workload_runs")
    assert len(runs) == 21 and runs[("other",)] == 3 and runs[("workload-22",)] == 1
    devices = of(samples, "wattfleet_workload_devices")
    assert (devices[("workload-22",)], devices[("workload-21",)], devices[("other",)]) == (1, 2, 0)


def test_names_that_need_escaping_arrive_as_they_are() -> None:
    fleet = Fleet(Allowance.of_site(90.0), FastestK())
    fleet.agents.connect('a "b"\\c', "agx-orin", "simulated", 1)
    assert of(scraped(fleet), "wattfleet_device_profiled_modes") == {('a "b"\\c',): 0}


# --- over HTTP ----------------------------------------------------------------------------------------------------


class Scrape(Protocol):
    """Sends a request, which is for the metrics unless it names another path."""

    async def __call__(self, headers: Mapping[str, str] | None = None, path: str = "/metrics") -> httpx.Response: ...


@asynccontextmanager
async def scraper(registry: CollectorRegistry) -> AsyncIterator[Scrape]:
    """The coordinator's web application with these metrics, without a server and a fleet to show."""
    application = http_application(cast(Queries, None), registry, ["coordinator"], has_authority=False)
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:

        async def scrape(headers: Mapping[str, str] | None = None, path: str = "/metrics") -> httpx.Response:
            return await client.get(path, headers=headers)

        yield scrape


@pytest.mark.parametrize("accept", ["", "text/plain;version=1.0.0", "application/openmetrics-text;version=1.0.0"])
def test_every_format_has_the_lines_of_the_prometheus_client(accept: str) -> None:
    class Odd(Collector):
        """Labels and values that are written in a way of their own."""

        def collect(self) -> Iterator[Metric]:
            rows = [(('a "b" \\ \n c', "x"), 1), (("plain", "y"), 1e30), (("z", ""), float("inf"))]
            yield DeviceFamily("odd", 'a "text"\nof \\ two lines', "counter", ("zone", "device"), rows)
            yield DeviceFamily("small", "tiny", "gauge", ("device",), [(("a",), 1.5e-7), (("b",), True)])
            yield DeviceFamily("none", "nothing", "gauge", ("device",), [])

    registry = CollectorRegistry()
    registry.register(FleetCollector(training_fleet(), now_s=lambda: 7.0))
    registry.register(Odd())
    encode, content_type = choose_encoder(accept)
    found, its_type = exposition(registry, accept)
    assert its_type == content_type
    assert (found.endswith(b"# EOF\n"), b"# EOF" in found) == ("openmetrics" in accept, "openmetrics" in accept)

    def lines(text: bytes) -> list[tuple[str, float | str]]:
        parted = (line.rpartition(" ") for line in text.decode().splitlines())
        return sorted((head, end if head.startswith("#") else float(end)) for head, _, end in parted)

    assert lines(found) == lines(encode(registry))


async def test_each_scrape_shows_the_fleet_as_it_is_then() -> None:
    fleet = small_fleet()
    async with scraper(coordinator_registry(fleet)) as scrape:
        found = parsed((await scrape()).text)
        assert {key: found[key] for key in scraped(fleet)} == scraped(fleet)
        assert found["wattfleet_exposed_plaintext_addresses",] == 0.0
        assert found["process_open_fds",] > 0
        fleet.agents.disconnect("nano")
        assert parsed((await scrape()).text)["wattfleet_device_state", "agx-orin", "nano", "offline"] == 1


async def test_prometheus_finds_no_fault_with_the_metrics() -> None:
    async with scraper(coordinator_registry(trained_fleet())) as scrape:
        promtool("check", "metrics", text=(await scrape()).text)


async def test_a_scrape_has_the_format_and_compression_that_it_accepts() -> None:
    async with scraper(coordinator_registry(small_fleet())) as scrape:
        plain = await scrape({"Accept-Encoding": "identity"})
        assert plain.headers["Content-Type"].startswith("text/plain; version=")
        assert "Content-Encoding" not in plain.headers
        packed = await scrape({"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"})
        assert packed.headers["Content-Encoding"] == "gzip"
        assert packed.headers["Content-Type"].startswith("application/openmetrics-text")
        assert packed.text.endswith("# EOF\n")


class SlowCollector(Collector):
    """Takes until it is let go, and counts how many scrapes are in it at once."""

    def __init__(self) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()
        self.inside = self.most = 0

    def collect(self) -> Iterator[Metric]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        assert self.let_go.wait(_WITHIN_S)
        self.inside -= 1
        yield from ()


async def test_the_page_answers_while_scrapes_are_computed_one_at_a_time() -> None:
    registry, slow = CollectorRegistry(auto_describe=False), SlowCollector()
    registry.register(slow)
    async with scraper(registry) as scrape:
        scrapes = [asyncio.create_task(scrape()) for _ in range(2)]
        assert await asyncio.to_thread(slow.entered.wait, _WITHIN_S)
        assert (await scrape(path="/static/page.css")).status_code == 200
        assert not any(each.done() for each in scrapes)
        slow.let_go.set()
        assert [each.status_code for each in await asyncio.gather(*scrapes)] == [200, 200]
    assert slow.most == 1


def test_latest_results_survive_eviction_and_a_restored_round_is_not_newest() -> None:
    fleet = trained_fleet()
    first = fleet.rounds.finish(f"{RUN}/1", [], 80.0)
    fleet.flower.plan(RUN, 2, NODES, 2.0)
    for device_id in ("orin", "nano"):
        fleet.rounds.observe(f"{RUN}/2", ObservedTraining(device_id, 20.0, 10.0))
    fleet.flower.report_metrics(RUN, 2, {"accuracy": 0.8})
    fleet.flower.plan(RUN, 3, NODES, 2.0)
    fleet.rounds.cache.evict([f"{RUN}/1", f"{RUN}/2"])
    fleet.rounds.cache.restore(first)
    fleet.flower.report_metrics(RUN, 1, {"loss": 1.0})
    samples = scraped(fleet)
    assert of(samples, "wattfleet_round_accuracy") == {(): 0.8}
    assert of(samples, "wattfleet_site_power_watts")["observed",] == 10 + 10 + 2.5
    assert of(samples, "wattfleet_round_number") == {(): 3}


def test_a_run_is_known_by_its_name_and_labels_and_few_runs_are() -> None:
    fleet = small_fleet()
    for k in range(30):
        fleet.flower.start_run(f"r{k}", "FedAvg", 1, name="night", labels={"site": "lab", "lr": "0.1"} if k else None)
    fleet.flower.finish_run("r29", "")
    registry = CollectorRegistry()
    registry.register(FleetCollector(fleet))
    samples = parsed(exposition(registry, "")[0].decode())
    found = list(of(samples, "wattfleet_run_info"))
    assert len(found) == 20
    assert (",lr=0.1,site=lab,", "night-29", "r28") in found, "the newest that has not ended"
    assert not any("r29" in each for each in found)


# --- Metrics access ---------------------------------------------------------------------------------------------------
# Access to /metrics on an address that other machines can reach.

_WITHIN_S = 20.0


async def test_metrics_for_other_machines_need_a_viewers_certificate(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    settings = certified(config, fleet.authority.folder).with_values(server={"http_address": "0.0.0.0:0"})

    def context_of(identity: Identity | None) -> ssl.SSLContext:
        return fleet.https_context(identity, tmp_path / "caller")

    def scraped(port: int, identity: Identity | None) -> str:
        url = f"https://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=_WITHIN_S, context=context_of(identity)) as response:
            return str(response.read().decode())

    def plain(port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_WITHIN_S):
            pass

    async with serving(settings) as served:
        port = split_address(served.bound.http_address)[1]
        text = await asyncio.to_thread(scraped, port, fleet.identity(Role.VIEWER, "prometheus"))
        [expiry] = re.findall(r'wattfleet_certificate_expiry_timestamp_seconds\{role="coordinator"\} (\S+)', text)
        assert float(expiry) == pytest.approx(fleet.authority.server.not_after.timestamp())
        for refused in (None, fleet.identity(Role.DEVICE, "orin")):
            with pytest.raises((OSError, http.client.HTTPException)):
                await asyncio.to_thread(scraped, port, refused)
        with pytest.raises((OSError, http.client.HTTPException)):
            await asyncio.to_thread(plain, port)
