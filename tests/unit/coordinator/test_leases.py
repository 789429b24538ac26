"""Leases: longer in large fleets, expired after silence, and replaced when an agent opens a new session."""

from __future__ import annotations

import pytest

from coordinator.errors import DuplicateSessionError
from coordinator.settings import SessionSettings
from coordinator.state.leases import Leases, pace_of

SETTINGS = SessionSettings()


def fleet_of(devices: int) -> Leases:
    leases = Leases(0.0)
    for k in range(devices):
        leases.begin(f"device-{k}", f"installation-{k}", 0.0)
    return leases


def test_a_small_fleet_is_heard_of_every_few_seconds_and_comes_back_at_once() -> None:
    pace = fleet_of(20).pace
    assert pace.lease_s == SETTINGS.lease_s
    assert pace.reconnect_s < 0.1


@pytest.mark.parametrize("devices", [2_000, 10_000])
def test_a_large_fleet_renews_and_comes_back_no_faster_than_can_be_served(devices: int) -> None:
    pace = fleet_of(devices).pace
    assert devices / pace.lease_s <= SETTINGS.renewals_per_s
    assert devices / pace.reconnect_s == pytest.approx(SETTINGS.reconnects_per_s)


def test_the_pace_after_a_restart_is_that_of_the_fleet_that_is_expected() -> None:
    leases = Leases(0.0, expected=[f"device-{k}" for k in range(10_000)])
    before = leases.pace
    leases.begin("device-0", "a", 1.0)
    assert leases.pace == before


def test_a_lease_lapses_after_three_silent_intervals_and_not_before() -> None:
    leases = fleet_of(3)
    lease, _ = leases.begin("late", "x", 100.0)
    leases.renew(lease, 104.0)
    assert {each.device_id for each in leases.expired(104.0)} == {"device-0", "device-1", "device-2"}
    assert lease not in leases.expired(104.0 + 3 * SETTINGS.lease_s - 0.001)
    assert lease in leases.expired(104.0 + 3 * SETTINGS.lease_s)


def test_an_agent_that_is_back_takes_the_place_of_its_old_session() -> None:
    leases = Leases(0.0)
    old, replaced = leases.begin("orin", "same", 0.0)
    assert replaced is None
    new, replaced = leases.begin("orin", "same", 1.0)
    assert replaced is old
    assert not leases.end(old)  # the old session ends, but the device stays connected
    assert len(leases) == 1
    assert leases.end(new)
    assert len(leases) == 0


@pytest.mark.parametrize(("first", "second"), [("one", "other"), ("", ""), ("one", ""), ("", "one")])
def test_another_agent_of_the_same_id_is_refused_while_the_first_is_there(first: str, second: str) -> None:
    leases = Leases(0.0)
    lease, _ = leases.begin("orin", first, 0.0)
    with pytest.raises(DuplicateSessionError, match="orin is already connected from another installation"):
        leases.begin("orin", second, 1.0)
    leases.end(lease)
    leases.begin("orin", second, 2.0)


def test_devices_that_were_there_before_a_restart_are_waited_for_within_the_grace() -> None:
    leases = Leases(100.0, expected=["a", "b", "c"])
    leases.begin("a", "x", 101.0)
    fleet = {"a", "b", "c", "never seen"}
    assert leases.expected_back(fleet, 110.0) == (2, SETTINGS.return_grace_s - 10.0)
    assert leases.expected_back({"a", "c"}, 110.0) == (1, SETTINGS.return_grace_s - 10.0)
    leases.begin("b", "x", 111.0)
    leases.begin("never seen", "x", 111.0)
    leases.begin("c", "x", 112.0)
    assert leases.expected_back(fleet, 113.0) == (0, 0.0)


def test_after_the_grace_nobody_is_waited_for_and_who_is_missing_is_told_once() -> None:
    leases = Leases(100.0, expected=["gone", "lost", "back"])
    leases.begin("back", "x", 101.0)
    assert leases.take_missing(100.0 + SETTINGS.return_grace_s - 0.1) == []
    assert leases.expected_back({"gone", "back"}, 100.0 + SETTINGS.return_grace_s - 0.1)[0] == 1
    assert leases.expected_back({"gone", "back"}, 100.0 + SETTINGS.return_grace_s) == (0, 0.0)
    assert leases.take_missing(100.0 + SETTINGS.return_grace_s) == ["gone", "lost"]
    assert leases.take_missing(100.0 + SETTINGS.return_grace_s) == []
    assert leases.pace == pace_of(1), "no other device is waited for"


def test_devices_that_are_called_back_are_waited_for_from_the_end_of_their_sessions() -> None:
    leases = Leases(0.0)
    called = [leases.begin(device_id, "x", 0.0)[0] for device_id in ("a", "b")]
    other, _ = leases.begin("other", "x", 0.0)
    for lease in called:
        leases.expect_reconnect(lease, 1_000.0)
        leases.end(lease)
    leases.end(other)
    assert leases.expected_back({"a", "b", "other"}, 1_010.0) == (2, SETTINGS.return_grace_s - 10.0)
    leases.begin("a", "x", 1_011.0)
    assert leases.expected_back({"a", "b", "other"}, 1_012.0) == (1, SETTINGS.return_grace_s - 12.0)
    assert leases.take_missing(1_000.0 + SETTINGS.return_grace_s) == ["b"]
