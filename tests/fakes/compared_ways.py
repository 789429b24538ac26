"""The part of a simulation's report that compares it with other ways of training."""

from __future__ import annotations

from typing import Any

_OBSERVED = {"duration_s": 45.5, "site_w": 120.0, "training_j": 6500.0, "over_budget_share": 0.0}

COMPARISON: list[dict[str, Any]] = [
    {"name": "this run, as observed", **_OBSERVED, "rounds": 3},
    {
        "name": "plain Flower",
        "duration_s": 99.5,
        "site_w": 130.0,
        "training_j": 7250.0,
        "over_budget_share": 0.75,
        "rounds": 3,
    },
    {"name": "the same devices in presets", **dict.fromkeys(_OBSERVED), "rounds": 0},
]
