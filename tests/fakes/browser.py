"""Debian's Chromium without a screen, driven by Playwright; tests skip with the reason where either is absent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
AXE = Path(__file__).resolve().parents[1] / "fixtures" / "axe-core" / "axe.min.js"
_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_WITHIN_MS = 60_000.0


class Browsed:
    """One tab, with what it asked for and complained of.

    Attributes:
        page: Playwright's page.
        complaints: errors on the console, and exceptions of scripts.
        elsewhere: requests to other hosts.
    """

    def __init__(self, page: Any, host: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        page.set_default_timeout(_WITHIN_MS)
        page.on("console", lambda each: self.complaints.append(each.text) if each.type == "error" else None)
        page.on("pageerror", lambda each: self.complaints.append(str(each)))
        page.on("request", lambda each: None if f"//{host}/" in each.url else self.elsewhere.append(each.url))

    async def accessibility_problems(self, only_serious: bool = False) -> list[str]:
        """What axe finds on the page: each rule with the first place that breaks it."""
        # Through the debugger: the page's own policy allows no foreign script.
        await self.page.evaluate(AXE.read_text())
        found = await self.page.evaluate("async () => (await axe.run(document)).violations")
        if only_serious:
            found = [each for each in found if each["impact"] in ("serious", "critical")]
        return [f"{each['id']}: {each['nodes'][0]['html']} {each['nodes'][0]['failureSummary']}" for each in found]

    async def until(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true; the page's own policy forbids Playwright's way to wait."""
        async with asyncio.timeout(_WITHIN_MS / 1e3):
            while not await self.page.evaluate(condition):
                await asyncio.sleep(0.05)

    async def overflow_px(self) -> int:
        """By how many pixels the page is wider than the window."""
        wider: int = await self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return wider


@asynccontextmanager
async def browsing(host: str, **options: Any) -> AsyncIterator[Browsed]:
    """A tab of a browser.

    Args:
        host: host and port that the page may ask.
        options: of Playwright's context, such as `viewport` and `color_scheme`.
    """
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=str(CHROMIUM), args=_OPTIONS)
        try:
            context = await browser.new_context(**options)
            yield Browsed(await context.new_page(), host)
        finally:
            await browser.close()
