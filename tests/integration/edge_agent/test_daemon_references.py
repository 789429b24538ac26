"""A whole agent whose coordinator names an unusable reference: it reports this, and waits for another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.coordinator_in_process import REFERENCE, CoordinatorInProcess
from tests.fakes.fitting_here import fitting_here
from tests.fakes.polling import until
from tests.fakes.running_agent import agent, new_board, ready_agent
from wattfleet.prediction import Artefact
from wattfleet_proto.convert import front_from_message
from wattfleet_proto.v1 import session_pb2


@pytest.fixture(autouse=True)
def fits_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)


def damaged() -> Any:
    return SimpleNamespace(digest=REFERENCE.digest, manifest=REFERENCE.manifest, weights=REFERENCE.weights[:-1] + b"\0")


def of_an_unknown_kind() -> Artefact:
    return Artefact(REFERENCE.manifest.replace(b'"roofline"', b'"crystal-ball"'), REFERENCE.weights)


def of_another_format() -> Any:
    changed = REFERENCE.manifest.replace(b'"format_version": 1', b'"format_version": 99')
    digest = hashlib.sha256(changed).hexdigest()
    return SimpleNamespace(digest=digest, manifest=changed, weights=REFERENCE.weights)


def of_another_task() -> Artefact:
    changed = json.loads(REFERENCE.manifest)
    changed["facts"] = {**(changed.get("facts") or {}), "task": "inference", "batch": 1}
    return Artefact(json.dumps(changed).encode(), REFERENCE.weights)


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        (damaged, "has the SHA-256"),
        (of_an_unknown_kind, "unknown predictor 'crystal-ball'"),
        (of_another_format, "has format 99"),
        (of_another_task, "is for inference, but this device trains"),
    ],
)
def test_an_unusable_reference_does_not_end_the_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reference: Callable[[], Any], why: str
) -> None:
    coordinator = CoordinatorInProcess(tmp_path, 6)
    coordinator.reference = reference()
    with coordinator.running(), agent(coordinator, tmp_path, new_board()) as running:
        until(lambda: running.has_ended or bool(coordinator.details))
        assert not running.has_ended, running.error
        assert why in coordinator.details[-1] and why in caplog.text
        assert coordinator.states[-1] == session_pb2.DEVICE_STATE_PROFILING
        coordinator.go()
        coordinator.reference = REFERENCE
        coordinator.come()
        until(lambda: coordinator.is_ready() or running.has_ended)
    assert running.error is None


@pytest.mark.parametrize(
    ("unusable", "is_first"),
    [(of_an_unknown_kind, False), (of_another_format, False), (of_an_unknown_kind, True), (of_another_task, True)],
)
def test_an_unusable_reference_beside_a_usable_one_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, unusable: Callable[[], Any], is_first: bool
) -> None:
    coordinator = CoordinatorInProcess(tmp_path, 6)
    pinned = [unusable(), REFERENCE] if is_first else [REFERENCE, unusable()]
    coordinator.reference, *coordinator.further = pinned
    with coordinator.running(), ready_agent(coordinator, tmp_path, new_board(), modes_first=None) as running:
        coordinator.announce("vision")
        until(lambda: running.has_ended or coordinator.front_of("vision") is not None)
        assert not running.has_ended
        assert coordinator.fronts[-1].reference_digest == REFERENCE.digest
    assert f"the reference {unusable().digest[:12]} is not used" in caplog.text


@pytest.mark.parametrize("reference", [of_an_unknown_kind, of_another_format, of_another_task])
def test_an_unusable_reference_that_is_pinned_between_rounds_strands_no_workload(
    tmp_path: Path, reference: Callable[[], Any]
) -> None:
    coordinator = CoordinatorInProcess(tmp_path, 6)
    with coordinator.running(), ready_agent(coordinator, tmp_path, new_board(), modes_first=None) as running:
        coordinator.announce("vision")
        until(lambda: coordinator.front_of("vision") is not None)
        mode = front_from_message(coordinator.fronts[-1].front).mode(0)
        assert running.round("a", mode, workload="vision")
        until(coordinator.is_ready)
        coordinator.go()
        coordinator.reference = reference()
        coordinator.reports.clear()
        coordinator.come()
        coordinator.announce("vision")
        until(lambda: any("preparing again" in detail for detail in coordinator.details))
        coordinator.go()
        coordinator.reference = REFERENCE
        coordinator.reports.clear()
        coordinator.come()
        coordinator.announce("vision")
        until(lambda: running.has_ended or coordinator.front_of("vision") is not None)
        until(lambda: running.has_ended or coordinator.is_ready())
        assert running.round("b", mode, workload="vision")
