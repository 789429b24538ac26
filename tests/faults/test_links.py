"""Faults on the links of agents, PowerAware and SuperNodes: rounds end, and the fleet returns to the same state."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.connections import FaultyLink, faulty_link
from tests.fakes.polling import eventually
from tests.faults.faults import (
    DEADLINE_S,
    DEVICES,
    FAULTS,
    IS_LONG,
    NO_FAULT,
    PACE,
    PARTITION,
    Fault,
    Outcome,
    name_of,
    on_each_transport,
    through,
)
from tests.faults.fleet import EPOCH_S, REAL, running
from wattfleet.simulation.flower import FlowerDeployment, Parts, SuperNodeConfig
from wattfleet_proto.v1 import session_pb2

# --- Test agents link -------------------------------------------------------------------------------------------------
# Faults between agents and coordinator: rounds end, queues stay bounded, and the fleet returns to the same state.


pytestmark = pytest.mark.timeout(600)

SHORT_FORM = ("half-open to the client", "partition")
"""The faults of the short form; others are on PowerAware's link: `SHORT_FORM_OF_PLANNING`."""

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


# --- Test planning link -----------------------------------------------------------------------------------------------
# Faults between PowerAware and the coordinator: rounds end by their deadline, and every report arrives once.

SHORT_FORM_OF_PLANNING = ("64 kB per s", "all reset at once")
"""The faults of the short form; others are on the agents' links: `SHORT_FORM`."""

_DEVICES = 3

_ASKED_S = 2.0
"""Time to ask whether the plan was trimmed if replies are missing: five round trips over a slow link."""


@pytest.mark.parametrize("case", on_each_transport(short=SHORT_FORM_OF_PLANNING), ids=name_of)
async def test_rounds_close_by_their_deadline(
    case: tuple[Fault, bool], config: CoordinatorSettings, tmp_path: Path
) -> None:
    fault, is_certified = case
    async with running(config, tmp_path / "fleet", _DEVICES, pace=PACE, is_certified=is_certified) as fleet:
        run = fleet.run(3)
        await eventually(lambda: all(device.is_training for device in fleet.devices))
        # One reply is missing, so that the round lasts until its deadline.
        fleet.grid.gone.add("orin-0")
        fault.begin(fleet.planning_link, PACE)
        began_s = time.monotonic()
        await eventually(lambda: len(fleet.rounds) == 1)
        fleet.grid.gone.clear()
        await asyncio.sleep(began_s + PACE.outage_s - time.monotonic())
        healed_s = time.monotonic()
        if fault.name != "forgotten connections":
            fleet.planning_link.heal()
        async with asyncio.timeout(300):
            await run
        closed = ", ".join(f"{each.took_s:.1f}" for each in fleet.rounds)
        next_s = fleet.rounds[1].sent_s - healed_s
        print(
            f"\nPowerAware, {name_of(case)}: rounds took {closed} s of at most {DEADLINE_S + _ASKED_S:.1f};"
            f" the next one was sent {next_s:.1f} s after the fault's end"
        )
        for each in fleet.rounds:
            assert each.took_s < DEADLINE_S + _ASKED_S + _BUSY_S
        assert fleet.rounds[1].sent_s < healed_s + 60.0
        await eventually(fleet.is_ready)
        everybody = sorted(device.device_id for device in fleet.devices)
        *_, last = (await fleet.observed()).values()
        assert last == everybody
        [seen] = await fleet.client.runs()
        assert seen.finished and not seen.error
        views = (await fleet.client.rounds(seen.run_id)).rounds
        failed = [[result.device_id for result in view.results if result.failure] for view in views]
        assert failed == [["orin-0"], [], []], "the results of each round arrived once"


# --- Test flower link -------------------------------------------------------------------------------------------------
# Faults between real SuperNodes and a real SuperLink, while PowerAware runs rounds.

_APP = Path(__file__).parent / "app"
_ALLOWANCE_S = 8.0
_DEADLINE_S = 2 * EPOCH_S + _ALLOWANCE_S + _ASKED_S
_BUSY_WITH_FLOWER_S = 20.0
_SETTLED_S = 400.0


@dataclass
class Run:
    """A run over a SuperLink with three SuperNodes, two of them behind a faulty link."""

    link: FaultyLink
    deployment: FlowerDeployment
    log: Path
    coordinator: str
    run_id: str = ""

    async def submit(self, rounds: int) -> None:
        """Start a run of the app."""
        config: dict[str, str | int | float] = {
            "coordinator": self.coordinator,
            "devices": _DEVICES,
            "rounds": rounds,
            "allowance-s": _ALLOWANCE_S,
            "log": str(self.log),
        }
        self.run_id = await asyncio.to_thread(self.deployment.submit, _APP, config)

    async def completed(self) -> None:
        """Wait until the run has completed."""
        async with asyncio.timeout(_SETTLED_S):
            while not await asyncio.to_thread(self.deployment.completed, self.run_id):
                await asyncio.sleep(0.2)

    def closed(self) -> list[dict[str, float]]:
        """The rounds that have ended."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]

    async def until(self, condition: Callable[[list[dict[str, float]]], bool]) -> None:
        """Wait until the rounds that have ended meet a condition."""
        async with asyncio.timeout(_SETTLED_S):
            while not condition(self.closed()):
                await asyncio.sleep(0.1)


@asynccontextmanager
async def supernodes_behind_link(config: CoordinatorSettings, folder: Path) -> AsyncIterator[Run]:
    async with running(config, folder / "fleet", _DEVICES, pace=REAL) as fleet:
        with Parts(folder / "logs") as parts:
            nodes = [SuperNodeConfig(each.device_id, n, folder / "none.sock") for n, each in enumerate(fleet.devices)]
            deployment = FlowerDeployment(parts, folder / "home", nodes)
            async with faulty_link(deployment.address) as link:
                await asyncio.to_thread(deployment.start, {each.device_id: link.address for each in nodes[1:]})
                yield Run(link, deployment, folder / "rounds.jsonl", fleet.planning.address)


# The short forms are `test_slow_link`, `test_waiting` and `test_quorum` of `tests/integration/flower`.
@pytest.mark.deployment
@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS if IS_LONG else [PARTITION], ids=str)
async def test_two_of_three_supernodes_lose_the_superlink_in_mid_round(
    fault: Fault, config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with supernodes_behind_link(config, tmp_path) as run:
        await run.submit(10 if IS_LONG else 4)
        await run.until(lambda closed: len(closed) >= 1)
        await asyncio.sleep(1.0)  # during the second round
        fault.begin(run.link, REAL)
        began_s = time.time()
        await run.until(lambda closed: len(closed) >= (4 if IS_LONG else 2))
        fault.end(run.link)
        healed_s = time.time()
        await run.completed()
        for _ in range(10):
            back = [each for each in run.closed() if each["sent_s"] > healed_s and each["replies"] == _DEVICES]
            if back:
                break
            await run.submit(1)
            await run.completed()
        closed = run.closed()
        took = ", ".join(f"{each['closed_s'] - each['sent_s']:.1f} s ({each['replies']} replies)" for each in closed)
        print(
            f"\nFlower, {fault} for {healed_s - began_s:.0f} s: rounds took {took}, of at most {_DEADLINE_S:.0f} s;"
            f" a round of all nodes was sent {back[0]['sent_s'] - healed_s:.0f} s after the fault's end"
        )
        for each in closed:
            assert each["closed_s"] - each["sent_s"] < _DEADLINE_S + _BUSY_WITH_FLOWER_S


# --- Test kernel faults -----------------------------------------------------------------------------------------------
# Faults created by the kernel, with `tc` in a network namespace of the test's own. Nothing outside it is changed.

_UNSHARED = ("unshare", "--net", "--map-root-user")
_ROOT = Path(__file__).parents[2]


def _require(discipline: str) -> None:
    """Skip the test if this kernel, or this user, cannot use a queueing discipline."""
    if missing := [program for program in ("unshare", "ip", "tc") if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    tried = subprocess.run(
        [*_UNSHARED, "tc", "qdisc", "add", "dev", "lo", "root", *discipline.split()], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"tc cannot use {discipline.split()[0]} here: {tried.stderr.strip()}")


# The short forms are the same faults on a link of the test's own.
@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(
    "discipline", ["netem delay 250ms", "netem loss 50%", "tbf rate 512kbit burst 16kb latency 2s"]
)
def test_a_fleet_recovers_from_faults_of_the_kernel(discipline: str, tmp_path: Path) -> None:
    _require(discipline)
    command = [*_UNSHARED, sys.executable, "-m", "tests.faults.in_namespace", str(tmp_path / "fleet")]
    done = subprocess.run(
        [*command, *discipline.split()],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(f"\nkernel, {discipline}: {done.stdout.splitlines()[-1]}")
