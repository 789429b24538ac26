"""The documentation as a site, built as `make docs` builds it."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import click
import pytest

from wattfleet_io.cli import wattfleet

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


def test_the_reference_has_settings_with_their_defaults(site: Path) -> None:
    settings = text(site / "reference/settings.html")
    assert "WATTFLEET_COORDINATOR_" in settings
    assert "Export metrics of single devices" in settings
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
