"""A whole agent and its workloads: those that the coordinator announces and grants, and those of apps."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.paths import PROFILE_FILE
from edge_agent.profiling.stored_profile import folder_name
from tests.fakes.coordinator_in_process import CoordinatorInProcess
from tests.fakes.fittings import fitting_here
from tests.fakes.polling import until
from tests.fakes.running_agent import RunningAgent, new_board, ready_agent
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Measurement, PowerMode, array_to_modes
from wattfleet.flower import profiled, until_deadline
from wattfleet.flower.client.agent_training import AgentUnreachableError
from wattfleet_proto.convert import front_from_message, measured_to_message
from wattfleet_proto.v1 import power_pb2, session_pb2

MODES = 6


@pytest.fixture(autouse=True)
def fits_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorInProcess]:
    with CoordinatorInProcess(tmp_path, MODES).running() as coordinator:
        yield coordinator


@pytest.fixture
def running(coordinator: CoordinatorInProcess, tmp_path: Path) -> Iterator[RunningAgent]:
    """An agent that was not configured for any network, and stores at most three workloads."""
    more = {"modes_first": None, "minibatches_per_epoch": None, "max_workloads": 3, "grant_timeout_s": 0.5}
    with ready_agent(coordinator, tmp_path, new_board(), **more) as running:
        yield running


@dataclass(frozen=True)
class Endless:
    """A data loader without a length, like one over a stream."""

    minibatches: int
    batch_size: int | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.minibatches))


class Loader(Endless):
    """A data loader with a length."""

    def __len__(self) -> int:
        return self.minibatches


def trains(loader: Iterable[int]) -> None:
    for _ in profiled(loader):
        pass


def front_after(coordinator: CoordinatorInProcess, workload: str) -> session_pb2.FrontReport:
    until(lambda: coordinator.front_of(workload) is not None)
    found = coordinator.front_of(workload)
    assert found is not None
    return found


def fastest_affordable(report: session_pb2.FrontReport) -> PowerMode:
    front = front_from_message(report.front)
    return front.mode(len(front) - 1)


def journal_of(running: RunningAgent, workload: str) -> list[dict[str, object]]:
    path = running.settings.device.state_dir / "workloads" / folder_name(workload) / PROFILE_FILE
    return [json.loads(line) for line in path.read_text().splitlines()]


def order(workload: str, synthetic: str, modes: int) -> session_pb2.ProfileOrder:
    return session_pb2.ProfileOrder(workload=power_pb2.Workload(name=workload), synthetic=synthetic, modes=modes)


@pytest.mark.parametrize("bad", ["x" * 10_000, "bell\x07\x1b[2Jname", " ", "", "\u202egpt"])
def test_an_announced_name_that_is_invalid_harms_no_other_workload(
    coordinator: CoordinatorInProcess, running: RunningAgent, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.announce(bad, "good")
    assert front_after(coordinator, "good").profiled_modes == 0
    assert {front.workload.name for front in coordinator.fronts} == {"good"}
    (said,) = [record.getMessage() for record in caplog.records if "invalid workload" in record.getMessage()]
    assert len(said) < 400 and said.isprintable()
    assert not running.has_ended and coordinator.is_ready()


def measured_by_another(workload: str, seed: int) -> session_pb2.MeasuredUnit:
    """Measurements of another unit of the running agent's kind of board, which is ten times as slow."""
    board = SimulatedDevice("orin-nano", seed)
    modes = board.modes[:: len(board.modes) // 12]
    minibatch_ms, power_mw = board.truth(modes)
    rows = zip(array_to_modes(modes), (10 * minibatch_ms).tolist(), power_mw.tolist(), strict=True)
    return session_pb2.MeasuredUnit(
        workload=workload, modes=[measured_to_message(Measurement(*row, batch=16)) for row in rows]
    )


def test_a_device_plans_with_what_others_of_its_kind_have_measured(
    coordinator: CoordinatorInProcess, running: RunningAgent, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.announce("digits")
    alone = front_from_message(front_after(coordinator, "digits").front)
    invalid = session_pb2.MeasuredUnit(workload="digits", modes=[session_pb2.MeasuredMode(minibatch_ms=-1)])
    coordinator.announce("digits", measured=[invalid, *(measured_by_another("digits", seed) for seed in (70, 71))])
    until(lambda: len(coordinator.fronts) > 1)
    together = front_from_message(front_after(coordinator, "digits").front)
    assert together.epoch_s.min() > 3 * alone.epoch_s.min()
    assert front_after(coordinator, "digits").profiled_modes == 0
    assert "invalid measurements of another device" in caplog.text


@pytest.mark.parametrize("bad", ["x" * 10_000, "bell\x07"])
def test_a_grant_of_an_invalid_workload_is_refused_and_the_next_one_trains(
    coordinator: CoordinatorInProcess, running: RunningAgent, bad: str
) -> None:
    coordinator.announce("good")
    mode = fastest_affordable(front_after(coordinator, "good"))
    with pytest.raises(AgentUnreachableError, match="granted no watts"):
        running.round("bad", mode, workload=bad)
    assert running.round("good", mode, workload="good")
    until(coordinator.is_ready)


def test_the_least_used_workloads_are_removed_and_the_coordinator_is_told(
    coordinator: CoordinatorInProcess, running: RunningAgent
) -> None:
    coordinator.announce("trained")
    mode = fastest_affordable(front_after(coordinator, "trained"))
    assert running.round("a", mode, lambda: trains(Loader(300, 16)), workload="trained")
    coordinator.announce("second", "third")
    front_after(coordinator, "third")
    coordinator.announce("third", "fourth")
    front_after(coordinator, "fourth")
    until(lambda: coordinator.removed == ["second"])
    left = {path.name for path in (running.settings.device.state_dir / "workloads").iterdir()}
    assert left == {folder_name(name) for name in ("trained", "third", "fourth")}
    assert len(journal_of(running, "trained")) > 1
    # It is announced again, and starts from scratch.
    coordinator.reports.clear()
    coordinator.announce("second")
    assert front_after(coordinator, "second").profiled_modes == 0


def test_the_length_of_an_earlier_installation_counts_for_no_other_workload(
    coordinator: CoordinatorInProcess, tmp_path: Path
) -> None:
    with ready_agent(coordinator, tmp_path, new_board(), modes_first=None, minibatches_per_epoch=500):
        coordinator.announce("vision")
        assert not front_after(coordinator, "vision").HasField("minibatches_per_epoch")


def test_an_ordered_measurement_is_reported_under_the_workloads_name(
    coordinator: CoordinatorInProcess, running: RunningAgent
) -> None:
    coordinator.send(profile=order("vision", "resnet18", MODES))
    until(lambda: (front := coordinator.front_of("vision")) is not None and front.profiled_modes == MODES)
    until(coordinator.is_ready)
    assert session_pb2.DEVICE_STATE_PROFILING in coordinator.states
    assert any("'vision', as the coordinator has ordered" in detail for detail in coordinator.details)


@pytest.mark.parametrize(
    ("synthetic", "modes", "why"),
    [
        ("os:abort", MODES, "is not a workload that ships with the agent: use one of resnet18"),
        ("x" * 10_000, MODES, "is not a workload that ships with the agent"),
        ("bell\x07", MODES, "is not a workload that ships with the agent"),
        ("resnet18", 0, "modes must be 1 to"),
        ("resnet18", 2**31, "modes must be 1 to"),
    ],
)
def test_an_order_that_must_not_be_carried_out_is_logged(
    coordinator: CoordinatorInProcess,
    running: RunningAgent,
    caplog: pytest.LogCaptureFixture,
    synthetic: str,
    modes: int,
    why: str,
) -> None:
    coordinator.send(profile=order("vision", synthetic, modes))
    coordinator.announce("good")
    front_after(coordinator, "good")
    (said,) = [record.getMessage() for record in caplog.records if "invalid order" in record.getMessage()]
    assert why in said and len(said) < 400 and said.isprintable()
    assert coordinator.front_of("vision") is None and coordinator.is_ready()


def test_a_workload_that_was_never_announced_trains_and_is_reported(
    coordinator: CoordinatorInProcess, running: RunningAgent
) -> None:
    coordinator.announce("known")
    mode = fastest_affordable(front_after(coordinator, "known"))
    assert running.round("a", mode, lambda: trains(Loader(300, 16)), workload="surprise")
    until(lambda: coordinator.front_of("surprise") is not None)
    assert front_after(coordinator, "surprise").minibatches_per_epoch == 300
    assert not front_after(coordinator, "known").HasField("minibatches_per_epoch")


def test_a_loader_without_a_length_is_measured_and_its_whole_trainings_are_observed(
    coordinator: CoordinatorInProcess, running: RunningAgent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    coordinator.announce("stream")
    mode = fastest_affordable(front_after(coordinator, "stream"))
    for number in range(4):
        assert running.round(f"{number}", mode, lambda: trains(Endless(600, 16)), workload="stream")
    report = front_after(coordinator, "stream")
    assert report.profiled_modes == MODES
    assert report.minibatches_per_epoch == pytest.approx(100, rel=0.1), "a virtual board trains so many unreported ones"
    assert "no data loader with a length (`len(loader)`), so whole trainings are learned from" in caplog.text
    assert any(row.get("kind") == "round" for row in journal_of(running, "stream"))


def test_an_app_that_never_measures_a_mode_is_told_why_and_so_is_the_coordinator(
    coordinator: CoordinatorInProcess, running: RunningAgent, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.announce("plain", "short")
    mode = fastest_affordable(front_after(coordinator, "plain"))
    front_after(coordinator, "short")
    whys = {
        ("plain", lambda: None): "the app has reported no data loader, so whole trainings are learned from",
        (
            "plain",
            lambda: list(until_deadline(Loader(50, 16))),
        ): "the app has reported no minibatches, so whole trainings are learned from",
        ("short", lambda: trains(Loader(10, 16))): "a training of 10 minibatches is too short to measure one",
    }
    for number, ((workload, train), why) in enumerate(whys.items()):
        assert running.round(f"{number}", mode, train, workload=workload)
        until(lambda why=why: coordinator.details[-1].startswith(f"parked; no mode measured yet: {why}"))
        assert coordinator.is_ready()
        assert f"no mode of {workload} measured yet: {why}" in caplog.text
    assert running.round("3", mode, lambda: trains(Loader(300, 16)), workload="plain")
    until(lambda: coordinator.details[-1] == "parked")


def test_a_restarted_agent_counts_the_modes_that_it_has_measured(
    coordinator: CoordinatorInProcess, tmp_path: Path
) -> None:
    more = {"modes_first": None, "minibatches_per_epoch": None}
    with ready_agent(coordinator, tmp_path, new_board(), **more) as running:
        coordinator.announce("kept")
        mode = fastest_affordable(front_after(coordinator, "kept"))
        assert running.round("0", mode, lambda: trains(Loader(300, 16)), workload="kept")
        until(lambda: front_after(coordinator, "kept").profiled_modes > 0)
        measured = front_after(coordinator, "kept").profiled_modes
    with ready_agent(coordinator, tmp_path, new_board(), **more):
        [state] = [report.state for report in coordinator.reports if report.HasField("state")][-1:]
        assert state.profiled_modes == measured


def test_a_run_may_change_its_batch(coordinator: CoordinatorInProcess, running: RunningAgent) -> None:
    coordinator.announce("grown")
    mode = fastest_affordable(front_after(coordinator, "grown"))
    for number, batch in enumerate((16, 16, 16, 512, 512, 512)):
        assert running.round(f"{number}", mode, lambda batch=batch: trains(Loader(400, batch)), workload="grown")
        until(coordinator.is_ready)
        if number == 2:
            before = front_after(coordinator, "grown")
    after = front_after(coordinator, "grown")
    assert (before.workload.batch, after.workload.batch) == (16, 512)
    # Thirty-two times the samples take several times longer.
    assert front_from_message(after.front).one_epoch_s[0] > 4 * front_from_message(before.front).one_epoch_s[0]
    _, *rows = journal_of(running, "grown")
    assert {row["batch"] or 16 for row in rows if "batch" in row} == {16, 512}


def test_an_ordered_measurement_that_fails_leaves_a_device_that_trains(
    coordinator: CoordinatorInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise InvalidInputError("torch is not installed")

    board = new_board()
    more = {"modes_first": None, "minibatches_per_epoch": None}
    with ready_agent(coordinator, tmp_path, board, retry_s=0.05, **more) as running:
        coordinator.announce("vision")
        mode = fastest_affordable(front_after(coordinator, "vision"))
        with monkeypatch.context() as patch:
            patch.setattr(board, "step", fails)
            coordinator.send(profile=order("other", "resnet18", MODES))
            until(lambda: any("torch is not installed" in detail for detail in coordinator.details))
            until(coordinator.is_ready)
        assert running.round("a", mode, lambda: trains(Loader(300, 16)), workload="vision")
        until(coordinator.is_ready)


def test_modes_that_are_measured_first_keep_the_device_from_rounds_of_other_fronts(
    coordinator: CoordinatorInProcess, tmp_path: Path
) -> None:
    with ready_agent(coordinator, tmp_path, new_board(), modes_first=10_000, minibatches_per_epoch=None):
        coordinator.announce("vision")
        assert front_after(coordinator, "vision").profiled_modes == MODES, "the coordinator asks for no more"
        until(coordinator.is_ready)
        assert "" not in {front.workload.name for front in coordinator.fronts}
        # Another run begins: the device takes part in rounds of the measured workload.
        before = coordinator.states.count(session_pb2.DEVICE_STATE_PROFILING)
        coordinator.announce("vision", "built-in")
        coordinator.announce("vision", "text")
        assert front_after(coordinator, "text").profiled_modes == MODES
        until(coordinator.is_ready)
        details = [detail for detail in coordinator.details if detail.startswith("measuring the workload")]
        assert details == [
            "measuring the workload 'vision' before its first round",
            "measuring the workload 'text' before its first round",
        ]
        assert coordinator.states.count(session_pb2.DEVICE_STATE_PROFILING) > before
