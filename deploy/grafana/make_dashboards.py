"""Generates the Grafana dashboards, which are too repetitive to be written by hand.

`python deploy/grafana/make_dashboards.py` writes `dashboards/*.json` from `panels.yml`, both beside this file. Each
dashboard can be provisioned unchanged, or imported into any other Grafana, which then asks for the Prometheus data
source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = ("fleet", "site", "device", "run", "predictor")
_PANELS = Path(__file__).parent / "panels.yml"
PROVISIONED_SOURCE = "wattfleet-prometheus"
_SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
_SELECTED = 'wattfleet_device_info{site=~"$site", board=~"$board", tags=~".*$tag.*"}'
_COLUMNS = 24


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: heading of the panel.
        queries: pairs of an expression and the legend of its series.
        kind: Grafana's type of panel.
        unit: Grafana's unit of the values.
        width: width in columns, of 24.
        height: height in rows of the grid.
        text: description for the tooltip.
        max: largest value of a gauge or an axis; None for no limit.
        warn: value from which the panel is orange; None for never.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 12
    height: int = 8
    text: str = ""
    max: float | None = None
    warn: float | None = None

    def as_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Return Grafana's panel at a position of the grid."""
        steps: list[dict[str, Any]] = [{"color": "blue", "value": None}]
        if self.warn is not None:
            steps.append({"color": "orange", "value": self.warn})
        defaults: dict[str, Any] = {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": steps}}
        if self.max is not None:
            defaults |= {"min": 0, "max": self.max}
        is_instant = self.kind in ("table", "stat", "bargauge")
        targets = [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend or "__auto",
                "instant": is_instant,
                "range": not is_instant,
                "format": "table" if self.kind == "table" else "time_series",
            }
            for index, (expression, legend) in enumerate(self.queries)
        ]
        panel: dict[str, Any] = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": _SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": _OPTIONS.get(self.kind, {}),
            "targets": targets,
        }
        if self.kind == "table":
            panel |= _joined([legend for _, legend in self.queries])
        return panel


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "none"},
    "bargauge": {"reduceOptions": {"calcs": ["lastNotNull"]}, "orientation": "horizontal", "displayMode": "basic"},
    # Grafana 13 has the paging option of a table outside of its footer, earlier versions inside.
    "table": {"showHeader": True, "enablePagination": True, "footer": {"enablePagination": True}},
}


def _joined(columns: Sequence[str]) -> dict[str, Any]:
    """Return transformations that join a table's queries to one row per device, with a column for each query."""
    hidden = {name: True for name in ("Time", *(f"Time {index + 1}" for index in range(len(columns))))}
    names = {f"Value #{chr(ord('A') + index)}": column for index, column in enumerate(columns)}
    if len(columns) == 1:
        names = {"Value": columns[0], **names}
    return {
        "transformations": [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": hidden, "renameByName": names}},
        ]
    }


def _panels(name: str) -> tuple[dict[str, Any], list[Panel]]:
    """Return a dashboard's description, and its panels."""
    described = yaml.safe_load(_PANELS.read_text())[name]
    panels = []
    for each in described["panels"]:
        queries = [
            (query["expr"].replace("<selected>", _SELECTED), query.get("legend", "")) for query in each["queries"]
        ]
        panels.append(Panel(**{**each, "queries": tuple(queries)}))
    return described, panels


def dashboard(name: str) -> dict[str, Any]:
    """Return one dashboard in Grafana's format for imports."""
    described, panels = _panels(name)
    return {
        "__inputs": [
            {
                "name": "DS_PROMETHEUS",
                "label": "Prometheus",
                "description": "The Prometheus that scrapes the coordinator.",
                "type": "datasource",
                "pluginId": "prometheus",
                "pluginName": "Prometheus",
            }
        ],
        "__requires": [
            {"type": "grafana", "id": "grafana", "name": "Grafana", "version": "10.0.0"},
            {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
        ],
        "uid": f"wattfleet-{name}",
        "title": described["title"],
        "description": described["text"],
        "tags": ["wattfleet"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "links": [
            {
                "type": "dashboards",
                "title": "Wattfleet",
                "icon": "external link",
                "tooltip": "",
                "targetBlank": False,
                "tags": ["wattfleet"],
                "asDropdown": False,
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "panels": _laid_out(panels),
    }


def _variables() -> list[dict[str, Any]]:
    # An import replaces the name by the chosen data source. In a provisioned dashboard, this variable has that name.
    source = {
        "name": "DS_PROMETHEUS",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {"text": "Prometheus", "value": PROVISIONED_SOURCE},
        "hide": 2,
    }
    tag = {"name": "tag", "label": "Tag contains", "type": "textbox", "query": "", "current": {"text": "", "value": ""}}
    return [
        source,
        _choice("site", "Site", "wattfleet_device_info", "site"),
        _choice("board", "Board", "wattfleet_device_info", "board"),
        tag,
        _choice("device", "Device", _SELECTED, "device"),
    ]


def _choice(name: str, label: str, metric: str, values_of: str) -> dict[str, Any]:
    query = f"label_values({metric}, {values_of})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "variables"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _laid_out(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Yield panels in rows of 24 columns. All panels of a row have the height of the first one."""
    laid_out, x, y, row_height = [], 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > _COLUMNS:
            x, y = 0, y + row_height
        row_height = panel.height if x == 0 else row_height
        laid_out.append(panel.as_json(number, x, y))
        laid_out[-1]["gridPos"]["h"] = row_height
        x += panel.width
    return laid_out


def main() -> None:
    """Write all dashboards."""
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(json.dumps(dashboard(name), indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
