"""Fixtures for tests of the Flower integration."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.agent_socket import Agent, agent_at
from tests.fakes.flower_in_process import WarningLog


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[WarningLog]:
    """The logged warnings; Flower's logger does not propagate them by default."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.INFO)
    yield WarningLog(caplog)


@pytest.fixture
def restored_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the names in Flower's SuperNode that `wattfleet-supernode` replaces."""
    for module, names in (
        ("flwr.supernode.start_client_internal", ("http_request_response", "time", "subprocess")),
        ("flwr.supernode.cli.flower_supernode", ("start_client_internal",)),
        ("flwr.supernode.fleet_http_connection", ("FleetHttpClient",)),
    ):
        for name in names:
            found = importlib.import_module(module)
            monkeypatch.setattr(found, name, getattr(found, name))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with agent_at(tmp_path / "agent.sock") as running:
        yield running


@pytest.fixture
def agent_that_retries_soon(tmp_path: Path) -> Iterator[Agent]:
    with agent_at(tmp_path / "agent.sock", retry_s=0.02) as running:
        yield running
