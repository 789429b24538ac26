"""The rate limit: bursts pass, and the long-term rate is kept."""

from __future__ import annotations

from wattfleet_io.tasks import TokenBucket


def test_a_burst_passes_and_the_next_event_waits_for_its_turn() -> None:
    bucket = TokenBucket.full(per_s=2.0, burst=3.0, now_s=10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(10.4)
    assert bucket.take(10.5) and not bucket.take(10.5)


def test_a_long_pause_allows_no_more_than_a_burst() -> None:
    bucket = TokenBucket.full(per_s=2.0, burst=3.0, now_s=0.0)
    assert [bucket.take(1e6) for _ in range(4)] == [True, True, True, False]


def test_events_that_are_taken_in_advance_wait_longer_and_longer() -> None:
    bucket = TokenBucket.full(per_s=2.0, burst=1.0, now_s=0.0)
    assert [bucket.take_later(0.0) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert bucket.take_later(1.0) == 0.5
