"""Faults between PowerAware and the coordinator: rounds end by their deadline, and every report arrives once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.polling import eventually
from tests.faults.agents_link import DEADLINE_S
from tests.faults.faults import PACE, Fault, name_of, on_each_transport
from tests.faults.fleet import running

pytestmark = pytest.mark.timeout(600)

SHORT_FORM = ("latency", "64 kB per s", "half-open to the server", "all reset at once")
"""The other faults are on the agents' links in `test_agents_link.py`."""

_BUSY_S = 10.0
_DEVICES = 3

_ASKED_S = 2.0
"""Time to ask whether the plan was trimmed if replies are missing: five round trips over a slow link."""


@pytest.mark.parametrize("case", on_each_transport(short=SHORT_FORM), ids=name_of)
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
