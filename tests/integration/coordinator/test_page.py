"""The web page in a real browser: realistic values, ids that mean something in an address, and the keyboard alone."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from coordinator.settings import CoordinatorSettings
from tests.fakes.browser import Browsed, browsing, chromium
from tests.fakes.served import serving, status
from tests.fakes.small_fleet import RUN, RUN_NAME
from tests.fakes.trained_fleet import DEVICES, HOT, OVER_BUDGET, SLOWEST, THROTTLED, Trained, trained, with_circuits
from wattfleet.core.modes import BOARDS
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import operator_pb2, planning_pb2, session_pb2

# --- Page -------------------------------------------------------------------------------------------------------------
# The web page in a real browser, for a coordinator whose devices report realistic values.


pytestmark = pytest.mark.asyncio(loop_scope="module")

_PICTURES = os.environ.get("PAGE_PICTURES")
_DESK, _PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
_PICTURED = ("fleet", "fleet-dark", "run", "device", "what-if", "phone")


async def picture(tab: Browsed, name: str) -> None:
    """Save one of the documentation's pictures, if a folder for them is configured."""
    if _PICTURES and name in _PICTURED:
        await tab.page.screenshot(path=str(Path(_PICTURES) / f"page-{name}.png"), full_page=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    """The browser of all tests; each has a tab with cookies and a cache of its own."""
    async with chromium() as started:
        yield started


@pytest.fixture
def circuits(config: CoordinatorSettings, tmp_path: Path) -> CoordinatorSettings:
    return with_circuits(config, tmp_path)


async def test_every_page_loads_without_a_complaint(circuits: CoordinatorSettings, browser: Any) -> None:
    pages = {
        "fleet": "/",
        "runs": "/runs",
        "run": f"/runs/{RUN}",
        "device": "/devices/agx-orin-1",
        "energy": "/energy?by=site,run,device&month=",
        "what-if": "/what-if?budget:site=100",
        "events": "/events",
        "no-device": "/?text=nothing",
        "circuit": "/?supply=rack",
        "no-circuit": "/?supply=attic",
        "no-run": "/runs?label=site=roof",
    }
    async with trained(circuits) as fleet, browsing(fleet.host, browser, viewport=_DESK) as tab:
        profiling = session_pb2.StateReport(
            state=session_pb2.DEVICE_STATE_PROFILING, profiled_modes=12, detail="measures modes of another workload"
        )
        for number in (2, 3):
            await fleet.train(await fleet.plan(number))
        for modes in (12, 15):
            profiling.profiled_modes = modes
            await fleet.agents["orin-nano-4"].send(state=profiling)
        for name, path in pages.items():
            answer = await tab.page.goto(fleet.url + path)
            assert answer.status == 200, path
            if name == "fleet":
                await tab.page.wait_for_selector("#watts canvas")
                await tab.page.wait_for_selector(".connection.live")
                await tab.page.wait_for_timeout(3_000 if _PICTURES else 0)  # so that the picture's chart shows a line
            for scheme, suffix in (("light", ""), ("dark", "-dark")):
                await tab.page.emulate_media(color_scheme=scheme)
                await picture(tab, name + suffix)
                assert await tab.accessibility_problems() == [], (path, scheme)
        assert tab.complaints == [] and tab.elsewhere == []


async def test_an_unknown_device_and_a_wrong_number_say_what_to_do(config: CoordinatorSettings, browser: Any) -> None:
    async with serving(config) as client, browsing(client.bound.http_address, browser, viewport=_DESK) as tab:
        url = f"http://{client.bound.http_address}"
        await tab.page.goto(url)
        assert "No device has connected yet" in await tab.page.inner_text("main")
        await tab.page.goto(f"{url}/what-if")
        assert "no device is ready to train: none ever connected" in await tab.page.inner_text("[role=alert]")
        for path, code, text in (
            ("/devices/<b>no", 404, "<b>no"),
            ("/nowhere", 404, "There is no such page"),
            ("/what-if?budget:site=many", 200, "the budget of site must be a number"),
            ("/events?kind=party", 200, "unknown kind of event 'party': use device, run, round, budget, coordinator"),
            ("/energy?by=room", 200, "name one or more of site, run, device"),
            ("/runs?label=site", 200, "a label is written as KEY=VALUE"),
        ):
            answer = await tab.page.goto(url + path)
            assert answer.status == code
            assert text in await tab.page.inner_text("[role=alert]")
            assert await tab.accessibility_problems() == []


async def test_the_fleet_is_filtered_and_brought_up_to_date_in_a_round(
    config: CoordinatorSettings, browser: Any
) -> None:
    async with trained(config) as fleet, browsing(fleet.host, browser, viewport=_DESK) as tab:
        await tab.page.goto(f"{fleet.url}/?text=nano")
        assert await tab.page.locator("#devices tbody tr").count() == 4
        await tab.page.wait_for_selector(".connection.live")
        plan = await fleet.plan(2)
        for part in plan.assignments:
            agent = fleet.agents[part.device_id]
            await agent.lease(GrantPhase.TRAINING, await agent.grant())
            await agent.send(state=session_pb2.StateReport(state=session_pb2.DEVICE_STATE_TRAINING, profiled_modes=50))
        await tab.page.wait_for_selector("#devices .state.training")
        assert await tab.page.locator("#devices tbody tr").count() == 4
        await tab.page.goto(f"{fleet.url}/runs/{RUN}")
        assert "Round 2, the newest" in await tab.page.inner_text("main")


async def listed(tab: Browsed) -> list[str]:
    """The devices of the list, from top to bottom."""
    names: list[str] = await tab.page.locator("#devices tbody th a").all_inner_texts()
    return names


async def test_an_operator_finds_who_is_slow_hot_or_over_budget_and_what_a_run_cost(
    config: CoordinatorSettings, browser: Any
) -> None:
    async with trained(config) as fleet, browsing(fleet.host, browser, viewport=_DESK) as tab:
        plan = await fleet.plan(2)
        [part] = [each for each in plan.assignments if each.device_id == OVER_BUDGET]
        await fleet.train(plan)
        await tab.page.goto(fleet.url)
        assert set((await listed(tab))[:3]) == {HOT, THROTTLED, OVER_BUDGET}, "the worst first"
        for words, device_id in (("hot", HOT), ("throttled", THROTTLED), ("over budget", OVER_BUDGET)):
            await tab.page.goto(fleet.url)
            await tab.page.click(f"#summary a:has-text('{words}')")
            assert await listed(tab) == [device_id]
        drawn = f"{1.2 * part.power_w:.1f}\nof {part.power_limit_w:.1f} allowed\nround 2"
        assert drawn in await tab.page.locator("#devices td").all_inner_texts()

        await tab.page.goto(fleet.url)
        await tab.page.click("#devices thead a:has-text('1 epoch')")
        assert (await listed(tab))[0] == SLOWEST
        await tab.page.click("#devices thead a:has-text('°C')")
        assert (await listed(tab))[0] == HOT
        await tab.page.select_option("[name=order]", "name")
        await tab.page.click(".filters button")
        assert await listed(tab) == sorted(DEVICES)

        await tab.page.click("nav >> text=Runs")
        await tab.page.wait_for_load_state()  # the text of a cell depends on the styles
        row = await tab.page.inner_text("#runs tbody tr")
        assert f"{fleet.training_j / 1e3:.1f} kJ\nfor {fleet.observed} of {fleet.trainings} trainings" in row
        await tab.page.click("#runs tbody th a")
        await tab.page.wait_for_load_state()
        assert (
            f"{fleet.training_j / 1e3:.1f} kJ\nfor {fleet.observed} of {fleet.trainings} trainings"
            in await tab.page.inner_text("#run .tiles")
        )
        over = tab.page.locator("#run td.bad", has_text=f"{part.power_limit_w:.1f} allowed")
        assert await over.count() == 1


async def test_a_device_is_over_budget_until_the_run_ends_and_its_round_stays_known(
    config: CoordinatorSettings, browser: Any
) -> None:
    async with trained(config) as fleet, browsing(fleet.host, browser, viewport=_DESK) as tab:
        await tab.page.goto(f"{fleet.url}/?state=over+budget")
        assert await listed(tab) == [OVER_BUDGET]
        await fleet.client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN))
        await tab.page.wait_for_selector("#devices >> text=No device matches")
        await tab.page.goto(f"{fleet.url}/?order=training")
        assert (await listed(tab))[0] == OVER_BUDGET
        cell = tab.page.locator("#devices tbody tr:first-child td.bad")
        assert "round 1 of an ended run" in await cell.inner_text()
        await cell.locator("a").click()
        assert await tab.page.inner_text("h1") == f"Run {RUN_NAME}"
        await tab.page.goto(f"{fleet.url}/devices/{OVER_BUDGET}")
        over = tab.page.locator("dl.facts dd .bad", has_text="allowed")
        assert f"in round 1 of run {RUN_NAME}, which has ended" in await over.inner_text()


async def test_a_device_shows_its_sensors_its_bounds_and_its_rounds(config: CoordinatorSettings, browser: Any) -> None:
    async with trained(config) as fleet, browsing(fleet.host, browser, viewport=_DESK) as tab:
        await tab.page.goto(f"{fleet.url}/devices/{THROTTLED}")
        facts = await tab.page.inner_text("dl.facts")
        for words in ("6.0 W, 54 °C, 4c 1.50/0.60/2.13, fan 35%, GPU 2% used", "3 times since it booted"):
            assert words in facts
        assert re.search(r"throttled itself \d+ s ago", facts)
        assert "58.3 kJ since its agent started" in facts
        assert await tab.page.locator("svg[aria-label^='Watts in its trainings'] circle.actual").count() == 1
        highest, lower = list(BOARDS["orin-nano"].presets)[:2]
        marks = await tab.page.locator(".preset-mark title").all_text_contents()
        assert [each.partition("preset ")[2] for each in marks] == [f"{highest}, measured", f"{lower}, predicted"]
        await tab.page.goto(f"{fleet.url}/devices/{OVER_BUDGET}")
        assert await tab.page.locator("svg[aria-label^='Watts in its trainings'] rect.failed").count() == 1
        await tab.page.click("#front-modes summary")
        await tab.page.wait_for_selector(".connection.live")
        await fleet.agents[OVER_BUDGET].lease(sample=session_pb2.BoardSample(power_w=31.5))
        await tab.page.wait_for_selector("dd:has-text('31.5 W')")
        assert await tab.page.locator("#front-modes[open]").count() == 1, "what was opened stays open"


async def test_profiling_is_shown_with_what_is_left(config: CoordinatorSettings, browser: Any) -> None:
    async with trained(config) as fleet, browsing(fleet.host, browser, viewport=_DESK) as tab:
        agent = fleet.agents["agx-orin-4"]
        for modes in (1, 2):
            await agent.send(
                state=session_pb2.StateReport(state=session_pb2.DEVICE_STATE_PROFILING, profiled_modes=modes)
            )
            await asyncio.sleep(1.0)  # the time of a mode, from which the rest is estimated
        await asyncio.sleep(1.5)  # the page may show a snapshot of this age
        await tab.page.goto(f"{fleet.url}/?state=profiling")
        row = await tab.page.inner_text("#devices tbody tr")
        assert "2 of 20" in row and "≤ " in row and "left" in row


async def state_of(fleet: Trained) -> tuple[Any, ...]:
    """The state that a plan may change: devices, rounds, budgets, and the next plan itself."""
    operator = fleet.client.operator
    return (
        await fleet.client.devices(),
        (await fleet.client.rounds()).rounds,
        await operator.GetBudgets(operator_pb2.GetBudgetsRequest()),
        await operator.PreviewPlan(operator_pb2.PreviewPlanRequest()),
    )


async def test_what_if_tells_who_drops_out_and_changes_nothing(config: CoordinatorSettings, browser: Any) -> None:
    async with trained(config) as fleet, browsing(fleet.host, browser, viewport=_DESK) as tab:
        before = await state_of(fleet)
        await tab.page.goto(f"{fleet.url}/what-if")
        await tab.page.fill("[name='budget:site']", "45")
        await tab.page.click("button[type=submit]")
        changes = await tab.page.inner_text("#changes")
        assert "drops out" in changes and re.search(r"orin-nano-1 trains in \S+ \S+ instead of \S+ \S+", changes)
        assert "45.0" in await tab.page.inner_text("#totals tbody tr:nth-child(2)")
        await tab.page.select_option("[name=policy]", "deadline")
        await tab.page.click("button[type=submit]")
        assert "needs a deadline" in await tab.page.inner_text("[role=alert]")
        await tab.page.select_option("[name=policy]", "fastest-k")
        await tab.page.fill("[name=clients]", "1")
        await tab.page.click("button[type=submit]")
        assert "1 of 8" in await tab.page.inner_text("#totals tbody tr:nth-child(2)")
        assert await state_of(fleet) == before


async def tiles(tab: Browsed) -> dict[str, str]:
    """The tiles of the fleet's page: their words, and their numbers."""
    texts = [each.split("\n", 1) for each in await tab.page.locator("#summary .tiles li").all_inner_texts()]
    return {words.strip(): number.strip() for number, words in texts}


async def test_behind_a_supply_devices_tiles_and_chart_are_those_of_the_supply(
    circuits: CoordinatorSettings, browser: Any
) -> None:
    drawn = {
        "": "42 W",
        "site": "42 W",
        "rack": "18.6 W",
        "roof": "23.4 W",
    }  # of boards that draw 4.2 W, 4.5 W, 4.8 W ...
    allowed = {"": "160 W", "site": "160 W", "rack": "110 W", "roof": "60 W"}
    sources = {"": "constant", "site": "constant", "rack": "fallback", "roof": "constant"}
    behind = {"": 8, "site": 8, "rack": 4, "roof": 4}
    async with trained(circuits) as fleet, browsing(fleet.host, browser, viewport=_DESK) as tab:
        for supply, watts in drawn.items():
            await tab.page.goto(f"{fleet.url}/?supply={supply}")
            shown = await tiles(tab)
            assert shown[f"allowed\n{sources[supply]}"] == allowed[supply], supply
            assert (shown["drawn now"], shown["devices"]) == (watts, str(behind[supply]))
            assert len(await listed(tab)) == behind[supply]
            await tab.page.wait_for_selector(".connection.live")
            await tab.until("document.querySelector('#watts .u-legend').innerText.includes(' W')")
            legend = await tab.page.inner_text("#watts .u-legend")
            for words in (f"Allowed{float(allowed[supply][:-2]):.1f} W", f"Drawn{float(watts[:-2]):.1f} W"):
                assert words in re.sub(r"\s*:?\s*", "", legend).replace("W", " W"), (supply, legend)
        for label, number in (("hot", "1"), ("ready", "4")):
            await tab.page.goto(f"{fleet.url}/?supply=rack")
            assert (await tiles(tab))[label] == number
        await tab.page.click("#summary a:has-text('hot')")
        assert (await listed(tab), "supply=rack" in tab.page.url) == ([HOT], True)
        await tab.page.click("#supplies a:has-text('roof')")
        assert await tab.page.locator("#supplies a[aria-current]").inner_text() == "roof"
        assert await tab.page.inner_text("h1") == "Fleet: roof"


async def test_a_budget_on_its_fallback_is_said_with_its_reason(circuits: CoordinatorSettings, browser: Any) -> None:
    async with trained(circuits) as fleet, browsing(fleet.host, browser, viewport=_DESK) as tab:
        await tab.page.goto(fleet.url)
        told = await tab.page.inner_text("#summary [role=alert]")
        assert told.startswith("rack: 110 W allowed, fallback of its query in force: no reading yet:")
        row = tab.page.locator("#supplies tr", has_text="rack")
        assert "fallback" in await row.locator("td.bad").inner_text()
        await fleet.client.operator.SetBudget(operator_pb2.SetBudgetRequest(supply="rack", watts=90.0))
        await tab.page.wait_for_selector("#supplies td:has-text('operator')")
        assert await tab.page.locator("#summary [role=alert]").count() == 0


async def test_what_if_in_the_middle_of_a_round_plans_the_one_after_it(
    circuits: CoordinatorSettings, browser: Any
) -> None:
    async with trained(circuits) as fleet, browsing(fleet.host, browser, viewport=_DESK) as tab:
        plan = await fleet.plan(2)
        for part in plan.assignments:
            agent = fleet.agents[part.device_id]
            await agent.lease(GrantPhase.TRAINING, await agent.grant())
            await agent.send(state=session_pb2.StateReport(state=session_pb2.DEVICE_STATE_TRAINING, profiled_modes=50))
        await tab.page.goto(f"{fleet.url}/what-if")
        assert await tab.page.locator("[role=alert]").count() == 0
        text = await tab.page.inner_text("main")
        assert f"Round 3 of run {RUN_NAME}" in text
        assert f"assuming that round 2 of run {RUN_NAME}, which is in flight, has ended" in text
        await tab.page.fill("[name='budget:roof']", "20")
        await tab.page.click("button[type=submit]")
        roof = await tab.page.locator("#plan-supplies tr", has_text="roof").locator("td").all_inner_texts()
        assert (roof[0], roof[2], roof[-1]) == ("60.0", "20.0", "assumed")
        assert float(roof[3]) <= 20.0 < float(roof[1])
        changes = await tab.page.inner_text("#changes")
        assert re.search(r"orin-nano-\d drops out: over its supply's budget", changes)


async def test_events_have_a_date_and_can_be_picked_out(circuits: CoordinatorSettings, browser: Any) -> None:
    async with trained(circuits) as fleet, browsing(fleet.host, browser, viewport=_DESK) as tab:
        await fleet.client.operator.SetBudget(operator_pb2.SetBudgetRequest(supply="roof", watts=30.0))
        await fleet.client.operator.ClearBudget(operator_pb2.ClearBudgetRequest(supply="roof"))

        async def rows() -> list[str]:
            return await tab.page.locator("#events tbody tr").all_inner_texts()

        await tab.page.goto(f"{fleet.url}/events?supply=roof&kind=budget")
        cleared, set_ = await rows()
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\tbudget\troof\tfrom 60 W to 30 W, set by the operator", set_)
        assert "from 30 W to 60 W: the override was cleared (constant)" in cleared
        assert "by unauthenticated on loopback" in set_ and "by unauthenticated on loopback" in cleared
        await tab.page.select_option("[name=supply]", "rack")
        await tab.page.click(".filters button")
        [fallback] = await rows()
        assert "110 W in force: the fallback of its query, no reading yet" in fallback
        await tab.page.goto(f"{fleet.url}/events?device={HOT}")
        assert [each.split("\t")[1:] for each in await rows()] == [
            ["device", HOT, "hot: 88 °C"],
            ["device", HOT, "connected for the first time: agx-orin"],
        ]
        await tab.page.goto(f"{fleet.url}/events?run={RUN}")
        assert [each.split("\t")[1:3] for each in await rows()] == [
            ["round", f"round 1 of {RUN_NAME}"],
            ["run", RUN_NAME],
        ]
        await tab.page.goto(f"{fleet.url}/events")
        await tab.page.wait_for_selector(".connection.live")
        await fleet.client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN, error="no space left"))
        await tab.page.wait_for_selector("#events td.bad:has-text('no space left')")


async def test_runs_have_names_and_are_found_by_their_labels(config: CoordinatorSettings, browser: Any) -> None:
    async with trained(config) as fleet, browsing(fleet.host, browser, viewport=_DESK) as tab:
        start = planning_pb2.StartRunRequest(run_id="4712", strategy="FedAvg", rounds=1, app="acme/speech")
        named = (await fleet.client.planning.StartRun(start)).name
        assert re.fullmatch(r"speech-\d{4}-\d{4}", named)

        async def names() -> list[str]:
            return await tab.page.locator("#runs tbody th > a").all_inner_texts()

        await tab.page.goto(f"{fleet.url}/runs")
        assert await names() == [named, RUN_NAME]
        await tab.page.click("#runs a.label:has-text('site=lab')")
        assert await names() == [RUN_NAME]
        await tab.page.goto(f"{fleet.url}/runs?state=finished")
        assert await tab.page.locator("#runs >> text=No run matches").count() == 1
        await tab.page.goto(f"{fleet.url}/runs/{RUN}")
        assert await tab.page.inner_text("h1") == f"Run {RUN_NAME}"
        assert f"Flower's id: {RUN}" in await tab.page.inner_text("main")


async def test_a_phone_needs_no_sideways_scrolling(circuits: CoordinatorSettings, browser: Any) -> None:
    paths = ("/", "/?supply=rack", "/runs", f"/runs/{RUN}", "/devices/agx-orin-1", "/what-if?budget:rack=60", "/events")
    async with trained(circuits) as fleet, browsing(fleet.host, browser, viewport=_PHONE) as tab:
        for path in paths:
            await tab.page.goto(fleet.url + path)
            assert await tab.overflow_px() <= 0, path
            assert await tab.accessibility_problems() == [], path
            if path == "/":
                await tab.page.wait_for_selector("#watts canvas")
                await picture(tab, "phone")


# --- Page names -------------------------------------------------------------------------------------------------------
# Devices and runs whose ids mean something in an address: the page's links lead to them in a real browser.

IDS = (
    "../../etc/passwd",
    "/absolute",
    "//host/path",
    "a/./b/../c/",
    "100%",
    "a%2Fb",
    "%2e%2e",
    "what?x=1&y#here",
    "back\\slash",
    "räck 1+2; 'orin'",
    "...",
)


@pytest.mark.slow
async def test_every_device_and_run_has_a_page_that_its_link_opens(config: CoordinatorSettings, browser: Any) -> None:
    async with serving(config) as client:
        for name in IDS:
            agent = client.agent()
            await agent.hello(name)
            await agent.goodbye()
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=name, strategy="FedAvg", rounds=1))
        run_names = {run.run_id: run.name for run in await client.runs()}
        host = client.bound.http_address
        async with browsing(host, browser) as tab:
            for listed in ("/", "/runs", "/events"):
                names = [run_names[name] if listed == "/runs" else name for name in IDS]
                await tab.page.goto(f"http://{host}{listed}")
                links = {
                    name: tab.page.locator("th").get_by_role("link", name=name, exact=True).first for name in names
                }
                # The address as the browser resolves it, which is what a click opens.
                addresses = {name: await link.evaluate("(each) => each.href") for name, link in links.items()}
                for name, address in addresses.items():
                    answer = await tab.page.goto(address)
                    assert answer.status == 200, (listed, name, tab.page.url)
                    assert name in await tab.page.inner_text("h1"), (listed, name, tab.page.url)


@pytest.mark.parametrize("name", [".", ".."])
async def test_a_device_or_run_cannot_be_named_like_a_folder_of_an_address(
    config: CoordinatorSettings, name: str
) -> None:
    async with serving(config) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.agent().hello(name)
        assert status(refused) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"a device's id must not be '{name}', which an address cannot name: choose another one",
        )
        with pytest.raises(grpc.aio.AioRpcError, match="a run's id must not be"):
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=name, strategy="FedAvg", rounds=1))


# --- Page keyboard ----------------------------------------------------------------------------------------------------
# Using the web page with the keyboard alone, in a real browser.

_KEYBOARD_DESK = {"width": 1280, "height": 900}
_NARROW = {"width": 640, "height": 700}
_MOST_TABS = 400
_WITHIN_S = 60.0

_FOCUSED = """() => {
  const focused = document.activeElement;
  if (focused === null || focused === document.body) return null;
  const style = getComputedStyle(focused), place = focused.getBoundingClientRect();
  return {
    index: [...document.querySelectorAll(CONTROLS)].indexOf(focused),
    text: focused.getAttribute("aria-label") ?? focused.textContent.trim(),
    name: focused.getAttribute("name"),
    outline: style.outlineColor,
    back: getComputedStyle(document.body).backgroundColor,
    outline_px: style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth),
    is_seen: place.right > 0 && place.bottom > 0 && place.left < innerWidth && place.top < innerHeight,
  };
}"""
_CONTROLS = "a[href], button, input, select, summary, [tabindex='0']"


def contrast(one: str, other: str) -> float:
    """The contrast of two CSS colours, as WCAG defines it."""

    def luminance(colour: str) -> float:
        channels = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


async def focused(tab: Browsed) -> dict[str, Any] | None:
    """The element with the focus, with its position among all controls; None if there is none."""
    found: dict[str, Any] | None = await tab.page.evaluate(_FOCUSED.replace("CONTROLS", repr(_CONTROLS)))
    return found


async def tabbed_to(tab: Browsed, text: str = "", name: str | None = None) -> None:
    """Press Tab until a control with this text, or a form field with this name, has the focus."""
    for _ in range(_MOST_TABS):
        await tab.page.keyboard.press("Tab")
        at = await focused(tab)
        if at is not None and (at["name"] == name if name is not None else at["text"].startswith(text)):
            return
    pytest.fail(f"Tab does not reach {text or name!r}")


async def rows(tab: Browsed) -> list[str]:
    names: list[str] = await tab.page.locator("#devices tbody th a").all_inner_texts()
    return names


@pytest.mark.slow
async def test_tab_reaches_every_control_and_shows_where_it_is(config: CoordinatorSettings, browser: Any) -> None:
    async with trained(config) as fleet, browsing(fleet.host, browser, viewport=_KEYBOARD_DESK) as tab:
        for path in (
            "/",
            "/runs",
            f"/runs/{RUN}",
            f"/devices/{THROTTLED}",
            "/what-if?budget:site=45",
            "/events",
            "/no",
        ):
            await tab.page.goto(fleet.url + path)
            for closed in await tab.page.locator("details").all():
                await closed.evaluate("(each) => (each.open = true)")
            count = await tab.page.locator(_CONTROLS).count()
            order = []
            for _ in range(count):
                await tab.page.keyboard.press("Tab")
                at = await focused(tab)
                assert at is not None, path
                assert at["outline_px"] >= 2 and at["is_seen"], (path, at)
                assert contrast(at["outline"], at["back"]) >= 3, (path, at)
                order.append(at["index"])
            assert order == list(range(count)), path
            await tab.page.keyboard.press("Shift+Tab")
            back = await focused(tab)
            assert back is not None and back["index"] == count - 2, path
            for _ in range(2):
                await tab.page.keyboard.press("Tab")
            left = await focused(tab)
            assert left is None or left["index"] == 0, "the last control lets the focus go"
            await tab.page.emulate_media(color_scheme="dark")
            await tab.page.keyboard.press("Tab")
            at = await focused(tab)
            assert at is not None and contrast(at["outline"], at["back"]) >= 3, (path, at)
            await tab.page.emulate_media(color_scheme="light")


async def test_an_operator_gets_from_the_front_to_a_device_and_a_what_if_by_keys(
    config: CoordinatorSettings, browser: Any
) -> None:
    async with trained(config) as fleet, browsing(fleet.host, browser, viewport=_KEYBOARD_DESK) as tab:
        keys = tab.page.keyboard
        await tab.page.goto(fleet.url)
        await keys.press("Tab")
        at = await focused(tab)
        assert at is not None and at["text"] == "Skip to the content" and at["is_seen"]
        await keys.press("Enter")
        await keys.press("Tab")
        assert await tab.page.evaluate("document.activeElement.closest('#summary') !== null"), "the header is skipped"

        await tabbed_to(tab, name="text")
        await keys.type("nano")
        await tabbed_to(tab, name="state")
        await keys.type("rea")
        await tabbed_to(tab, name="order")
        for _ in range(4):
            await keys.press("ArrowDown")
        await keys.press("Enter")
        await tabbed_to(tab, "Show")
        async with tab.page.expect_navigation():
            await keys.press("Enter")
        assert len(await rows(tab)) == 4 and (await rows(tab))[0] == SLOWEST

        await tabbed_to(tab, "Device")
        async with tab.page.expect_navigation():
            await keys.press("Enter")
        assert await rows(tab) == sorted(each for each in DEVICES if "nano" in each)

        await tabbed_to(tab, THROTTLED)
        async with tab.page.expect_navigation():
            await keys.press("Enter")
        assert await tab.page.inner_text("h1") == THROTTLED
        await tabbed_to(tab, "All 4 modes")
        await keys.press("Enter")
        assert await tab.page.locator("#front-modes[open] tbody tr:visible").count() == 4
        await tabbed_to(tab, "1")
        async with tab.page.expect_navigation():
            await keys.press("Enter")
        assert await tab.page.inner_text("h1") == f"Run {RUN_NAME}"

        await tabbed_to(tab, "What if")
        async with tab.page.expect_navigation():
            await keys.press("Enter")
        await tabbed_to(tab, name="budget:site")
        await keys.type("45")
        async with tab.page.expect_navigation():
            await keys.press("Enter")
        assert "drops out" in await tab.page.inner_text("#changes")


@pytest.mark.slow
async def test_wide_tables_are_scrolled_by_keys_and_updates_keep_the_focus(
    config: CoordinatorSettings, browser: Any
) -> None:
    async with trained(config) as fleet, browsing(fleet.host, browser, viewport=_NARROW) as tab:
        await tab.page.goto(fleet.url)
        await tab.page.wait_for_selector(".connection.live")
        await tabbed_to(tab, "Table of devices")
        # An update may replace the table before a key press has moved the focus.
        async with asyncio.timeout(_WITHIN_S):
            while not await tab.page.evaluate("document.querySelector('#devices .scroll').scrollLeft > 0"):
                await tab.page.keyboard.press("ArrowRight")
        await fleet.agents[THROTTLED].lease(sample=session_pb2.BoardSample(power_w=31.5))
        await tab.page.wait_for_selector("#devices td:has-text('31.5')")
        at = await focused(tab)
        assert at is not None and at["text"] == "Table of devices"
        assert await tab.page.evaluate("document.querySelector('#devices .scroll').scrollLeft > 0")
