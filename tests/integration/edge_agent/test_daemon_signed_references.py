"""A whole agent that trusts an operator's root: an unsigned reference does not stop its trainings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.reference_metadata import utc_now
from edge_agent.paths import TRUST_DIRECTORY
from edge_agent.session.references import trust_root
from tests.fakes.coordinator_in_process import REFERENCE, CoordinatorInProcess
from tests.fakes.fitting_here import fitting_here
from tests.fakes.polling import until
from tests.fakes.running_agent import new_board, ready_agent
from tests.fakes.signed_repository import SignedRepository, reference
from wattfleet_proto.convert import front_from_message
from wattfleet_proto.v1 import session_pb2

NEW = reference("new")


@pytest.fixture(autouse=True)
def fits_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)


def test_a_refused_reference_is_told_of_and_the_old_one_goes_on_until_it_is_signed(tmp_path: Path, agent: Any) -> None:
    repository = SignedRepository(tmp_path / "operator", utc_now)
    repository.publish()
    trust_root(tmp_path / "state" / TRUST_DIRECTORY, repository.operator.roots[0], utc_now().timestamp())
    coordinator = CoordinatorInProcess(tmp_path, 6)
    coordinator.metadata = repository.metadata.file
    with (
        coordinator.running(),
        ready_agent(coordinator, tmp_path, new_board(), modes_first=None, reference_retry_s=0.2) as running,
    ):
        coordinator.go()
        coordinator.reference = NEW
        coordinator.reports.clear()
        coordinator.come()
        until(lambda: coordinator.is_ready() and "is refused: not named" in coordinator.details[-1])
        coordinator.announce("vision")
        until(lambda: coordinator.front_of("vision") is not None)
        assert coordinator.fronts[-1].reference_digest == REFERENCE.digest
        assert running.round("a", front_from_message(coordinator.fronts[-1].front).mode(0), workload="vision")
        shown = agent("status", "--device", "simulated:orin-nano", "--state-dir", tmp_path / "state", "--json")
        signed = shown.content["references"]
        assert signed["in_force"] == [REFERENCE.digest] and "not named" in signed["refused"]
        assert "refused" in agent("status", "--device", "simulated:orin-nano", "--state-dir", tmp_path / "state").out
        coordinator.reports.clear()
        repository.publish(NEW)
        until(lambda: any(each.reference_digest == NEW.digest for each in coordinator.fronts))
        until(lambda: coordinator.states[-1] == session_pb2.DEVICE_STATE_READY)
        assert "refused" not in coordinator.details[-1]
    status = json.loads((tmp_path / "state" / TRUST_DIRECTORY / "in-force.json").read_bytes())
    assert (status["digests"], status["refused"]) == ([NEW.digest], "")


def test_a_root_is_trusted_by_command(tmp_path: Path, agent: Any) -> None:
    repository = SignedRepository(tmp_path / "operator", utc_now)
    root = repository.operator.newest_root_file
    ended = agent("trust-references", root, "--state-dir", tmp_path / "state")
    assert ended.code == 0 and "restart the agent" in ended.out
    assert (tmp_path / "state" / TRUST_DIRECTORY / "root.json").read_bytes() == root.read_bytes()
    refused = agent("trust-references", root.with_name("targets.json"), "--state-dir", tmp_path / "other")
    assert refused.code == 2 and "not a root of signed references" in refused.err
    assert not (tmp_path / "other").exists()
    missing = agent("trust-references", tmp_path / "missing", "--state-dir", tmp_path / "other")
    assert missing.code == 2 and "missing: cannot be used" in missing.err
