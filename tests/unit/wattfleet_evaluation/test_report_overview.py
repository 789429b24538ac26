"""The tables at the top of an evaluation report: which evaluation fills which cell."""

from __future__ import annotations

from typing import Any

from wattfleet_evaluation.reports.cases import Published
from wattfleet_evaluation.reports.page import overview_of


def pair(
    reference: str, target: str, predictors: list[str], methods: list[str], published: list[Published]
) -> dict[str, Any]:
    return {
        "reference": reference,
        "target": target,
        "intervals": [{"name": name, "from": reference} for name in predictors],
        "choices": [{"name": name, "from": reference} for name in methods],
        "published": published,
    }


def test_each_target_has_one_column_with_its_first_reference() -> None:
    pairs = [
        pair("resnet", "mobilenet", ["roofline"], ["wattfleet"], []),
        pair("resnet", "yolo", ["roofline"], ["wattfleet"], []),
        pair("mobilenet", "resnet", ["roofline"], ["wattfleet"], []),
        pair("mobilenet", "yolo", ["roofline"], ["wattfleet"], []),
    ]
    found = overview_of(pairs)
    assert found.columns == [("mobilenet", "resnet"), ("yolo", "resnet"), ("resnet", "mobilenet")]
    assert [row and row["from"] for row in found.errors["roofline"]] == ["resnet", "resnet", "mobilenet"]


def test_a_method_that_was_not_evaluated_on_a_target_leaves_its_place_empty() -> None:
    pairs = [
        pair("resnet", "mobilenet", ["roofline"], ["maxn"], []),
        pair("resnet", "nano", ["roofline", "tree"], ["maxn", "presets"], []),
    ]
    found = overview_of(pairs)
    assert found.errors["tree"] == [None, {"name": "tree", "from": "resnet"}]
    assert found.choices["presets"] == [None, {"name": "presets", "from": "resnet"}]


def test_published_errors_are_those_from_fifty_modes() -> None:
    of_ten, of_fifty = (Published("nano", "powertrain", modes, 20.0, 6.0, "4.2") for modes in (10, 50))
    found = overview_of([pair("resnet", "nano", ["roofline"], [], [of_ten, of_fifty])])
    assert found.published == {"powertrain": [of_fifty]}
