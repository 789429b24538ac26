"""Power modes and mode spaces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeSpace, PowerMode, array_to_modes, modes_to_array

SMALL = ModeSpace(
    cores=(4, 2), cpu_khz=(1_000_000, 500_000, 750_000), gpu_hz=(300_000_000,), mem_hz=(2_133_000_000, 204_000_000)
)
KNOB = st.integers(1, 20_000_000_000)


@given(st.lists(st.builds(PowerMode, KNOB, KNOB, KNOB, KNOB), max_size=20))
def test_modes_survive_conversion_to_an_array_and_back(modes: list[PowerMode]) -> None:
    array = modes_to_array(modes)
    assert array.shape == (len(modes), 4)
    assert array_to_modes(array) == modes


def test_a_label_has_cores_and_gigahertz() -> None:
    assert PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000).label() == "12c 2.20/1.30/3.20"


def test_a_space_holds_every_combination_once_the_last_knob_fastest() -> None:
    expected = list(
        itertools.product((2, 4), (500_000, 750_000, 1_000_000), (300_000_000,), (204_000_000, 2_133_000_000))
    )
    assert len(SMALL) == len(expected) == 12
    assert array_to_modes(SMALL.array()) == [PowerMode(*values) for values in expected]


def test_a_space_contains_its_own_modes_only() -> None:
    modes = array_to_modes(SMALL.array())
    assert all(mode in SMALL for mode in modes)
    for knob in PowerMode._fields:
        stranger = modes[0]._replace(**{knob: getattr(modes[0], knob) + 1})
        assert stranger not in SMALL


def test_the_highest_and_the_lowest_mode_bound_all_others() -> None:
    array = SMALL.array()
    assert tuple(SMALL.highest) == tuple(array.max(axis=0))
    assert tuple(SMALL.lowest) == tuple(array.min(axis=0))
    assert SMALL.highest in SMALL and SMALL.lowest in SMALL


def test_the_order_of_a_knobs_values_does_not_matter() -> None:
    shuffled = ModeSpace(SMALL.cores[::-1], SMALL.cpu_khz[::-1], SMALL.gpu_hz, SMALL.mem_hz[::-1])
    assert shuffled == SMALL
    assert np.array_equal(shuffled.array(), SMALL.array())


@pytest.mark.parametrize("knob", PowerMode._fields)
@pytest.mark.parametrize("values", [(), (0, 5), (-1,), (3, 3)])
def test_a_knob_without_distinct_positive_values_is_refused_by_name(knob: str, values: tuple[int, ...]) -> None:
    knobs = {name: (1,) for name in PowerMode._fields} | {knob: values}
    with pytest.raises(InvalidInputError, match=f"^{knob}: needs one or more distinct positive values"):
        ModeSpace(**knobs)
