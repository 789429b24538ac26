"""The operator's site file: how it is read, and that errors name the file and the key."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from coordinator.budgets.prometheus_budget import PrometheusBudget
from coordinator.budgets.site_file import DeviceRules, SiteFile, read_site_file
from wattfleet.budgets import ConstantBudget, DailySchedule, ReadingRule, TimedSchedule
from wattfleet.errors import InvalidInputError

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
