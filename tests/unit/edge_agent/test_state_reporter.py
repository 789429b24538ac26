"""The agent's reports of its state."""

from __future__ import annotations

from edge_agent.runtime.states import PreparationRestarted, ProfileEnded, StateReporter
from tests.fakes.agent_socket import Reports


def test_of_a_long_detail_the_beginning_is_reported() -> None:
    reports = Reports()
    reporter = StateReporter(reports)  # type: ignore[arg-type]
    reporter.decide(ProfileEnded(repeated=False))
    reporter.report(reporter.decide(PreparationRestarted("x" * 100_000)), 50)
    [report] = reports.states
    assert report.detail == "x" * 2_000
