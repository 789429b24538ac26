"""The benchmark of how many measured modes a board's first workload saves for its second one."""

from __future__ import annotations

import pytest

from benchmarks.second_workload import MODES, needed


def test_a_constant_saving_is_found_from_the_errors() -> None:
    # The error is 40 / n, or 20 / n with the first workload: half the modes give the same error.
    found = needed([40 / n for n in MODES], [20 / n for n in MODES])
    assert found[0] == MODES[0], "fewer modes were not measured"
    assert found[1:] == pytest.approx([n / 2 for n in MODES[1:]])


def test_errors_that_are_never_reached_are_named() -> None:
    found = needed([5, 4, 3, 2, 1], [6, 5, 4, 3, 2])
    assert found[-1] is None
    assert found[:-1] == pytest.approx([5, 10, 25, 50])
