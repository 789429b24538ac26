"""A simulation: its apps, options, duties and processes, how long it takes, what ends it, and its report's figures."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.devices.selection import open_virtual_board
from edge_agent.devices.virtual.simulated import SpanFile
from edge_agent.paths import SERVED_FILE
from edge_agent.serving.device_turns import ServedSpan
from tests.fakes.polling import until
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import MAX_BATCH_OPTIONS, PowerMode
from wattfleet.simulation.devices import FleetDevice
from wattfleet.simulation.fleet import FleetParts
from wattfleet.simulation.flower import environment
from wattfleet.simulation.report import duties_of
from wattfleet.simulation.report_figures import device_styles, point_labels
from wattfleet.simulation.run import Forecast, Stage, duties_named, left_text, require_kept
from wattfleet.simulation.settings import DEFAULT_APPS, SimulatedApp, SimulationSettings, apps_named
from wattfleet.simulation.simulate import terminable

# --- Apps named -------------------------------------------------------------------------------------------------------
# The apps that the option `--app` names.


@pytest.mark.parametrize(
    ("text", "apps"),
    [
        ("perceptron:32", [("perceptron", 32, ())]),
        ("perceptron:16/32/64", [("perceptron", 16, (32, 64))]),
        ("perceptron:64/16", [("perceptron", 64, (16,))]),
        ("convolutional:8/16+perceptron:32", [("convolutional", 8, (16,)), ("perceptron", 32, ())]),
    ],
)
def test_the_first_size_is_the_apps_own(text: str, apps: list[tuple[str, int, tuple[int, ...]]]) -> None:
    named = apps_named(text)
    assert named == tuple(SimulatedApp(*app) for app in apps)
    assert "+".join(map(str, named)) == text, "reports name an app as it was asked for"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("perceptron:16/", "write network:minibatch size"),
        ("perceptron:/16", "write network:minibatch size"),
        ("perceptron:16/many", "write network:minibatch size"),
        ("perceptron:16/-32", "write network:minibatch size"),
        ("perceptron:16,32", "write network:minibatch size"),
        ("perceptron:16/0", "at least 1 sample, not 0"),
        ("perceptron:16/32/16", "perceptron:16/32/16"),
        ("transformer:16/32", "unknown network 'transformer'"),
    ],
)
def test_sizes_that_cannot_be_are_refused(text: str, error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        apps_named(text)


def test_more_sizes_than_a_plan_can_choose_from_are_refused() -> None:
    with pytest.raises(InvalidInputError):
        apps_named(f"perceptron:{'/'.join(map(str, range(1, MAX_BATCH_OPTIONS + 2)))}")


# --- Coordinator options ----------------------------------------------------------------------------------------------
# A simulated fleet starts its coordinator with the options of the simulation.


class StartedError(Exception):
    """Raised instead of starting a process."""


class NoProcesses:
    """A starter that raises an error with the command instead of running it."""

    def start(self, name: str, command: Sequence[str], *_: Any) -> None:
        raise StartedError(" ".join(command))


def settings(policy: str, deadline_s: float | None, clients: int | None = None) -> SimulationSettings:
    return SimulationSettings(
        devices=[FleetDevice("nano-0", "simulated:orin-nano", 0, 0, None)],
        apps=DEFAULT_APPS,
        rounds=1,
        site_budget_w=50.0,
        profile_modes=5,
        policy=policy,
        clients=clients,
        seed=0,
        reference="agx_orin_resnet18",
        metrics_port=0,
        deadline_s=deadline_s,
    )


def command_of(simulated: SimulationSettings, scratch: Path) -> str:
    with pytest.raises(StartedError) as started:
        FleetParts(NoProcesses(), simulated, scratch).start_coordinator("127.0.0.1:1")  # type: ignore[arg-type]
    return str(started.value)


def test_the_policy_and_its_options_reach_the_coordinator(tmp_path: Path) -> None:
    assert "--policy deadline" in (command := command_of(settings("deadline", 62.5), tmp_path / "a"))
    assert command.endswith("--deadline-s 62.5") and "--clients" not in command
    other = command_of(settings("fastest-k", None, clients=2), tmp_path / "b")
    assert "--clients 2" in other and "--deadline-s" not in other


def test_a_deadline_is_asked_for_before_anything_starts() -> None:
    with pytest.raises(InvalidInputError, match="pass it as --deadline-s"):
        settings("deadline", None)


# --- Duties -----------------------------------------------------------------------------------------------------------
# Whether the boards of a simulated fleet can keep their duties, and how the report shows them.

MODE = PowerMode(4, 1190400, 306000000, 665600000)


def require(duty: str) -> None:
    device = FleetDevice("orin-nano-0", "simulated:orin-nano", 1, 0, duty)
    require_kept([device], {"orin-nano-0": open_virtual_board(device.spec, device.seed)})


def test_a_latency_that_no_mode_keeps_is_refused_with_the_lowest_that_would_do() -> None:
    with pytest.raises(InvalidInputError, match="--duty mobilenetv3:60:5: orin-nano-0: no mode answers") as refused:
        require("mobilenetv3:60:5")
    lowest = re.search(r"allow at least (\d+) ms", str(refused.value))
    assert lowest is not None
    require(f"mobilenetv3:60:{int(lowest[1]) + 1}")
    with pytest.raises(InvalidInputError, match="no mode answers"):
        require(f"mobilenetv3:60:{int(lowest[1]) - 2}")


def test_more_requests_than_a_board_answers_are_refused_with_the_most_that_would_do() -> None:
    with pytest.raises(InvalidInputError, match=r"send at most [\d.]+ a second"):
        require("resnet:5000:500")


def test_a_replayed_board_has_no_duty(tmp_path: Path) -> None:
    file = tmp_path / "board.csv"
    file.write_text("cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw\n4,1190400,306000000,665600000,462.3,10931\n")
    device = FleetDevice("replay-0", f"replay:{file}", 0, 0, "resnet:5:500")
    with pytest.raises(InvalidInputError, match="replay-0: a replayed board has no inference measurements"):
        require_kept([device], {"replay-0": open_virtual_board(device.spec, 0)})
    require_kept([FleetDevice("replay-0", device.spec, 0, 0)], {})


def test_the_option_is_named_where_a_duty_is_refused() -> None:
    assert [duty.workload for duty in duties_named(["resnet:5:500", "mobilenetv3:5:500"])] == ["resnet", "mobilenetv3"]
    with pytest.raises(InvalidInputError, match="--duty: there are no measurements of the inference of 'vgg'"):
        duties_named(["resnet:5:500", "vgg:5:500"])


def span(begin_s: float, latencies_ms: list[float], minibatches: int = 0) -> ServedSpan:
    """Ten seconds in which a request arrives every second."""
    arrival_s = [begin_s + k for k in range(len(latencies_ms))]
    ends_s = (begin_s + 10 * (np.arange(minibatches) + 1) / max(1, minibatches)).tolist()
    return ServedSpan(begin_s, begin_s + 10, MODE, 64, minibatches > 0, 9e3, arrival_s, latencies_ms, ends_s)


def test_the_report_has_latencies_and_training_on_one_time_axis(tmp_path: Path) -> None:
    file = SpanFile(tmp_path / SERVED_FILE, ServedSpan)
    for each in (span(100, [20] * 10), span(110, [20] * 10), span(120, [400, 600, *[300] * 8], 20), span(900, [30])):
        file.append(each)
    part = {"device": "a", "predicted_epoch_s": 12.0, "observed_epoch_s": 10.0, "length_assumed": False}
    assumed = part | {"observed_epoch_s": 1.0, "length_assumed": True}
    runs = [{"rounds": [{"assignments": [part, assumed, part | {"device": "b"}]}]}]
    (duty,) = duties_of([FleetDevice("a", "", 0, 0, "resnet:1:500")], {"a": tmp_path}, runs).values()

    assert (duty["requests"], duty["missed"]) == (31, 1)
    assert duty["in_time_share"] == pytest.approx(30 / 31)
    assert duty["beside_training"]["p50_ms"] == 300
    assert duty["at_rest"]["p99_ms"] == pytest.approx(28, abs=2)
    assert (duty["minibatches"], duty["training_s"], duty["rest_s"]) == (20, 10, 30)
    assert (duty["training_of_plan"], duty["observed_trainings"]) == (1.2, 1)
    spans = [(each["begin_s"], each["end_s"], each["is_training"]) for each in duty["spans"]]
    assert spans == [(100, 120, False), (120, 130, True), (900, 910, False)]
    series, late = duty["series"], duty["late"]
    assert late == {"at_s": [121.0], "latency_ms": [600.0]}
    assert series["at_s"][0] == pytest.approx(100 + series["width_s"] / 2)
    assert sum(series["minibatches_per_s"]) * series["width_s"] == pytest.approx(20, rel=1e-3)
    during = [value for at_s, value in zip(series["at_s"], series["p50_ms"], strict=True) if 140 < at_s < 890]
    assert set(during) == {None}
    known = [(at_s, value) for at_s, value in zip(series["at_s"], series["p95_ms"], strict=True) if value is not None]
    assert max(known, key=lambda each: each[1])[0] == pytest.approx(121, abs=series["width_s"])


def test_boards_without_duties_are_not_in_the_report(tmp_path: Path) -> None:
    assert duties_of([FleetDevice("a", "", 0, 0)], {"a": tmp_path}, []) == {}


# --- Environment ------------------------------------------------------------------------------------------------------
# The environment that processes of a simulated fleet inherit from the user.


def test_nothing_of_the_users_own_fleet_reaches_the_simulated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own = (
        "WATTFLEET_COORDINATOR",
        "WATTFLEET_COORDINATOR_STORE_KEEP_DAYS",
        "WATTFLEET_COORDINATOR_DEVICES_TAG",
        "WATTFLEET_AGENT_SESSION_COORDINATOR",
        "WATTFLEET_IDENTITY",
        "WATTFLEET_INSECURE",
        "WATTFLEET_SUPERNODE",
    )
    for name in (*own, "WATTFLEET_CONFIG", "WATTFLEET_LOG_FORMAT"):
        monkeypatch.setenv(name, "set")
    found = environment({"FLWR_HOME": "home"})
    assert not set(own) & set(found)
    assert found["WATTFLEET_CONFIG"] == "", "no settings file, not even the usual one"
    assert (found["WATTFLEET_LOG_FORMAT"], found["FLWR_HOME"]) == ("set", "home")


# --- Forecast ---------------------------------------------------------------------------------------------------------
# How long a simulation still takes.

START_S = sum(stage.usual_s(2) for stage in Stage)


def test_at_first_the_usual_times_count_down_and_a_slow_stage_delays_the_rest() -> None:
    forecast = Forecast(devices=2, rounds=3, together=[1], now_s=100.0)
    at_first_s = forecast.left_s(100.0)
    runs_s = at_first_s - START_S
    assert runs_s > 0
    assert forecast.left_s(103.0) == pytest.approx(at_first_s - 3.0)
    assert forecast.left_s(900.0) == pytest.approx(at_first_s - Stage.COORDINATOR.usual_s(2))
    forecast.begin(Stage.FLOWER, 900.0)
    forecast.begin(Stage.IDLE_POWER, 1000.0)
    forecast.begin(Stage.IDLE_POWER, 1001.0)
    assert forecast.left_s(1002.0) == pytest.approx(Stage.IDLE_POWER.usual_s(2) - 2.0 + runs_s)


def test_later_the_rounds_of_this_simulation_count() -> None:
    forecast = Forecast(devices=2, rounds=3, together=[1, 2])
    forecast.begin_group(0, 50.0)
    forecast.note_rounds([], 0, 60.0)
    forecast.note_rounds([30.0], 0, 80.0)
    forecast.note_rounds([30.0, 35.0], 1, 130.0)  # a round takes 50 s
    before_first_plan_s = forecast.left_s(130.0) - (2 * 50.0 + 3 * 2 * 50.0)
    assert 0 < before_first_plan_s < 60.0, "of the second group, whose two apps share the boards"
    assert forecast.left_s(140.0) == pytest.approx(forecast.left_s(130.0) - 10.0)
    forecast.note_rounds([30.0, 35.0, 35.0], 3, 320.0)  # 80 s in the mean
    assert forecast.left_s(320.0) == pytest.approx(before_first_plan_s + 3 * 2 * 80.0)
    forecast.begin_group(1, 330.0)
    forecast.note_rounds([30.0], 0, 350.0)
    assert forecast.left_s(350.0) == pytest.approx(3 * 2 * 80.0)
    forecast.note_rounds([30.0, 30.0, 30.0], 3, 950.0)
    assert forecast.left_s(960.0) == 0


def test_a_round_that_takes_longer_than_expected_delays_the_later_ones() -> None:
    forecast = Forecast(devices=2, rounds=3, together=[1])
    forecast.begin_group(0, 0.0)
    forecast.note_rounds([90.0], 0, 20.0)
    assert forecast.left_s(20.0) == pytest.approx(3 * 90.0), "as planned, since no round has ended"
    assert forecast.left_s(50.0) == pytest.approx(3 * 90.0 - 30.0)
    assert forecast.left_s(320.0) == pytest.approx(2 * 300.0)
    forecast.note_rounds([90.0, 90.0], 1, 340.0)
    assert forecast.left_s(340.0) == pytest.approx(2 * 320.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "almost done"), (23.0, "about 20 s left"), (55.1, "about 60 s left"), (140.0, "about 2 min left")],
)
def test_an_estimate_is_stated_with_its_precision(seconds: float, text: str) -> None:
    assert left_text(seconds) == text


# --- The end of a simulation ------------------------------------------------------------------------------------------
# What ends `wattfleet simulate`.

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(params=SIGNALS)
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal whose handling is the same after the test as before."""
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_ends_it_as_ctrl_c_does(number: signal.Signals) -> None:
    signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt), terminable():
        os.kill(os.getpid(), number)


def test_a_signal_during_a_call_of_grpc_ends_it_once_the_call_has_ended(number: signal.Signals) -> None:
    signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    ended: list[bool] = []
    scope = {"__name__": "grpc._channel", "send": lambda: os.kill(os.getpid(), number)}
    exec("def call():\n    send()\n    return True", scope)
    with pytest.raises(KeyboardInterrupt), terminable():
        ended.append(scope["call"]())  # type: ignore[operator]
        until(lambda: False)
    assert ended == [True], "an exception in it would leave gRPC's locks held"


def test_a_signal_that_was_ignored_at_the_start_does_not_end_it(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with terminable():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is signal.SIG_IGN


# --- Device styles ----------------------------------------------------------------------------------------------------
# Colours and marks of devices in the report's figures.


def test_every_device_of_a_large_fleet_looks_different() -> None:
    assert len(set(device_styles(f"device-{k}" for k in range(64)).values())) == 64


# --- Point labels -----------------------------------------------------------------------------------------------------
# Labels of points in a figure that would overprint each other.


def test_labels_of_near_points_are_one_and_of_far_ones_several() -> None:
    near = {("a", 100.0, 20.0): [1, 3], ("b", 110.0, 19.5): [2], ("c", 5000.0, 5.0): [4]}
    assert point_labels(near) == ["", "<b>rounds 1–3</b>", "<b>round 4</b>"]
