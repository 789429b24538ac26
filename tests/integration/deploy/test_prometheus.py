"""Prometheus's rules and Grafana's dashboard, and a real Prometheus that scrapes a fleet, also over mutual TLS."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from coordinator.display.words import THROTTLED_WITHIN_S
from coordinator.settings import CoordinatorSettings
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.exporter import read_url
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.runtime.agent import run_agent
from tests.fakes.agent_settings import agent_settings
from tests.fakes.coordinator_in_process import CoordinatorInProcess
from tests.fakes.fittings import fitting_here
from tests.fakes.fleets import HOT, front
from tests.fakes.polling import eventually, until
from tests.fakes.prometheus import (
    Prometheus,
    alert_queries,
    dashboards,
    documented_metrics,
    documented_samples,
    panel_queries,
    plaintext_job,
    promtool,
    scraping,
)
from tests.fakes.running_agent import agent, new_board
from tests.fakes.served import Agent, CertifiedFleet, Client, certified, serving
from tests.fakes.small_fleet import RUN
from wattfleet.common.addresses import split_address
from wattfleet.common.identity.identity_folder import write_identity
from wattfleet.common.identity.peers import Role
from wattfleet.core.duties import KeptDuty
from wattfleet_proto.convert import board_sample_to_message, front_to_message, kept_duty_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import operator_pb2, planning_pb2, session_pb2

# --- Dashboard and rules ----------------------------------------------------------------------------------------------
# Prometheus's rules and Grafana's dashboard are valid, and refer only to metrics that the coordinator serves.


DEPLOY = Path(__file__).parents[3] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
GRAFANA = DEPLOY / "grafana"
SERVED = documented_samples()


def queries() -> list[tuple[str, str]]:
    return [*panel_queries(), *alert_queries()]


@pytest.mark.parametrize(("name", "expression"), queries())
def test_queries_name_only_what_the_coordinator_serves(name: str, expression: str) -> None:
    for metric, selector in re.findall(r"(wattfleet_\w+)(?:\{([^}]*)\})?", expression):
        assert metric in SERVED, name
        assert set(re.findall(r"(\w+)\s*[=!]", selector)) <= SERVED[metric], name


def test_every_metric_of_the_coordinator_is_on_a_dashboard() -> None:
    shown = {metric for _, query in panel_queries() for metric in re.findall(r"wattfleet_\w+", query)}
    assert [each.name for each in documented_metrics() if not shown & set(each.samples)] == []


def test_prometheus_accepts_its_configuration() -> None:
    # The certificates exist only once a fleet runs.
    promtool("check", "config", "--syntax-only", PROMETHEUS / "prometheus.yml")


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    rules = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    cases = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    alerts = {rule["alert"] for group in rules for rule in group["rules"]}
    expected = [(each["alertname"], bool(each.get("exp_alerts"))) for case in cases for each in case["alert_rule_test"]]
    assert set(expected) == {(alert, fires) for alert in alerts for fires in (True, False)}


def test_the_page_and_the_alert_agree_for_how_long_a_board_is_throttled() -> None:
    rules = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    [query] = [each["expr"] for group in rules for each in group["rules"] if each["alert"] == "WattfleetThrottling"]
    assert re.findall(r"\[(\w+)\]", query) == [f"{THROTTLED_WITHIN_S / 60:.0f}m"]


def test_prometheus_accepts_the_alerts() -> None:
    promtool("check", "rules", PROMETHEUS / "alerts.yml")


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", PROMETHEUS / "alerts_test.yml")


def test_prometheus_can_parse_the_dashboards_queries(tmp_path: Path) -> None:
    rules = [{"record": f"dashboard:query:{number}", "expr": query} for number, (_, query) in enumerate(queries())]
    written = tmp_path / "dashboard.yml"
    written.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", written)


def test_the_dashboards_are_those_that_their_script_writes() -> None:
    script = runpy.run_path(str(GRAFANA / "make_dashboards.py"))
    assert {name: script["dashboard"](name) for name in script["DASHBOARDS"]} == dashboards()


def unknown_keys(content: Any, understood: Any, path: str = "") -> Iterator[str]:
    """The keys of a dashboard that are missing after Grafana's schema has read and written it."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key not in understood:
                yield f"{path}.{key}"
            else:
                yield from unknown_keys(value, understood[key], f"{path}.{key}")
    elif isinstance(content, list):
        assert len(content) == len(understood), path
        for value, other in zip(content, understood, strict=True):
            yield from unknown_keys(value, other, path)
    elif content != understood:
        yield path


@pytest.mark.parametrize("name", dashboards())
def test_grafanas_schema_knows_every_key_of_a_dashboard(name: str) -> None:
    register_default_plugins()  # the schemas of panels and queries
    content = dashboards()[name]
    understood = json.loads(json.dumps(Dashboard.from_json(content), cls=JSONEncoder))
    beside = {
        *(".__inputs", ".__requires"),  # part of the file format in which dashboards are imported
        ".templating.list.definition",  # used by the list of variables
        ".panels.options.enablePagination",  # since Grafana 13
    }
    assert set(unknown_keys(content, understood)) <= beside


@pytest.mark.parametrize("name", dashboards())
def test_panels_fill_the_grid_without_overlap(name: str) -> None:
    panels = dashboards()[name]["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) == 24 * len({y for _, y in cells})
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.parametrize("name", dashboards())
def test_a_dashboard_can_be_imported_with_another_source_or_provisioned(name: str) -> None:
    content = dashboards()[name]
    [asked] = content["__inputs"]
    variables = {each["name"]: each for each in content["templating"]["list"]}
    assert set(variables) == {asked["name"], "site", "board", "tag", "device"}
    sources = [target["datasource"]["uid"] for panel in content["panels"] for target in panel["targets"]]
    assert set(sources) == {f"${{{asked['name']}}}"}
    text = (GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text()
    [source] = yaml.safe_load(text)["datasources"]
    assert variables[asked["name"]]["current"]["value"] == source["uid"]


@pytest.mark.parametrize("name", dashboards())
def test_what_shows_every_device_shows_a_table_or_only_the_worst(name: str) -> None:
    """A panel with five hundred lines is unreadable: the others show one value, or the devices that a user selects."""
    for panel in dashboards()[name]["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            if "wattfleet_device_" not in query.replace("wattfleet_device_info", "") or panel["type"] == "table":
                continue
            assert re.match(r"(topk|bottomk|sum|count)\b", query) or 'device=~"$device"' in query, panel["title"]


def test_the_dashboards_lie_where_grafana_looks() -> None:
    text = (GRAFANA / "provisioning" / "dashboards" / "wattfleet.yml").read_text()
    [provider] = yaml.safe_load(text)["providers"]
    folder = provider["options"]["path"]
    grafana = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]["grafana"]
    assert f"./grafana/dashboards:{folder}:ro" in grafana["volumes"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/fleet.json"


# --- Queries answer ---------------------------------------------------------------------------------------------------
# Every query of the dashboards and the alerts, against a real Prometheus that scrapes a training fleet.
#
# Two devices follow a script that triggers every metric. One device is a real agent on a simulated board.

RULES = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yml"
MOST_ROUNDS = 25
SCRAPED_S = 1.3
WITHOUT_AUTHORITY = re.compile("wattfleet_certificate_expiry")
"""A coordinator without an authority has no certificates; `test_metrics_access.py` reads these of one that has."""


SITE = """
[supplies.site]
budget = { watts = 100 }

[batteries.shed]
supply = "site"
capacity = "10 kWh"
charge = { operator = true }
"""


async def limit_energy(client: Client) -> None:
    """State the charge of the site's battery, and give the site an energy budget."""
    await client.operator.SetCharge(operator_pb2.SetChargeRequest(name="site", share=0.9))
    await client.operator.SetBudget(operator_pb2.SetBudgetRequest(supply="site", energy_j=3.6e7, per="day"))


def selectors(query: str) -> set[str]:
    """The series that an alert reads, since the alert itself has no result while everything is normal."""
    return set(re.findall(r"\b(?:wattfleet_\w+|up)(?:\{[^}]*\})?", query))


def expected_answers() -> dict[str, str]:
    """The queries that must have had a result at least once, by name."""
    of_alerts = {f"{name}: {series}": series for name, query in alert_queries() for series in selectors(query)}
    return {
        name: query
        for name, query in {**dict(panel_queries()), **of_alerts}.items()
        if not WITHOUT_AUTHORITY.search(query)
    }


def sample(number: int) -> session_pb2.BoardSample:
    """The sensor values of a hot board after some rounds."""
    return board_sample_to_message(replace(HOT, power_w=20.0 + number, throttle_events=number, energy_j=100.0 * number))


async def others(client: Client) -> Agent:
    """A device that went offline, and one whose front is refused and whose power cannot be read."""
    gone, blind = client.agent(), client.agent()
    await gone.hello("gone")
    await gone.goodbye()
    await blind.hello("blind")
    absurd = front_to_message(front((20, 90_000)))
    await blind.send(front=session_pb2.FrontReport(front=absurd, idle_w=5.0, minibatches_per_epoch=100))
    assert blind.refusals
    return blind


async def one_round(client: Client, agents: tuple[Agent, Agent], blind: Agent, number: int) -> None:
    """One round up to its training; the first observation of the Orin contradicts its prediction."""
    plan = await client.plan(number)
    await client.obey(GrantPhase.TRAINING)
    kept = KeptDuty("camera", 500, 0.95, 29.5, 12 * number, number, (*[number] * 11, *[0] * 6), 1e3, 350.0, 4, 0.5, 1)
    lease = session_pb2.Lease(sample=session_pb2.BoardSample(temperature_c=40.0), duty=kept_duty_to_message(kept))
    await blind.send(lease=lease)
    for session, seconds, watts in zip(agents, (20.5, 36.0), (90.0 if number == 1 else 30.5, 14.5), strict=True):
        seen = session_pb2.Observation(plan_id=plan.plan_id, epoch_s=seconds, power_w=watts)
        await session.send(observation=seen)
    await client.planning.ReportMetrics(
        planning_pb2.ReportMetricsRequest(run_id=RUN, round=number, metrics={"accuracy": 0.5})
    )


async def end_round(client: Client, agents: tuple[Agent, Agent], number: int) -> None:
    results = [planning_pb2.DeviceResult(device_id=each) for each in ("orin", "nano")]
    await client.planning.FinishRound(
        planning_pb2.FinishRoundRequest(plan_id=f"{RUN}/{number}", results=results, wall_s=1.5)
    )
    await client.end_trainings()
    for session in agents:
        await session.send(lease=session_pb2.Lease(sample=sample(number)))


@asynccontextmanager
async def real_agent(client: Client, board: SimulatedDevice, folder: Path) -> AsyncIterator[str]:
    """Run an agent that measures no modes, until its device is ready; yields the address of its own metrics."""
    settings = agent_settings(
        folder / "state", coordinator=client.bound.address, modes_first=0, metrics_address="127.0.0.1:0"
    )
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_agent(settings, board, built_in_workload(board.step), folder / "device", stop), name="agent"
    )

    async def is_ready() -> bool:
        assert not running.done(), running.exception()
        return (await client.states()).get(settings.device.id) == "ready"

    try:
        await eventually(is_ready)
        url = read_url(settings.device.state_dir)
        assert url is not None
        yield url.removeprefix("http://").removesuffix("/metrics")
    finally:
        stop.set()
        await running


def its_board(prometheus: Prometheus, series: str) -> list[float]:
    """The metrics of the real agent's board: those that the coordinator exports, and those that the agent exports."""
    [of_coordinator] = prometheus.values(f'wattfleet_device_{series}{{device="orin-nano-0"}}')
    [of_agent] = prometheus.values(f"wattfleet_board_{series}")
    return [of_coordinator, of_agent]


def answered(prometheus: Prometheus, queries: dict[str, str]) -> set[str]:
    return {name for name, query in queries.items() if prometheus.values(query)}


@pytest.mark.timeout(180)
async def test_every_panel_and_every_alert_answers_while_a_fleet_trains(
    config: CoordinatorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)
    board = new_board()
    (tmp_path / "site.toml").write_text(SITE)
    config = config.with_values(site={"budget_w": None, "file": tmp_path / "site.toml"})
    async with serving(config) as client, real_agent(client, board, tmp_path / "agent") as own_metrics:
        await limit_energy(client)
        agents = await client.two_ready()
        for agent, point in zip(agents, ((20, 30), (35, 15)), strict=True):
            uncertain = front_to_message(front(point, epoch_log_sd=0.05, power_log_sd=0.02))
            await agent.send(front=session_pb2.FrontReport(front=uncertain, idle_w=3.0, minibatches_per_epoch=100))
        blind = await others(client)
        unanswered = expected_answers()
        assert len(unanswered) > 100
        jobs = [
            plaintext_job("coordinator", client.bound.http_address),
            plaintext_job("wattfleet-agents", own_metrics),
        ]
        with scraping(jobs, tmp_path, [RULES]) as prometheus:
            for number in range(1, MOST_ROUNDS):
                await one_round(client, agents, blind, number)
                await asyncio.sleep(SCRAPED_S)  # Prometheus scrapes in real time
                for name in await asyncio.to_thread(answered, prometheus, unanswered):
                    del unanswered[name]
                await end_round(client, agents, number)
                if not unanswered:
                    break
            groups = (await asyncio.to_thread(prometheus.get, "rules"))["groups"]
            mode, power_w = board.current_mode(), board.activity().power_mw / 1e3
            assert await asyncio.to_thread(its_board, prometheus, "cpu_clock_hertz") == [mode.cpu_khz * 1e3] * 2
            assert await asyncio.to_thread(its_board, prometheus, "online_cores") == [mode.cores] * 2
            assert await asyncio.to_thread(its_board, prometheus, "power_watts") == pytest.approx(
                [power_w] * 2, rel=0.2
            )
            assert await asyncio.to_thread(prometheus.values, "up") == [1.0, 1.0]
    assert unanswered == {}
    assert {rule["name"]: rule["health"] for group in groups for rule in group["rules"]} == {
        name: "ok" for name, _ in alert_queries()
    }


# --- Scrape over TLS --------------------------------------------------------------------------------------------------
# A real Prometheus scrapes an agent and a coordinator over mutual TLS, with the documented scrape jobs.

ROOT = Path(__file__).parents[3]
ANYWHERE = "0.0.0.0:0"
IDENTITY_FILES = ("ca_file", "cert_file", "key_file")

Job = dict[str, Any]


def job_of_agents() -> Job:
    """The scrape job in the documentation of an agent's metrics."""
    [block] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL)
    [job] = yaml.safe_load(block)
    return dict(job)


def job_of_coordinator() -> Job:
    """The scrape job of the fleet in containers."""
    [job] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    return dict(job)


def on_this_machine(job: Mapping[str, Any], identity: Path, port: int) -> Job:
    """A job that uses the identity files of a folder, for a server on this machine."""
    own_files = {key: str(identity / Path(job["tls_config"][key]).name) for key in IDENTITY_FILES}
    return {
        **job,
        "tls_config": {**job["tls_config"], **own_files},
        "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
    }


def without_certificate(job: Mapping[str, Any]) -> Job:
    """The same job for a client that has only the authority's certificate."""
    tls = {key: value for key, value in job["tls_config"].items() if key not in ("cert_file", "key_file")}
    return {**job, "job_name": "stranger", "tls_config": tls}


def require_scraped(prometheus: Prometheus, job: str, query: str, answer: float) -> None:
    """Wait until a query returns a value from a job's target, and the stranger's scrapes have failed."""

    def errors() -> dict[str, str]:
        targets = prometheus.get("targets", state="active")["activeTargets"]
        return {each["labels"]["job"]: each["lastError"] for each in targets if each["health"] != "unknown"}

    until(lambda: errors().keys() == {job, "stranger"})
    assert errors()[job] == ""
    # The server refuses the handshake; the client may notice only when it writes.
    assert any(text in errors()["stranger"] for text in ("certificate required", "broken pipe", "connection reset"))
    until(lambda: prometheus.values(query) == [answer])
    assert prometheus.values(f'up{{job="{job}"}}') == [1]
    assert prometheus.values('up{job="stranger"}') == [0]
    assert prometheus.values('count({job="stranger", __name__=~"wattfleet_.*"})') == []


@pytest.fixture
def fleet(tmp_path: Path) -> CertifiedFleet:
    return CertifiedFleet.create(tmp_path / "authority")


@pytest.fixture
def viewer(fleet: CertifiedFleet, tmp_path: Path) -> Path:
    """The folder with Prometheus's identity."""
    write_identity(tmp_path / "viewer", fleet.identity(Role.VIEWER, "prometheus"))
    return tmp_path / "viewer"


def test_an_agent(fleet: CertifiedFleet, viewer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)
    write_identity(tmp_path / "state" / "identity", fleet.identity(Role.DEVICE, "orin-nano-0", board="orin-nano"))
    with (
        CoordinatorInProcess(tmp_path, 0).running() as coordinator,
        agent(coordinator, tmp_path, new_board(), metrics_address=ANYWHERE) as running,
    ):
        folder = running.settings.device.state_dir
        until(lambda: read_url(folder) is not None or running.has_ended)
        url = read_url(folder)
        assert url is not None, running.error
        port = split_address(url.removeprefix("https://").removesuffix("/metrics"))[1]
        job = on_this_machine(job_of_agents(), viewer, port)
        with scraping([job, without_certificate(job)], tmp_path) as prometheus:
            query = 'wattfleet_agent_info{device="orin-nano-0", provenance="simulated"}'
            require_scraped(prometheus, "wattfleet-agents", query, 1)


async def test_a_coordinator(config: CoordinatorSettings, fleet: CertifiedFleet, viewer: Path, tmp_path: Path) -> None:
    settings = certified(config, fleet.authority.folder).with_values(server={"http_address": ANYWHERE})

    def scrape(port: int) -> None:
        job = on_this_machine(job_of_coordinator(), viewer, port)
        with scraping([job, without_certificate(job)], tmp_path) as prometheus:
            require_scraped(prometheus, "coordinator", "wattfleet_exposed_plaintext_addresses", 0)

    async with serving(settings) as served:
        await asyncio.to_thread(scrape, split_address(served.bound.http_address)[1])
