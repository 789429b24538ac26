"""What the coordinator learns about a run: its name, labels and workload, and that somebody stops it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from tests.fakes.flower_in_process import APP, GridOfNodes, PlannerStub, fleet, internal_server_error, run
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Task, Workload, WorkloadFacts
from wattfleet.flower import FedBuff, PowerAware
from wattfleet.flower.server import stopping
from wattfleet_proto.names import is_stopped
from wattfleet_proto.v1 import planning_pb2, power_pb2

# --- Run naming -------------------------------------------------------------------------------------------------------
# The name and the labels that a run gets at the coordinator.


SMALL_NETWORK = ArrayRecord([np.zeros((4, 2), np.float32)])


def started(config: Any = None, **options: Any) -> planning_pb2.StartRunRequest:
    """The request with which a run starts."""
    planner, grid = PlannerStub(), GridOfNodes({})
    grid.run_config = config or {}
    PowerAware(FedAvg(), planner, clock=grid.clock, **options).start(grid, SMALL_NETWORK, num_rounds=0)
    [request] = planner.asked("StartRun")
    asked: planning_pb2.StartRunRequest = request
    return asked


def test_without_a_name_the_coordinator_gets_the_app_to_name_the_run_after() -> None:
    request = started()
    assert (request.name, request.app, dict(request.labels)) == ("", APP, {})


def test_a_run_has_the_name_and_labels_of_its_author() -> None:
    request = started(run_name="night", labels={"site": "lab", "lr": 0.1, "warm": True})
    assert (request.name, dict(request.labels)) == ("night", {"site": "lab", "lr": "0.1", "warm": "True"})


def test_what_flwr_run_states_counts_more_than_the_app() -> None:
    config = {"run-name": "day", "run-labels": "site=roof gpu=1"}
    request = started(config, run_name="night", labels={"site": "lab", "lr": 0.1})
    assert (request.name, dict(request.labels)) == ("day", {"site": "roof", "gpu": "1", "lr": "0.1"})
    assert started({"run-name": "", "run-labels": ""}, run_name="night").name == "night"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run_name": "two words"}, "a run's name must have 1 to 60 printable characters"),
        ({"run_name": "17351"}, "not only digits, not '17351'"),
        ({"run_name": 7}, "run_name must be a text, not 7: leave it out"),
        ({"labels": {"a b": "c"}}, "the key of a label must have 1 to 40 printable characters"),
        ({"labels": {"a": None}}, "the label 'a' must have a text of 1 to 100 printable characters, not None"),
        ({"labels": ["site=lab"]}, "labels must be a dictionary such as"),
        ({"labels": {str(k): "v" for k in range(17)}}, "a run has at most 16 labels, not 17"),
    ],
)
def test_a_wrong_name_or_label_is_refused_where_the_app_states_it(options: Any, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        PowerAware(FedAvg(), PlannerStub(), **options)


@pytest.mark.parametrize("config", [{"run-name": "two words"}, {"run-labels": "lab"}, {"run-name": 7}])
def test_a_wrong_run_config_ends_the_app_before_the_run_starts(config: Any) -> None:
    with pytest.raises(InvalidInputError, match="a run's name must|a label is written as"):
        started(config)


def test_the_app_logs_what_its_run_is_called(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(self: PlannerStub, request: Any, **_: Any) -> planning_pb2.StartRunResponse:
        return planning_pb2.StartRunResponse(name="digits-0714-1532")

    monkeypatch.setattr(PlannerStub, "StartRun", named, raising=False)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    planner, grid = PlannerStub(), GridOfNodes({})
    with caplog.at_level(logging.INFO, "flwr"):
        PowerAware(FedAvg(), planner, clock=grid.clock).start(grid, SMALL_NETWORK, num_rounds=0)
    assert "is called digits-0714-1532 at the coordinator" in caplog.text


# --- Workload naming --------------------------------------------------------------------------------------------------
# The description of a run's workload that the coordinator gets.


def layers(*widths: int, dtype: type = np.float32) -> ArrayRecord:
    """A dense network."""
    return ArrayRecord([np.zeros((m, n), dtype) for m, n in zip(widths, widths[1:], strict=False)])


NETWORK = layers(64, 32, 10)


def told(arrays: ArrayRecord = NETWORK, config: Any = None, strategy: Any = None, **options: Any) -> power_pb2.Workload:
    """The workload that a run states when it starts."""
    planner, grid = PlannerStub(), GridOfNodes({})
    grid.run_config = config or {}
    PowerAware(strategy or FedAvg(), planner, clock=grid.clock, **options).start(grid, arrays, num_rounds=0)
    [started] = planner.asked("StartRun")
    workload: power_pb2.Workload = started.workload
    return workload


def test_a_run_without_a_name_is_named_after_the_app_and_its_network() -> None:
    workload = told()
    app, digest = workload.name.split(" #")
    assert app == APP
    assert len(digest) == 8 and int(digest, 16) >= 0
    assert workload.parameters == 64 * 32 + 32 * 10
    assert workload.task == power_pb2.TASK_TRAINING


def test_the_same_app_with_another_batch_is_the_same_workload() -> None:
    assert told().name == told(config={"batch-size": 64, "learning-rate": 0.1, "num-server-rounds": 7}).name


def test_two_apps_of_one_name_with_other_networks_are_told_apart() -> None:
    networks = [NETWORK, layers(64, 16, 10), layers(64, 32, 10, 10), layers(64, 32, 10, dtype=np.float16)]
    renamed = ArrayRecord({f"layer{name}": array for name, array in NETWORK.items()})
    names = [told(network).name for network in [*networks, renamed]]
    assert len(set(names)) == 5
    assert {name.split(" #")[0] for name in names} == {APP}


def test_weights_do_not_change_the_workload() -> None:
    trained = ArrayRecord([array + 1 for array in NETWORK.to_numpy_ndarrays()])
    assert told(trained).name == told().name


@pytest.mark.parametrize("key", ["model", "image-size", "image_size", "sequence_length", "precision"])
def test_a_run_config_key_that_changes_the_work_makes_another_workload(key: str) -> None:
    first, second = told(config={key: 1}).name, told(config={key: 2}).name
    assert first.startswith(f"{APP} {key.replace('_', '-')}=1 #")
    assert first != second != told().name


def test_the_order_of_the_run_config_does_not_matter() -> None:
    assert told(config={"model": "r", "dataset": "d"}).name == told(config={"dataset": "d", "model": "r"}).name


def test_the_app_may_list_its_own_keys() -> None:
    config = {"depth": 3, "model": "resnet"}
    assert told(config=config, workload_keys=("depth",)).name.startswith(f"{APP} depth=3 #")


def test_the_app_may_name_its_workload() -> None:
    assert told(workload="resnet18-imagenet").name == "resnet18-imagenet"
    stated = told(workload=Workload("bert", WorkloadFacts(batch=32, parameters=110e6, precision="bfloat16")))
    assert (stated.name, stated.batch, stated.parameters, stated.precision) == ("bert", 32, 110e6, "bfloat16")


def test_fedbuff_runs_state_their_workload() -> None:
    assert told(strategy=FedBuff(2)).name == told().name


def test_a_network_without_arrays_states_no_number_of_parameters() -> None:
    assert not told(ArrayRecord()).HasField("parameters")


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ("", "1 to 200 printable characters, not ''"),
        ("resnet\x1b[31m", "printable characters, not 'resnet"),
        ("x" * 10_000, "not one of 10,000 characters: give it a shorter or plainer name"),
        (18, "must be a name or a wattfleet.core.modes.Workload, not 18"),
        (Workload("w", WorkloadFacts(Task.INFERENCE)), "'w' is inference, but a Flower app trains"),
    ],
)
def test_a_workload_that_cannot_be_used_is_refused_at_once(stated: Any, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason.replace("[", r"\[")) as refused:
        told(workload=stated)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("value", ["x" * 10_000, "res\nnet", "\u202e18"])
def test_a_run_config_that_names_no_workload_is_refused_with_the_remedy(value: str) -> None:
    planner, grid = PlannerStub(), GridOfNodes({})
    grid.run_config = {"model": value}
    with pytest.raises(InvalidInputError, match=r"State it in the app: PowerAware\(strategy, workload='...'\)") as no:
        PowerAware(FedAvg(), planner).start(grid, NETWORK)
    assert len(str(no.value)) < 500
    assert planner.calls == [], "nothing was started"
    assert told(config={"model": value}, workload="digits").name == "digits"


def test_a_single_text_as_keys_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"a sequence of keys, such as \('model',\)"):
        told(workload_keys="model")


# --- Stopped runs -----------------------------------------------------------------------------------------------------
# What the coordinator learns about a run that somebody stops.

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
BY_SUPERLINK = "stopped by Flower's SuperLink, as after `flwr stop`"


class RunNotRunningException(Exception):  # noqa: N818 - named by Flower
    """What Flower raises if the SuperLink answers that the run has ended."""


def refused(path: str = "/v1/runtime/pull-messages") -> httpx.HTTPStatusError:
    """Flower's error after `flwr stop`, when the SuperLink does not accept the run's token any more."""
    error = internal_server_error("pull-messages")
    request = httpx.Request("POST", f"http://127.0.0.1:8000{path}")
    response = httpx.Response(401, request=request)
    return httpx.HTTPStatusError("401 Unauthorized", request=error.request, response=response)


class Serving:
    """A ServerApp's process, as Flower sets it up: a signal ends it, without an exception if this takes too long."""

    def __init__(self, planner: PlannerStub) -> None:
        self._planner = planner
        self.reported_before: list[str] = []

    def end(self, number: int, frame: FrameType | None) -> None:
        self.reported_before = ends(self._planner)
        raise SystemExit(0)


@pytest.fixture
def serving() -> Iterator[tuple[PlannerStub, Serving]]:
    planner = PlannerStub()
    process = Serving(planner)
    before = {number: signal.signal(number, process.end) for number in SIGNALS}
    try:
        yield planner, process
        assert all(signal.getsignal(number) == process.end for number in SIGNALS), "handlers are restored"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ends(planner: PlannerStub) -> list[str]:
    """Why the run has ended, as it was reported to the coordinator."""
    return [each.error for each in planner.asked("FinishRun")]


class StoppedGrid(GridOfNodes):
    """Nodes of a run that is stopped while replies are awaited, after the first round.

    Attributes:
        stop: stops the run.
        is_over: whether the SuperLink refuses requests.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__(fleet())
        self.stop = stop
        self.is_over = False

    def get_node_ids(self) -> Iterable[int]:
        if self.is_over:
            raise refused("/v1/runtime/get-nodes")
        return super().get_node_ids()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = super().pull_messages(message_ids)
        if len(self.trainings()) > 4:
            self.stop()
        return replies


def stop_at_superlink() -> None:
    """As Flower's grid does when the SuperLink refuses a request."""
    try:
        raise refused()
    except httpx.HTTPStatusError:
        signal.raise_signal(signal.SIGINT)


def test_flwr_stop_is_recorded_as_a_stop(serving: tuple[PlannerStub, Serving]) -> None:
    planner, process = serving
    with pytest.raises(SystemExit):
        run(StoppedGrid(stop_at_superlink), planner, rounds=3)
    assert ends(planner) == [BY_SUPERLINK]
    assert process.reported_before == [BY_SUPERLINK], "Flower may end the process before an exception gets through"
    assert is_stopped(BY_SUPERLINK)


def test_a_stop_that_a_heartbeat_notices_is_recorded_alike(serving: tuple[PlannerStub, Serving]) -> None:
    planner, _ = serving

    def stop() -> None:
        grid.is_over = True
        signal.raise_signal(signal.SIGINT)

    grid = StoppedGrid(stop)
    with pytest.raises(SystemExit):
        run(grid, planner, rounds=3)
    assert ends(planner) == [BY_SUPERLINK]


@pytest.mark.parametrize("is_over", [True, False])
def test_an_error_of_a_request_that_a_stop_interrupts_is_recorded_as_a_stop(is_over: bool) -> None:
    """When `flwr stop` comes while a message is pushed, the session of the message ends, too."""
    planner = PlannerStub()

    def fail() -> None:
        grid.is_over = is_over
        raise ObjectPushError("97c5", "12184", "fc36")

    grid = StoppedGrid(fail)
    with pytest.raises(ObjectPushError):
        run(grid, planner, rounds=3)
    [recorded] = ends(planner)
    assert recorded == BY_SUPERLINK if is_over else recorded.startswith("ObjectPushError: ")


def test_a_superlink_that_ends_is_recorded(
    serving: tuple[PlannerStub, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner, process = serving

    def stop() -> None:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit):
        run(StoppedGrid(stop), planner, rounds=3)
    assert ends(planner) == process.reported_before == ["stopped because Flower's SuperLink ended"]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_to_the_serverapp_is_recorded(serving: tuple[PlannerStub, Serving], number: signal.Signals) -> None:
    planner, process = serving
    with pytest.raises(SystemExit):
        run(StoppedGrid(lambda: signal.raise_signal(number)), planner, rounds=3)
    assert ends(planner) == process.reported_before == [f"stopped by {number.name}, which its ServerApp got"]


def test_a_coordinator_that_does_not_answer_delays_the_end_by_seconds(
    serving: tuple[PlannerStub, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, process = serving
    released = threading.Event()

    class Hanging(PlannerStub):
        def __getattr__(self, method: str) -> Callable[..., Any]:
            if method == "FinishRun" and threading.current_thread() is not threading.main_thread():
                released.wait(60.0)
            return super().__getattr__(method)

    monkeypatch.setattr(stopping, "_REPORTED_WITHIN_S", 0.01)
    planner = Hanging()
    try:
        with pytest.raises(SystemExit):
            run(StoppedGrid(lambda: signal.raise_signal(signal.SIGTERM)), planner, rounds=3)
        assert ends(planner) == ["stopped with its ServerApp"], "reported once more, when the exception got through"
    finally:
        released.set()


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (ValueError("a shape is wrong"), "ValueError: a shape is wrong"),
        (SystemExit(3), "SystemExit: 3"),
        (SystemExit(0), "stopped with its ServerApp"),
        (KeyboardInterrupt(), "stopped with its ServerApp"),
        (RunNotRunningException(), BY_SUPERLINK),
        (refused("/data/part-3"), "HTTPStatusError: 401 Unauthorized"),
    ],
    ids=str,
)
def test_an_error_is_no_stop_unless_it_comes_from_one(error: BaseException, recorded: str) -> None:
    planner = PlannerStub()

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        run(StoppedGrid(fail), planner, rounds=3)
    assert ends(planner) == [recorded]


def test_in_another_thread_no_handler_is_changed() -> None:
    planner = PlannerStub()
    before = [signal.getsignal(number) for number in SIGNALS]
    seen: list[Any] = []
    grid = StoppedGrid(lambda: seen.append([signal.getsignal(number) for number in SIGNALS]))
    thread = threading.Thread(target=lambda: run(grid, planner, rounds=2))
    thread.start()
    thread.join()
    assert seen and seen[0] == before
    assert ends(planner) == [""]
