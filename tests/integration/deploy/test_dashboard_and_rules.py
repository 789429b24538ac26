"""Prometheus' rules and Grafana's dashboard parse, and name only metrics that the coordinator serves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.documented_metrics import documented_samples
from tests.fakes.promtool import promtool

DEPLOY = Path(__file__).parents[3] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
GRAFANA = DEPLOY / "grafana"
SERVED = documented_samples()


def panels() -> list[dict[str, Any]]:
    return json.loads((GRAFANA / "dashboards" / "fleet.json").read_text())["panels"]


def expressions() -> Iterator[tuple[str, str]]:
    """Every query of the dashboard and of the rules, with a name to tell it by."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_queries_name_only_what_the_coordinator_serves(name: str, expression: str) -> None:
    for metric, selector in re.findall(r"(wattfleet_\w+)(?:\{([^}]*)\})?", expression):
        assert metric in SERVED, name
        assert set(re.findall(r"(\w+)\s*[=!]", selector)) <= SERVED[metric], name


def test_every_metric_of_the_coordinator_is_on_the_dashboard() -> None:
    queries = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    assert set(re.findall(r"wattfleet_\w+", queries)) == set(SERVED)


def test_prometheus_accepts_its_configuration() -> None:
    # The certificates are there only once a fleet runs.
    promtool("check", "config", "--syntax-only", PROMETHEUS / "prometheus.yml")


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    rules = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    cases = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    alerts = {rule["alert"] for group in rules for rule in group["rules"]}
    expected = [(each["alertname"], bool(each.get("exp_alerts"))) for case in cases for each in case["alert_rule_test"]]
    assert set(expected) == {(alert, fires) for alert in alerts for fires in (True, False)}


def test_prometheus_accepts_the_alerts() -> None:
    promtool("check", "rules", PROMETHEUS / "alerts.yml")


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", PROMETHEUS / "alerts_test.yml")


def test_prometheus_can_parse_the_dashboards_queries(tmp_path: Path) -> None:
    rules = [
        {"record": f"dashboard:query:{number}", "expr": expression}
        for number, (_, expression) in enumerate(expressions())
    ]
    written = tmp_path / "dashboard.yml"
    written.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", written)


def test_panels_fill_the_grid_without_overlap() -> None:
    cells = [
        (x, y)
        for panel in panels()
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert {x for x, _ in cells} == set(range(24))
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_the_dashboard_reads_the_provisioned_source_and_lies_where_grafana_looks() -> None:
    provisioning = GRAFANA / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    for panel in panels():
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {source["uid"]}

    [provider] = yaml.safe_load((provisioning / "dashboards" / "wattfleet.yml").read_text())["providers"]
    folder = provider["options"]["path"]
    grafana = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]["grafana"]
    assert f"./grafana/dashboards:{folder}:ro" in grafana["volumes"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/fleet.json"
