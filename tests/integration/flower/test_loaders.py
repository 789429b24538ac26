"""An app's data loaders against a real agent socket: profiled by themselves or by the app, and until a deadline."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from edge_agent.runtime.readiness import parked_mode
from tests.fakes.agent_socket import (
    MODE,
    Agent,
    RecordingAgent,
    answered,
    assigned,
    context,
    granted,
    message,
    recording_agent,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode, array_to_modes, modes_to_array
from wattfleet.flower import AgentUnreachableError, power_mode_mod, profiled, until_deadline
from wattfleet.flower.client.agent_training import CURRENT_TRAINING
from wattfleet_proto.assignment import (
    APP_WEIGHS_KEY,
    CUT_KEY,
    OBSERVED_EPOCH_S_KEY,
    OBSERVED_POWER_W_KEY,
    RECORD_KEY,
    SHARE_KEY,
    UNPROFILED_KEY,
    RoundAssignment,
)
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import local_pb2

# --- Automatic profiling ----------------------------------------------------------------------------------------------
# Training with torch is profiled without a change of the app, and other uses of loaders are not.


BATCHES, BATCH = 50, 4


@pytest.fixture
def observed_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingAgent]:
    # Every minibatch is reported: they take no time here, so the usual half second would never pass.
    monkeypatch.setattr("wattfleet.flower.client.loaders._REPORT_INTERVAL_S", 0.0)
    iterate = DataLoader.__iter__
    with recording_agent(tmp_path / "agent.sock") as running:
        yield running
    assert DataLoader.__iter__ is iterate, "torch is as it was"


class Trainer:
    """A network with one weight, and a loader of its data."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.loader = DataLoader(TensorDataset(torch.arange(float(BATCHES * BATCH))[:, None] / 200), batch_size=BATCH)
        self.seen: list[float] = []

    def step(self, batch: list[torch.Tensor]) -> None:
        self.seen += batch[0].flatten().tolist()
        self.optimizer.zero_grad()
        self.net(batch[0]).mean().backward()
        self.optimizer.step()

    def epoch(self, loader: Any = None) -> None:
        for batch in self.loader if loader is None else loader:
            self.step(batch)


def train(observed_agent: RecordingAgent, work: Callable[[], object], **node_config: Any) -> str | None:
    """Train as an app, and return why its reply says that no mode was measured; None if it does not say so."""

    def app(request: Message, _: Context) -> Message:
        work()
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(observed_agent.socket), **node_config}), app)
    assert not reply.has_error()
    return reply.content.get(RECORD_KEY, {}).get(UNPROFILED_KEY)  # type: ignore[no-any-return]


def test_a_reply_says_why_a_training_was_not_profiled(
    observed_agent: RecordingAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    batches = list(trainer.loader)
    wrap = "wrap the loader in `wattfleet.flower.profiled`"
    assert train(observed_agent, trainer.epoch) is None
    assert train(observed_agent, lambda: trainer.epoch(profiled(batches)), **{"auto-profile": False}) is None
    assert (
        train(observed_agent, trainer.epoch, **{"auto-profile": False})
        == f"auto-profile is false on its SuperNode: {wrap}"
    )
    short = DataLoader(trainer.loader.dataset, batch_size=50)
    assert train(observed_agent, lambda: trainer.epoch(short)) == (
        f"a pass over its data has only 4 minibatches: {wrap}, or use smaller batches"
    )
    assert str(train(observed_agent, lambda: trainer.epoch(batches))).startswith(
        "its minibatches come from no PyTorch DataLoad"
    )
    assert str(train(observed_agent, lambda: list(trainer.loader))).startswith(
        "no step of a PyTorch optimizer was seen. If the app has some, import"
    )
    monkeypatch.delitem(sys.modules, "torch")
    assert train(observed_agent, lambda: None) == (
        "its minibatches come from no DataLoader: whole trainings are learned from; if it has a loop over minibatches,"
        " wrap the loop's data in `wattfleet.flower.profiled`"
    )


def test_a_loop_over_a_dataloader_is_profiled_from_its_first_step(observed_agent: RecordingAgent) -> None:
    trainer = Trainer()
    train(observed_agent, trainer.epoch)
    assert trainer.seen == pytest.approx([k / 200 for k in range(BATCHES * BATCH)]), "no batch is lost"
    assert observed_agent.minibatches == BATCHES - 1
    assert [report.paused for report in observed_agent.reports] == [False] * BATCHES + [True]
    [seen] = observed_agent.loaders
    assert (seen.batch, seen.loader_workers, seen.minibatches_per_epoch) == (BATCH, 0, BATCHES)
    assert seen.after_minibatch


def test_a_loader_too_short_to_measure_a_mode_is_seen_but_not_profiled(observed_agent: RecordingAgent) -> None:
    trainer = Trainer()
    train(observed_agent, lambda: trainer.epoch(DataLoader(trainer.loader.dataset, batch_size=50)))
    assert [(seen.batch, seen.minibatches_per_epoch) for seen in observed_agent.loaders] == [(50, 4)]
    assert not observed_agent.reports
    assert len(trainer.seen) == BATCHES * BATCH


def test_a_short_loader_is_profiled_since_a_mode_is_measured_over_passes(observed_agent: RecordingAgent) -> None:
    trainer = Trainer()
    train(observed_agent, lambda: trainer.epoch(DataLoader(trainer.loader.dataset, batch_size=10)))
    assert observed_agent.reports


def test_it_learns_the_same_as_without(observed_agent: RecordingAgent) -> None:
    weights = []
    for profiles in (True, False):
        torch.manual_seed(0)
        trainer = Trainer()
        shuffled = DataLoader(trainer.loader.dataset, batch_size=BATCH, shuffle=True)
        train(observed_agent, lambda t=trainer, s=shuffled: t.epoch(s), **{"auto-profile": profiles})  # type: ignore[misc]
        weights.append((trainer.net.weight.item(), trainer.seen, torch.rand(1).item()))
    assert weights[0] == weights[1]


def test_evaluation_and_statistics_during_a_training_are_not_profiled(observed_agent: RecordingAgent) -> None:
    trainer = Trainer()

    def work() -> None:
        with torch.no_grad():
            for _ in trainer.loader:
                trainer.optimizer.step()  # whatever this step does
        for (batch,) in trainer.loader:  # computes the mean of the data, with gradients enabled
            batch.mean()

    train(observed_agent, work)
    assert observed_agent.requests and not observed_agent.reports and not observed_agent.loaders


def test_messages_without_an_assignment_are_not_profiled(observed_agent: RecordingAgent) -> None:
    Trainer().epoch()
    assert observed_agent.requests == []


def test_it_can_be_switched_off_for_a_node(observed_agent: RecordingAgent) -> None:
    train(observed_agent, Trainer().epoch, **{"auto-profile": False})
    assert observed_agent.requests and not observed_agent.reports and not observed_agent.loaders
    with pytest.raises(InvalidInputError, match="auto-profile must be true or false, not 'no'"):
        train(observed_agent, Trainer().epoch, **{"auto-profile": "no"})


@pytest.mark.parametrize("wrap", [profiled, lambda loader: until_deadline(profiled(loader))])
def test_a_loader_that_is_wrapped_already_is_profiled_once(observed_agent: RecordingAgent, wrap: Any) -> None:
    trainer = Trainer()
    train(observed_agent, lambda: trainer.epoch(wrap(trainer.loader)))
    assert observed_agent.minibatches == BATCHES
    assert [report.paused for report in observed_agent.reports].count(True) == 1
    assert len(observed_agent.loaders) == 1


def test_until_deadline_alone_is_profiled_as_well(observed_agent: RecordingAgent) -> None:
    trainer = Trainer()
    train(observed_agent, lambda: trainer.epoch(until_deadline(trainer.loader)))
    assert observed_agent.minibatches == BATCHES - 1
    assert [seen.batch for seen in observed_agent.loaders] == [BATCH]


def test_of_nested_loaders_only_the_outer_one_is_profiled(observed_agent: RecordingAgent) -> None:
    trainer = Trainer()

    def work() -> None:
        for batch in trainer.loader:
            trainer.step(batch)
            for inner in DataLoader(trainer.loader.dataset, batch_size=BATCH):
                trainer.step(inner)

    train(observed_agent, work)
    # During the first outer batch, the outer loop has not made a step yet, so the inner one is profiled.
    assert observed_agent.minibatches == 2 * (BATCHES - 1)


def test_loaders_read_side_by_side_are_profiled_once(observed_agent: RecordingAgent) -> None:
    trainer = Trainer()
    other = DataLoader(trainer.loader.dataset, batch_size=BATCH)

    def work() -> None:
        for batch, _ in zip(trainer.loader, other, strict=True):
            trainer.step(batch)

    train(observed_agent, work)
    assert observed_agent.minibatches == BATCHES - 1
    assert len(observed_agent.loaders) == 1


def test_a_loop_that_is_left_early_pauses_the_measuring(observed_agent: RecordingAgent) -> None:
    trainer = Trainer()

    def work() -> None:
        for k, batch in enumerate(trainer.loader):
            trainer.step(batch)
            if k == 3:
                break
        gc.collect()
        trainer.epoch()

    train(observed_agent, work)
    assert [report.paused for report in observed_agent.reports].count(True) == 2
    assert observed_agent.minibatches == 2 + BATCHES - 1, "the minibatch that was left is not reported"


def test_an_exception_in_the_loop_reaches_the_app_and_undoes_the_wrapping(observed_agent: RecordingAgent) -> None:
    trainer = Trainer()

    def work() -> None:
        for k, batch in enumerate(trainer.loader):
            trainer.step(batch)
            if k == 3:
                raise MemoryError("out of memory")

    with pytest.raises(MemoryError, match="out of memory"):
        train(observed_agent, work)
    assert observed_agent.requests[0][-1].finish.failed
    train(observed_agent, trainer.epoch)
    assert observed_agent.minibatches > BATCHES - 1, "the next training is profiled again"


def test_an_iterator_that_outlives_its_training_goes_on_without_the_agent(observed_agent: RecordingAgent) -> None:
    trainer, held = Trainer(), []

    def work() -> None:
        held.append(iter(trainer.loader))
        for _ in range(3):
            trainer.step(next(held[0]))

    train(observed_agent, work)
    reports = len(observed_agent.reports)
    assert len(list(held[0])) == BATCHES - 3
    assert len(observed_agent.reports) == reports


def test_a_loop_in_a_thread_of_the_app_is_left_alone(observed_agent: RecordingAgent) -> None:
    trainer = Trainer()

    def work() -> None:
        thread = threading.Thread(target=trainer.epoch)
        thread.start()
        thread.join()

    train(observed_agent, work)
    assert len(trainer.seen) == BATCHES * BATCH
    assert not observed_agent.reports


def test_overlapping_trainings_in_one_process_are_profiled_each(observed_agent: RecordingAgent) -> None:
    barrier = threading.Barrier(2)

    def work() -> None:
        barrier.wait(10)
        Trainer().epoch()

    threads = [threading.Thread(target=train, args=(observed_agent, work)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert observed_agent.minibatches == 2 * (BATCHES - 1)
    assert len(observed_agent.loaders) == 2


def test_a_loader_without_a_length_tells_nothing_of_it(observed_agent: RecordingAgent) -> None:
    class Stream(IterableDataset[list[torch.Tensor]]):
        def __iter__(self) -> Iterator[Any]:
            return iter([(torch.ones(1),)] * (BATCHES * BATCH))

    trainer = Trainer()
    train(observed_agent, lambda: trainer.epoch(DataLoader(Stream(), batch_size=BATCH, num_workers=0)))
    [seen] = observed_agent.loaders
    assert seen.batch == BATCH and not seen.HasField("minibatches_per_epoch")
    assert observed_agent.minibatches == BATCHES - 1


def test_an_agent_that_has_enough_is_not_sent_more(observed_agent: RecordingAgent) -> None:
    observed_agent.wants = 3
    trainer = Trainer()
    train(observed_agent, lambda: [trainer.epoch() for _ in range(2)])
    assert observed_agent.minibatches == 3


def test_torch_before_2_0_is_not_profiled(observed_agent: RecordingAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["torch.optim.optimizer"], "register_optimizer_step_post_hook")
    trainer = Trainer()
    train(observed_agent, trainer.epoch)
    assert len(trainer.seen) == BATCHES * BATCH and not observed_agent.reports


# --- Profiled loader --------------------------------------------------------------------------------------------------
# `profiled(loader)` against a real agent socket: modes are measured while the app trains.


def trains_on(batches: Any, seen: list[int], modes: list[PowerMode], agent: Agent) -> Any:
    def train(request: Message, _: Context) -> Message:
        for batch in profiled(batches):
            seen.append(batch)
            modes.append(agent.board.current_mode())
        modes.append(agent.board.current_mode())
        return answered(request, _)

    return train


def test_modes_are_measured_during_training_and_no_batch_is_lost(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every minibatch is reported: they take no time here, so the usual half second would never pass.
    monkeypatch.setattr("wattfleet.flower.client.loaders._REPORT_INTERVAL_S", 0.0)
    seen: list[int] = []
    modes: list[PowerMode] = []
    before = len(agent.journal.records)
    train = trains_on(range(800), seen, modes, agent)
    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert not reply.has_error()
    assert seen == list(range(800))
    measured = [record.mode for record in agent.journal.records[before:]]
    assert measured and set(measured) < set(modes)
    assert modes[-1] == MODE, "after the loader the assigned mode is in force again"
    assert agent.board.current_mode() == parked_mode(agent.board)
    # The rest of the training was in the assigned mode only.
    (observed,) = agent.reports.observations
    minibatch_ms, power_mw = agent.board.truth(modes_to_array([MODE]))
    assert observed.epoch_s == pytest.approx(len(seen) * minibatch_ms[0] / 1e3, rel=0.05)
    assert observed.power_w == pytest.approx(power_mw[0] / 1e3, rel=0.05)
    assert len(agent.reports.fronts) == 1


def test_modes_are_measured_while_torch_trains_without_a_change_of_the_app(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wattfleet.flower.client.loaders._REPORT_INTERVAL_S", 0.0)
    before = len(agent.journal.records)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    modes: list[PowerMode] = []

    def train(request: Message, _: Context) -> Message:
        for batch in DataLoader(torch.zeros(800, 1), batch_size=1):
            net(batch).sum().backward()
            optimizer.step()
            modes.append(agent.board.current_mode())
        modes.append(agent.board.current_mode())
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert not reply.has_error()
    measured = {record.mode for record in agent.journal.records[before:]}
    assert measured and measured < set(modes)
    assert modes[0] == modes[-1] == MODE


def test_no_mode_that_may_exceed_the_rounds_power_limit_is_measured(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wattfleet.flower.client.loaders._REPORT_INTERVAL_S", 0.0)
    front = agent.learner.predicted_front()[0]
    thriftiest = array_to_modes(front.modes)[int(np.argmin(front.power_w))]
    agent.grant(granted(thriftiest, 1.001 * float(np.min(front.power_w)), plan_id="7/2", grant_id=2))
    modes: list[PowerMode] = []
    train = trains_on(range(10), [], modes, agent)
    power_mode_mod(assigned(plan_id="7/2"), context(**{"agent-socket": str(agent.socket)}), train)
    assert set(modes) == {thriftiest}
    assert len(agent.reports.observations) == 1, "such a round is observed as any other"


def test_outside_a_planned_training_a_profiled_loader_only_passes_batches() -> None:
    assert list(profiled(range(3))) == [0, 1, 2]


def test_an_app_killed_while_modes_are_measured_leaves_the_device_parked(agent: Agent) -> None:
    def train(request: Message, _: Context) -> Message:
        for batch in profiled(range(100)):
            if batch == 3:
                assert agent.board.current_mode() != MODE
                raise MemoryError("out of memory")
        raise AssertionError("unreachable")

    with pytest.raises(MemoryError):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert agent.board.current_mode() == parked_mode(agent.board)
    agent.grant(granted(plan_id="7/2", grant_id=2))
    where = context(**{"agent-socket": str(agent.socket)})
    assert not power_mode_mod(assigned(plan_id="7/2"), where, answered).has_error()


@pytest.mark.parametrize(
    ("fetch_stall_ms", "reason"),
    [
        (-1.0, "fetch_stall_ms must be 0 or more"),
        (float("inf"), "fetch_stall_ms must be 0 or more"),
        (float("nan"), "fetch_stall_ms must be 0 or more"),
        (1e12, "1e.09 s of minibatches"),
        (5_000.0, "5.005 s of minibatches"),
    ],
)
def test_a_minibatch_of_impossible_times_is_refused(agent: Agent, fetch_stall_ms: float, reason: str) -> None:
    def train(request: Message, _: Context) -> Message:
        training = CURRENT_TRAINING.get()
        assert training is not None
        training.report([local_pb2.MinibatchTimes(fetch_stall_ms=fetch_stall_ms, compute_ms=5.0)], paused=False)
        raise AssertionError("unreachable")

    with pytest.raises(AgentUnreachableError, match=f"INVALID_ARGUMENT: {reason}"):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reporter.state is DeviceState.READY


# --- Deadline in training ---------------------------------------------------------------------------------------------
# `until_deadline(loader)` against a real agent socket.


def assigned_until(deadline_s: float | None, epochs: float = 1.0, plan_id: str = "7/1") -> Message:
    record = RoundAssignment(plan_id, "orin-nano-0", epochs, deadline_s=deadline_s).to_record()
    return message(RecordDict({RECORD_KEY: ConfigRecord(record)}))


def work_in(reply: Message) -> dict[str, object]:
    """The part of a reply that describes the work that was done."""
    left_out = ("observed-", UNPROFILED_KEY)
    return {key: value for key, value in reply.content[RECORD_KEY].items() if not key.startswith(left_out)}


def test_a_training_cut_by_its_deadline_is_reported_for_the_work_done(agent: Agent) -> None:
    seen: list[int] = []

    def train(request: Message, _: Context) -> Message:
        for _epoch in range(2):
            seen.extend(until_deadline(range(10)))
        return answered(request, _)

    where = context(**{"agent-socket": str(agent.socket)})
    whole = power_mode_mod(assigned_until(None, epochs=2.0), where, train)
    assert work_in(whole) == {CUT_KEY: False, APP_WEIGHS_KEY: False, SHARE_KEY: 1.0}
    assert seen == [*range(10), *range(10)]

    seen.clear()
    agent.grant(granted(plan_id="7/2", grant_id=2))
    cut = power_mode_mod(assigned_until(1e-9, 2.0, "7/2"), where, train)
    assert not cut.has_error()
    assert work_in(cut) == {CUT_KEY: True, APP_WEIGHS_KEY: False, SHARE_KEY: 0.05}
    assert seen == [0]
    # One minibatch on the simulated board is too short to sample its power.
    (only,) = agent.reports.observations
    assert whole.content[RECORD_KEY][OBSERVED_EPOCH_S_KEY] == only.epoch_s
    assert whole.content[RECORD_KEY][OBSERVED_POWER_W_KEY] == only.power_w


def test_a_deadline_during_measuring_restores_the_assigned_mode(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattfleet.flower.client.loaders._REPORT_INTERVAL_S", 0.0)
    modes: list[PowerMode] = []

    def train(request: Message, _: Context) -> Message:
        for _batch in until_deadline(profiled(range(800)), app_weighs=True):
            modes.append(agent.board.current_mode())
        modes.append(agent.board.current_mode())
        return answered(request, _)

    reply = power_mode_mod(assigned_until(1e-9), context(**{"agent-socket": str(agent.socket)}), train)
    assert len(modes) == 2 and modes[0] != MODE and modes[1] == MODE
    assert reply.content[RECORD_KEY][APP_WEIGHS_KEY] is True
    assert reply.content[RECORD_KEY][SHARE_KEY] == pytest.approx(1 / 800)
    assert agent.reports.observations == []


def test_without_a_loaders_length_no_epoch_time_is_learnt(agent: Agent) -> None:
    def train(request: Message, _: Context) -> Message:
        assert list(until_deadline(iter(range(10)))) == [0]
        return answered(request, _)

    reply = power_mode_mod(assigned_until(1e-9), context(**{"agent-socket": str(agent.socket)}), train)
    assert work_in(reply) == {CUT_KEY: True, APP_WEIGHS_KEY: False}
    assert agent.reports.observations == []
    assert agent.board.current_mode() == parked_mode(agent.board)


@pytest.mark.parametrize("epochs_done", [1.5, -0.1, float("nan")])
def test_more_epochs_than_assigned_are_refused(agent: Agent, epochs_done: float) -> None:
    def train(request: Message, _: Context) -> Message:
        training = CURRENT_TRAINING.get()
        assert training is not None
        with pytest.raises(grpc.RpcError):
            training.finish(False, epochs_done)
        raise MemoryError("to leave the mod")

    with pytest.raises((MemoryError, AgentUnreachableError)):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.observations == []
