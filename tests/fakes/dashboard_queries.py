"""The queries of Grafana's dashboards and of the alerts, as Prometheus receives them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are not installed

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
    groups = yaml.safe_load((_DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]
