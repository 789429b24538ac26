"""Labels of points in a figure that would overprint each other."""

from __future__ import annotations

from wattfleet_simulation.report_figures import point_labels


def test_labels_of_near_points_are_one_and_of_far_ones_several() -> None:
    near = {("a", 100.0, 20.0): [1, 3], ("b", 110.0, 19.5): [2], ("c", 5000.0, 5.0): [4]}
    assert point_labels(near) == ["", "<b>rounds 1–3</b>", "<b>round 4</b>"]
