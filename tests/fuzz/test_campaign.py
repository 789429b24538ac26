"""A campaign counts its inputs, and fails if they are too few."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.fuzz import campaign as campaigns
from tests.fuzz.campaign import FIRST_SEED, Campaign


def inputs_of(monkeypatch: pytest.MonkeyPatch, each_takes_s: float, at_least: int = 1) -> Campaign:
    """A campaign of 20 s in virtual time, whose inputs take this long."""
    now_s = [100.0]
    monkeypatch.setattr(campaigns, "FUZZ_S", 20.0)
    monkeypatch.setattr(campaigns, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    campaign = Campaign()
    for _ in campaign.inputs(at_least):
        now_s[0] += each_takes_s
    return campaign


def test_inputs_are_made_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = inputs_of(monkeypatch, each_takes_s=0.5)
    assert (campaign.count, campaign.took_s, campaign.seed) == (40, 20.0, FIRST_SEED + 39)


def test_there_are_at_least_as_many_inputs_as_required(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inputs_of(monkeypatch, each_takes_s=1.0, at_least=25).count == 25


def test_too_few_inputs_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="only 5 inputs in 20 s"):
        inputs_of(monkeypatch, each_takes_s=4.0)
