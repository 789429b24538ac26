"""Budgets in the coordinator: the site file, the watch that reads them, clock jumps, and the fleet's supplies."""

from __future__ import annotations

import asyncio
import logging
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from coordinator.budgets.budget_watch import BudgetWatch
from coordinator.budgets.prometheus_budget import PrometheusBudget
from coordinator.budgets.site_file import AnyBudget, SiteFile, read_site_file
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
from coordinator.state.agents import DeviceRules
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceResult, ObservedTraining
from tests.fakes.small_fleet import (
    NANO_FRONT,
    NANO_NODE,
    NODES,
    ORIN_FRONT,
    ORIN_NODE,
    RUN,
    confirm_all,
    end_training,
    make_ready,
    small_fleet,
    train,
)
from tests.fakes.watched_budgets import METER, NOON, Answer, Watched, run
from wattfleet.core.budgets import (
    ConstantBudget,
    DailySchedule,
    InForce,
    Override,
    ReadingRule,
    Supplies,
    Supply,
    TimedSchedule,
    read_timed_schedule,
)
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.planning import Allowance, Selection
from wattfleet.core.planning.policies import AllDevices

# --- Site file --------------------------------------------------------------------------------------------------------
# The operator's site file: how it is read, and that errors name the file and the key.


WHOLE = """
[supplies.site]
budget = { watts = 300 }
[supplies.rack-1]
parent = "site"
budget = { schedule = { timezone = "Europe/Berlin", spans = { "06:00-18:00" = 200, "18:00-06:00" = 80.5 } } }
devices = ["orin-*", "xavier-1"]
[supplies.rack-2]
parent = "site"
budget = { query = "sum(surplus_watts)", url = "http://127.0.0.1:9090", every_s = 10, max_age_s = 40, fallback_w = 60 }
devices = ["nano-?"]
[supplies.socket]
parent = "rack-2"
budget = { csv = "plan.csv", fallback_w = 50 }
[devices."orin-3"]
limit_w = 20
tags = ["lab", "solar"]
[devices.nano-1]
"""
NOW = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)


def read(folder: Path, text: str, plan: str = "from,watts\n2026-06-01T06:00Z,70\n") -> SiteFile:
    (folder / "plan.csv").write_text(plan)
    (folder / "site.toml").write_text(text)
    return read_site_file(folder / "site.toml")


def test_a_site_file_may_refuse_trainings_without_a_plan(tmp_path: Path) -> None:
    supplies = "[supplies.site]\nbudget = { watts = 300 }\n"
    assert not read(tmp_path, supplies).refuses_unplanned
    assert read(tmp_path, 'unplanned_trainings = "refuse"\n' + supplies).refuses_unplanned
    assert "unplanned_trainings: Input should be 'warn' or 'refuse'" in refused(
        tmp_path, "unplanned_trainings = true\n" + supplies
    )


def refused(folder: Path, text: str, plan: str = "from,watts\n2026-06-01T06:00Z,70\n") -> str:
    with pytest.raises(InvalidInputError) as error:
        read(folder, text, plan)
    assert str(error.value).startswith(str(folder / "site.toml")), "the text names the file"
    return str(error.value).removeprefix(str(folder / "site.toml"))


def one(budget: str) -> str:
    return f"[supplies.site]\nbudget = {budget}\n"


def test_a_whole_file_is_read_into_the_houses_types(tmp_path: Path) -> None:
    site = read(tmp_path, WHOLE)
    assert site.supplies.names == ("site", "rack-1", "rack-2", "socket")
    assert site.supplies.path("socket") == ("socket", "rack-2", "site")
    assert site.budgets["site"] == ConstantBudget(300)
    assert site.budgets["rack-1"] == DailySchedule.of(
        ZoneInfo("Europe/Berlin"), {"06:00-18:00": 200, "18:00-06:00": 80.5}
    )
    assert site.budgets["rack-2"] == PrometheusBudget(
        "http://127.0.0.1:9090", "sum(surplus_watts)", 10, ReadingRule(max_age_s=40, fallback_w=60)
    )
    plan = site.budgets["socket"]
    assert isinstance(plan, TimedSchedule)
    assert plan.in_force(NOW).watts == 70
    assert plan.fallback_w == 50
    assert site.rules_of("orin-3") == DeviceRules(20, frozenset({"lab", "solar"}))
    assert site.rules_of("nano-1") == site.rules_of("never-named") == DeviceRules(None, frozenset())


def test_the_example_of_the_guide_can_be_used_as_it_stands(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "budgets.md").read_text()
    file, plan = (re.search(rf"```{kind}\n(.*?)```", guide, re.DOTALL) for kind in ("toml", "csv"))
    assert file and plan
    site = read(tmp_path, file[1], plan[1])
    assert {name: type(budget) for name, budget in site.budgets.items()} == {
        "site": ConstantBudget,
        "rack-1": DailySchedule,
        "rack-2": PrometheusBudget,
        "rack-3": TimedSchedule,
    }
    assert site.supply_of("xavier-1") == "rack-2"


@pytest.mark.parametrize(
    ("device_id", "supply"),
    [("orin-3", "rack-1"), ("orin-", "rack-1"), ("xavier-1", "rack-1"), ("nano-1", "rack-2"), ("nano-12", "site")],
)
def test_a_device_hangs_behind_the_supply_that_its_id_matches_else_at_the_only_site(
    tmp_path: Path, device_id: str, supply: str
) -> None:
    assert read(tmp_path, WHOLE).supply_of(device_id) == supply


def test_upper_and_lower_case_are_told_apart(tmp_path: Path) -> None:
    assert read(tmp_path, WHOLE).supply_of("ORIN-3") == "site"


SEVERAL = """
[supplies.roof]
budget = { watts = 100 }
devices = ["orin-*", "orin-1*"]
[supplies.shed]
budget = { watts = 50 }
devices = ["*-3"]
"""


def test_a_device_of_no_supply_is_refused_where_there_are_several_sites(tmp_path: Path) -> None:
    site = read(tmp_path, SEVERAL)
    with pytest.raises(InvalidInputError, match="'nano-1' matches no supply.*several sites \\(roof, shed\\)"):
        site.supply_of("nano-1")


def test_a_device_of_two_supplies_is_refused_but_one_may_name_it_twice(tmp_path: Path) -> None:
    site = read(tmp_path, SEVERAL)
    assert site.supply_of("orin-12") == "roof"
    with pytest.raises(InvalidInputError, match=re.escape("'orin-3' matches 'orin-*' of roof and '*-3' of shed")):
        site.supply_of("orin-3")


@pytest.mark.parametrize("timing", ["", ", every_s = 15", ", max_age_s = 60.0"])
def test_a_query_is_asked_every_15_s_and_its_reading_lasts_60_unless_stated(tmp_path: Path, timing: str) -> None:
    text = one(f'{{ query = "up", url = "http://prometheus:9090", fallback_w = 1{timing} }}')
    assert read(tmp_path, text).budgets["site"] == PrometheusBudget(
        "http://prometheus:9090", "up", 15, ReadingRule(60, 1)
    )


QUERY = 'query = "up", url = "http://127.0.0.1:9090"'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ": supplies: is missing"),
        ("supplies = {}", ": no supplies: give at least one"),
        ("[supplies.site]", ": supplies.site.budget: is missing"),
        ("[supplies", " is not valid TOML: "),
        (one("{ watts = 1 }") + "colour = 3", ": unknown key 'colour' in [supplies.site]"),
        (one("{ watts = 1 }") + "[racks.a]", ": unknown key 'racks'"),
        (one("{ watts = 1, volts = 2 }"), ": unknown key 'volts' in [supplies.site.budget]"),
        (one("{ watts = 1 }\nparents = 3"), ": unknown key 'parents' in [supplies.site]; did you mean 'parent'?"),
        (
            one(f"{{ {QUERY}, fallback_w = 5, max_age = 3 }}"),
            ": unknown key 'max_age' in [supplies.site.budget]; did you mean 'max_age_s'?",
        ),
        (
            one('{ schedule = { timezone = "UTC", spans = {}, zone = "UTC" } }'),
            ": unknown key 'zone' in [supplies.site.budget.schedule]; did you mean 'timezone'?",
        ),
        (one("{}"), ": supplies.site.budget: must have exactly one of the keys watts, schedule, csv, query"),
        (one("300"), ": supplies.site.budget: must have exactly one of the keys watts, schedule, csv, query"),
        (one('{ watts = 1, csv = "plan.csv" }'), ": supplies.site.budget: must have exactly one of the keys"),
        (one('{ watts = "300" }'), ": supplies.site.budget.watts: "),
        (one("{ watts = true }"), ": supplies.site.budget.watts: "),
        (one("{ watts = 0 }"), ": supplies.site.budget: a budget must be finite and above 0 W, not 0"),
        (one("{ watts = -3 }"), ": supplies.site.budget: a budget must be finite and above 0 W, not -3"),
        (one("{ watts = nan }"), ": supplies.site.budget: a budget must be finite and above 0 W, not nan"),
        (one("{ watts = inf }"), ": supplies.site.budget: a budget must be finite and above 0 W, not inf"),
        (one(f"{{ {QUERY} }}"), ": supplies.site.budget.fallback_w: is missing"),
        (one('{ query = "up", fallback_w = 1 }'), ": supplies.site.budget.url: is missing"),
        (one(f"{{ {QUERY}, fallback_w = nan }}"), ": supplies.site.budget: a fallback must be finite and above 0 W"),
        (one(f"{{ {QUERY}, fallback_w = 5, every_s = 60 }}"), ": supplies.site.budget: every_s must be from 1 s to"),
        (one(f"{{ {QUERY}, fallback_w = 5, max_age_s = -1 }}"), ": supplies.site.budget: the maximum age of a reading"),
        (
            one('{ query = "up", url = "here", fallback_w = 5 }'),
            ": supplies.site.budget: the url must be that of a Prometheus server",
        ),
        (one('{ csv = "plan.csv" }'), ": supplies.site.budget.fallback_w: is missing"),
        (one('{ csv = "absent.csv", fallback_w = 5 }'), "absent.csv cannot be read: No such file or directory"),
        (one('{ csv = ".", fallback_w = 5 }'), "cannot be read: Is a directory"),
        (
            one('{ schedule = { timezone = "Europe/Berlin", spans = { "06:00-18:00" = 200 } } }'),
            ": supplies.site.budget: the schedule has no budget for 00:00-06:00",
        ),
        (
            one('{ schedule = { timezone = "Mars/Olympus", spans = { "00:00-24:00" = 200 } } }'),
            ": supplies.site.budget: unknown time zone 'Mars/Olympus'",
        ),
        (
            one('{ schedule = { timezone = "../../etc", spans = { "00:00-24:00" = 200 } } }'),
            "unknown time zone '../../etc'",
        ),
        (one('{ schedule = { timezone = "UTC" } }'), ": supplies.site.budget.schedule.spans: is missing"),
        (one('{ watts = 1 }\nparent = "main"'), ": supply 'site' has the unknown parent 'main'"),
        (one('{ watts = 1 }\nparent = "site"'), ": the supplies form a cycle"),
        (
            one('{ watts = 1 }\ndevices = ["a"]') + '[supplies.b]\nbudget = { watts = 1 }\ndevices = ["a"]',
            ": supplies.b.devices: 'a' is already listed in site",
        ),
        (one('{ watts = 1 }\ndevices = [""]'), ": supplies.site.devices: an empty pattern"),
        (one('{ watts = 1 }\ndevices = "a"'), ": supplies.site.devices: "),
        (one('{ watts = 1 }\n[devices."a-*"]'), ': devices."a-*": write the complete id of one device'),
        (one("{ watts = 1 }\n[devices.a]\nlimit_w = 0"), ': devices."a".limit_w must be finite and above 0 W'),
        (one("{ watts = 1 }\n[devices.a]\nlimit_w = nan"), ': devices."a".limit_w must be finite and above 0 W'),
        (
            one('{ watts = 1 }\n[devices.a]\ntags = [""]'),
            ': devices."a".tags: a tag must have 1 to 200 printable characters',
        ),
        (
            one('{ watts = 1 }\n[devices.a]\ntags = ["b", "south roof"]'),
            ': devices."a".tags: a tag must have 1 to 200 printable characters',
        ),
        (one("{ watts = 1 }\n[devices]\na = 3"), ": devices.a: must be a table"),
        ("supplies = 3", ": supplies: must be a table"),
        (one("{ watts = 1 }\n[devices.a]\nlimit = 3"), ": unknown key 'limit' in [devices.a]; did you mean 'limit_w'?"),
    ],
)
def test_what_cannot_be_is_refused_by_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = " + "[" * 100_000, "is not valid TOML: it is nested too deeply"),
        ("a = " + "{a = " * 500 + "1" + "}" * 500, "is not valid TOML: it is nested too deeply"),
        (one("{ watts = " + "9" * 5000 + " }"), "is not valid TOML: an integer has too many digits"),
        (one("{ watts = " + "9" * 400 + " }"), "supplies.site.budget.watts: Input should be a valid number"),
        (one('{ csv = "\\u0000", fallback_w = 5 }'), "cannot be read"),
        (one('{ csv = "' + "x" * 5000 + '", fallback_w = 5 }'), "cannot be read"),
    ],
)
def test_a_file_that_breaks_a_parser_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    assert why in refused(tmp_path, text)


@pytest.mark.parametrize("watts", ["9" * 5000, "1e999", "nan", "\x00", '"' + "9" * 200_000 + '"'])
def test_a_plan_with_a_number_that_cannot_be_is_refused_by_line(tmp_path: Path, watts: str) -> None:
    text = refused(tmp_path, one('{ csv = "plan.csv", fallback_w = 5 }'), f"from,watts\n2026-06-01T06:00Z,{watts}\n")
    assert "plan.csv: line" in text and len(text) < 1000


def test_all_keys_that_are_wrong_are_told_at_once(tmp_path: Path) -> None:
    told = refused(tmp_path, one('{ watts = "many" }') + "colour = 3\n[racks.a]")
    for key in ("supplies.site.budget.watts: ", "unknown key 'colour' in [supplies.site]", "unknown key 'racks'"):
        assert key in told


def test_a_plan_that_is_wrong_is_told_by_its_own_file_and_line(tmp_path: Path) -> None:
    told = refused(tmp_path, WHOLE, "from,watts\n2026-06-01T06:00Z,-70\n")
    assert f"supplies.socket.budget: {tmp_path / 'plan.csv'}: line 2: a budget must be finite" in told


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="absent.toml cannot be read: No such file"):
        read_site_file(tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xfc")
    with pytest.raises(InvalidInputError, match="latin.toml is not valid TOML: it is not UTF-8 text"):
        read_site_file(tmp_path / "latin.toml")


# --- Budget watch -----------------------------------------------------------------------------------------------------
# The watch that reads budgets, in virtual time: when it reports changes, and that it survives failing sources.


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


# --- Budget clock jumps -----------------------------------------------------------------------------------------------
# Budget overrides when the system date jumps, in virtual time.


@pytest.mark.parametrize("hours", [24, -1])
def test_an_override_lasts_as_long_as_it_was_set_for_if_the_clock_jumps(
    hours: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(w: Watched) -> None:
        w.watch.override("site", Override(80, w.clock.now() + timedelta(hours=2)))
        await w.clock.advance(1800)
        w.clock.jump(hours=hours)
        await w.clock.advance(5399)
        assert w.watts("site") == 80
        until = w.watch.status("site").override
        assert until is not None and until.until == w.clock.now() + timedelta(seconds=1)
        await w.clock.advance(2)
        assert w.watts("site") == 300

    run(scenario, Watched({"site": ConstantBudget(300)}))
    assert "the clock was put" in caplog.text


@pytest.mark.parametrize(("set_w", "in_force_w"), [(80, 80), (500, 300)])
def test_a_doubtful_override_lowers_the_watts_and_never_raises_them(set_w: float, in_force_w: float) -> None:
    watched = Watched({"site": ConstantBudget(300)})
    overrides = {"site": Override(set_w, NOON + timedelta(hours=1))}
    watched.watch = watched.new_watch({"site": ConstantBudget(300)}, overrides, is_doubtful=True)

    async def scenario(w: Watched) -> None:
        assert w.watts("site") == in_force_w
        assert w.watch.override("site", Override(500)).in_force.watts == 500, "a new one is the operator's word"

    run(scenario, watched)


def test_the_end_of_an_override_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator.budgets.budget_watch")
    watched = Watched({"site": ConstantBudget(300)})
    watched.watch = watched.new_watch({"site": ConstantBudget(300)}, {"site": Override(80, NOON - timedelta(hours=1))})

    async def scenario(w: Watched) -> None:
        assert w.watts("site") == 300

    run(scenario, watched)
    assert "supply site: the override of 80 W ended at 2026-06-01T11:00:00+00:00" in caplog.text


# --- Fleet budgets ----------------------------------------------------------------------------------------------------
# How the fleet handles supplies, device settings of the operator, and budgets that change.

SUPPLIES = Supplies((Supply("site"), Supply("rack", "site"), Supply("roof", "site")))
SITE = SiteFile(
    SUPPLIES,
    {name: ConstantBudget(100.0) for name in SUPPLIES.names},
    attached=(("orin*", "rack"), ("nano*", "roof"), ("*-both", "rack"), ("*-both*", "roof")),
    rules={"orin": DeviceRules(limit_w=25.0, tags=frozenset({"lab"}))},
)


def two_circuits(selection: Selection | None = None, rack_w: float = 100.0) -> Fleet:
    allowance = Allowance(SUPPLIES, {"site": 100.0, "rack": rack_w, "roof": 100.0})
    fleet = Fleet(allowance, AllDevices(), placement=SITE, selection=selection)
    make_ready(fleet, "orin", ORIN_FRONT, 5.0, ORIN_NODE)
    make_ready(fleet, "nano", NANO_FRONT, 3.0, NANO_NODE)
    fleet.flower.start_run(RUN, "FedAvg", 3)
    return fleet


def watts(amount: float) -> InForce:
    return InForce(amount, "query", False, "the meter")


def modes_of(fleet: Fleet, plan_id: str) -> dict[str, float]:
    return {a.device_id: a.power_w for a in fleet.rounds.records[plan_id].plan.assignments}


def test_a_device_keeps_its_own_limit_and_its_circuit() -> None:
    record = two_circuits().flower.plan(RUN, 1, NODES, 1.0)
    # The Orin's faster modes exceed its own limit of 25 W.
    assert {a.device_id: a.power_w for a in record.plan.assignments} == {"orin": 20, "nano": 15}
    assert {use.supply: use.planned_w for use in record.plan.supplies} == {"site": 35, "rack": 20, "roof": 15}
    with pytest.raises(InfeasibleBudgetError, match="rack: 12 W is not enough to train one device on top of 5.0 W"):
        two_circuits(Selection(exclude=("site:roof",)), rack_w=12.0).flower.plan(RUN, 1, NODES, 1.0)


def test_the_operator_chooses_by_tag() -> None:
    record = two_circuits(Selection(include=("tag:lab",))).flower.plan(RUN, 1, NODES, 1.0)
    assert [a.device_id for a in record.plan.assignments] == ["orin"]
    assert record.plan.decisions[0].reason == "not included: matches none of tag:lab"


def test_a_device_that_hangs_behind_two_supplies_is_refused_alone() -> None:
    fleet = two_circuits()
    with pytest.raises(InvalidInputError, match="x-both"):
        fleet.agents.connect("x-both", "agx-orin", "simulated", 100)
    assert fleet.flower.plan(RUN, 1, NODES, 1.0).plan.assignments


def test_watts_that_fall_trim_the_round_in_flight_and_a_rise_leaves_it() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    before = modes_of(fleet, plan_id)
    confirm_all(fleet)
    assert fleet.set_budget("site", watts(200.0)) == []
    [record] = fleet.set_budget("site", watts(33.0))
    assert record == fleet.rounds.records[plan_id]
    assert record.plan.planned_w <= 33
    assert set(confirm_all(fleet)) == {"orin", "nano"} - {
        d for d in before if before[d] == modes_of(fleet, plan_id).get(d)
    }
    assert fleet.set_budget("site", watts(33.0)) == []
    fleet.set_budget("site", watts(20.0))
    stop = confirm_all(fleet)["orin"]
    assert (stop.plan_id, stop.assignment) == (plan_id, None)


def test_a_device_that_is_done_is_not_told_anything() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    for device_id in ("orin", "nano"):
        train(fleet, device_id)
    end_training(fleet, "orin")
    fleet.rounds.observe(plan_id, ObservedTraining("orin", 12.0, 30.0))
    changed = fleet.set_budget("site", watts(17.0))
    told = confirm_all(fleet)
    assert [(device_id, each.assignment is not None) for device_id, each in told.items()] == [("nano", True)]
    assert {a.device_id for a in changed[0].plan.assignments} == {"orin", "nano"}


def test_a_round_that_is_over_is_not_trimmed() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    fleet.rounds.finish(plan_id, [], 50.0)
    assert fleet.set_budget("site", watts(10.0)) == []


def test_the_next_round_keeps_the_watts_as_they_are_then() -> None:
    fleet = small_fleet()
    fleet.set_budget("site", watts(0.0))
    with pytest.raises(InfeasibleBudgetError, match="0 W is not enough"):
        fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.set_budget("site", watts(100.0))
    assert len(fleet.flower.plan(RUN, 1, NODES, 1.0).plan.assignments) == 2


def test_a_straggler_counts_with_the_watts_that_were_set_aside_for_it() -> None:
    fleet = small_fleet()
    first = fleet.flower.plan(RUN, 1, NODES, 1.0)
    set_aside_w = {a.device_id: a.power_limit_w for a in first.plan.assignments}["orin"]
    train(fleet, "orin")
    train(fleet, "nano")
    end_training(fleet, "nano")
    fleet.rounds.finish(first.plan_id, [DeviceResult("orin", "no reply within 90 s"), DeviceResult("nano")], 90.0)
    second = fleet.flower.plan(RUN, 2, NODES, 1.0)
    assert [a.device_id for a in second.plan.assignments] == ["nano"]
    assert second.plan.planned_w == set_aside_w + second.plan.assignments[0].power_limit_w


def test_a_device_whose_training_was_sent_for_counts_before_it_begins() -> None:
    fleet = small_fleet()
    [assignment] = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0).plan.assignments
    second = fleet.flower.plan(RUN, 2, [NANO_NODE], 1.0)  # as asynchronous strategies do, during the first
    assert second.plan.planned_w == assignment.power_limit_w + second.plan.assignments[0].power_limit_w


def test_a_device_that_failed_twice_in_a_row_is_left_out_of_a_round() -> None:
    fleet = small_fleet()
    for number in (1, 2):
        plan_id = fleet.flower.plan(RUN, number, NODES, 1.0).plan_id
        fleet.rounds.finish(plan_id, [DeviceResult("orin", "the app raised: OOM"), DeviceResult("nano")], 50.0)
        confirm_all(fleet)
    third = fleet.flower.plan(RUN, 3, NODES, 1.0)
    assert [a.device_id for a in third.plan.assignments] == ["nano"]
    assert "failed 2 times in a row: excluded until round 4" in [d.reason for d in third.plan.decisions]
    fleet.rounds.finish(third.plan_id, [DeviceResult("nano")], 50.0)
    confirm_all(fleet)
    assert len(fleet.flower.plan(RUN, 4, NODES, 1.0).plan.assignments) == 2
