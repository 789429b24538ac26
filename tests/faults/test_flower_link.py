"""Faults between real SuperNodes and a real SuperLink, while PowerAware runs rounds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.faulty_link import FaultyLink, faulty_link
from tests.faults.device import EPOCH_S
from tests.faults.faults import FAULTS, IS_LONG, PARTITION, Fault
from tests.faults.fleet import REAL, running
from wattfleet_simulation.flower import FlowerDeployment, Node, Parts

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(900)]

_APP = Path(__file__).parent / "app"
_DEVICES = 3
_ALLOWANCE_S = 8.0
_ASKED_S = 2.0
_DEADLINE_S = 2 * EPOCH_S + _ALLOWANCE_S + _ASKED_S
_BUSY_S = 20.0
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
            nodes = [Node(each.device_id, n, folder / "none.sock") for n, each in enumerate(fleet.devices)]
            deployment = FlowerDeployment(parts, folder / "home", nodes)
            async with faulty_link(deployment.address) as link:
                await asyncio.to_thread(deployment.start, {each.device_id: link.address for each in nodes[1:]})
                yield Run(link, deployment, folder / "rounds.jsonl", fleet.planning.address)


# The short forms are `test_slow_link`, `test_waiting` and `test_quorum` of `tests/integration/wattfleet_flower`.
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
            assert each["closed_s"] - each["sent_s"] < _DEADLINE_S + _BUSY_S
