"""A supply's budget at a moment, the trees of supplies, and the errors of each."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.core.budgets import (
    Budget,
    ConstantBudget,
    DailySchedule,
    InForce,
    Override,
    Reading,
    ReadingRule,
    Span,
    Supplies,
    Supply,
    TimedRow,
    TimedSchedule,
    read_timed_schedule,
)
from wattfleet.core.errors import InvalidInputError

# --- Budgets ----------------------------------------------------------------------------------------------------------
# A supply's budget at a moment, from constants, schedules, plans and readings, and the errors of each.


BERLIN = ZoneInfo("Europe/Berlin")
NO_WATTS = [0.0, -1.0, math.nan, math.inf, -math.inf]
NOW = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize("watts", NO_WATTS)
def test_stated_watts_have_to_be_finite_and_above_zero(watts: float) -> None:
    for state in (
        ConstantBudget,
        lambda w: Span(0, 1440, w),
        lambda w: TimedRow(NOW, w),
        lambda w: TimedSchedule((TimedRow(NOW, 1.0),), w),
        lambda w: ReadingRule(60, w),
        Override,
    ):
        with pytest.raises(InvalidInputError, match=r"must be finite and above 0 W, not"):
            state(watts)


def test_an_override_is_in_force_until_it_is_over() -> None:
    until = at("2026-06-01T14:00+02:00")
    assert Override(40).in_force(until + timedelta(days=999)) == InForce(40, "operator", False, "set by the operator")
    last = until - timedelta(microseconds=1)
    assert Override(40, until).in_force(last) == InForce(40, "operator", False, "set by the operator")
    assert Override(40, until).in_force(until) is None
    with pytest.raises(InvalidInputError, match="has no UTC offset"):
        Override(40, until.replace(tzinfo=None))


def test_a_constant_is_the_same_at_all_times() -> None:
    assert ConstantBudget(300).in_force(NOW) == InForce(300, "constant", False, "constant budget")


# --- daily schedules ---------------------------------------------------------------------------------------------


def test_a_span_over_midnight_has_the_night_on_both_sides_of_it() -> None:
    schedule = DailySchedule.of(BERLIN, {"06:00-18:00": 200, "18:00-06:00": 80})
    watts = {clock: schedule.in_force(at(f"2026-06-01T{clock}:00+02:00")).watts for clock in ("05:59", "06:00")}
    assert watts == {"05:59": 80, "06:00": 200}
    assert schedule.in_force(at("2026-06-01T23:59:59.999+02:00")).watts == 80
    assert schedule.in_force(at("2026-06-01T17:59:59.999+02:00")) == InForce(
        200, "schedule", False, "06:00-18:00 Europe/Berlin"
    )


def test_a_moment_is_looked_up_on_the_zones_wall_clock_whatever_its_own_offset() -> None:
    schedule = DailySchedule.of(BERLIN, {"00:00-12:00": 1, "12:00-24:00": 2})
    assert schedule.in_force(at("2026-06-01T10:30:00+00:00")).watts == 2  # the wall clock shows 12:30 in summer
    assert schedule.in_force(at("2026-01-01T10:30:00+00:00")).watts == 1  # the wall clock shows 11:30 in winter
    assert schedule.in_force(at("2026-06-01T20:30:00+10:00")).watts == 2


def test_the_skipped_hour_in_spring_never_applies_and_autumns_applies_twice() -> None:
    schedule = DailySchedule.of(BERLIN, {"02:00-03:00": 99, "03:00-02:00": 1})
    spring = [schedule.in_force(at("2026-03-29T00:00:00+00:00") + timedelta(minutes=m)).watts for m in range(180)]
    assert 99 not in spring
    autumn = [schedule.in_force(at("2026-10-24T23:00:00+00:00") + timedelta(minutes=m)).watts for m in range(240)]
    assert autumn == [1] * 60 + [99] * 120 + [1] * 60


@st.composite
def days(draw: st.DrawFn) -> list[tuple[int, int, float]]:
    """A day cut into pieces with different watts. The last one continues past midnight unless it is cut there."""
    cuts = sorted(draw(st.sets(st.integers(0, 1439), min_size=2, max_size=6)))
    return [(start, end, float(k + 1)) for k, (start, end) in enumerate(zip(cuts, [*cuts[1:], cuts[0]], strict=True))]


def clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


@given(
    days(),
    st.sampled_from(["Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe", "Asia/Kathmandu", "UTC"]),
    st.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1), timezones=st.just(timezone.utc)),
)
def test_every_minute_of_every_day_has_exactly_one_budget(
    pieces: list[tuple[int, int, float]], zone: str, moment: datetime
) -> None:
    """The oracle compares the wall clock's text with the schedule's text, so it shares no arithmetic with the code."""
    schedule = DailySchedule.of(ZoneInfo(zone), {f"{clock(s)}-{clock(e)}": watts for s, e, watts in pieces})
    wall = moment.astimezone(ZoneInfo(zone)).strftime("%H:%M")
    right = [
        watts
        for s, e, watts in pieces
        if (clock(s) <= wall < clock(e) if s < e else wall >= clock(s) or wall < clock(e))
    ]
    assert [schedule.in_force(moment).watts] == right


@given(days(), st.integers(0, 5))
def test_a_day_with_a_piece_left_out_is_refused_and_so_is_one_with_a_piece_twice(
    pieces: list[tuple[int, int, float]], pick: int
) -> None:
    start, end, watts = pieces[pick % len(pieces)]
    rest = tuple(Span(s, e or 1440, w) for s, e, w in pieces if s != start)
    missing = f"{clock(start)}-{clock(end or 1440)}" if start < (end or 1440) else f"{clock(start)}-24:00"
    with pytest.raises(InvalidInputError, match=f"has no budget for .*{missing}"):
        DailySchedule(BERLIN, rest)
    with pytest.raises(InvalidInputError, match=f"several budgets for .*{missing}"):
        DailySchedule(BERLIN, (*rest, Span(start, end or 1440, watts), Span(start, end or 1440, watts + 1)))


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ({}, "has no budget for 00:00-24:00"),
        ({"06:00-18:00": 1, "19:00-05:30": 2}, "has no budget for 05:30-06:00, 18:00-19:00"),
        ({"06:00-18:00": 1, "17:00-07:00": 2}, "several budgets for 06:00-07:00, 17:00-18:00"),
        ({"6-18": 1}, "'6-18' is not a time span: write it as 06:00-18:00"),
        ({"06:00-25:00": 1}, "'25:00' is not a time of day"),
        ({"06:60-18:00": 1}, "'06:60' is not a time of day"),
        ({"24:00-06:00": 1}, "a span must start at 00:00 to 23:59"),
        ({"06:00-06:00": 1}, "empty span: write 00:00-24:00"),
        ({"06:00-18:00": -5}, "06:00-18:00 must be finite and above 0 W, not -5"),
    ],
)
def test_a_schedule_that_is_none_is_refused_and_the_error_names_the_minutes(spans: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        DailySchedule.of(BERLIN, spans)
    assert said in str(refused.value)


@pytest.mark.parametrize("whole_day", ["00:00-24:00", "00:00-00:00"])
def test_one_span_may_be_the_whole_day(whole_day: str) -> None:
    assert DailySchedule.of(BERLIN, {whole_day: 7}).in_force(NOW).watts == 7


# --- plans of dated rows -----------------------------------------------------------------------------------------

PLAN = """from,watts
2026-06-01T06:00+02:00,200
2026-06-01T10:00Z,150.5
2026-06-01T18:00+02:00,80
"""
PLAN_WITH_ENDS = """from , until, watts
2026-06-01T06:00+02:00,2026-06-01T18:00+02:00,200
2026-06-01T16:00Z,,80
2026-06-01T22:00+02:00,2026-06-02T00:00+02:00,90
"""


@pytest.mark.parametrize(
    ("moment", "watts", "fallback"),
    [
        ("2026-06-01T03:59:59+00:00", 50, True),
        ("2026-06-01T04:00:00+00:00", 200, False),
        ("2026-06-01T09:59:59+00:00", 200, False),
        ("2026-06-01T12:00:00+02:00", 150.5, False),
        ("2026-06-01T18:00:00+02:00", 80, False),
        ("2036-06-01T18:00:00+02:00", 80, False),
    ],
)
def test_a_row_holds_until_the_next_and_the_last_for_good(moment: str, watts: float, fallback: bool) -> None:
    state = read_timed_schedule(PLAN, 50).in_force(at(moment))
    assert (state.watts, state.source, state.fallback) == (watts, "csv", fallback)


def test_a_plan_that_ends_leaves_the_fallback_and_says_so() -> None:
    plan = read_timed_schedule("\ufeff" + PLAN_WITH_ENDS, 50)
    assert plan.in_force(at("2026-06-01T21:59:59+02:00")).watts == 80
    assert plan.in_force(at("2026-06-01T23:59:59+02:00")).watts == 90
    assert plan.in_force(at("2026-06-02T00:00:00+02:00")) == InForce(
        50, "csv", True, "the table ended at 2026-06-02T00:00:00+02:00"
    )
    assert plan.in_force(at("2026-06-01T05:00:00+02:00")).reason == "the table starts at 2026-06-01T06:00:00+02:00"


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), st.integers(-200, 5000))
def test_any_moment_has_the_watts_of_the_newest_row_before_it(steps: list[int], minute: int) -> None:
    starts = [NOW + timedelta(minutes=sum(steps[:k])) for k in range(len(steps))]
    plan = TimedSchedule(tuple(TimedRow(start, k + 1.0) for k, start in enumerate(starts)), 99.0)
    moment = NOW + timedelta(minutes=minute)
    assert plan.in_force(moment).watts == (sum(start <= moment for start in starts) or 99.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the first line must be from,watts or from,until,watts"),
        ("time,watts\n", "not 'time,watts'"),
        ("from,watts\n", "the table has no rows"),
        ("from,watts\n2026-06-01T06:00+02:00\n", "line 2: the line must have 2 fields"),
        ("from,watts\n2026-06-01T06:00+02:00,1,2\n", "line 2: the line must have 2 fields"),
        ("from,watts\n2026-06-01T06:00,1\n", "line 2: 2026-06-01T06:00:00 has no UTC offset"),
        ("from,watts\ntomorrow,1\n", "line 2: 'tomorrow' is not a time: write it as"),
        ("from,watts\n2026-06-01T06:00Z,many\n", "line 2: 'many' is not a number of watts"),
        ("from,watts\n2026-06-01T06:00Z,nan\n", "line 2: a budget must be finite and above 0 W, not nan"),
        ("from,watts\n2026-06-01T06:00Z,-3\n", "line 2: a budget must be finite and above 0 W, not -3"),
        (
            "from,watts\n2026-06-01T06:00Z,1\n2026-06-01T06:00Z,2\n",
            "later than the row before it: sort the rows",
        ),
        ("from,watts\n2026-06-01T06:00Z,1\n2026-06-01T07:00+02:00,2\n", "does not start later than the row before it"),
        ("from,until,watts\n2026-06-01T06:00Z,2026-06-01T06:00Z,1\n", "line 2: until"),
        (
            "from,until,watts\n2026-06-01T06:00Z,2026-06-01T07:00Z,1\n2026-06-01T08:00Z,,2\n",
            "leave a gap between 2026-06-01T07:00:00+00:00 and 2026-06-01T08:00:00+00:00",
        ),
        (
            "from,until,watts\n2026-06-01T06:00Z,2026-06-01T09:00Z,1\n2026-06-01T08:00Z,,2\n",
            "overlap between 2026-06-01T09:00:00+00:00 and 2026-06-01T08:00:00+00:00",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused_and_the_error_says_where(text: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        read_timed_schedule(text, 50)
    assert said in str(refused.value)


# --- readings ----------------------------------------------------------------------------------------------------

RULE = ReadingRule(max_age_s=60, fallback_w=40)


def test_a_reading_is_in_force_until_it_is_stale() -> None:
    reading = Reading(120, NOW)
    for age_s, expected in ((0, 120), (60, 120), (60.001, 40), (1e6, 40), (-60, 120), (-60.001, 40)):
        assert RULE.in_force(NOW + timedelta(seconds=age_s), reading).watts == expected


def test_the_fallback_says_why_it_is_in_force() -> None:
    late = NOW + timedelta(seconds=61)
    assert RULE.in_force(NOW, None) == InForce(40, "query", True, "no reading yet")
    assert RULE.in_force(NOW, None, "no answer").reason == "no reading yet: no answer"
    at = f"{NOW.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    stale = RULE.in_force(late, Reading(120, NOW), "no answer").reason
    assert stale == f"the newest reading may be from {at}, over 60 s ago: no answer"
    assert RULE.in_force(late + timedelta(hours=1), Reading(120, NOW), "no answer").reason == stale, "logged once"
    early = RULE.in_force(NOW - timedelta(seconds=61), Reading(120, NOW)).reason
    assert early == f"the newest reading is from {at}, in the future: was the clock set back?"
    assert RULE.in_force(NOW, Reading(120, NOW), "no answer") == InForce(120, "query", False, "measured")


def test_a_measured_zero_is_no_failure() -> None:
    assert RULE.in_force(NOW, Reading(0, NOW)) == InForce(0, "query", False, "measured")


@pytest.mark.parametrize("watts", [-0.1, math.nan, math.inf])
def test_measured_watts_have_to_be_finite_and_not_negative(watts: float) -> None:
    with pytest.raises(InvalidInputError, match="must be finite and 0 or more"):
        Reading(watts, NOW)


@pytest.mark.parametrize("max_age_s", [0, -1, math.nan, math.inf])
def test_a_reading_has_to_get_stale_some_time(max_age_s: float) -> None:
    with pytest.raises(InvalidInputError, match="must be finite and above 0 s"):
        ReadingRule(max_age_s, 40)


def test_a_time_without_an_offset_is_refused_wherever_the_time_matters() -> None:
    naive = datetime(2026, 6, 1, 12)
    budgets: list[Budget] = [DailySchedule.of(BERLIN, {"00:00-24:00": 7}), read_timed_schedule(PLAN, 50)]
    for budget in budgets:
        with pytest.raises(InvalidInputError, match="has no UTC offset"):
            budget.in_force(naive)
    with pytest.raises(InvalidInputError, match="has no UTC offset"):
        RULE.in_force(naive, None)
    with pytest.raises(InvalidInputError, match="has no UTC offset"):
        Reading(1, naive)


# --- Supplies ---------------------------------------------------------------------------------------------------------
# Trees of supplies: every path upwards ends at a site, and other structures are refused.


def supplies(**parents: str | None) -> Supplies:
    return Supplies(tuple(Supply(name, parent) for name, parent in parents.items()))


def test_a_path_goes_from_a_supply_up_to_its_site() -> None:
    tree = supplies(socket="rack", rack="site", site=None, shed=None)
    assert tree.path("socket") == ("socket", "rack", "site")
    assert tree.path("site") == ("site",)
    assert tree.path("shed") == ("shed",)
    assert tree.roots == ("site", "shed")
    assert tree.names == ("socket", "rack", "site", "shed")
    assert (tree.parent_of("rack"), tree.parent_of("site")) == ("site", None)


@given(st.lists(st.integers(0, 30), max_size=30))
def test_any_tree_is_accepted_in_any_order_and_its_paths_follow_the_parents(picks: list[int]) -> None:
    """Supply k is a site, or is below one of the supplies before it."""
    parents = {"s0": None} | {
        f"s{k}": None if pick % (k + 1) == k else f"s{pick % (k + 1)}" for k, pick in enumerate(picks, start=1)
    }
    tree = Supplies(tuple(Supply(name, parents[name]) for name in reversed(parents)))
    for name in parents:
        path = tree.path(name)
        assert path[0] == name
        assert parents[path[-1]] is None
        assert [parents[below] for below in path[:-1]] == list(path[1:])


@pytest.mark.parametrize(
    ("parents", "said"),
    [
        ({}, "no supplies: give at least one"),
        ({" ": None}, "empty name"),
        ({"rack": "site"}, "has the unknown parent 'site'"),
        ({"site": None, "rack": "rack"}, "cycle (rack <- rack)"),
        ({"site": None, "a": "b", "b": "c", "c": "b"}, "cycle (b <- c <- b)"),
    ],
)
def test_what_is_no_tree_is_refused_and_the_error_names_it(parents: dict[str, str | None], said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        supplies(**parents)
    assert said in str(refused.value)


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="'site' is defined twice"):
        Supplies((Supply("site"), Supply("site")))


def test_a_supply_that_is_not_stated_has_no_path() -> None:
    with pytest.raises(InvalidInputError, match="unknown supply 'rack': use one of site"):
        supplies(site=None).path("rack")
