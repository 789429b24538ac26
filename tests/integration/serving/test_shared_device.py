"""An inference server beside a training on one device with a real agent socket, and simulated boards in real time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from edge_agent.devices.device import DutyNotKeptError
from edge_agent.devices.virtual.simulated import LiveSimulatedDevice, SimulatedDevice
from edge_agent.serving.turns import Batching, TurnPurpose
from tests.fakes.boards import MODE, OTHER, PARKED
from tests.fakes.duties import DutyAgent, duty, duty_agent_at
from tests.fakes.polling import until
from wattfleet.core.duties import ConstantArrivals, Duty
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Task, Workload, WorkloadFacts
from wattfleet.flower import profiled, until_deadline
from wattfleet.serving import DutyServer, share_device

# --- Shared device ----------------------------------------------------------------------------------------------------
# An inference server beside a training, on one device with a real agent socket.


class OneDevice:
    """Counts how often a batch of requests and a minibatch have computed at the same time."""

    def __init__(self, inference_s: float = 0.01) -> None:
        self.inference_s = inference_s
        self.trains = self.infers = False
        self.overlaps = self.minibatches = 0

    def answer(self, inputs: list[int]) -> list[int]:
        self.infers = True
        self.overlaps += self.trains
        time.sleep(self.inference_s)
        self.infers = False
        return inputs

    def train(self, minibatch_s: float) -> None:
        self.trains = True
        self.overlaps += self.infers
        time.sleep(minibatch_s)
        self.trains = False
        self.minibatches += 1


@contextmanager
def training(device: OneDevice, socket: str, minibatch_s: float) -> Iterator[None]:
    """Train in the background until the end of the block, whatever ends it."""
    ended = threading.Event()

    def train() -> None:
        for _ in share_device(range(10**6), agent_socket=socket):
            device.train(minibatch_s)
            if ended.is_set():
                return

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)
    assert not thread.is_alive()


def latencies_of(server: DutyServer[int, int], seconds: float, per_s: float, seed: int = 0) -> list[float]:
    """Send random requests for a while; returns the latency of each, in seconds."""
    chance, ends_s = random.Random(seed), time.monotonic() + seconds
    answers, latencies = [], []

    def note(asked_s: float) -> None:
        latencies.append(time.monotonic() - asked_s)

    while time.monotonic() < ends_s:
        asked_s = time.monotonic()
        answer = server.submit(1)
        answer.add_done_callback(lambda _, asked_s=asked_s: note(asked_s))
        answers.append(answer)
        time.sleep(chance.expovariate(per_s))
    for answer in answers:
        answer.result(10)
    return latencies


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[DutyAgent]:
    with duty_agent_at(tmp_path / "agent.sock", duty(latency_ms=150)) as running:
        yield running


@pytest.fixture
def device() -> OneDevice:
    return OneDevice()


def test_requests_are_answered_in_time_while_minibatches_ask_for_turns(agent, device):
    with DutyServer(device.answer, agent_socket=agent.socket) as server:
        server.answer_blocking(0)
        with training(device, agent.socket, minibatch_s=0.03):
            latencies = latencies_of(server, seconds=4, per_s=20)
        figures = agent.turns.kept_duty()
    assert device.overlaps == 0
    assert device.minibatches > 40, "the rest of the time is trained"
    late = sum(latency > 0.15 for latency in latencies) / len(latencies)
    assert late <= 0.05
    assert figures.requests == len(latencies) + 1 == sum(figures.latency_counts)
    assert 10 < figures.arrivals_per_s < 30
    assert figures.training_share > 0.02
    assert figures.missed <= 0.05 * figures.requests


def test_requests_gather_as_the_agent_has_chosen(agent):
    batches = []

    def model(inputs):
        batches.append(list(inputs))
        return inputs

    with DutyServer(model, agent_socket=agent.socket) as server:
        server.answer_blocking(0)
        agent.turns.plan_batching = lambda mode: Batching(batch=3, wait_ms=300)
        agent.turns.choose_batching()
        time.sleep(0.1)  # the server is told
        begun_s = time.monotonic()
        for answer in [server.submit(number) for number in (1, 2, 3)]:
            answer.result(10)
        assert time.monotonic() - begun_s < 0.25, "the batch is full"
        answers = [server.submit(number) for number in (4, 5)]
        assert answers[1].result(10) == 5
        assert time.monotonic() - begun_s >= 0.3, "another request might have come"
    assert batches == [[0], [1, 2, 3], [4, 5]]


def test_batches_are_as_small_as_planned_until_requests_are_late(agent):
    batches, held = [], threading.Event()

    def model(inputs):
        batches.append(list(inputs))
        assert held.wait(10)
        return inputs

    with DutyServer(model, largest_batch=8, agent_socket=agent.socket) as server:
        held.set()
        agent.turns.plan_batching = lambda mode: Batching(batch=2)
        agent.turns.choose_batching()
        time.sleep(0.1)  # the server is told
        held.clear()
        answers = [server.submit(0)]
        until(lambda: batches == [[0]])
        answers += [server.submit(number) for number in (1, 2, 3)]
        held.set()
        assert [answer.result(10) for answer in answers] == [0, 1, 2, 3]
        assert batches == [[0], [1, 2], [3]]
        held.clear()
        answers = [server.submit(4)]
        until(lambda: batches[3:] == [[4]])
        answers += [server.submit(number) for number in (5, 6, 7)]
        time.sleep(0.3)  # longer than the limit
        held.set()
        assert [answer.result(10) for answer in answers] == [4, 5, 6, 7]
    assert batches[4:] == [[5, 6, 7]]


def test_a_minibatch_longer_than_the_limit_gets_no_turn_but_a_trial(agent, device):
    with DutyServer(device.answer, agent_socket=agent.socket) as server:
        for number in range(20):
            server.answer_blocking(number)
        with training(device, agent.socket, minibatch_s=0.2):
            until(lambda: "does not fit" in agent.turns.kept_duty().waits)
            trained = device.minibatches
            latencies = latencies_of(server, seconds=1, per_s=20)
            assert device.minibatches == trained <= 4
            assert max(latencies) < 0.15
            agent.set_duty(None)  # without a duty, it continues
            until(lambda: device.minibatches > trained)


def test_both_go_on_when_the_agent_dies_and_share_again_when_it_is_back(tmp_path, device):
    socket = tmp_path / "agent.sock"
    with ExitStack() as apps:
        with duty_agent_at(socket, duty()) as agent:
            server = apps.enter_context(DutyServer(device.answer, agent_socket=agent.socket))
            apps.enter_context(training(device, agent.socket, minibatch_s=0.01))
            server.answer_blocking(0)
            until(lambda: device.minibatches > 5)
        trained = device.minibatches
        assert max(latencies_of(server, seconds=0.5, per_s=50)) < 0.2
        assert device.minibatches > trained + 10
        with duty_agent_at(socket, duty()) as agent:
            until(lambda: agent.turns.servers == 1)
            until(lambda: agent.turns.figures.training_share(time.monotonic()) > 0)
            assert server.answer_blocking(3) == 3
            until(lambda: agent.turns.kept_duty().requests > 0)
            apps.close()
            until(lambda: agent.turns.servers == 0)


def test_a_training_that_dies_in_its_turn_does_not_keep_the_device(agent, device):
    minibatches = iter(share_device(range(10), agent_socket=agent.socket))
    next(minibatches)
    with DutyServer(device.answer, agent_socket=agent.socket) as server:
        waiting = server.submit(1)
        minibatches.close()
        assert waiting.result(5) == 1


def test_without_an_agent_the_loader_is_what_it_was(tmp_path):
    class Loader(list):
        batch_size = 16

    shared = share_device(Loader([1, 2, 3]), agent_socket=str(tmp_path / "none.sock"))
    assert list(shared) == [1, 2, 3]
    assert len(shared) == 3 and shared.batch_size == 16
    both = share_device(until_deadline(profiled(Loader([1, 2, 3]))), agent_socket=str(tmp_path / "none.sock"))
    assert list(both) == [1, 2, 3] and len(both) == 3
    with pytest.raises(AttributeError):
        shared.num_workers  # noqa: B018 - tests whether the attribute exists


def test_the_mode_changes_while_nobody_has_the_device(agent, device):
    changes = []
    apply = agent.board.apply

    def watched(mode):
        changes.append(mode)
        device.overlaps += device.trains + device.infers
        apply(mode)
        device.overlaps += device.trains + device.infers

    agent.board.apply = watched
    agent.board.modes = agent.board.modes[:1]
    agent.set_duty(duty(latency_ms=10_000, per_s=2))  # no mode breaks it, even on a busy machine
    with DutyServer(device.answer, agent_socket=agent.socket) as server:
        for number in range(10):
            server.answer_blocking(number)
        slower = MODE._replace(gpu_hz=MODE.gpu_hz // 2)
        with training(device, agent.socket, minibatch_s=0.02), ThreadPoolExecutor(1) as apps:
            requests = apps.submit(latencies_of, server, 1.5, 30)
            while not requests.done():
                agent.device.apply(slower if agent.board.mode == MODE else MODE)
                time.sleep(0.05)
            requests.result()
    assert len(changes) > 5
    assert device.overlaps == 0


def test_a_mode_that_would_break_the_duty_is_refused(agent, device):
    agent.device.apply(OTHER)  # no server is connected, so there is nothing to answer
    with DutyServer(device.answer, agent_socket=agent.socket) as server:
        for number in range(10):
            server.answer_blocking(number)
        until(lambda: agent.turns.kept_duty().requests == 10)
        with pytest.raises(DutyNotKeptError, match="is not known to answer the requests of 'camera' within 150 ms"):
            agent.device.apply(PARKED)
        agent.device.apply(MODE)
    assert agent.turns.resting_mode(PARKED, agent.board.modes) == PARKED


def test_a_device_rests_in_the_lowest_mode_that_keeps_the_duty_or_in_the_highest(agent, device):
    with DutyServer(device.answer, agent_socket=agent.socket) as server:
        until(lambda: agent.turns.servers == 1)
        # Nothing is measured: the current mode may be kept, and no lower one is known to be sufficient.
        assert agent.turns.resting_mode(MODE, agent.board.modes) == MODE
        with pytest.raises(DutyNotKeptError):
            agent.device.apply(PARKED)
        for number in range(10):
            server.answer_blocking(number)
        until(lambda: agent.turns.kept_duty().requests == 10)
        agent.set_duty(duty(latency_ms=1_000, per_s=2))  # kept even if a busy machine delays answers
        assert agent.turns.resting_mode(PARKED, agent.board.modes) == OTHER
        agent.set_duty(duty(latency_ms=1))
        assert agent.turns.resting_mode(PARKED, agent.board.modes) == MODE
        agent.device.apply(MODE)  # although it does not keep this duty either
        with pytest.raises(DutyNotKeptError):
            agent.device.apply(OTHER)


def test_a_profile_of_the_agent_holds_turns_while_requests_arrive(agent, device):
    with DutyServer(device.answer, agent_socket=agent.socket) as server:
        for number in range(10):
            server.answer_blocking(number)
        ended = threading.Event()

        def profile() -> None:
            while not ended.is_set():
                with agent.turns.from_thread(TurnPurpose.MINIBATCH):
                    device.train(0.03)

        profiling = threading.Thread(target=profile)
        profiling.start()
        latencies = latencies_of(server, seconds=2, per_s=20)
        ended.set()
        profiling.join(10)
    assert device.minibatches > 15
    assert device.overlaps == 0
    assert sum(latency > 0.15 for latency in latencies) <= 0.05 * len(latencies)


def test_profiled_around_a_shared_device_is_refused_with_the_remedy():
    with pytest.raises(InvalidInputError, match=r"share_device\(profiled\(loader\)\)"):
        profiled(until_deadline(share_device([1, 2])))
    assert list(share_device(profiled([1, 2]), agent_socket="none.sock")) == [1, 2]


# --- Simulated in real time -------------------------------------------------------------------------------------------
# A simulated board in real time behind an agent: apps take at least the simulated time.

DUTY = Duty("resnet", ConstantArrivals(5.0), 2000.0)
EARLY = 0.9
"""No step of these is more than a tenth shorter than the median: their jitter is below 2 %."""


@pytest.fixture
def simulated_agent(tmp_path) -> Iterator[DutyAgent]:
    with duty_agent_at(tmp_path / "agent.sock", DUTY, LiveSimulatedDevice("orin-nano", 3)) as simulated_agent:
        yield simulated_agent


@pytest.fixture
def physics() -> SimulatedDevice:
    return SimulatedDevice("orin-nano", 3)


def inference_ms(physics: SimulatedDevice, batch: int) -> float:
    served = Workload("resnet", WorkloadFacts(batch=batch, task=Task.INFERENCE))
    return physics.load(physics.current_mode(), served).minibatch_ms


def test_a_minibatch_takes_the_time_of_the_board(simulated_agent, physics):
    begun_s = time.monotonic()
    assert list(share_device(range(3), agent_socket=simulated_agent.socket)) == [0, 1, 2]
    took_ms = (time.monotonic() - begun_s) * 1e3
    assert took_ms >= 3 * EARLY * physics.load(physics.current_mode()).minibatch_ms


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_requests_are_answered_after_the_time_of_their_batch(simulated_agent, physics, batch):
    computed: list[int] = []

    def model(inputs: list[int]) -> list[int]:
        if not computed:
            time.sleep(0.05)  # all others arrive in the meantime, and form one batch
        computed.append(len(inputs))
        return inputs

    with DutyServer(model, largest_batch=8, agent_socket=simulated_agent.socket) as server:
        first = server.submit(0)
        until(lambda: first.running() or first.done())
        begun_s = time.monotonic()
        assert [answer.result(10) for answer in [server.submit(each) for each in range(batch)]] == list(range(batch))
        took_ms = (time.monotonic() - begun_s) * 1e3
    between = (inference_ms(physics, 2) + inference_ms(physics, 4)) / 2
    assert computed == [1, batch]
    assert took_ms >= EARLY * (between if batch == 3 else inference_ms(physics, batch))


def test_the_power_is_idle_power_again_after_the_turns(simulated_agent, physics):
    idle_mw = physics.load(physics.current_mode()).idle_mw
    for _ in share_device(range(20), agent_socket=simulated_agent.socket):
        pass
    meter = simulated_agent.device.start_meter()
    assert meter.read().power_mw[-1] > 1.05 * idle_mw
    until(lambda: meter.read().power_mw[-1] < 1.05 * idle_mw)
    meter.stop()
