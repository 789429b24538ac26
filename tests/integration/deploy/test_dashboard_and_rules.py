"""Prometheus's rules and Grafana's dashboard are valid, and refer only to metrics that the coordinator serves."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from coordinator.display.words import THROTTLED_WITHIN_S
from tests.fakes.dashboard_queries import alert_queries, dashboards, panel_queries
from tests.fakes.documented_metrics import documented_metrics, documented_samples
from tests.fakes.promtool import promtool

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
