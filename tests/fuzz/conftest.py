"""Counts the inputs of each campaign, and reports the one that fails."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.fuzz.campaign import FUZZ_S, Campaign

_PROPERTY = "fuzz"


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Generator[Campaign]:
    """The inputs of one test; their number is reported at the end."""
    inputs = Campaign()
    yield inputs
    request.node.user_properties.append((_PROPERTY, f"{inputs.count:,} inputs in {inputs.took_s:.1f} s"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the input to the report of a failure, whatever has failed."""
    report = yield
    inputs = getattr(item, "funcargs", {}).get("campaign")
    if report.failed and isinstance(inputs, Campaign):
        report.sections.append(("Fuzzed input", inputs.failure()))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the number of inputs of each campaign, if it was given time."""
    if FUZZ_S < 1:
        return
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == _PROPERTY and report.when == "teardown":
                    terminalreporter.write_line(f"{value}: {report.nodeid}")
