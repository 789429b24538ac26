"""The known boards, compared with figures published by NVIDIA and PowerTrain."""

from __future__ import annotations

import pytest

from wattfleet.errors import InvalidInputError
from wattfleet.modes import BOARDS, PowerMode, board_named

MODE_COUNTS = {"agx-orin": 18_096, "xavier-agx": 29_232, "orin-nano": 1_800, "orin-nx": 5_824}
MAXN = {
    "agx-orin": PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000),
    "xavier-agx": PowerMode(8, 2_265_600, 1_377_000_000, 2_133_000_000),
    "orin-nano": PowerMode(6, 1_510_400, 624_750_000, 2_133_000_000),
    "orin-nx": PowerMode(8, 1_984_000, 918_000_000, 3_199_000_000),
}


def test_the_known_boards() -> None:
    assert set(BOARDS) == set(MODE_COUNTS)


@pytest.mark.parametrize("kind", MODE_COUNTS)
def test_a_board_has_the_published_number_of_modes_and_highest_mode(kind: str) -> None:
    known = board_named(kind)
    assert known.kind == kind
    assert known.title.startswith("Jetson")
    assert len(known.space) == len(known.space.array()) == MODE_COUNTS[kind]
    assert known.space.highest == MAXN[kind]


@pytest.mark.parametrize("kind", MODE_COUNTS)
def test_clocks_are_in_the_units_of_their_knobs(kind: str) -> None:
    for mode in (board_named(kind).space.lowest, board_named(kind).space.highest):
        assert 0.1 < mode.cpu_khz / 1e6 < 2.5
        assert 0.1 < mode.gpu_hz / 1e9 < 1.5
        assert 0.2 < mode.mem_hz / 1e9 < 3.3


@pytest.mark.parametrize("kind", ["", "agx_orin", "AGX-ORIN", "nano"])
def test_an_unknown_kind_is_refused_with_the_known_ones(kind: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        board_named(kind)
    assert repr(kind) in str(refusal.value)
    assert all(known in str(refusal.value) for known in MODE_COUNTS)
