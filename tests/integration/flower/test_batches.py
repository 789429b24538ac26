"""Minibatches of a training: of the size that a plan has chosen, and larger than it was granted for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message
from torch.utils.data import DataLoader, TensorDataset

from edge_agent.devices.selection import open_virtual_board
from edge_agent.learning.fitting import Fitted, Fitting
from edge_agent.learning.fitting_process import FittingFailedError
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.runtime.readiness import parked_mode
from tests.fakes.agent_socket import APP, MODE, Agent, agent_at, answered, assigned, context, granted
from tests.fakes.fittings import POWER_LOG_SD, BatchFitting, Table
from tests.fakes.polling import until
from wattfleet.core.choosing import Front, SamplingSettings
from wattfleet.core.modes import BatchOptions, ModeArray, PowerMode, Profile, Workload, WorkloadFacts, array_to_modes
from wattfleet.flower import planned_loader, power_mode_mod, profiled, until_deadline
from wattfleet_proto.assignment import CUT_KEY, RECORD_KEY, WORK_KEY, AssignedWork
from wattfleet_proto.convert import front_from_message
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc, session_pb2

# --- Planned batches --------------------------------------------------------------------------------------------------
# Trainings with the batch size that a plan has chosen, from the mod to the agent's next front.


MODES = array_to_modes(open_virtual_board("simulated:orin-nano", 1).modes)
# A batch of 64 needs twice the samples of a batch of 16 to reach the same accuracy.
OPTIONS = BatchOptions((16, 32, 64), (0.5, 0.75, 1.0))
WORKLOAD = Workload(APP, WorkloadFacts(batch=16), OPTIONS)
SAMPLES = 96  # six minibatches of 16, or three of 64 that are trained twice


def planned_watts(mode: PowerMode, batch: int) -> float:
    return 4.0 + 2.0 * (1 + batch / 64) * mode.gpu_hz / MODE.gpu_hz


@pytest.fixture
def choosing_agent(tmp_path: Path) -> Iterator[Agent]:
    """An agent with a workload whose batch size a plan may choose."""
    batches = (*OPTIONS.batches, 48)
    table = Table(
        {batch: np.array([1e10 * batch**0.3 / mode.gpu_hz for mode in MODES]) for batch in batches},
        {batch: np.array([1e3 * planned_watts(mode, batch) for mode in MODES]) for batch in batches},
    )
    with agent_at(tmp_path / "agent.sock", open_fitting=table.opener()) as running:
        running.learner.announced(WORKLOAD)
        running.learner.refit()
        yield running


def grant_of(choosing_agent: Agent, batch: int, plan_id: str = "7/1", grant_id: int = 2) -> None:
    """Grant a round in which a plan has chosen a batch size."""
    message: session_pb2.Grant = granted(MODE, 1.05 * planned_watts(MODE, batch), plan_id, grant_id)
    message.batch = batch
    choosing_agent.grant(message)


def train(
    choosing_agent: Agent, batch: int, app: Callable[[Message, Context], Message], plan_id: str = "7/1"
) -> Message:
    request = assigned(plan_id=plan_id)
    work = AssignedWork(batch, lr_scale=batch / 16, passes=OPTIONS.relative_to(16, batch))
    request.content[WORK_KEY] = ConfigRecord(work.to_record())
    return power_mode_mod(request, context(**{"agent-socket": str(choosing_agent.socket)}), app)


def loader() -> Any:
    return profiled(planned_loader(TensorDataset(torch.arange(SAMPLES)), 16))


def offered(choosing_agent: Agent) -> set[int]:
    """The batch sizes of the newest front that the agent has reported."""
    return batches_of(front_from_message(choosing_agent.reports.fronts[-1].front))


def batches_of(front: Front) -> set[int]:
    return set() if front.batch is None else set(front.batch.tolist())


def test_a_training_in_the_planned_batch_and_mode_is_observed(choosing_agent: Agent) -> None:
    during: list[PowerMode] = []
    sizes: list[int] = []

    def app(request: Message, where: Context) -> Message:
        for (samples,) in loader():
            sizes.append(len(samples))
            during.append(choosing_agent.board.current_mode())
        return answered(request, where)

    grant_of(choosing_agent, 64)
    assert not train(choosing_agent, 64, app).has_error()
    assert sizes == [64, 64, 64], "two passes"
    assert set(during) == {MODE}
    assert (choosing_agent.learner.known.workload.facts.batch, choosing_agent.learner.minibatches_per_epoch) == (64, 3)
    assert choosing_agent.learner.known.reported_minibatches == 3
    [observed] = choosing_agent.reports.observations
    assert observed.plan_id == "7/1"
    assert offered(choosing_agent) == set(OPTIONS.batches)


def test_rounds_with_different_batches_follow_each_other(
    choosing_agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    def app(request: Message, where: Context) -> Message:
        list(loader())
        return answered(request, where)

    for number, batch in enumerate((64, 16, 32, 16), 1):
        grant_of(choosing_agent, batch, f"7/{number}", grant_id=1 + number)
        assert not train(choosing_agent, batch, app, f"7/{number}").has_error()
        assert choosing_agent.learner.known.workload.facts.batch == batch
        assert offered(choosing_agent) == set(OPTIONS.batches)
    assert len(choosing_agent.reports.observations) == 4
    assert "will not choose a batch size" not in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("NvMapMemAllocInternalTagged: 1075072515 error 12: Out of Memory"),
        MemoryError(),
    ],
    ids=["torch", "board", "host"],
)
def test_a_batch_that_does_not_fit_is_not_offered_again(choosing_agent: Agent, error: Exception) -> None:
    def app(request: Message, where: Context) -> Message:
        for _ in loader():
            raise error
        raise AssertionError("unreachable")

    grant_of(choosing_agent, 64)
    with pytest.raises(type(error)):
        train(choosing_agent, 64, app)
    assert choosing_agent.board.current_mode() == parked_mode(choosing_agent.board)
    assert choosing_agent.reports.observations == []
    assert batches_of(choosing_agent.learner.predicted_front()[0]) == {16, 32}
    choosing_agent.learner.announced(WORKLOAD)  # as after a reconnection
    assert choosing_agent.learner.known.offered_batches == (16, 32)


def test_smaller_batches_train_after_one_that_does_not_fit(choosing_agent: Agent) -> None:
    def app(request: Message, where: Context) -> Message:
        for (samples,) in loader():
            if len(samples) > 16:
                raise MemoryError
        return answered(request, where)

    for number, (batch, left) in enumerate([(64, {16, 32}), (32, {16})], 1):
        grant_of(choosing_agent, batch, f"7/{number}", grant_id=1 + number)
        with pytest.raises(MemoryError):
            train(choosing_agent, batch, app, f"7/{number}")
        assert batches_of(choosing_agent.learner.predicted_front()[0]) == left
    grant_of(choosing_agent, 16, "7/3", grant_id=9)
    assert not train(choosing_agent, 16, app, "7/3").has_error()
    assert [observed.plan_id for observed in choosing_agent.reports.observations] == ["7/3"]


@pytest.mark.parametrize("has_begun", [False, True], ids=["before the first minibatch", "during the first minibatch"])
def test_the_coordinator_is_told_that_a_batch_does_not_fit(choosing_agent: Agent, has_begun: bool) -> None:
    def app(request: Message, where: Context) -> Message:
        minibatches = loader()
        if has_begun:
            next(iter(minibatches))
        raise torch.OutOfMemoryError("CUDA out of memory")

    grant_of(choosing_agent, 64)
    with pytest.raises(torch.OutOfMemoryError):
        train(choosing_agent, 64, app)
    assert offered(choosing_agent) == {16, 32}


@pytest.mark.parametrize("ends", ["with an exception", "with an error"])
def test_a_training_that_fails_otherwise_leaves_all_batches(choosing_agent: Agent, ends: str) -> None:
    def app(request: Message, where: Context) -> Message:
        list(loader())
        if ends == "with an error":
            return Message(Error(2, "no data"), reply_to=request)
        raise ValueError("the data are damaged")

    grant_of(choosing_agent, 64)
    if ends == "with an error":
        assert train(choosing_agent, 64, app).has_error()
    else:
        with pytest.raises(ValueError, match="damaged"):
            train(choosing_agent, 64, app)
    assert choosing_agent.learner.known.workload.batches == OPTIONS


def test_an_app_that_ignores_its_batch_is_kept_within_its_watts(choosing_agent: Agent) -> None:
    """It was granted the power for 16 samples, and trains with 64."""
    during: list[PowerMode] = []

    def app(request: Message, where: Context) -> Message:
        for _ in profiled(DataLoader(TensorDataset(torch.arange(SAMPLES)), 64)):
            during.append(choosing_agent.board.current_mode())
        return answered(request, where)

    grant_of(choosing_agent, 16)
    train(choosing_agent, 16, app)
    assert all(planned_watts(mode, 64) <= 1.05 * planned_watts(MODE, 16) for mode in during)
    assert offered(choosing_agent) == set(), "it trains with its own batch"


# --- Larger batch -----------------------------------------------------------------------------------------------------
# A training whose app uses larger minibatches than it was planned and granted for.

MOST_GPU_HZ = max(mode.gpu_hz for mode in MODES)
CERTAIN = 1.6449 * POWER_LOG_SD  # logarithm of the 95 % quantile, from a table of the normal distribution
HARDLY_LESS_CERTAIN = 1.5548 * POWER_LOG_SD  # of the 94 % quantile


def watts(mode: PowerMode, batch: int) -> float:
    """The median power, in watts, that the agent predicts in these tests."""
    return 4.0 + 4.0 * (batch / 16) * mode.gpu_hz / MOST_GPU_HZ


def certain_watts(mode: PowerMode, batch: int) -> float:
    return watts(mode, batch) * float(np.exp(CERTAIN))


GRANTED_W = certain_watts(MODE, 16) + 1e-3


@dataclass
class Loader:
    """A data loader of an app."""

    batch_size: int
    num_workers: int = 2
    minibatches: int = 6

    def __len__(self) -> int:
        return self.minibatches

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.minibatches))


@dataclass
class Fittings:
    """Opens fittings to the batch size of a workload, and records them."""

    measures: bool = False
    fits: list[int | None] = field(default_factory=list)
    error: Exception | None = None
    may_end: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_end.set()

    @contextmanager
    def __call__(self, known: KnownWorkload) -> Iterator[Fitting]:
        batch = known.workload.facts.batch
        modes = open_virtual_board("simulated:orin-nano", 1).modes
        power_mw = np.array([1e3 * watts(mode, batch or 16) for mode in MODES])
        minibatch_ms = np.array([1e11 / mode.gpu_hz for mode in MODES])
        yield self.Noted(modes, power_mw, minibatch_ms, self.measures, self, batch)

    @dataclass
    class Noted(BatchFitting):
        fittings: Fittings | None = None
        batch: int | None = None

        def fit(self, profile: Profile, measured_modes: int) -> Fitted:
            assert self.fittings is not None
            assert self.fittings.may_end.wait(30)
            if self.fittings.error is not None:
                raise self.fittings.error
            self.fittings.fits.append(self.batch)
            return super().fit(profile, measured_modes)

        def next_modes(self, profile: Profile, settings: SamplingSettings, exclude: ModeArray) -> ModeArray:
            return super().next_modes(profile, settings, exclude)[::-1]  # not the first one of the front


@pytest.fixture
def fittings() -> Fittings:
    return Fittings()


@pytest.fixture
def agent(tmp_path: Path, fittings: Fittings) -> Iterator[Agent]:
    with agent_at(tmp_path / "agent.sock", open_fitting=fittings) as running:
        fittings.fits.clear()
        running.grant(granted(power_limit_w=GRANTED_W))
        yield running


def train_with(agent: Agent, work: Callable[[], object]) -> Message:
    def train(request: Message, _: Context) -> Message:
        work()
        return answered(request, _)

    return power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)


def reported_watts(agent: Agent) -> list[float]:
    """The median power, in watts, of the fastest mode of each reported front."""
    return [report.front.points[0].power_w for report in agent.reports.fronts]


def most_watts(batch: int) -> float:
    return max(watts(mode, batch) for mode in MODES)


def test_a_larger_batch_is_trained_in_the_fastest_mode_within_the_grant(
    agent: Agent, fittings: Fittings, caplog: pytest.LogCaptureFixture
) -> None:
    during: list[PowerMode] = []

    def work() -> None:
        during.extend(agent.board.current_mode() for _ in profiled(Loader(32)))
        assert reported_watts(agent) == [pytest.approx(most_watts(32))], "the next plan may be made at any time"

    assert not train_with(agent, work).has_error()
    assert len(set(during)) == 1
    fastest_hz = max(mode.gpu_hz for mode in MODES if certain_watts(mode, 32) <= GRANTED_W)
    assert during[0].gpu_hz == fastest_hz < MODE.gpu_hz
    assert certain_watts(during[0], 32) <= GRANTED_W
    assert f"training continues at {during[0].label()} instead of {MODE.label()}" in caplog.text
    assert "the app's minibatches of 32 samples may draw more than the" in caplog.text
    assert agent.reports.observations == [], "it would count for the planned mode"
    assert fittings.fits == [32, 32], "once for the batch, and once after the round"
    assert agent.board.current_mode() == parked_mode(agent.board)


@pytest.mark.parametrize(
    ("loader", "limit_w"),
    [
        (Loader(32), certain_watts(MODE, 32) + 1e-3),
        (Loader(32), watts(MODE, 32) * float(np.exp(HARDLY_LESS_CERTAIN))),
        (Loader(8), certain_watts(MODE, 16)),
        (Loader(16, num_workers=4), certain_watts(MODE, 16)),
        (Loader(16), certain_watts(MODE, 16)),
    ],
    ids=["enough watts", "hardly more than planned", "smaller", "other workers", "as planned"],
)
def test_the_granted_mode_stays_in_force(agent: Agent, loader: Loader, limit_w: float) -> None:
    during: list[PowerMode] = []
    agent.grant(granted(power_limit_w=limit_w, grant_id=2))
    train_with(agent, lambda: during.extend(agent.board.current_mode() for _ in profiled(loader)))
    assert set(during) == {MODE}
    assert len(agent.reports.observations) == 1


def test_a_mode_that_is_less_certain_than_93_pct_is_lowered(agent: Agent) -> None:
    during: list[PowerMode] = []
    limit_w = watts(MODE, 32) * float(np.exp(1.4 * POWER_LOG_SD))  # the 91.9 % quantile
    agent.grant(granted(power_limit_w=limit_w, grant_id=2))
    train_with(agent, lambda: during.extend(agent.board.current_mode() for _ in profiled(Loader(32))))
    assert MODE not in during and max(certain_watts(mode, 32) for mode in during) <= limit_w


def test_modes_measured_after_that_keep_within_the_grant(agent: Agent, fittings: Fittings) -> None:
    fittings.measures = True
    during: set[PowerMode] = set()

    def work() -> None:
        for _ in profiled(Loader(32, minibatches=50)):
            during.add(agent.board.current_mode())
            break
        during.add(agent.board.current_mode())

    train_with(agent, work)
    assert len(during) > 1, "modes were measured"
    assert max(certain_watts(mode, 32) for mode in during) <= GRANTED_W


def test_a_batch_that_no_mode_keeps_within_the_grant_ends_the_training(agent: Agent) -> None:
    seen: list[int] = []

    def work() -> None:
        for batch in until_deadline(profiled(Loader(10_000))):
            until(lambda: agent.board.current_mode() == parked_mode(agent.board))
            seen.append(batch)

    reply = train_with(agent, work)
    assert reply.content[RECORD_KEY][CUT_KEY] is True
    assert len(seen) <= 2
    assert agent.reports.observations == []
    assert reported_watts(agent)[0] == pytest.approx(most_watts(10_000))


def test_the_app_learns_why_its_training_stops(agent: Agent) -> None:
    with streamed(agent) as stream:
        stream.send(loader=local_pb2.LoaderSeen(batch=10_000))
        assert stream.answer().stop.reason == (
            f"no power mode keeps the app's minibatches of 10,000 samples within the {GRANTED_W:.1f} W granted:"
            " the next round is planned for them"
        )
        assert agent.board.current_mode() == parked_mode(agent.board)
        stream.send(finish=local_pb2.FinishTraining(epochs_done=0.01))
        assert stream.answer().HasField("finished")


@pytest.mark.parametrize("ends", ["with an error", "with an exception"])
def test_the_next_plan_counts_the_batch_of_an_app_that_failed(agent: Agent, ends: str) -> None:
    def train(request: Message, _: Context) -> Message:
        list(profiled(Loader(32)))
        if ends == "with an exception":
            raise MemoryError("out of memory")
        return Message(Error(2, "no data"), reply_to=request)

    try:
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    except MemoryError:
        pass
    assert reported_watts(agent)[-1:] == [pytest.approx(most_watts(32))]


def test_the_next_plan_counts_the_batch_of_an_app_that_was_killed(agent: Agent, fittings: Fittings) -> None:
    fittings.may_end.clear()
    with streamed(agent) as stream:
        stream.send(loader=local_pb2.LoaderSeen(batch=32))
        until(lambda: agent.learner.is_outdated)
        stream.call.cancel()
        fittings.may_end.set()
        until(lambda: agent.board.current_mode() == parked_mode(agent.board))
        until(lambda: len(agent.reports.fronts) == 1)
    assert reported_watts(agent) == [pytest.approx(most_watts(32))]


def test_a_grant_that_was_planned_for_the_batch_before_continues_in_a_lower_mode(agent: Agent) -> None:
    slower = max((mode for mode in MODES if mode.gpu_hz < MODE.gpu_hz), key=lambda mode: mode.gpu_hz)
    limit_w = certain_watts(slower, 16) + 1e-3
    assert watts(slower, 32) > limit_w
    agent.grant(granted(power_limit_w=2 * GRANTED_W, grant_id=2))
    with streamed(agent) as stream:
        stream.send(loader=local_pb2.LoaderSeen(batch=32))
        until(lambda: len(agent.reports.fronts) == 1)
        assert agent.board.current_mode() == MODE
        agent.grant(granted(slower, power_limit_w=limit_w, grant_id=3))
        until(lambda: agent.board.current_mode() != MODE)
        fastest_hz = max(mode.gpu_hz for mode in MODES if certain_watts(mode, 32) <= limit_w)
        assert agent.board.current_mode().gpu_hz == fastest_hz
        agent.grant(granted(slower, power_limit_w=3.0, grant_id=4))
        assert "within the 3.0 W granted" in stream.answer().stop.reason
        assert agent.board.current_mode() == parked_mode(agent.board)
        stream.send(finish=local_pb2.FinishTraining(epochs_done=0.5))
        assert stream.answer().HasField("finished")


def test_a_batch_whose_watts_cannot_be_predicted_is_not_trained(agent: Agent, fittings: Fittings) -> None:
    fittings.error = FittingFailedError("the fitting process was killed")
    with streamed(agent) as stream:
        stream.send(loader=local_pb2.LoaderSeen(batch=32))
        assert stream.answer().stop.reason == (
            "the watts of the app's minibatches of 32 samples cannot be predicted: the fitting process was killed"
        )
        assert agent.board.current_mode() == parked_mode(agent.board)
        fittings.error = None
        stream.send(finish=local_pb2.FinishTraining(epochs_done=0.5))
        assert stream.answer().HasField("finished")
    until(lambda: len(agent.reports.fronts) == 1)
    assert reported_watts(agent) == [pytest.approx(most_watts(32))]


def test_the_agent_answers_others_while_it_fits(agent: Agent, fittings: Fittings) -> None:
    fittings.may_end.clear()
    with streamed(agent) as stream:
        stream.send(loader=local_pb2.LoaderSeen(batch=32))
        until(lambda: agent.learner.is_outdated)
        with streamed(agent, is_refused=True) as other, pytest.raises(grpc.RpcError, match="is training already"):
            other.answer()
        fittings.may_end.set()
        stream.send(finish=local_pb2.FinishTraining())
        assert stream.answer().HasField("finished")


class Stream:
    """An app's stream to the agent, message by message."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: SimpleQueue[local_pb2.TrainRequest | None] = SimpleQueue()
        self.call: Any = local_pb2_grpc.LocalAgentServiceStub(channel).Train(iter(self._requests.get, None))

    def send(self, **body: Any) -> None:
        self._requests.put(local_pb2.TrainRequest(**body))

    def answer(self) -> local_pb2.TrainResponse:
        answer: local_pb2.TrainResponse = next(self.call)
        return answer

    def end(self) -> None:
        self._requests.put(None)


@contextmanager
def streamed(agent: Agent, is_refused: bool = False) -> Iterator[Stream]:
    """The stream of a training that has started, unless it is refused."""
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        stream = Stream(channel)
        stream.send(start=local_pb2.StartTraining(plan_id="7/1", device_id="orin-nano-0", epochs=1.0))
        if not is_refused:
            assert stream.answer().HasField("started")
        try:
            yield stream
        finally:
            stream.end()
