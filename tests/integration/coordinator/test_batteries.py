"""Batteries and energy budgets of supplies in a serving coordinator: the site file, the commands, and restarts."""

from __future__ import annotations

import asyncio
import os
import re
import urllib.request
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.budgets.battery_watch import BatteryWatch, charge_in
from coordinator.budgets.prometheus_budget import PrometheusNumber, number_of
from coordinator.budgets.site_file import SiteBattery, read_site_file
from coordinator.errors import NoReadingError, SourceFailedError, UnusableReadingError
from coordinator.settings import CoordinatorSettings
from tests.fakes.served import Client, asked, served_with_shell, status
from tests.fakes.small_fleet import small_fleet
from wattfleet.core.budgets import HourlyHarvest, Period, PeriodBudget
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.v1 import operator_pb2

WH = 3600.0
SITE = """
[supplies.site]
budget = { watts = 100 }
"""
SHED = (
    SITE
    + """
[batteries.shed]
supply = "site"
capacity = "1 kWh"
reserve_percent = 30
charge = { operator = true }
harvest = { timezone = "UTC", hourly_w = [0,0,0,0,0,0,5,20,40,60,80,90,90,90,80,60,40,20,5,0,0,0,0,0] }
"""
)


def with_site(config: CoordinatorSettings, folder: Path, text: str) -> CoordinatorSettings:
    (folder / "site.toml").write_text(text)
    return config.with_values(site={"budget_w": None, "file": folder / "site.toml"})


def batteries_in(folder: Path, text: str) -> tuple[SiteBattery, ...]:
    (folder / "site.toml").write_text(text)
    return read_site_file(folder / "site.toml").batteries


# --- Site file --------------------------------------------------------------------------------------------------------


def test_a_battery_of_a_supply_is_read_from_the_site_file(tmp_path: Path) -> None:
    [shed] = batteries_in(tmp_path, SHED)
    assert (shed.placed.name, shed.placed.supply, shed.placed.source) == ("shed", "site", "operator")
    battery = shed.placed.battery
    assert (battery.capacity_j, battery.reserve_j) == (1000 * WH, 300 * WH)
    assert isinstance(battery.harvest, HourlyHarvest)
    # With a harvest, a night is kept in hand; what a person states holds for a day.
    assert (battery.parked_s, battery.max_age_s, battery.decay_s) == (24 * 3600, 24 * 3600, 4 * 3600)


def test_batteries_of_devices_may_be_read_by_a_query_each(tmp_path: Path) -> None:
    text = (
        SITE
        + """
[batteries.boards]
devices = ["pi-*"]
capacity = "74 Wh"
charge = { query = "soc{board='$device'}", url = "http://127.0.0.1:9090" }
"""
    )
    [boards] = batteries_in(tmp_path, text)
    assert boards.placed.devices == ("pi-*",)
    assert boards.charge == PrometheusNumber(
        "http://127.0.0.1:9090", "soc{board='$device'}", 60.0, 900.0, "percent", 100.0
    )
    assert boards.placed.battery.parked_s == 0, "without a harvest, no night is waited for"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (('capacity = "1 kWh"', 'capacity = "1 kg"'), "batteries.shed: capacity: '1 kg' is not an energy"),
        (('capacity = "1 kWh"', 'capacity = "-1 kWh"'), "capacity must be finite and above 0 J"),
        (("reserve_percent = 30", "reserve_percent = 120"), "the reserve of a battery must be 0 to 99 %, not 120 %"),
        (("hourly_w = [0,", "hourly_w = ["), "a harvest by hour has 24 numbers of watts, not 23"),
        (("hourly_w = [0,", "hourly_w = [-1,"), "the watts of a harvest must be finite and 0 W or more, not -1"),
        (('timezone = "UTC"', 'timezone = "Mars"'), "unknown time zone 'Mars'"),
        (("operator = true", "agent = true"), "the charge of a supply's battery cannot come from an agent"),
        (("{ operator = true }", "{}"), "batteries.shed.charge: must have exactly one of the keys query, file, agent"),
        (("{ operator = true }", "{ file = 'a', every = 3 }"), "unknown key 'every' in [batteries.shed.charge]"),
        (('supply = "site"', 'supply = "roof"'), "unknown supply 'roof': use one of site"),
        (('supply = "site"', ""), "give either supply or devices"),
        (('supply = "site"', 'suply = "site"'), "unknown key 'suply' in [batteries.shed]; did you mean 'supply'?"),
    ],
)
def test_a_battery_that_cannot_be_used_is_refused(tmp_path: Path, change: tuple[str, str], why: str) -> None:
    assert change[0] in SHED
    with pytest.raises(InvalidInputError) as error:
        batteries_in(tmp_path, SHED.replace(*change))
    assert why in str(error.value)


def test_a_supply_has_one_battery(tmp_path: Path) -> None:
    again = SHED.replace(SITE, "").replace("[batteries.shed]", "[batteries.barn]")
    with pytest.raises(InvalidInputError, match="batteries.barn: site already has the battery shed"):
        batteries_in(tmp_path, SHED + again)


BOARDS = (
    SITE
    + """
[batteries.boards]
devices = ["pi-*"]
capacity = "74 Wh"
charge = { agent = true }
"""
)


@pytest.mark.parametrize("pattern", ["*", "pi-1", "pi-*", "pi-?", "*-1", "p[a-i]-[1-3]x", "??-*"])
def test_two_batteries_for_the_same_devices_are_refused(tmp_path: Path, pattern: str) -> None:
    again = BOARDS.replace(SITE, "").replace("batteries.boards", "batteries.more").replace("pi-*", pattern)
    with pytest.raises(InvalidInputError, match="batteries.more: devices .* already have the battery boards"):
        batteries_in(tmp_path, BOARDS + again)


@pytest.mark.parametrize("pattern", ["nano-*", "pi", "p[a-h]-*", "pi_?", "*-pi", "[!p]*"])
def test_batteries_of_different_devices_are_accepted(tmp_path: Path, pattern: str) -> None:
    boards = BOARDS.replace("pi-*", "pi-[1-9]")
    again = BOARDS.replace(SITE, "").replace("batteries.boards", "batteries.more").replace("pi-*", pattern)
    assert len(batteries_in(tmp_path, boards + again)) == 2


@pytest.mark.parametrize("source", ["{ query = 'soc', url = 'http://127.0.0.1:9090' }", "{ file = 'soc' }"])
def test_one_reading_for_many_devices_is_refused(tmp_path: Path, source: str) -> None:
    text = BOARDS.replace("{ agent = true }", source)
    with pytest.raises(InvalidInputError, match=r"of its charge is the same for all of its devices: write \$device"):
        batteries_in(tmp_path, text)
    assert batteries_in(tmp_path, text.replace("soc", "soc-$device"))
    assert batteries_in(tmp_path, text.replace("pi-*", "pi-1"))


def test_a_harvest_whose_table_has_ended_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "sun.csv").write_text("from,watts\n2026-06-01T06:00Z,7\n2026-06-01T18:00Z,0\n")
    sites = batteries_in(tmp_path, SHED[: SHED.index("harvest")] + 'harvest = { csv = "sun.csv" }\n')
    date = datetime(2026, 6, 1, 18, 30, tzinfo=timezone.utc)
    fleet = small_fleet(now=lambda: date, batteries=[each.placed for each in sites])
    fleet.stores.state_charge("site", 0.8)
    assert fleet.battery_states()[0].problem == ""
    date = datetime(2026, 6, 1, 19, tzinfo=timezone.utc)
    assert "the table of its harvest has ended: write new rows" in fleet.battery_states()[0].problem


def test_a_harvest_may_be_a_table_of_dated_rows(tmp_path: Path) -> None:
    (tmp_path / "sun.csv").write_text("from,watts\n2026-06-01T06:00Z,7\n2026-06-01T18:00Z,0\n")
    text = SHED[: SHED.index("harvest")] + 'harvest = { csv = "sun.csv" }\n'
    [shed] = batteries_in(tmp_path, text)
    assert shed.placed.battery.harvest.watts(datetime(2026, 6, 1, 7, tzinfo=timezone.utc)) == 7.0
    (tmp_path / "sun.csv").write_text("from,watts\n2026-06-01T06:00Z,much\n")
    with pytest.raises(InvalidInputError, match=r"sun.csv: line 2: 'much' is not a number of watts"):
        batteries_in(tmp_path, text)


# --- Readings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["140", "-1", "nan", "inf", "full", "", "\xff"])
def test_a_file_with_an_impossible_charge_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "soc").write_bytes(text.encode("latin-1"))
    with pytest.raises(UnusableReadingError):
        charge_in(tmp_path / "soc")


def test_a_charge_is_as_old_as_its_file(tmp_path: Path) -> None:
    (tmp_path / "soc").write_text("62.5 %\n")
    os.utime(tmp_path / "soc", (1_780_000_000, 1_780_000_000))
    charge = charge_in(tmp_path / "soc")
    assert (charge.share, charge.measured_at.timestamp()) == (0.625, 1_780_000_000)
    with pytest.raises(NoReadingError, match="cannot be read: No such file"):
        charge_in(tmp_path / "missing")


def test_a_query_that_returns_140_percent_is_refused() -> None:
    answer = b'{"status":"success","data":{"resultType":"scalar","result":[1780000000,"140"]}}'
    query = PrometheusNumber("http://127.0.0.1:9090", "soc", 60.0, 900.0, "percent", 100.0)
    with pytest.raises(UnusableReadingError, match="percent must be finite and not negative and at most 100"):
        number_of(answer, query, datetime.fromtimestamp(1_780_000_000, timezone.utc))


async def test_a_query_that_stops_answering_leaves_a_battery_emptier_by_the_hour(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = (
        SITE
        + """
[batteries.boards]
devices = ["*"]
capacity = "100 Wh"
charge = { query = "soc{board='$device'}", url = "http://127.0.0.1:9090", every_s = 60 }
max_age_s = 3600
"""
    )
    date = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)
    sites = batteries_in(tmp_path, text)
    fleet = small_fleet(now=lambda: date, batteries=[each.placed for each in sites])
    queries: list[str] = []

    async def answer(query: PrometheusNumber) -> tuple[float, datetime]:
        queries.append(query.query)
        if len(queries) > len(fleet.agents.devices):
            raise SourceFailedError("http://127.0.0.1:9090 does not answer")
        return 100.0, date

    passed = asyncio.Event()

    async def sleep(seconds: float) -> None:
        if passed.is_set():
            await asyncio.Event().wait()
        passed.set()

    watch = BatteryWatch(sites, fleet, sleep, answer)
    await watch.start()
    try:
        await asyncio.wait_for(passed.wait(), 5)
        assert sorted(queries[:2]) == ["soc{board='nano'}", "soc{board='orin'}"]
        energies = []
        for hours in (0.0, 1.0, 3.0, 5.1):
            date = datetime(2026, 6, 1, 12, tzinfo=timezone.utc) + timedelta(hours=hours)
            energies.append({each.holder: each.level.energy_j / WH for each in fleet.battery_states()}["device/nano"])
        # It idles at 3 W. After the first hour, a quarter of what is left goes with each further hour.
        assert energies == pytest.approx([100, 97, 91 / 2, 0], rel=0.01)
        while "does not answer" not in fleet.battery_states()[0].problem:
            await asyncio.sleep(0.01)
        assert "too old" in fleet.battery_states()[0].problem
        assert "does not answer" in fleet.battery_states()[0].problem
        text = "battery of nano: the charge cannot be read: http://127.0.0.1:9090 does not answer"
        assert caplog.text.count(text) == 1
    finally:
        await watch.stop()


BOTH_QUERIED = (
    SITE
    + """
[batteries.shed]
supply = "site"
capacity = "100 Wh"
charge = { query = "soc", url = "http://127.0.0.1:9090" }
harvest = { query = "sun", url = "http://127.0.0.1:9090" }
"""
)


async def test_a_harvest_that_fails_leaves_the_charge_as_it_is_read(tmp_path: Path) -> None:
    sites = batteries_in(tmp_path, BOTH_QUERIED)
    date = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)
    fleet = small_fleet(now=lambda: date, batteries=[each.placed for each in sites])
    answers: dict[str, float | Exception] = {"soc": 80.0, "sun": SourceFailedError("the sun does not answer")}
    turns = asyncio.Semaphore(0)
    passed = asyncio.Semaphore(0)

    async def answer(query: PrometheusNumber) -> tuple[float, datetime]:
        found = answers[query.query]
        if isinstance(found, Exception):
            raise found
        return found, date

    async def sleep(seconds: float) -> None:
        passed.release()
        await turns.acquire()

    watch = BatteryWatch(sites, fleet, sleep, answer)
    await watch.start()
    try:
        await asyncio.wait_for(passed.acquire(), 5)
        [shed] = fleet.battery_states()
        assert shed.level.energy_j == pytest.approx(80 * WH)
        assert shed.problem == "its harvest cannot be read: the sun does not answer"
        answers |= {"soc": SourceFailedError("the gauge does not answer"), "sun": 7.0}
        turns.release()
        await asyncio.wait_for(passed.acquire(), 5)
        [shed] = fleet.battery_states()
        assert shed.level.harvest is not None
        assert shed.level.harvest.watts(date) == 7.0
        assert shed.problem == "its charge cannot be read: the gauge does not answer"
        answers["soc"] = 80.0
        turns.release()
        await asyncio.wait_for(passed.acquire(), 5)
        assert fleet.battery_states()[0].problem == ""
    finally:
        await watch.stop()


async def test_a_source_that_does_not_answer_lets_the_coordinator_start(tmp_path: Path) -> None:
    sites = batteries_in(tmp_path, BOTH_QUERIED)
    fleet = small_fleet(batteries=[each.placed for each in sites])

    async def answer(query: PrometheusNumber) -> tuple[float, datetime]:
        await asyncio.Event().wait()
        raise AssertionError

    watch = BatteryWatch(sites, fleet, query=answer)
    await asyncio.wait_for(watch.start(), 1)
    await watch.stop()
    assert "its charge is unknown, so it counts as empty" in fleet.battery_states()[0].problem


# --- Commands ---------------------------------------------------------------------------------------------------------


async def test_the_charge_of_a_battery_is_stated_and_shown_by_command(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    config = with_site(config, tmp_path, SHED)
    async with served_with_shell(config) as (client, shell):
        await client.two_ready()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.plan()
        assert "the battery of site (its charge is unknown, so it counts as empty)" in status(refused)[1]
        shown = (await shell("battery", "show", columns=100)).stdout
        assert "site: its charge is unknown, so it counts as empty" in shown
        assert "80 %" in (await shell("battery", "set", "site", "80")).stdout.replace("80%", "80 %")
        assert (await client.plan()).assignments
    async with served_with_shell(config) as (client, shell):
        [shed] = await asked(shell, "battery", "show")
        assert (shed["name"], shed["of_device"], shed["measured_share"]) == ("site", False, 0.8)
        assert shed["energy_j"] < 800 * WH, "what is set aside for the round survives the restart"
        assert shed["reserve_j"] == 300 * WH


async def test_the_charge_of_a_mistyped_device_is_refused(config: CoordinatorSettings, tmp_path: Path) -> None:
    text = BOARDS.replace("pi-*", "*").replace("agent = true", "operator = true")
    async with served_with_shell(with_site(config, tmp_path, text)) as (client, shell):
        await client.two_ready()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.operator.SetCharge(operator_pb2.SetChargeRequest(name="typo", share=0.8))
        assert status(refused)[0] is grpc.StatusCode.NOT_FOUND
        assert "unknown device 'typo'" in status(refused)[1]
        await shell("battery", "set", "orin", "80")
        assert {each["name"]: each["measured_share"] for each in await asked(shell, "battery", "show")} == {
            "nano": None,
            "orin": 0.8,
        }


async def test_an_energy_budget_is_set_shown_and_removed_by_command(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with served_with_shell(with_site(config, tmp_path, SITE)) as (client, shell):
        await client.two_ready()
        answer = (await shell("budget", "set", "site", "5kWh", "--per", "day", "--timezone", "Europe/Berlin")).stdout
        assert "18.00 MJ left of 18.00 MJ per day (Europe/Berlin)" in answer
        plan = await client.plan()
        assert all(each.HasField("longest_s") for each in plan.assignments)
        [site] = await asked(shell, "budget", "show")
        assert (site["energy_budget_j"], site["energy_per"], site["energy_spent_j"]) == (18e6, "day", 0.0)
        assert site["energy_set_aside_j"] > 0
        assert site["watts"] == 100.0, "an energy budget leaves the watts as they are"
    async with served_with_shell(with_site(config, tmp_path, SITE)) as (client, shell):
        [after] = await asked(shell, "budget", "show")
        same = ("energy_budget_j", "energy_set_aside_j", "energy_timezone", "energy_until")
        assert [after[key] for key in same] == [site[key] for key in same]
        assert "set aside" in (await shell("budget", "show", columns=100)).stdout
        assert (await shell("budget", "clear", "site", "--energy")).stdout == "site: no energy budget\n"
        [none] = await asked(shell, "budget", "show")
        assert none["energy_budget_j"] is None


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"energy_j": -1.0, "per": "day"}, "an energy budget must be finite and above 0 J"),
        ({"energy_j": float("inf"), "per": "day"}, "an energy budget must be finite and above 0 J"),
        ({"energy_j": float("nan"), "per": "day"}, "an energy budget must be finite and above 0 J"),
        ({"energy_j": 1.0, "per": "year"}, "an energy budget is per day, week, month, not 'year'"),
        ({"energy_j": 1.0, "per": "day", "timezone": "Mars"}, "unknown time zone 'Mars'"),
        ({"energy_j": 1.0, "per": "day", "watts": 3.0}, "set either"),
        ({"watts": 3.0, "per": "day"}, "only an energy budget has a period"),
    ],
)
async def test_an_energy_budget_that_cannot_be_used_is_refused(
    config: CoordinatorSettings, request_: dict[str, Any], why: str
) -> None:
    async with served_with_shell(config) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.operator.SetBudget(operator_pb2.SetBudgetRequest(supply="site", **request_))
        assert status(refused)[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert why in status(refused)[1]


async def test_two_budgets_of_a_supply_replace_each_other(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (_, shell):
        await shell("budget", "set", "site", "5kWh", "--per", "day")
        await shell("budget", "set", "site", "20kWh", "--per", "week")
        [site] = await asked(shell, "budget", "show")
        budget = PeriodBudget(20 * 3.6e6, Period.WEEK)
        assert (site["energy_budget_j"], site["energy_per"]) == (budget.budget_j, budget.per.value)


# --- Page -------------------------------------------------------------------------------------------------------------


async def live_text(client: Client, part: str) -> str:
    """The text of a part of the page that updates replace; attributes and whitespace aside."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{client.bound.http_address}/", timeout=30) as answer:
            return str(answer.read().decode())

    [content] = re.findall(rf'<div id="{part}" data-live>(.*?)\n</div>', await asyncio.to_thread(read), re.DOTALL)
    return " ".join(re.sub("<[^>]*>", " ", content).split())


async def shown(client: Client, part: str, text: str) -> bool:
    """Whether the page soon shows a text: it shows the newest of its snapshots."""
    async with asyncio.timeout(30):
        while text not in await live_text(client, part):
            await asyncio.sleep(0.2)
    return True


async def test_the_page_shows_batteries_and_energy_budgets_as_they_change(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with served_with_shell(with_site(config, tmp_path, SHED)) as (client, shell):
        await client.two_ready()
        assert await shown(client, "batteries", "site 0 % 0 J 1.08 MJ 0 J operator its charge is unknown")
        await shell("battery", "set", "site", "80")
        await shell("budget", "set", "site", "5kWh", "--per", "day")
        assert await shown(client, "batteries", "site 80 % 2.88 MJ 1.08 MJ")
        assert "unknown" not in await live_text(client, "batteries")
        assert await shown(client, "supplies", "18.00 MJ left of 18.00 MJ per day (UTC)")


async def test_a_fleet_without_batteries_has_no_table_of_them(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, _):
        assert await live_text(client, "batteries") == ""
