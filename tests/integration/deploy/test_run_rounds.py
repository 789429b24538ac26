"""The one-shot service that runs the rounds: it waits for the fleet, and exits with the result of Flower's run."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from wattfleet_proto.v1 import planning_pb2, session_pb2, view_pb2
from wattfleet_simulation.flower import NoAnswerError, PartFailedError
from wattfleet_simulation.run import NotInTimeError, RunSeen, await_ready, await_run, require_observed

READY, PROFILING = session_pb2.DEVICE_STATE_READY, session_pb2.DEVICE_STATE_PROFILING


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[3] / "deploy" / "image" / "run_rounds.py"))


class RecordedView:
    """A coordinator that returns recorded responses in order, and then repeats the last one."""

    def __init__(
        self,
        runs: list[RunSeen] | None = None,
        fleets: list[list[view_pb2.DeviceView]] | None = None,
    ) -> None:
        self._runs = runs or []
        self._fleets = fleets or []

    def run(self, run_id: str) -> RunSeen:
        recorded = self._runs.pop(0) if len(self._runs) > 1 else self._runs[0]
        return recorded if recorded.run.run_id == run_id else RunSeen()

    def devices(self) -> list[view_pb2.DeviceView]:
        return self._fleets.pop(0) if len(self._fleets) > 1 else self._fleets[0]


def answers(*results: bool | PartFailedError) -> Callable[[str], bool]:
    """Flower's responses, one after the other."""
    remaining = list(results)

    def completed(run_id: str) -> bool:
        assert run_id == "7"
        result = remaining.pop(0)
        if isinstance(result, PartFailedError):
            raise result
        return result

    return completed


@dataclass
class Flower:
    """Flower's command line with recorded responses."""

    completed: Callable[[str], bool]


def wait(view: Any, flower: Callable[[str], bool], on_poll: Callable[[RunSeen], None] = lambda _: None) -> None:
    await_run(view, "7", flower, 60.0, 0.0, on_poll, ask_flower_every_s=1e6)


def ended_round(number: int, **more: Any) -> view_pb2.RoundView:
    plan = planning_pb2.PlanRoundResponse(
        assignments=[planning_pb2.Assignment(device_id=name) for name in ("agx-orin-0", "orin-nx-0")],
        duration_s=96.4,
        site_budget_w=100,
    )
    return view_pb2.RoundView(round=number, plan=plan, wall_s=9.0, metrics={"accuracy": 0.442}, device_count=2, **more)


def run(*rounds: view_pb2.RoundView, run_id: str = "7", **more: Any) -> RunSeen:
    return RunSeen(view_pb2.RunView(run_id=run_id, **more), rounds)


def test_every_round_is_told_once_even_the_last(script: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    first = ended_round(1, observed_site_w=96.16, observed_duration_s=98.3)
    view = RecordedView([run(), run(first), run(first), run(first, ended_round(2), finished=True)])
    wait(view, answers(False, True), script["RoundPrinter"]())
    assert capsys.readouterr().out.splitlines() == [
        "round 1: agx-orin-0, orin-nx-0; 96.2 W of 100 W; 98 s, predicted 96 s; accuracy 44.2%",
        "round 2: agx-orin-0, orin-nx-0; accuracy 44.2%",
    ]


def test_a_slow_answer_of_flower_ends_nothing(script: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    silent = NoAnswerError("flwr list did not answer within 120 s")
    flower = Flower(answers(silent, silent, True))
    view: Any = RecordedView([run(), run(finished=True)])
    await_run(view, "7", lambda run_id: script["completed"](flower, view, run_id), 60.0, 0.0, ask_flower_every_s=-1.0)
    assert capsys.readouterr().out == 2 * "flwr list did not answer within 120 s; asking again\n"


def test_an_earlier_run_is_not_taken_for_this_one(script: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    earlier = run(ended_round(1), run_id="6", finished=True, error="an old failure")
    wait(RecordedView([earlier, earlier, run(finished=True)]), answers(True), script["RoundPrinter"]())
    assert capsys.readouterr().out == ""


def test_a_failed_run_fails_with_the_coordinators_reason(script: dict[str, Any]) -> None:
    failure = PartFailedError("the Flower run ended as 'finished:failed'")
    # Flower may report the end before the coordinator is queried again.
    view = RecordedView([run(), run(error="PlanningError: 20 W cannot carry one device")])
    view.run("7")
    with pytest.raises(PartFailedError, match="finished:failed'.*20 W cannot carry one device"):
        script["completed"](Flower(answers(failure)), view, "7")


def test_a_reason_that_comes_with_flowers_answer_is_told() -> None:
    # The run fails after the coordinator was queried, and before Flower is.
    view = RecordedView([run(), run(error="PlanningError: 20 W cannot carry one device", finished=True)])

    def tell(seen: RunSeen) -> None:
        if seen.run.error:
            raise PartFailedError(f"the Flower run failed: {seen.run.error}")

    with pytest.raises(PartFailedError, match="failed: .*20 W cannot carry one device"):
        await_run(view, "7", answers(PartFailedError("ended")), 60.0, 0.0, tell, ask_flower_every_s=-1.0)  # type: ignore[arg-type]


def test_a_run_that_never_reached_the_coordinator_shows_flowers_log(script: dict[str, Any]) -> None:
    shown: list[str] = []
    script["explained"].__globals__["print_log"] = shown.append
    failure = PartFailedError("the Flower run ended as 'finished:failed'")
    with pytest.raises(PartFailedError, match="finished:failed'.*log above"):
        script["completed"](Flower(answers(failure)), RecordedView([run(run_id="")]), "7")
    assert shown == ["7"]


def test_a_log_that_does_not_end_hides_no_reason(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hanging = tmp_path / "flwr"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    names = script["print_log"].__globals__
    monkeypatch.setitem(names, "program", lambda name: str(hanging))
    monkeypatch.setitem(names, "LOG_WITHIN_S", 0.01)
    failure = PartFailedError("the Flower run ended as 'finished:failed'")
    with pytest.raises(PartFailedError, match="finished:failed"):
        script["completed"](Flower(answers(failure)), RecordedView([run(run_id="")]), "7")
    assert "flwr log did not end within 0.01 s" in capsys.readouterr().out


def test_a_completed_run_in_which_nobody_trained_is_a_failure() -> None:
    one_failed = ended_round(1, failed_device_ids=["agx-orin-0"])
    all_failed = ended_round(2, failed_device_ids=["agx-orin-0", "orin-nx-0"])
    wait(RecordedView([run(one_failed, finished=True)]), answers(True))
    with pytest.raises(PartFailedError, match="no device trained in round 2: see the logs of agx-orin-0, orin-nx-0"):
        wait(RecordedView([run(one_failed, all_failed, finished=True)]), answers(True))


def test_a_simulation_fails_if_too_few_rounds_have_an_observation() -> None:
    def simulated(*rounds: view_pb2.RoundView) -> None:
        view: Any = RecordedView([run(*rounds, finished=True)])
        await_run(view, "7", answers(True), 60.0, 0.0, check=require_observed)

    observed = ended_round(1, observations=[view_pb2.DeviceObservation(device_id="agx-orin-0")])
    # The second round was spent measuring modes, so there was nothing left to observe.
    simulated(observed, ended_round(2))
    with pytest.raises(PartFailedError, match="no device's training was observed in rounds 2–3"):
        simulated(observed, ended_round(2), ended_round(3))
    with pytest.raises(PartFailedError, match="no device trained in round 2"):
        simulated(observed, ended_round(2, failed_device_ids=["agx-orin-0", "orin-nx-0"]))


def test_the_rounds_wait_for_the_whole_fleet() -> None:
    def fleet(*states: session_pb2.DeviceState.ValueType) -> list[view_pb2.DeviceView]:
        return [view_pb2.DeviceView(device_id=f"orin-nx-{k}", state=state) for k, state in enumerate(states)]

    view = RecordedView(fleets=[fleet(), fleet(READY), fleet(READY, PROFILING), fleet(READY, READY)])
    await_ready(view, 2, 60.0, 0.0)  # type: ignore[arg-type]
    assert view.devices() == fleet(READY, READY)

    with pytest.raises(NotInTimeError, match="orin-nx-1 profiling"):
        await_ready(RecordedView(fleets=[fleet(READY, PROFILING)]), 2, 0.0, 0.0)  # type: ignore[arg-type]


def test_a_wait_says_for_whom_and_ends_without_them(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = script["await_devices"].__globals__
    monkeypatch.setitem(names, "POLL_S", 0.0)
    offline = view_pb2.DeviceView(device_id="orin-nx-1", state=session_pb2.DEVICE_STATE_OFFLINE)
    ready = view_pb2.DeviceView(device_id="orin-nx-0", state=READY)
    waits = "ready; waiting up to 0 s for the others"
    script["await_devices"](RecordedView(fleets=[[], [ready], [ready], [ready, offline]]), 3, 0.05)
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"0 of 3 devices are {waits}: 3 not enrolled",
        f"1 of 3 devices are {waits}: 2 not enrolled",
        f"1 of 3 devices are {waits}: orin-nx-1 offline, 1 not enrolled",
        "not all of 3 devices were ready within 0.05 s: orin-nx-1 offline, 1 not enrolled. The run starts with 1 of"
        " them; the others join when they are ready",
    ]
    monkeypatch.setitem(names, "REPEATED_AFTER_S", 0.0)
    script["await_devices"](RecordedView(fleets=[[ready, offline], [ready, offline], [ready, ready]]), 2, 60.0)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 3 and told[0] == told[1].replace("59 s", "60 s") and told[2] == "all 2 devices are ready"
    with pytest.raises(NotInTimeError, match="orin-nx-1 offline"):
        script["await_devices"](RecordedView(fleets=[[offline]]), 1, 0.0)


def test_a_run_that_does_not_end_is_given_up() -> None:
    with pytest.raises(NotInTimeError, match="the Flower run did not end within 0 s"):
        await_run(RecordedView([run()]), "7", answers(), 0.0, 0.0)  # type: ignore[arg-type]
