"""The presets of boards, as agents report them with their fronts."""

from __future__ import annotations

import pytest

from coordinator.state.operator import PresetPoints
from tests.fakes.fronts import front
from wattfleet.errors import InvalidInputError
from wattfleet_proto.convert import presets_from_messages, presets_to_messages
from wattfleet_proto.device_state import MAX_PRESETS, PresetPoint

MAXN = PresetPoint("MAXN", front((10, 50), warmup_s=2.0), True)


def test_presets_are_kept_by_device_and_workload_until_the_device_leaves() -> None:
    presets = PresetPoints()
    presets.report("orin", "digits", (MAXN,), ["digits"])
    presets.report("orin", "words", (), ["digits", "words"])
    assert (presets.of("orin", "digits"), presets.of("orin", "words"), presets.of("nano", "digits")) == (
        (MAXN,),
        (),
        (),
    )
    presets.report("orin", "words", (MAXN,), ["words"])
    assert presets.of("orin", "digits") == (), "its front of this workload is gone"
    presets.forget(["orin"])
    assert presets.of("orin", "words") == ()


def test_a_message_is_read_as_it_was_written() -> None:
    (read,) = presets_from_messages(presets_to_messages([MAXN]))
    assert (read.name, read.is_measured, read.front.mode(0)) == ("MAXN", True, MAXN.front.mode(0))
    assert (read.front.epoch_s[0], read.front.power_w[0], read.front.warmup_s[0]) == (10, 50, 2)


def test_what_no_board_can_have_is_refused() -> None:
    good = presets_to_messages([MAXN])[0]
    with pytest.raises(InvalidInputError, match=f"up to {MAX_PRESETS} presets, not {MAX_PRESETS + 1}"):
        presets_from_messages([good] * (MAX_PRESETS + 1))
    for name in ("", "two\nlines", "x" * 65):
        bad = presets_to_messages([MAXN])[0]
        bad.name = name
        with pytest.raises(InvalidInputError, match="printable characters"):
            presets_from_messages([bad])
    good.point.power_w = float("nan")
    with pytest.raises(InvalidInputError):
        presets_from_messages([good])
