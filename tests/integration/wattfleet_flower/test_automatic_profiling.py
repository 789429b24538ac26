"""Training with torch is profiled without a change of the app, and other uses of loaders are not."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.fakes.agent_socket import answered, assigned, context
from tests.fakes.recording_agent import RecordingAgent, recording_agent
from wattfleet.errors import InvalidInputError
from wattfleet_flower import power_mode_mod, profiled, until_deadline
from wattfleet_proto.assignment import RECORD_KEY, UNPROFILED_KEY

BATCHES, BATCH = 50, 4


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingAgent]:
    # Every minibatch is reported: they take no time here, so the usual half second would never pass.
    monkeypatch.setattr("wattfleet_flower.client.loaders._REPORT_INTERVAL_S", 0.0)
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


def train(agent: RecordingAgent, work: Callable[[], object], **node_config: Any) -> str | None:
    """Train as an app, and return why its reply says that no mode was measured; None if it does not say so."""

    def app(request: Message, _: Context) -> Message:
        work()
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket), **node_config}), app)
    assert not reply.has_error()
    return reply.content.get(RECORD_KEY, {}).get(UNPROFILED_KEY)  # type: ignore[no-any-return]


def test_a_reply_says_why_a_training_was_not_profiled(agent: RecordingAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    batches = list(trainer.loader)
    remedy = "wrap the loader in `wattfleet_flower.profiled`"
    assert train(agent, trainer.epoch) is None
    assert train(agent, lambda: trainer.epoch(profiled(batches)), **{"auto-profile": False}) is None
    assert train(agent, trainer.epoch, **{"auto-profile": False}) == f"auto-profile is false on its SuperNode: {remedy}"
    short = DataLoader(trainer.loader.dataset, batch_size=50)
    assert train(agent, lambda: trainer.epoch(short)) == (
        f"a pass over its data has only 4 minibatches: {remedy}, or use smaller batches"
    )
    assert str(train(agent, lambda: trainer.epoch(batches))).startswith("its minibatches come from no PyTorch DataLoad")
    assert str(train(agent, lambda: list(trainer.loader))).startswith("no step of a PyTorch optimizer was seen: import")
    monkeypatch.delitem(sys.modules, "torch")
    assert train(agent, lambda: None) == f"its minibatches come from no DataLoader: {remedy}"


def test_a_loop_over_a_dataloader_is_profiled_from_its_first_step(agent: RecordingAgent) -> None:
    trainer = Trainer()
    train(agent, trainer.epoch)
    assert trainer.seen == pytest.approx([k / 200 for k in range(BATCHES * BATCH)]), "no batch is lost"
    assert agent.minibatches == BATCHES - 1
    assert [report.paused for report in agent.reports] == [False] * BATCHES + [True]
    [seen] = agent.loaders
    assert (seen.batch, seen.loader_workers, seen.minibatches_per_epoch) == (BATCH, 0, BATCHES)
    assert seen.after_minibatch


def test_a_loader_too_short_to_measure_a_mode_is_seen_but_not_profiled(agent: RecordingAgent) -> None:
    trainer = Trainer()
    train(agent, lambda: trainer.epoch(DataLoader(trainer.loader.dataset, batch_size=50)))
    assert [(seen.batch, seen.minibatches_per_epoch) for seen in agent.loaders] == [(50, 4)]
    assert not agent.reports
    assert len(trainer.seen) == BATCHES * BATCH


@pytest.mark.parametrize(("protocol_minor", "is_profiled"), [(1, False), (2, True)])
def test_a_short_loader_is_profiled_only_where_a_mode_is_measured_over_passes(
    agent: RecordingAgent, protocol_minor: int, is_profiled: bool
) -> None:
    agent.protocol_minor = protocol_minor
    trainer = Trainer()
    train(agent, lambda: trainer.epoch(DataLoader(trainer.loader.dataset, batch_size=10)))
    assert bool(agent.reports) == is_profiled


def test_it_learns_the_same_as_without(agent: RecordingAgent) -> None:
    weights = []
    for profiles in (True, False):
        torch.manual_seed(0)
        trainer = Trainer()
        shuffled = DataLoader(trainer.loader.dataset, batch_size=BATCH, shuffle=True)
        train(agent, lambda t=trainer, s=shuffled: t.epoch(s), **{"auto-profile": profiles})  # type: ignore[misc]
        weights.append((trainer.net.weight.item(), trainer.seen, torch.rand(1).item()))
    assert weights[0] == weights[1]


def test_evaluation_and_statistics_during_a_training_are_not_profiled(agent: RecordingAgent) -> None:
    trainer = Trainer()

    def work() -> None:
        with torch.no_grad():
            for _ in trainer.loader:
                trainer.optimizer.step()  # whatever this step does
        for (batch,) in trainer.loader:  # computes the mean of the data, with gradients enabled
            batch.mean()

    train(agent, work)
    assert agent.requests and not agent.reports and not agent.loaders


def test_messages_without_an_assignment_are_not_profiled(agent: RecordingAgent) -> None:
    Trainer().epoch()
    assert agent.requests == []


def test_it_can_be_switched_off_for_a_node(agent: RecordingAgent) -> None:
    train(agent, Trainer().epoch, **{"auto-profile": False})
    assert agent.requests and not agent.reports and not agent.loaders
    with pytest.raises(InvalidInputError, match="auto-profile must be true or false, not 'no'"):
        train(agent, Trainer().epoch, **{"auto-profile": "no"})


@pytest.mark.parametrize("wrap", [profiled, lambda loader: until_deadline(profiled(loader))])
def test_a_loader_that_is_wrapped_already_is_profiled_once(agent: RecordingAgent, wrap: Any) -> None:
    trainer = Trainer()
    train(agent, lambda: trainer.epoch(wrap(trainer.loader)))
    assert agent.minibatches == BATCHES
    assert [report.paused for report in agent.reports].count(True) == 1
    assert len(agent.loaders) == 1


def test_until_deadline_alone_is_profiled_as_well(agent: RecordingAgent) -> None:
    trainer = Trainer()
    train(agent, lambda: trainer.epoch(until_deadline(trainer.loader)))
    assert agent.minibatches == BATCHES - 1
    assert [seen.batch for seen in agent.loaders] == [BATCH]


def test_of_nested_loaders_only_the_outer_one_is_profiled(agent: RecordingAgent) -> None:
    trainer = Trainer()

    def work() -> None:
        for batch in trainer.loader:
            trainer.step(batch)
            for inner in DataLoader(trainer.loader.dataset, batch_size=BATCH):
                trainer.step(inner)

    train(agent, work)
    # During the first outer batch, the outer loop has not made a step yet, so the inner one is profiled.
    assert agent.minibatches == 2 * (BATCHES - 1)


def test_loaders_read_side_by_side_are_profiled_once(agent: RecordingAgent) -> None:
    trainer = Trainer()
    other = DataLoader(trainer.loader.dataset, batch_size=BATCH)

    def work() -> None:
        for batch, _ in zip(trainer.loader, other, strict=True):
            trainer.step(batch)

    train(agent, work)
    assert agent.minibatches == BATCHES - 1
    assert len(agent.loaders) == 1


def test_a_loop_that_is_left_early_pauses_the_measuring(agent: RecordingAgent) -> None:
    trainer = Trainer()

    def work() -> None:
        for k, batch in enumerate(trainer.loader):
            trainer.step(batch)
            if k == 3:
                break
        gc.collect()
        trainer.epoch()

    train(agent, work)
    assert [report.paused for report in agent.reports].count(True) == 2
    assert agent.minibatches == 2 + BATCHES - 1, "the minibatch that was left is not reported"


def test_an_exception_in_the_loop_reaches_the_app_and_undoes_the_wrapping(agent: RecordingAgent) -> None:
    trainer = Trainer()

    def work() -> None:
        for k, batch in enumerate(trainer.loader):
            trainer.step(batch)
            if k == 3:
                raise MemoryError("out of memory")

    with pytest.raises(MemoryError, match="out of memory"):
        train(agent, work)
    assert agent.requests[0][-1].finish.failed
    train(agent, trainer.epoch)
    assert agent.minibatches > BATCHES - 1, "the next training is profiled again"


def test_an_iterator_that_outlives_its_training_goes_on_without_the_agent(agent: RecordingAgent) -> None:
    trainer, held = Trainer(), []

    def work() -> None:
        held.append(iter(trainer.loader))
        for _ in range(3):
            trainer.step(next(held[0]))

    train(agent, work)
    reports = len(agent.reports)
    assert len(list(held[0])) == BATCHES - 3
    assert len(agent.reports) == reports


def test_a_loop_in_a_thread_of_the_app_is_left_alone(agent: RecordingAgent) -> None:
    trainer = Trainer()

    def work() -> None:
        thread = threading.Thread(target=trainer.epoch)
        thread.start()
        thread.join()

    train(agent, work)
    assert len(trainer.seen) == BATCHES * BATCH
    assert not agent.reports


def test_overlapping_trainings_in_one_process_are_profiled_each(agent: RecordingAgent) -> None:
    barrier = threading.Barrier(2)

    def work() -> None:
        barrier.wait(10)
        Trainer().epoch()

    threads = [threading.Thread(target=train, args=(agent, work)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agent.minibatches == 2 * (BATCHES - 1)
    assert len(agent.loaders) == 2


def test_a_loader_without_a_length_tells_nothing_of_it(agent: RecordingAgent) -> None:
    class Stream(IterableDataset[list[torch.Tensor]]):
        def __iter__(self) -> Iterator[Any]:
            return iter([(torch.ones(1),)] * (BATCHES * BATCH))

    trainer = Trainer()
    train(agent, lambda: trainer.epoch(DataLoader(Stream(), batch_size=BATCH, num_workers=0)))
    [seen] = agent.loaders
    assert seen.batch == BATCH and not seen.HasField("minibatches_per_epoch")
    assert agent.minibatches == BATCHES - 1


def test_an_agent_that_has_enough_is_not_sent_more(agent: RecordingAgent) -> None:
    agent.wants = 3
    trainer = Trainer()
    train(agent, lambda: [trainer.epoch() for _ in range(2)])
    assert agent.minibatches == 3


def test_an_agent_of_protocol_2_0_is_told_nothing_of_loaders(agent: RecordingAgent) -> None:
    agent.protocol_minor = 0
    trainer = Trainer()
    train(agent, lambda: trainer.epoch(until_deadline(trainer.loader)))
    assert not agent.loaders
    assert agent.minibatches == BATCHES - 1


def test_torch_before_2_0_is_not_profiled(agent: RecordingAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["torch.optim.optimizer"], "register_optimizer_step_post_hook")
    trainer = Trainer()
    train(agent, trainer.epoch)
    assert len(trainer.seen) == BATCHES * BATCH and not agent.reports
