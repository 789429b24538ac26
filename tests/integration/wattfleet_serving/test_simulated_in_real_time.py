"""A simulated board in real time behind an agent: apps take at least the simulated time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from edge_agent.devices.virtual.simulated import LiveSimulatedDevice, SimulatedDevice
from tests.fakes.duty_agent import DutyAgent, duty_agent_at
from tests.fakes.polling import until
from wattfleet.duties import ConstantArrivals, Duty
from wattfleet.modes import Task, Workload, WorkloadFacts
from wattfleet_serving import DutyServer, share_device

DUTY = Duty("resnet", ConstantArrivals(5.0), 2000.0)
EARLY = 0.9
"""No step of these is more than a tenth shorter than the median: their jitter is below 2 %."""


@pytest.fixture
def agent(tmp_path) -> Iterator[DutyAgent]:
    with duty_agent_at(tmp_path / "agent.sock", DUTY, LiveSimulatedDevice("orin-nano", 3)) as agent:
        yield agent


@pytest.fixture
def physics() -> SimulatedDevice:
    return SimulatedDevice("orin-nano", 3)


def inference_ms(physics: SimulatedDevice, batch: int) -> float:
    served = Workload("resnet", WorkloadFacts(batch=batch, task=Task.INFERENCE))
    return physics.load(physics.current_mode(), served).minibatch_ms


def test_a_minibatch_takes_the_time_of_the_board(agent, physics):
    begun_s = time.monotonic()
    assert list(share_device(range(3), agent_socket=agent.socket)) == [0, 1, 2]
    took_ms = (time.monotonic() - begun_s) * 1e3
    assert took_ms >= 3 * EARLY * physics.load(physics.current_mode()).minibatch_ms


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_requests_are_answered_after_the_time_of_their_batch(agent, physics, batch):
    computed: list[int] = []

    def model(inputs: list[int]) -> list[int]:
        if not computed:
            time.sleep(0.05)  # all others arrive in the meantime, and form one batch
        computed.append(len(inputs))
        return inputs

    with DutyServer(model, largest_batch=8, agent_socket=agent.socket) as server:
        first = server.submit(0)
        until(lambda: first.running() or first.done())
        begun_s = time.monotonic()
        assert [answer.result(10) for answer in [server.submit(each) for each in range(batch)]] == list(range(batch))
        took_ms = (time.monotonic() - begun_s) * 1e3
    between = (inference_ms(physics, 2) + inference_ms(physics, 4)) / 2
    assert computed == [1, batch]
    assert took_ms >= EARLY * (between if batch == 3 else inference_ms(physics, batch))


def test_the_power_is_idle_power_again_after_the_turns(agent, physics):
    idle_mw = physics.load(physics.current_mode()).idle_mw
    for _ in share_device(range(20), agent_socket=agent.socket):
        pass
    meter = agent.device.start_meter()
    assert meter.read().power_mw[-1] > 1.05 * idle_mw
    until(lambda: meter.read().power_mw[-1] < 1.05 * idle_mw)
    meter.stop()
