"""A coordinator that is killed at random moments while rounds run: no acknowledged data is lost.

It serves from SQLite and from PostgreSQL. A short form runs with all tests; `make chaos` kills 50 times on each store.
CHAOS_SEED repeats the moments of an earlier run.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import URL

from edge_agent.session.certificate_keeper import connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.outbox import Outbox, OutboxFile
from tests.fakes.fleets import front
from tests.fakes.real_processes import CoordinatorProcess
from wattfleet.common.identity.channels import Endpoint
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import (
    planning_pb2,
    planning_pb2_grpc,
    power_pb2,
    session_pb2,
    view_pb2,
    view_pb2_grpc,
)

SEED = int(os.environ.get("CHAOS_SEED", "0"))
KILLS = int(os.environ.get("CHAOS_KILLS", "2"))
AGENTS = 100 if KILLS > 10 else 30
BACK_WITHIN_S = 5.0
GRANTED_WITHIN_S = 90.0
RUN = "chaos"
FRONT = front((10, 14), (12, 10), (20, 7))


@dataclass
class Acknowledged:
    """What the coordinator has acknowledged."""

    plans: dict[int, planning_pb2.PlanRoundResponse] = field(default_factory=dict)
    observations: set[tuple[int, str, float]] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)


@dataclass
class SimulatedAgent:
    """The agent's real link to the coordinator, without a device behind it."""

    device_id: str
    folder: Path
    address: str
    session: CoordinatorSession = field(init=False)
    outbox: Outbox = field(init=False)

    async def run(self) -> None:
        async def welcomed(welcome: session_pb2.Welcome) -> None:
            pass

        hello = session_pb2.Hello(
            device_id=self.device_id,
            board="orin-nano",
            provenance=power_pb2.PROVENANCE_SIMULATED,
            mode_count=100,
            protocol=own_version(),
            installation=self.device_id,
        )
        self.outbox = Outbox(OutboxFile(self.folder / self.device_id / "outbox.jsonl"))
        self.session = CoordinatorSession(connects_to(Endpoint(self.address)), hello, welcomed, self.outbox)
        self.session.report_front(
            session_pb2.FrontReport(front=front_to_message(FRONT), idle_w=3.0, minibatches_per_epoch=100)
        )
        self.session.report_state(session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY))
        await self.session.run()

    async def train(self, plan_id: str, takes_s: float, epoch_s: float) -> None:
        """Train under the round's grant, report the training, and wait until the report is acknowledged."""
        await self.session.grants.wait_for(plan_id, GRANTED_WITHIN_S)
        self.session.grants.begin(plan_id)
        await asyncio.sleep(takes_s)
        self.session.grants.ended()
        self.session.report_observation(session_pb2.Observation(plan_id=plan_id, epoch_s=epoch_s, power_w=9.0))
        while not await self.session.flush(5):
            pass


class FlowerServer:
    """Runs rounds without end; repeats every request that fails."""

    def __init__(self, address: str, agents: dict[str, SimulatedAgent], acknowledged: Acknowledged) -> None:
        options = [("grpc.max_reconnect_backoff_ms", 500)]
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self._planning = planning_pb2_grpc.PlanningServiceStub(self.channel)
        self._agents = agents
        self._acknowledged = acknowledged
        self._chance = random.Random(SEED)

    async def run(self) -> None:
        bindings = [planning_pb2.NodeBinding(node_id=k + 1, device_id=d) for k, d in enumerate(self._agents)]
        await self.asked("BindNodes", planning_pb2.BindNodesRequest(bindings=bindings))
        await self.asked("StartRun", planning_pb2.StartRunRequest(run_id=RUN, strategy="FedAvg", rounds=0))
        number = 0
        while True:
            number += 1
            node_ids = range(1, len(self._agents) + 1)
            request = planning_pb2.PlanRoundRequest(run_id=RUN, round=number, node_ids=node_ids, epochs=1.0)
            plan = await self.asked("PlanRound", request)
            self._acknowledged.plans[number] = plan
            await asyncio.gather(*(self._train(number, plan.plan_id, each.device_id) for each in plan.assignments))
            results = [planning_pb2.DeviceResult(device_id=each.device_id, share=1.0) for each in plan.assignments]
            finish = planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, results=results, wall_s=number)
            await self.asked("FinishRound", finish)
            self._acknowledged.finished.add(number)

    async def _train(self, number: int, plan_id: str, device_id: str) -> None:
        epoch_s = self._chance.uniform(8, 12)
        await self._agents[device_id].train(plan_id, self._chance.uniform(0, 0.1), epoch_s)
        self._acknowledged.observations.add((number, device_id, epoch_s))

    async def asked(self, method: str, request: Any) -> Any:
        while True:
            try:
                return await getattr(self._planning, method)(request, timeout=10, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                # No device is ready yet, or the coordinator is gone, or it is stopping and cancels calls that exceed
                # its grace period.
                assert error.code() in (
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    grpc.StatusCode.CANCELLED,
                ), error
                await asyncio.sleep(0.05)


async def rounds_kept(address: str) -> list[view_pb2.RoundView]:
    async with grpc.aio.insecure_channel(address) as channel:
        view = view_pb2_grpc.ViewServiceStub(channel)
        try:
            asked = view_pb2.StreamRoundsRequest(run_id=RUN)
            return [each async for each in view.StreamRounds(asked, timeout=10, wait_for_ready=True)]
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND, error
            return []  # it was killed before the run had begun


def require_nothing_lost(kept: list[view_pb2.RoundView], acknowledged: Acknowledged) -> None:
    by_number = {round_.round: round_ for round_ in kept}
    assert len(by_number) == len(kept), "no round is planned twice"
    for number, plan in acknowledged.plans.items():
        assert by_number[number].plan.assignments == plan.assignments
        assert by_number[number].plan.decisions == plan.decisions
    observed = {(r.round, each.device_id, each.epoch_s) for r in kept for each in r.observations}
    assert acknowledged.observations <= observed
    assert len({(number, device_id) for number, device_id, _ in observed}) == len(observed), "none counts twice"
    assert acknowledged.finished <= {r.round for r in kept if r.HasField("wall_s")}


@pytest.mark.timeout(300 + 12 * KILLS)
@pytest.mark.parametrize(
    ("location", "how", "times"),
    [
        ("postgresql", "killed", KILLS),
        # `test_campaign.py` has a short form for SQLite.
        pytest.param("sqlite", "killed", KILLS, marks=pytest.mark.slow),
        pytest.param("sqlite", "stopped", 2, marks=pytest.mark.slow),
        pytest.param("postgresql", "stopped", 2, marks=pytest.mark.slow),
    ],
    indirect=["location"],
)
async def test_whenever_it_is_ended_nothing_that_was_acknowledged_is_lost(
    tmp_path: Path, location: Path | URL, how: str, times: int
) -> None:
    coordinator = CoordinatorProcess(
        tmp_path, location, "--site-budget-w", "600", "--policy", "random", "--clients", "20"
    )
    acknowledged = Acknowledged()
    chance = random.Random(SEED)

    await coordinator.start()
    agents = {f"device-{k:03}": SimulatedAgent(f"device-{k:03}", tmp_path, coordinator.address) for k in range(AGENTS)}
    flower = FlowerServer(coordinator.address, agents, acknowledged)
    working = [asyncio.create_task(agent.run()) for agent in agents.values()]
    working.append(asyncio.create_task(flower.run()))
    restarts_s = []
    try:
        for _ in range(times):
            before = len(acknowledged.plans), len(acknowledged.finished)
            await asyncio.sleep(chance.uniform(0.0, 1.0))
            if how == "killed":
                coordinator.kill()
            else:  # most likely in the middle of a round
                assert await asyncio.to_thread(coordinator.stop) == 0
            seen = Acknowledged(dict(acknowledged.plans), set(acknowledged.observations), set(acknowledged.finished))
            restarts_s.append(await coordinator.start())
            require_nothing_lost(await rounds_kept(coordinator.address), seen)
            # Rounds resume: one is planned and another one finished that were not before the kill.
            while len(acknowledged.plans) <= before[0] or len(acknowledged.finished) <= before[1]:
                await asyncio.sleep(0.02)
                for task in working:
                    assert not task.done(), task.exception()
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await flower.channel.close()
        with suppress(ProcessLookupError):
            assert coordinator.stop() == 0
    restarts_s.sort()
    print(f"back within {restarts_s[-1]:.2f} s, {restarts_s[len(restarts_s) // 2]:.2f} s in the median")
    if times > 10:  # the short form runs in parallel with other tests
        assert restarts_s[-1] <= BACK_WITHIN_S
    assert len(acknowledged.finished) > times // 2
    if isinstance(location, Path):
        with sqlite3.connect(location) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        database.close()
