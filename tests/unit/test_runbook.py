"""The runbook says what to do at every alert."""

from __future__ import annotations

import re
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]


def test_the_runbook_has_exactly_the_alerts_of_the_rules() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/operate.md").read_text(), re.MULTILINE) == alerts
