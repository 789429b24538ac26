"""Faults between agents and coordinator: rounds end, queues stay bounded, and the fleet returns to the same state."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.polling import eventually
from tests.faults.agents_link import DEADLINE_S, Outcome, through
from tests.faults.faults import DEVICES, NO_FAULT, PACE, Fault, name_of, on_each_transport
from tests.faults.fleet import running
from wattfleet_proto.v1 import session_pb2

pytestmark = pytest.mark.timeout(600)

SHORT_FORM = ("50 % loss", "half-open to the client", "partition", "forgotten connections")
"""The other faults are on PowerAware's link in `test_planning_link.py`."""

_BUSY_S = 10.0
"""Time that a busy machine may add to any duration."""

_REPORTS_AT_MOST = 4
"""In an outbox: the newest state and front, and the observations of two rounds."""

_BACKLOG_BYTES = 64 * 1024
_GROWTH_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """Results that are computed once: the state of a fleet without a fault."""
    return {}


async def state_without_fault(known: dict[str, Any], config: CoordinatorSettings, folder: Path) -> Any:
    if not known:
        known.update((await through(NO_FAULT, config, folder)).state)
    return known


def require_sound(outcome: Outcome, state: Any) -> None:
    """Check what has to hold after every fault."""
    for each in outcome.rounds:
        assert each.took_s < DEADLINE_S + _BUSY_S
    assert outcome.most_waiting <= _REPORTS_AT_MOST
    assert outcome.backlog_bytes <= _BACKLOG_BYTES
    assert outcome.grown_bytes <= _GROWTH_BYTES
    assert outcome.state == state
    everybody = sorted(f"orin-{number}" for number in range(DEVICES))
    first, *_, last = outcome.observed.values()
    assert first == last == everybody, "every observation is stored exactly once"
    for observed in outcome.observed.values():
        assert len(observed) == len(set(observed))


@pytest.mark.parametrize("case", on_each_transport(short=SHORT_FORM), ids=name_of)
async def test_a_fleet_recovers_from_a_fault(
    case: tuple[Fault, bool], config: CoordinatorSettings, tmp_path: Path, known: dict[str, Any]
) -> None:
    fault, is_certified = case
    state = await state_without_fault(known, config, tmp_path / "without")
    outcome = await through(fault, config, tmp_path / "with", is_certified=is_certified)
    print(f"\nagents, {name_of(case)}: {outcome}")
    require_sound(outcome, state)
    if fault.cuts:
        assert outcome.detected_s is not None and outcome.detected_s < 3 * PACE.lease_s + _BUSY_S


async def test_nine_of_ten_devices_are_gone_in_mid_round_and_come_back_at_once(
    config: CoordinatorSettings, tmp_path: Path, known: dict[str, Any]
) -> None:
    devices = max(10, DEVICES)
    cut = Fault("nine of ten gone", lambda link, _: link.partition(), cuts=True)
    outcome = await through(cut, config, tmp_path / "fleet", devices=devices, is_certified=True, share=0.9)
    print(f"\nagents, nine of ten gone and back at once: {outcome}")
    for each in outcome.rounds:
        assert each.took_s < DEADLINE_S + _BUSY_S
    assert outcome.most_waiting <= _REPORTS_AT_MOST and outcome.backlog_bytes <= _BACKLOG_BYTES
    everybody = sorted(f"orin-{number}" for number in range(devices))
    *_, last = outcome.observed.values()
    assert last == everybody
    assert {each["state"] for each in outcome.state.values()} == {session_pb2.DEVICE_STATE_READY}


async def test_a_device_without_its_link_parks_when_its_grant_lapses(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with running(config, tmp_path / "fleet", 3, pace=PACE) as fleet:
        for device in fleet.devices:
            device.trains_s = 3 * PACE.grant_lifetime_s
        run = fleet.run(1)
        await eventually(lambda: all(device.is_training for device in fleet.devices))
        fleet.links[0].partition()
        cut_s = time.monotonic()
        lapsed = fleet.devices[0].trainings
        while lapsed[-1].ended_s is None or any(view.HasField("granted_w") for view in (await fleet.views()).values()):
            if any(device.is_training for device in fleet.devices):
                granted = [view.HasField("granted_w") for view in (await fleet.views()).values()]
                still = [device.is_training for device in fleet.devices]
                assert all(counts or not trains for counts, trains in zip(granted, still, strict=True))
            await asyncio.sleep(0.1)
            assert time.monotonic() - cut_s < 1.01 * PACE.grant_lifetime_s + PACE.lease_s + 3 * _BUSY_S
        released_s = time.monotonic() - cut_s
        parked_s = max(device.trainings[-1].ended_s or 0.0 for device in fleet.devices) - cut_s
        print(
            f"\nagents, partition for longer than a grant: parked after {parked_s:.1f} s, released {released_s:.1f} s"
        )
        assert parked_s < PACE.grant_lifetime_s + _BUSY_S
        assert {device.trainings[-1].stopped for device in fleet.devices} == {
            "the agent could not reach the coordinator for too long"
        }
        fleet.links[0].heal()
        await run
        await eventually(fleet.is_ready)
