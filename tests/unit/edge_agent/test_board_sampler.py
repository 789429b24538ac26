"""The samples that an agent takes of its board between two leases, in virtual time."""

from __future__ import annotations

import asyncio
import math

import pytest

from edge_agent.devices.device import Conditions
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.runtime.states import BoardSampler
from tests.fakes.scripted_device import OTHER, ScriptedDevice
from wattfleet_proto.convert import board_sample_from_message, board_sample_to_message
from wattfleet_proto.device_state import BoardSample
from wattfleet_proto.v1 import session_pb2


def sampled(device: ScriptedDevice, sampler: BoardSampler, seconds: int) -> BoardSample:
    """Sample once a second."""
    sampler.sample()
    for _ in range(seconds):
        device.clock.sleep_s(1.0)
        sampler.sample()
    assert sampler.latest is not None
    return sampler.latest


def test_energy_is_the_area_below_the_power() -> None:
    device = ScriptedDevice(power_at=lambda at_s: 1_000.0 * at_s)
    device.conditions_at = lambda at_s: Conditions(61.5, 3)
    # The power rises by 1 W per second: 50 J after ten seconds.
    assert sampled(device, BoardSampler(device), 10) == BoardSample(10.0, 61.5, OTHER, 3, energy_j=50.0)


def test_a_power_that_cannot_be_read_is_missing_and_adds_no_energy() -> None:
    device = ScriptedDevice(power_at=lambda at_s: math.nan if 3 <= at_s <= 6 else 10_000.0)
    sampler = BoardSampler(device)
    missing = sampled(device, sampler, 5)
    assert (missing.power_w, missing.energy_j) == (None, 20.0)
    assert sampled(device, sampler, 4).energy_j == 40.0


def test_a_suspended_board_adds_no_energy_for_the_gap() -> None:
    device = ScriptedDevice(power_at=lambda at_s: 10_000.0)
    sampler = BoardSampler(device)
    sampled(device, sampler, 2)
    device.clock.sleep_s(3_600.0)
    assert sampled(device, sampler, 1).energy_j == 30.0


def test_a_simulated_board_counts_the_energy_of_its_own_time() -> None:
    device = SimulatedDevice("orin-nano", 1)
    sampler = BoardSampler(device)
    sampler.sample()
    began_s = device.clock.now_s()
    device.run(500)
    sampler.sample()
    took_s, load = device.clock.now_s() - began_s, device.load_in_force
    assert sampler.latest is not None and sampler.latest.energy_j is not None
    assert load.idle_mw / 1e3 * took_s < sampler.latest.energy_j <= load.power_mw / 1e3 * took_s
    assert sampler.latest.power_w == load.idle_mw / 1e3


async def test_a_board_that_cannot_be_read_is_tried_again() -> None:
    device, faults = ScriptedDevice(), [OSError("gone")]

    def conditions(at_s: float) -> Conditions:
        if faults:
            raise faults.pop()
        return Conditions(50.0, None)

    device.conditions_at = conditions
    seen: list[BoardSample | None] = []

    async def sleep(seconds: float) -> None:
        seen.append(sampler.latest)
        if len(seen) == 2:
            raise asyncio.CancelledError

    sampler = BoardSampler(device, sleep)
    with pytest.raises(asyncio.CancelledError):
        await sampler.run()
    assert seen[0] is None and seen[1] is not None and seen[1].temperature_c == 50.0


def test_a_sample_survives_the_wire_and_what_no_board_can_have_counts_as_missing() -> None:
    sample = BoardSample(12.5, -3.0, OTHER, 0, 0.0, 1.0, 99.5)
    assert board_sample_from_message(board_sample_to_message(sample)) == sample
    assert board_sample_from_message(board_sample_to_message(BoardSample())) == BoardSample()
    absurd = session_pb2.BoardSample(
        power_w=-1, temperature_c=math.inf, fan_share=1.5, energy_j=math.nan, gpu_use_share=0.5
    )
    assert board_sample_from_message(absurd) == BoardSample(gpu_use_share=0.5)
