"""Using the web page with the keyboard alone, in a real browser."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.browser import Browsed, browsing
from tests.fakes.small_fleet import RUN, RUN_NAME
from tests.fakes.trained_fleet import DEVICES, SLOWEST, THROTTLED, trained
from wattfleet_proto.v1 import session_pb2

_DESK = {"width": 1280, "height": 900}
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_tab_reaches_every_control_and_shows_where_it_is(config: CoordinatorSettings, scheme: str) -> None:
    async with trained(config) as fleet, browsing(fleet.host, viewport=_DESK, color_scheme=scheme) as tab:
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


async def test_an_operator_gets_from_the_front_to_a_device_and_a_what_if_by_keys(config: CoordinatorSettings) -> None:
    async with trained(config) as fleet, browsing(fleet.host, viewport=_DESK) as tab:
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


async def test_wide_tables_are_scrolled_by_keys_and_updates_keep_the_focus(
    config: CoordinatorSettings,
) -> None:
    async with trained(config) as fleet, browsing(fleet.host, viewport=_NARROW) as tab:
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
