"""A real Prometheus scrapes an agent and a coordinator over mutual TLS, with the documented scrape jobs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.settings import CoordinatorSettings
from edge_agent.exporter import read_url
from tests.fakes.certified import CertifiedFleet, certified
from tests.fakes.coordinator_in_process import CoordinatorInProcess
from tests.fakes.fitting_here import fitting_here
from tests.fakes.polling import until
from tests.fakes.prometheus import Prometheus, scraping
from tests.fakes.running_agent import agent, new_board
from tests.fakes.served import serving
from wattfleet_identity.identity_folder import write_identity
from wattfleet_identity.peers import Role
from wattfleet_io.addresses import split_address

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
    settings = certified(config, fleet.authority.folder).with_values(server={"metrics_address": ANYWHERE})

    def scrape(port: int) -> None:
        job = on_this_machine(job_of_coordinator(), viewer, port)
        with scraping([job, without_certificate(job)], tmp_path) as prometheus:
            require_scraped(prometheus, "coordinator", "wattfleet_exposed_plaintext_addresses", 0)

    async with serving(settings) as served:
        await asyncio.to_thread(scrape, split_address(served.bound.metrics_address)[1])
