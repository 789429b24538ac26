"""The web page's messages when the coordinator fails, and the details in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import urllib.error
import urllib.request
from email.message import Message
from typing import Any

import pytest

from coordinator.errors import StoreUnavailableError
from coordinator.page import application, fleet_page
from coordinator.page.queries import Queries
from coordinator.page.snapshots import Snapshots
from coordinator.settings import CoordinatorSettings
from tests.fakes.browser import browsing
from tests.fakes.served import serving

_DESK = {"width": 1280, "height": 900}
_WITHIN_S = 30.0
_DETAIL = "a detail that viewers must not see"


def fails(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError(_DETAIL)


async def answer_of(url: str) -> tuple[int, Message, str]:
    """The status, headers and text of a response; for a stream, the text that arrives before it ends."""

    def read() -> tuple[int, Message, str]:
        try:
            with urllib.request.urlopen(url, timeout=_WITHIN_S) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    return await asyncio.to_thread(read)


def logged(caplog: pytest.LogCaptureFixture, error_id: str) -> logging.LogRecord:
    """The one line of the log that contains an error's id."""
    [found] = [each for each in caplog.records if error_id in each.getMessage()]
    return found


def id_in(text: str) -> str:
    found = re.search(r"error ([0-9a-f]{8})", text)
    assert found is not None, text
    return found[1]


async def test_an_unexpected_error_is_a_page_with_the_id_of_its_log_line(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Queries, "audit_log", fails)
    async with serving(config) as client, browsing(str(client.bound.page_address), viewport=_DESK) as tab:
        url = f"http://{client.bound.page_address}/events"
        answer = await tab.page.goto(url)
        assert answer.status == 500
        error_id = id_in(await tab.page.inner_text("[role=alert]"))
        record = logged(caplog, error_id)
        assert record.exc_info is not None and _DETAIL in str(record.exc_info[1])
        assert record.levelno == logging.ERROR and "/events" in record.getMessage()
        body = await answer.text()
        assert _DETAIL not in body and "Traceback" not in body
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert await tab.accessibility_problems() == []
        await tab.page.click("nav >> text=Fleet")
        assert "No device has connected yet" in await tab.page.inner_text("main")


async def test_scripts_get_errors_as_json_with_the_id_of_the_log_line(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_page, "asdict", fails)
    monkeypatch.setattr(application, "StreamingResponse", fails)
    async with serving(config) as client:
        for path in ("/watts.json", "/updates"):
            status, headers, text = await answer_of(f"http://{client.bound.page_address}{path}")
            assert status == 500 and headers["Content-Type"] == "application/json"
            assert path in logged(caplog, id_in(json.loads(text)["detail"])).getMessage()
            assert _DETAIL not in text


async def test_a_stream_of_updates_that_fails_ends_with_the_reason(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Snapshots, "after", fails)
    async with serving(config) as client:
        status, _, text = await answer_of(f"http://{client.bound.page_address}/updates")
    assert status == 200 and text.startswith("event: failure\ndata: ")
    assert logged(caplog, id_in(text)).exc_info is not None
    assert _DETAIL not in text


async def test_pages_say_why_they_are_not_up_to_date_until_they_are_again(
    config: CoordinatorSettings, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*arguments: Any) -> Any:
        raise StoreUnavailableError("the database <b>does not answer")

    async with serving(config) as client, browsing(str(client.bound.page_address), viewport=_DESK) as tab:
        await tab.page.goto(f"http://{client.bound.page_address}/runs")
        await tab.page.wait_for_selector(".connection.live")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Queries, "budgets", unavailable)
            await tab.page.wait_for_selector(".connection.away:has-text('the database <b>does not answer')")
            await asyncio.sleep(2.5)  # the time of two snapshots
        await tab.page.wait_for_selector(".connection.live")
        lines = [each for each in caplog.messages if "cannot be brought up to date" in each]
        assert len(lines) == 1, "one line for an outage"


async def test_without_any_snapshot_pages_fail_with_the_id_of_one_line_of_the_log(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts: list[str] = []

    def fails_differently(*arguments: Any) -> Any:
        texts.append(f"{_DETAIL}, for the {len(texts)}. time")
        raise RuntimeError(texts[-1])

    monkeypatch.setattr(Queries, "budgets", fails_differently)
    answers = []
    async with serving(config) as client, asyncio.timeout(_WITHIN_S):
        while len(texts) < 3:
            answers.append(await answer_of(f"http://{client.bound.page_address}/"))
            await asyncio.sleep(0.1)
    assert {status for status, _, _ in answers} == {503}
    [error_id] = {id_in(text) for _, _, text in answers}
    assert logged(caplog, error_id).exc_info is not None
    assert len([each for each in caplog.records if each.levelno == logging.ERROR]) == 1


async def test_a_page_too_many_says_that_it_is_not_live_and_asks_again(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "_MAX_VIEWERS", 0)
    async with serving(config) as client, browsing(str(client.bound.page_address), viewport=_DESK) as tab:
        await tab.page.clock.install()
        await tab.page.goto(f"http://{client.bound.page_address}/runs")
        await tab.page.wait_for_selector(".connection.away:has-text('0 viewers already receive updates')")
        monkeypatch.setattr(application, "_MAX_VIEWERS", 1)
        await tab.page.clock.fast_forward(11_000)
        await tab.page.wait_for_selector(".connection.live")


async def test_the_page_only_reads(config: CoordinatorSettings) -> None:
    async with serving(config) as client:

        def post() -> str:
            request = urllib.request.Request(f"http://{client.bound.page_address}/what-if", method="POST")
            with pytest.raises(urllib.error.HTTPError, match="405") as refused:
                urllib.request.urlopen(request, timeout=_WITHIN_S)
            return refused.value.read().decode()

        assert "The page only reads" in await asyncio.to_thread(post)
