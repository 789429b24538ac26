"""A device that reports impossible values is left out, and all others are planned."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from coordinator.settings import CoordinatorSettings
from coordinator.store import checksums
from tests.fakes.served import READY, Agent, Client, serving_client
from tests.fakes.small_fleet import NODES, RUN
from wattfleet_proto.v1 import planning_pb2, power_pb2, session_pb2

LIAR_NODE = 77
POLICIES = ("fastest-k", "all", "random", "deadline", "tiers", "oort", "fair", "progress")


def one_point(**values: float) -> power_pb2.Front:
    """A front of one mode that differs from an ordinary one in the given values."""
    mode = power_pb2.PowerMode(cores=4, cpu_khz=1_500_000, gpu_hz=600_000_000, mem_hz=2_133_000_000)
    return power_pb2.Front(points=[power_pb2.FrontPoint(mode=mode, **{"epoch_s": 20.0, "power_w": 30.0, **values})])


IMPLAUSIBLE = {
    "uncertain time": (one_point(epoch_log_sd=800.0), 5.0),
    "uncertain watts": (one_point(power_log_sd=2.1), 5.0),
    "5e-324 s": (one_point(epoch_s=5e-324), 5.0),
    "1e-200 s": (one_point(epoch_s=1e-200), 5.0),
    "1e300 s": (one_point(epoch_s=1e300), 5.0),
    "warm-up of 1e8 s": (one_point(warmup_s=1e8), 5.0),
    "1e200 W": (one_point(power_w=1e200), 5.0),
    "900 W": (one_point(power_w=900.0), 5.0),
    "idles at 999 W": (one_point(), 999.0),
    "idles at 1e300 W": (one_point(), 1e300),
}


def with_policy(config: CoordinatorSettings, policy: str) -> CoordinatorSettings:
    return config.with_values(policy={"name": policy, "deadline_s": 100.0 if policy == "deadline" else None})


async def with_liar(client: Client, front: power_pb2.Front, idle_w: float) -> Agent:
    """Two honest devices, and one that reports this front."""
    await client.two_ready()
    return await lie(client, front, idle_w)


async def lie(
    client: Client, front: power_pb2.Front, idle_w: float, device_id: str = "liar", node_id: int = LIAR_NODE
) -> Agent:
    """A new device that reports this front."""
    liar = client.agent()
    await liar.hello(device_id)
    await liar.send(front=session_pb2.FrontReport(front=front, idle_w=idle_w))
    await liar.send(state=READY)
    binding = planning_pb2.NodeBinding(node_id=node_id, device_id=device_id)
    await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=[binding]))
    return liar


async def plan(client: Client, run_id: str = RUN, liar_node: int = LIAR_NODE) -> planning_pb2.PlanRoundResponse:
    request = planning_pb2.PlanRoundRequest(run_id=run_id, round=1, node_ids=[*NODES, liar_node], epochs=1.0)
    found: planning_pb2.PlanRoundResponse = await client.planning.PlanRound(request)
    return found


def assert_usable(made: planning_pb2.PlanRoundResponse) -> None:
    """Check that the plan selects honest devices only, and that all its numbers are finite."""
    chosen = {each.device_id for each in made.assignments}
    assert chosen and chosen <= {"orin", "nano"}
    assert 0 < made.duration_s <= 60.0 and 0 < made.planned_w <= made.site_budget_w
    for each in made.assignments:
        assert all(map(math.isfinite, (each.epoch_s, each.power_w, each.power_limit_w, each.warmup_s)))


@pytest.mark.parametrize("policy", POLICIES)
async def test_an_implausible_front_leaves_out_its_device_only(config: CoordinatorSettings, policy: str) -> None:
    async with serving_client(with_policy(config, policy)) as client:
        liar = await with_liar(client, one_point(), 5.0)
        for case, (front, idle_w) in IMPLAUSIBLE.items():
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=case, strategy="FedAvg", rounds=3))
            await liar.send(front=session_pb2.FrontReport(front=front, idle_w=idle_w))
            assert_usable(await plan(client, case))
            shown = (await client.devices())["liar"]
            assert shown.state == session_pb2.DEVICE_STATE_READY, "its session lasts"
            assert "no device can have" in shown.left_out or "more than" in shown.left_out
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=case))
            await client.end_trainings()


async def test_a_newcomer_with_an_implausible_front_is_shown(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
        for number, (front, idle_w) in enumerate(IMPLAUSIBLE.values()):
            run_id, liar, node_id = f"run {number}", f"liar {number}", LIAR_NODE + number
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=run_id, strategy="FedAvg", rounds=3))
            await lie(client, front, idle_w, device_id=liar, node_id=node_id)
            assert_usable(await plan(client, run_id, node_id))
            assert (await client.devices())[liar].left_out
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=run_id))
            await client.end_trainings()


async def test_a_plausible_front_ends_the_exclusion(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        liar = await with_liar(client, one_point(epoch_s=1e-200), 5.0)
        assert (await client.devices())["liar"].left_out
        await liar.send(front=session_pb2.FrontReport(front=one_point(), idle_w=5.0))
        assert not (await client.devices())["liar"].left_out
        assert "liar" in {each.device_id for each in (await plan(client)).assignments}


async def test_a_device_with_an_older_front_is_left_out_with_the_reason(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        liar = await with_liar(client, one_point(), 5.0)
        await liar.send(front=session_pb2.FrontReport(front=one_point(epoch_s=1e-200), idle_w=5.0))
        made = await plan(client)
        assert_usable(made)
        [reason] = [each.reason for each in made.decisions if each.device_id == "liar"]
        assert reason.startswith("left out: ") and "1e-06" in reason


async def test_the_agent_is_told_why_its_front_is_refused(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        agent = client.agent()
        await agent.hello("liar")
        await agent.send(front=session_pb2.FrontReport(front=one_point(), idle_w=999.0))
        assert "999 W as its idle power" in agent.refusals[-1]
        await agent.send(front=session_pb2.FrontReport(front=one_point(), idle_w=5.0))
        assert len(agent.refusals) == 1


@pytest.mark.parametrize("values", [(1e-200, 30.0), (1e200, 30.0), (20.0, 1e200), (20.0, 999.0), (math.nan, 1.0)])
async def test_an_implausible_observation_is_dropped(config: CoordinatorSettings, values: tuple[float, float]) -> None:
    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        made = await client.plan()
        bad = session_pb2.Observation(plan_id=made.plan_id, epoch_s=values[0], power_w=values[1])
        await orin.send(observation=bad)
        good = session_pb2.Observation(plan_id=made.plan_id, epoch_s=36.0, power_w=14.5)
        await nano.send(observation=good)
        [shown] = (await client.rounds()).rounds
        assert [each.device_id for each in shown.observations] == ["nano"]
        assert "observed" in orin.refusals[-1]


IMPLAUSIBLE_RESULTS = (
    (1e200, 1e200),
    (1e200, 100.0),
    (-1e300, 100.0),
    (1.0, 1e300),
    (math.nan, 100.0),
    (1.0, -math.inf),
)
"""Pairs of a loss and a number of examples."""


@pytest.mark.parametrize("policy", POLICIES)
async def test_an_implausible_result_counts_as_not_reported(config: CoordinatorSettings, policy: str) -> None:
    async with serving_client(with_policy(config, policy)) as client:
        await client.two_ready()
        for loss, num_examples in IMPLAUSIBLE_RESULTS:
            run_id = f"loss {loss}, {num_examples} examples"
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=run_id, strategy="FedAvg", rounds=3))
            for number in range(1, 4):
                made = await client.plan(number, run_id)
                assert math.isfinite(made.duration_s) and made.assignments
                results = [
                    planning_pb2.DeviceResult(device_id=each.device_id, share=1.0, loss=2.0, num_examples=100.0)
                    for each in made.assignments
                ]
                results[0].loss, results[0].num_examples = loss, num_examples
                finish = planning_pb2.FinishRoundRequest(plan_id=made.plan_id, results=results, wall_s=40.0)
                await client.planning.FinishRound(finish)
                await client.end_trainings()
            first = (await client.rounds(run_id)).rounds[0].results[0]
            assert not first.HasField("loss") or abs(first.loss) <= 1e9
            assert not first.HasField("num_examples") or 0 <= first.num_examples <= 1e9
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=run_id))


async def test_a_stored_front_that_is_not_plausible_does_not_end_the_start(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
    with closing(sqlite3.connect(config.store.location)) as store, store:
        checksums.prepare(store)
        points = np.array([[4, 1.5e6, 6e8, 2.1e9, 20.0, 30.0, 800.0, 0.0, 0.0]], dtype="<f8")
        store.execute("UPDATE workload_front SET points = ? WHERE device_id = 'orin'", (points.tobytes(),))
    async with serving_client(config) as client:
        shown = await client.devices()
        assert not shown["orin"].HasField("front") and shown["nano"].HasField("front")
