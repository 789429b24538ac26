"""Prometheus and its checker, the queries of dashboards and alerts, and the metrics that the documentation lists."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.polling import until

# --- Prometheus -------------------------------------------------------------------------------------------------------
# A real Prometheus on loopback; tests that use it are skipped if it is not installed.


_STOP_S = 20.0


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus process that scrapes every second."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """The data of a reply of its API.

        Raises:
            HTTPError: it refuses the request, for example because it cannot evaluate a query.
        """
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}{query}", timeout=10) as response:
            return json.load(response)["data"]

    def values(self, query: str) -> list[float]:
        """The current values of a query, without NaN."""
        found = [float(each["value"][1]) for each in self.get("query", query=query)["result"]]
        return [value for value in found if not math.isnan(value)]


def plaintext_job(name: str, target: str) -> dict[str, Any]:
    """A scrape job for an unprotected address, host:port."""
    return {"job_name": name, "static_configs": [{"targets": [target]}]}


@contextmanager
def scraping(jobs: Sequence[Mapping[str, Any]], folder: Path, rules: Sequence[Path] = ()) -> Iterator[Prometheus]:
    """Run a Prometheus.

    Args:
        jobs: the scrape jobs, in the form of `scrape_configs`.
        folder: folder for its files.
        rules: files of rules that it evaluates.
    """
    if not shutil.which("prometheus"):
        pytest.skip("prometheus is not installed (Debian's package prometheus brings it)")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(each) for each in rules],
        "scrape_configs": jobs,
    }
    written = folder / "prometheus.yml"
    written.write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = Prometheus(f"http://127.0.0.1:{port}")
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={written}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            until(lambda: _is_ready(found))
            yield found
        finally:
            process.terminate()
            process.wait(_STOP_S)


def _is_ready(prometheus: Prometheus) -> bool:
    try:
        with urllib.request.urlopen(f"{prometheus.url}/-/ready", timeout=5):
            return True
    except OSError:  # including the error statuses of HTTP
        return False


# --- Promtool ---------------------------------------------------------------------------------------------------------
# Prometheus's own checker, promtool; tests that use it are skipped if it is not installed.


def promtool(*arguments: str | Path, text: str | None = None) -> None:
    """Run `promtool` on a text, if one is given; fails the test if promtool reports an error."""
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (Debian's package prometheus brings it)")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, input=text, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


# --- Dashboard queries ------------------------------------------------------------------------------------------------
# The queries of Grafana's dashboards and of the alerts, as Prometheus receives them.

_DEPLOY = Path(__file__).parents[2] / "deploy"
_CHOSEN = {"$__rate_interval": "20s", "$__range": "10m", "$site": ".*", "$board": ".*", "$device": ".*", "$tag": ""}
"""What Grafana replaces the variables by, with everything selected."""


def dashboards() -> dict[str, Any]:
    """All dashboards, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((_DEPLOY / "grafana/dashboards").iterdir())}


def panel_queries(chosen: Mapping[str, str] = _CHOSEN) -> list[tuple[str, str]]:
    """The query of every panel, with a name that identifies it."""
    found = []
    for name, content in dashboards().items():
        for panel in content["panels"]:
            for target in panel["targets"]:
                query = target["expr"]
                for variable, value in chosen.items():
                    query = query.replace(variable, value)
                found.append((f"{name}: {panel['title']} {target['refId']}", query))
    return found


def alert_queries() -> list[tuple[str, str]]:
    """The expression of every alert, by name."""
    import yaml  # type: ignore[import-untyped]  # its stubs are not installed, nor is it where the agent is alone

    groups = yaml.safe_load((_DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


# --- Documented metrics -----------------------------------------------------------------------------------------------
# The metrics listed in the documentation: their names, types, labels and help texts.
#
# An agent's metrics are in a section of their own; the others are the coordinator's.

_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
_ROW = re.compile(
    r"\| `(?P<name>wattfleet_\w+)` \| (?P<type>gauge|counter|histogram) \| (?P<labels>.*?) \| (?P<text>.+) \|"
)


@dataclass(frozen=True)
class DocumentedMetric:
    """One row of the page. Counters are listed with their suffix `_total`."""

    name: str
    type: str
    labels: frozenset[str]
    text: str

    @property
    def samples(self) -> dict[str, frozenset[str]]:
        """The names of its samples, each with its labels."""
        if self.type != "histogram":
            return {self.name: self.labels}
        beside = dict.fromkeys((f"{self.name}_count", f"{self.name}_sum"), self.labels)
        return {f"{self.name}_bucket": self.labels | {"le"}, **beside}


_OF_AGENTS = "\n## On the device itself\n"


def documented_metrics() -> list[DocumentedMetric]:
    """The rows of the coordinator's metrics, in order."""
    page = _PAGE.read_text()
    return _rows(page.replace(_section_of_agents(page), ""))


def documented_metrics_of_agents() -> list[DocumentedMetric]:
    """The rows of an agent's metrics, in order."""
    return _rows(_section_of_agents(_PAGE.read_text()))


def _section_of_agents(page: str) -> str:
    begin = page.index(_OF_AGENTS)
    return page[begin : page.index("\n## ", begin + 1)]


def _rows(text: str) -> list[DocumentedMetric]:
    return [
        DocumentedMetric(row["name"], row["type"], frozenset(re.findall(r"`(\w+)`", row["labels"])), row["text"])
        for row in _ROW.finditer(text)
    ]


def documented_samples() -> dict[str, frozenset[str]]:
    """The names of all samples, each with its labels."""
    return {name: labels for metric in documented_metrics() for name, labels in metric.samples.items()}
