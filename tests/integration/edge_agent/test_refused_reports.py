"""A report that the coordinator refuses while the session lasts."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent.session.outbox import Outbox, OutboxFile
from tests.integration.edge_agent.test_coordinator_session import Coordinator, run, session_with, state
from wattfleet_proto.v1 import session_pb2


def test_a_refused_report_is_logged_once_and_the_session_lasts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        coordinator = Coordinator(ack=session_pb2.Ack(refusal="999 W as its idle power"))
        async with session_with(coordinator, Outbox(OutboxFile(tmp_path / "outbox.jsonl"))) as (session, _):
            for detail in ("first", "second"):
                session.report_state(state(detail))
                assert await session.flush(10)
            assert session.connected

    run(body)
    assert caplog.text.count("the coordinator refused a report: 999 W as its idle power") == 1
