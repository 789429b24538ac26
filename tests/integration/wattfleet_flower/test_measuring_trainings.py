"""A training that is run in order to measure, on a real agent's socket: when it ends, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch.utils.data import DataLoader

from edge_agent.runtime.readiness import parked_mode
from tests.fakes.agent_socket import MODE, Agent, answered, context, granted, message
from tests.fakes.polling import until
from wattfleet_flower import power_mode_mod, profiled, until_deadline
from wattfleet_proto.assignment import MEASURED_KEY, RECORD_KEY, RoundAssignment
from wattfleet_proto.v1 import session_pb2

PLAN = "7/measuring-1"


def to_measure(modes: int, longest_s: float = 3600.0, power_limit_w: float = 25.0) -> session_pb2.Grant:
    grant = granted(MODE, power_limit_w, PLAN, grant_id=2)
    grant.measuring.CopyFrom(session_pb2.Measuring(modes=modes, longest_s=longest_s))
    return grant


def run(agent: Agent, train: Callable[[Message, Context], Message]) -> Message:
    record = RoundAssignment(PLAN, "orin-nano-0", epochs=1.0, measures=True).to_record()
    request = message(RecordDict({"config": ConfigRecord({"lr": 0.1}), RECORD_KEY: ConfigRecord(record)}))
    return power_mode_mod(request, context(**{"agent-socket": str(agent.socket)}), train)


def app(batches: Iterable[Any], seen: list[Any]) -> Callable[[Message, Context], Message]:
    def train(request: Message, _: Context) -> Message:
        try:
            for batch in profiled(batches):
                seen.append(batch)
        except Exception:  # what a careless app does
            raise AssertionError("no app may catch the end of its training") from None
        return answered(request, _)

    return train


@pytest.fixture(autouse=True)
def reports_every_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    # They take no time here, so the usual half second would never pass.
    monkeypatch.setattr("wattfleet_flower.client.loaders._REPORT_INTERVAL_S", 0.0)


def test_a_training_ends_once_its_modes_are_measured(agent: Agent) -> None:
    agent.grant(to_measure(modes=2))
    seen: list[int] = []
    before = len(agent.journal.records)
    reply = run(agent, app(range(100_000), seen))
    assert dict(reply.content[RECORD_KEY]) == {MEASURED_KEY: True}
    assert 2 <= len(agent.journal.records) - before <= 5 and 80 < len(seen) < 100_000
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.observations == [], "no round waits for it"
    assert agent.reports.states[-1].state == session_pb2.DEVICE_STATE_READY
    assert len(agent.reports.fronts) == 1, "the next plan knows what was measured"


def test_a_training_goes_on_measuring_while_modes_are_left(agent: Agent) -> None:
    agent.grant(to_measure(modes=50))
    run(agent, app(range(100_000), []))
    assert len(agent.journal.records) == 12, "as many as the agent may measure: more than one fit chooses"


def test_for_a_loaders_facts_one_minibatch_is_enough(agent: Agent) -> None:
    agent.grant(to_measure(modes=0))
    before, seen = len(agent.journal.records), []  # type: ignore[var-annotated]
    run(agent, app(range(321), seen))
    assert (len(seen), len(agent.journal.records) - before) == (0, 0)
    assert agent.learner.known.minibatches_per_epoch == 321


def test_no_measurement_begins_after_the_time_is_over(agent: Agent) -> None:
    agent.grant(to_measure(modes=50, longest_s=1e-3))
    before = len(agent.journal.records)
    run(agent, app(range(100_000), []))
    assert len(agent.journal.records) - before <= 1


def test_torch_apps_end_without_a_change(agent: Agent) -> None:
    agent.grant(to_measure(modes=2))
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    steps = 0

    def train(request: Message, _: Context) -> Message:
        nonlocal steps
        for _epoch in range(50):
            for batch in DataLoader(torch.zeros(800, 1), batch_size=1):
                net(batch).sum().backward()
                optimizer.step()
                steps += 1
        return answered(request, _)

    assert MEASURED_KEY in run(agent, train).content[RECORD_KEY]
    assert 80 < steps < 40_000


def test_an_app_whose_loader_is_not_wrapped_trains_to_the_end_and_is_learned_from(agent: Agent) -> None:
    agent.grant(to_measure(modes=5))

    def train(request: Message, _: Context) -> Message:
        for _batch in until_deadline(range(200)):
            agent.board.step()
        return answered(request, _)

    reply = run(agent, train)
    assert MEASURED_KEY not in reply.content.get(RECORD_KEY, {})
    assert agent.reports.observations == []
    assert agent.board.current_mode() == parked_mode(agent.board)


def test_a_withdrawn_grant_ends_the_training(agent: Agent) -> None:
    agent.grant(to_measure(modes=50))

    def batches() -> Iterable[int]:
        for k in range(100_000):
            if k == 5:
                agent.grant(granted(None, plan_id=PLAN, grant_id=3))
                until(lambda: agent.board.current_mode() == parked_mode(agent.board))
            yield k

    seen: list[int] = []
    reply = run(agent, app(batches(), seen))
    assert MEASURED_KEY in reply.content[RECORD_KEY]
    assert 5 <= len(seen) <= 7
    assert agent.board.current_mode() == parked_mode(agent.board)


def test_an_app_that_fails_while_it_measures_leaves_the_device_parked(agent: Agent) -> None:
    agent.grant(to_measure(modes=50))

    def train(request: Message, _: Context) -> Message:
        for batch in profiled(range(100)):
            if batch == 3:
                raise MemoryError("out of memory")
        raise AssertionError("unreachable")

    with pytest.raises(MemoryError):
        run(agent, train)
    assert agent.board.current_mode() == parked_mode(agent.board)


class WithoutLength:
    """Passes over a stream of data, of which nobody knows how long they are."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100_000))


def test_a_loader_without_a_length_is_measured(agent: Agent) -> None:
    agent.grant(to_measure(modes=2))
    before, seen = len(agent.journal.records), []  # type: ignore[var-annotated]
    reply = run(agent, app(WithoutLength(), seen))
    assert MEASURED_KEY in reply.content[RECORD_KEY] and len(seen) < 100_000
    assert len(agent.journal.records) - before >= 2
    assert agent.board.current_mode() == parked_mode(agent.board)


def test_a_device_whose_duty_leaves_no_time_ends_its_training_at_once(agent: Agent) -> None:
    agent.duty = "cameras"
    agent.grant(to_measure(modes=5))
    before, seen = len(agent.journal.records), []  # type: ignore[var-annotated]
    reply = run(agent, app(range(321), seen))
    assert MEASURED_KEY in reply.content[RECORD_KEY]
    assert (len(seen) <= 1, len(agent.journal.records)) == (True, before), "its times would contain the requests"
    assert agent.learner.known.minibatches_per_epoch == 321
    assert agent.board.current_mode() == parked_mode(agent.board)


def test_one_minibatch_of_minutes_ends_the_training_with_what_is_known(agent: Agent) -> None:
    agent.grant(to_measure(modes=5, longest_s=20.0))
    seen: list[int] = []

    def batches() -> Iterable[int]:
        for k in range(100):
            agent.board.clock.sleep_s(300.0)
            yield k

    reply = run(agent, app(batches(), seen))
    assert MEASURED_KEY in reply.content[RECORD_KEY] and len(seen) <= 2
    assert agent.board.current_mode() == parked_mode(agent.board)


def test_only_modes_within_the_granted_watts_are_measured(agent: Agent) -> None:
    front = agent.learner.predicted_front()[0]
    limit_w = float(front.planned_w[len(front) // 2])
    mode = front.mode(len(front) // 2)
    grant = to_measure(modes=3, power_limit_w=1.001 * limit_w)
    grant.mode.CopyFrom(granted(mode).mode)
    agent.grant(grant)
    before = len(agent.journal.records)
    run(agent, app(range(100_000), []))
    measured = agent.journal.records[before:]
    assert measured and all(each.power_mw <= 1e3 * limit_w * 1.05 for each in measured)
