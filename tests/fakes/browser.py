"""Debian's Chromium, headless, driven by Playwright; tests are skipped if either is not installed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
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
    """One tab, with its requests and errors.

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
        """The rules that axe finds broken on the page, each with the first element that breaks it."""
        # Through the debugger, because the page's content security policy allows no foreign script.
        await self.page.evaluate(AXE.read_text())
        found = await self.page.evaluate("async () => (await axe.run(document)).violations")
        if only_serious:
            found = [each for each in found if each["impact"] in ("serious", "critical")]
        return [f"{each['id']}: {each['nodes'][0]['html']} {each['nodes'][0]['failureSummary']}" for each in found]

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true; the page's policy forbids Playwright's own way to wait."""
        async with asyncio.timeout(_WITHIN_MS / 1e3):
            while not await self.page.evaluate(condition):
                await asyncio.sleep(0.05)

    async def overflow_px(self) -> int:
        """The number of pixels by which the page is wider than the window."""
        wider: int = await self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return wider


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """A browser."""
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=str(CHROMIUM), args=_OPTIONS)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def browsing(host: str, browser: Any = None, **options: Any) -> AsyncIterator[Browsed]:
    """A tab with cookies and a cache of its own.

    Args:
        host: host and port that the page may request.
        browser: the browser; None for a new one.
        options: options of Playwright's context, such as `viewport` and `color_scheme`.
    """
    async with AsyncExitStack() as opened:
        browser = browser or await opened.enter_async_context(chromium())
        context = await browser.new_context(**options)
        opened.push_async_callback(context.close)
        yield Browsed(await context.new_page(), host)
