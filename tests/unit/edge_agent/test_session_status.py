"""An agent's log and status of its session: every change is reported, but not every attempt."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from edge_agent.paths import SESSION_FILE
from edge_agent.session.status import SessionNews, read_session_status


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def news(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> SessionNews:
    caplog.set_level(logging.INFO, logger="edge_agent")
    return SessionNews("fleet:7070", tmp_path / SESSION_FILE, clock)


def test_an_outage_is_one_line_an_hour_whatever_the_attempts_say_and_its_end_is_one(
    news: SessionNews, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for k in range(599):
        news.failed(f"the coordinator is away (attempt {k})", "away")
        clock.now_s += 1
    assert caplog.messages == ["the coordinator is away (attempt 0)"]
    news.connected()
    assert caplog.messages[1:] == ["the coordinator at fleet:7070 can be reached again after 599.0 s"]
    news.failed("the coordinator is away (again)", "away")
    assert caplog.messages[2:] == ["the coordinator is away (again)"]


def test_a_refusal_during_an_outage_is_told(news: SessionNews, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    news.failed("the coordinator is away", "away")
    clock.now_s += 10
    news.failed("the coordinator refused this device")
    assert caplog.messages == ["the coordinator is away", "the coordinator refused this device"]


def test_a_problem_that_stays_is_logged_again_after_an_hour(
    news: SessionNews, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(7201):
        news.failed("the coordinator is away")
        clock.now_s += 1
    assert len(caplog.messages) == 3


def test_problems_that_keep_changing_are_logged_six_times_a_minute(
    news: SessionNews, clock: Clock, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for k in range(600):
        news.failed(f"problem {k}")
        clock.now_s += 0.1
    assert len(caplog.messages) == 6
    clock.now_s += 60
    news.failed("the last one")
    status = read_session_status(tmp_path)
    assert status is not None and status.problem == "the last one"


def test_the_file_follows_the_session(news: SessionNews, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_session_status(tmp_path) is None
    news.failed("the coordinator is away")
    away = read_session_status(tmp_path)
    news.connected()
    connected = read_session_status(tmp_path)
    assert away is not None and connected is not None
    assert (away.address, away.problem) == ("fleet:7070", "the coordinator is away")
    assert (connected.address, connected.problem) == ("fleet:7070", None)
    assert caplog.messages[-1] == "the coordinator at fleet:7070 can be reached again after 0.0 s"
