"""The watch that reads budgets, in virtual time: when it reports changes, and that it survives failing sources."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from coordinator.budgets.budget_watch import BudgetWatch
from coordinator.budgets.site_file import AnyBudget
from coordinator.errors import (
    AmbiguousQueryError,
    BudgetSourceError,
    NoReadingError,
    SourceFailedError,
    StaleReadingError,
    UnknownRecordError,
    UnsuitableQueryError,
    UnusableReadingError,
)
from tests.fakes.watched_budgets import METER, NOON, Answer, Watched, run
from wattfleet.budgets import (
    ConstantBudget,
    DailySchedule,
    InForce,
    Override,
    read_timed_schedule,
)


def test_every_supply_has_its_watts_when_start_is_back() -> None:
    budgets: dict[str, AnyBudget] = {
        "site": ConstantBudget(300),
        "rack": METER,
        "night": DailySchedule.of(ZoneInfo("UTC"), {"06:00-18:00": 200, "18:00-06:00": 80}),
        "plan": read_timed_schedule("from,watts\n2026-06-02T00:00Z,70\n", 50),
    }

    async def scenario(w: Watched) -> None:
        assert w.told == [("site", 300), ("rack", 120), ("night", 200), ("plan", 50)]
        assert {name for name, state in w.watch.in_force.items() if state.fallback} == {"plan"}

    run(scenario, Watched(budgets))


def test_a_schedule_changes_within_a_second_and_is_told_once() -> None:
    night = DailySchedule.of(ZoneInfo("UTC"), {"06:00-18:00": 200, "18:00-06:00": 80})

    async def scenario(w: Watched) -> None:
        await w.clock.advance(5.5)
        assert w.told == [("rack", 200)]
        await w.clock.advance(5.5)
        assert w.told == [("rack", 200), ("rack", 80)]
        await w.clock.advance(600)
        assert len(w.told) == 2

    run(scenario, Watched({"rack": night}, start=datetime(2026, 6, 1, 17, 59, 50, tzinfo=timezone.utc)))


def test_a_plan_falls_back_when_it_ends() -> None:
    plan = read_timed_schedule("from,until,watts\n2026-06-01T12:00Z,2026-06-01T12:01Z,70\n", 50)

    async def scenario(w: Watched) -> None:
        await w.clock.advance(59)
        assert w.watts() == 70
        await w.clock.advance(2)
        assert w.watch.in_force["rack"] == InForce(50, "csv", True, "the table ended at 2026-06-01T12:01:00+00:00")

    run(scenario, Watched({"rack": plan}))


def test_a_query_is_asked_as_often_as_stated_and_told_only_when_it_changes() -> None:
    async def scenario(w: Watched) -> None:
        await w.clock.advance(61)
        assert w.meter.asked == 5
        w.meter.answer = 130.0
        await w.clock.advance(15)
        w.meter.answer = 0.0
        await w.clock.advance(15)
        assert w.told == [("rack", 120), ("rack", 130), ("rack", 0)]
        assert not w.watch.in_force["rack"].fallback

    run(scenario, Watched({"rack": METER}))


TAKEN = "2026-06-01 12:00:00 UTC"

TROUBLES = [
    SourceFailedError("http://127.0.0.1:9090 cannot be reached"),
    NoReadingError("answers no series"),
    UnusableReadingError("answers NaN"),
    UnusableReadingError("answers -3"),
    StaleReadingError("answers for 300 s ago"),
    AmbiguousQueryError("answers 2 series"),
    UnsuitableQueryError("refuses"),
    None,
    RuntimeError("a bug"),
]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_failing_source_keeps_its_reading_until_stale_then_the_fallback(trouble: Answer) -> None:
    async def scenario(w: Watched) -> None:
        w.meter.answer = trouble
        await w.clock.advance(60)
        assert w.told == [("rack", 120)]
        await w.clock.advance(1)
        assert w.told == [("rack", 120), ("rack", 40)]
        state = w.watch.in_force["rack"]
        assert state.fallback
        assert state.reason.startswith(f"the newest reading may be from {TAKEN}, over 60 s ago")
        if isinstance(trouble, BudgetSourceError):
            assert state.reason.endswith(str(trouble))
        await w.clock.advance(600)
        assert len(w.told) == 2

    run(scenario, Watched({"rack": METER}))


def test_a_source_that_is_back_counts_at_its_next_answer() -> None:
    async def scenario(w: Watched) -> None:
        w.meter.answer = SourceFailedError("no route")
        await w.clock.advance(100)
        w.meter.answer = 90.0
        await w.clock.advance(15)
        assert w.told == [("rack", 120), ("rack", 40), ("rack", 90)]
        assert w.watch.in_force["rack"] == InForce(90, "query", False, "measured")

    run(scenario, Watched({"rack": METER}))


def test_one_lost_answer_changes_nothing() -> None:
    async def scenario(w: Watched) -> None:
        for _ in range(20):
            w.meter.answer = NoReadingError("nothing")
            await w.clock.advance(15)
            w.meter.answer = 120.0
            await w.clock.advance(15)
        assert w.told == [("rack", 120)]

    run(scenario, Watched({"rack": METER}))


def test_a_supply_whose_query_hangs_or_fails_keeps_no_other_from_its_watts() -> None:
    budgets: dict[str, AnyBudget] = {
        "rack": METER,
        "night": DailySchedule.of(ZoneInfo("UTC"), {"00:00-12:01": 200, "12:01-00:00": 80}),
    }

    async def scenario(w: Watched) -> None:
        w.meter.answer = None
        await w.clock.advance(90)
        assert w.told == [("rack", 120), ("night", 200), ("night", 80), ("rack", 40)]

    run(scenario, Watched(budgets))


@pytest.mark.parametrize("trouble", [t for t in TROUBLES if isinstance(t, BudgetSourceError)][:5])
def test_a_source_that_gives_nothing_at_the_start_leaves_the_fallback(trouble: BudgetSourceError) -> None:
    async def scenario(w: Watched) -> None:
        assert w.told == [("rack", 40)]
        assert w.watch.in_force["rack"].reason == f"no reading yet: {trouble}"
        w.meter.answer = 90.0
        await w.clock.advance(15)
        assert w.watts() == 90

    run(scenario, Watched({"rack": METER}, trouble))


@pytest.mark.parametrize("error", [AmbiguousQueryError, UnsuitableQueryError])
async def test_a_query_that_has_to_be_changed_is_an_error_at_the_start(error: type[BudgetSourceError]) -> None:
    watched = Watched({"site": ConstantBudget(300), "rack": METER}, error("answers 2 series"))

    with pytest.raises(error, match="supply 'rack': answers 2 series"):
        await watched.watch.start()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert watched.told == []


def test_the_log_says_each_trouble_once_and_each_change_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator.budgets.budget_watch")

    async def scenario(w: Watched) -> None:
        for watts in range(40):
            w.meter.answer = UnusableReadingError(f"answers -{watts}")
            await w.clock.advance(15)
        w.meter.answer = SourceFailedError("no route")
        await w.clock.advance(600)
        w.meter.answer = 90.0
        await w.clock.advance(15)
        w.meter.answer = 91.0
        await w.clock.advance(600)

    run(scenario, Watched({"rack": METER}))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "supply rack: 120 W in force: measured"),
        ("WARNING", "supply rack: answers -0"),
        (
            "WARNING",
            f"supply rack: 40 W (fallback) in force: the newest reading may be from {TAKEN}, over 60 s ago: answers -0",
        ),
        ("WARNING", "supply rack: no route"),
        (
            "WARNING",
            f"supply rack: 40 W (fallback) in force: the newest reading may be from {TAKEN}, over 60 s ago: no route",
        ),
        ("INFO", "supply rack: its query returns watts again"),
        ("INFO", "supply rack: 90 W in force: measured"),
    ]


def test_the_operators_watts_come_before_any_source_until_they_are_over() -> None:
    watched = Watched({"rack": METER, "site": ConstantBudget(300)})

    async def scenario(w: Watched) -> None:
        until = NOON + timedelta(seconds=60)
        status = w.watch.override("rack", Override(80, until))
        assert (status.in_force.watts, status.in_force.source, status.since) == (80, "operator", NOON)
        assert status.override == Override(80, until)
        w.meter.answer = 110.0
        await w.clock.advance(59)
        assert w.watts() == 80, "and the source is asked meanwhile"
        await w.clock.advance(2)
        status = w.watch.status("rack")
        assert (status.in_force.watts, status.in_force.source, status.override) == (110, "query", None)
        assert NOON + timedelta(seconds=60) <= status.since <= NOON + timedelta(seconds=61)
        w.watch.override("site", Override(200))
        assert w.watch.override("site", None).in_force.watts == 300
        assert w.watch.override("site", None).in_force.watts == 300, "there is nothing to clear"
        for ask in (lambda: w.watch.override("attic", None), lambda: w.watch.status("attic")):
            with pytest.raises(UnknownRecordError, match="unknown supply 'attic'; known: rack, site"):
                ask()
        assert w.told == [("rack", 120), ("site", 300), ("rack", 80), ("rack", 110), ("site", 200), ("site", 300)]

    run(scenario, watched)


def test_a_listener_that_fails_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched({"rack": METER})
    tell = watched.tell

    def fail_once(supply: str, state: InForce) -> None:
        tell(supply, state)
        if state.watts == 130:
            raise RuntimeError("a bug")

    watched.watch = BudgetWatch({"rack": METER}, fail_once, watched.clock.now, watched.clock.sleep, watched.meter)

    async def scenario(w: Watched) -> None:
        w.meter.answer = 130.0
        await w.clock.advance(15)
        w.meter.answer = 140.0
        await w.clock.advance(15)
        assert w.told == [("rack", 120), ("rack", 130), ("rack", 140)]

    run(scenario, watched)
    assert "a bug" in caplog.text
