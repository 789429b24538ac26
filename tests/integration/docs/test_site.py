"""The documentation as a website, built as `make docs` builds it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import pytest

from tests.fakes.browser import Browsed, browsing
from wattfleet.common.cli import wattfleet

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def host(site: Path) -> Iterator[str]:
    """The host and port where the site is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def text(page: Path) -> str:
    return text_of(page.read_text())


def text_of(markup: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", markup))


def test_every_page_of_the_repository_is_on_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / (name.with_name("index.html") if name.stem == "README" else name)).exists()


def test_what_pages_link_to_outside_docs_is_on_the_site(site: Path) -> None:
    assert (site / "repository/deploy/index.html").exists()
    assert (site / "repository/examples/choose_a_mode.py").read_text() == (
        ROOT / "examples" / "choose_a_mode.py"
    ).read_text()


def test_the_reference_has_every_group_of_commands_and_its_options(site: Path) -> None:
    commands = text(site / "reference/commands.html")
    for name in wattfleet.list_commands(click.Context(wattfleet)):
        assert f"wattfleet {name}" in commands
    assert "--site-budget-w" in commands
    assert "[never|rarely|often]" in commands
    assert "WATTFLEET_COORDINATOR_DEVICES_STATE, _TAG" in commands


def test_the_reference_has_settings_with_their_defaults(site: Path) -> None:
    settings = text(site / "reference/settings.html")
    assert "WATTFLEET_COORDINATOR_STORE_KEEP_DAYS" in settings
    assert "Export metrics of individual devices" in settings
    assert "Default: all devices." in settings


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    loading = re.compile(r"""<(?:script|img|iframe)[^>]*src=["']?(?:https?:)?//|<link[^>]*href=["']?(?:https?:)?//""")
    for page in site.rglob("*.html"):
        assert not loading.search(page.read_text()), page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(?:https?:)?//", style.read_text()), style.name


def test_code_of_a_numbered_step_is_within_the_step(site: Path) -> None:
    page = (site / "duties.html").read_text()
    steps = re.search(r"<ol>(.*?)</ol>", page, re.DOTALL)
    assert steps is not None and steps[1].count("<li>") == 5
    assert "agent duty set" in text_of(steps[1]) and "```" not in text_of(steps[1])


def test_every_page_of_a_section_is_in_its_menu(site: Path) -> None:
    menu = text(site / "flower.html")
    assert "Quickstart with PyTorch" in menu and "A fleet with docker-compose" in menu


def test_the_search_knows_every_page_of_the_menu(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())["docs"]
    found = {each["location"]: each["title"] for each in index}
    assert found["your-app.html"] == "Add it to your Flower app"
    assert "pip install" in " ".join(each["text"] for each in index if each["location"].startswith("index.html"))
    pages = {each.partition("#")[0] for each in found}
    menu = re.findall(r'href="([^"#:]+\.html)" class="md-(?:nav|tabs)__link', (site / "your-app.html").read_text())
    assert len(menu) > 30 and {*menu} - {"your-app.html"} <= pages
    assert any(each.startswith("reference/commands.html#wattfleet-coordinator-budget-set") for each in found)


def test_the_search_of_opened_files_is_the_same(site: Path) -> None:
    inlined = (site / "search/search_index.js").read_text()
    assert inlined == f"var __index = {(site / 'search/search_index.json').read_text()}"


async def check(tab: Browsed, host: str, page: str) -> None:
    await tab.page.goto(f"http://{host}/{page}")
    assert await tab.accessibility_problems(only_serious=True) == [], page
    assert await tab.overflow_px() <= 0, page


async def search(tab: Browsed, words: str) -> None:
    """Type until there is a result: text typed before the index is loaded is searched only at the next key press."""
    query, result = tab.page.locator("[data-md-component=search-query]"), tab.page.locator(".md-search-result__item")
    for _ in range(60):
        await query.fill("")
        await query.press_sequentially(words)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(result.first.wait_for(), 2.0)
            return
    pytest.fail(f"nothing is found for {words!r}")


@pytest.mark.timeout(600)
async def test_the_site_in_a_browser_is_accessible_and_asks_no_other_host(host: str) -> None:
    async with browsing(host, viewport={"width": 1280, "height": 900}, color_scheme="light") as tab:
        await check(tab, host, "index.html")
        await search(tab, "supernode certificate")
        assert tab.complaints == [] and tab.elsewhere == []


# The short form is the test before. A browser of its own, since the page remembers the selected colour scheme.
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_dark_site_in_a_browser_and_on_a_phone_is_accessible(host: str) -> None:
    async with browsing(host, viewport={"width": 1280, "height": 900}, color_scheme="dark") as tab:
        await check(tab, host, "your-app.html")
        await tab.until("document.body.dataset.mdColorScheme === 'slate'")
        await tab.page.set_viewport_size({"width": 390, "height": 844})
        await check(tab, host, "reference/settings.html")
        assert tab.complaints == [] and tab.elsewhere == []


async def cut_off(tab: Browsed) -> list[str]:
    """The first line of each drawing that is wider than its place on the page."""
    found: list[str] = await tab.page.evaluate(
        "[...document.querySelectorAll('.md-content pre code')]"
        ".filter(each => each.textContent.includes('+---') && each.scrollWidth > each.clientWidth)"
        ".map(each => each.textContent.trim().split('\\n')[0])"
    )
    return found


@pytest.mark.timeout(600)
@pytest.mark.slow
async def test_pages_opened_as_files_can_be_searched_and_their_drawings_fit(site: Path) -> None:
    async with browsing("", viewport={"width": 1280, "height": 900}, color_scheme="light") as tab:
        await tab.page.goto((site / "flower.html").as_uri())
        await search(tab, "supernode certificate")
        result = tab.page.locator(".md-search-result__link").first
        await result.click()
        assert tab.page.url.startswith(site.as_uri()) and ".html" in tab.page.url
        assert tab.complaints == [] and not [each for each in tab.elsewhere if not each.startswith("file:")]
        for page, widths in {"architecture.html": [1280], "how-it-works.html": [1280, 390]}.items():
            for width in widths:
                await tab.page.set_viewport_size({"width": width, "height": 900})
                await tab.page.goto((site / page).as_uri())
                assert await tab.page.locator("pre code", has_text="+---").count() == 1
                assert await cut_off(tab) == [], f"{page} at {width} px"
