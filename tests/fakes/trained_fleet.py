"""A coordinator with a page, and eight devices that have trained a round and report realistic values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np

from coordinator.settings import CoordinatorSettings
from tests.fakes.fleets import columns_of, front
from tests.fakes.served import Agent, Client, hello_of, serving
from tests.fakes.small_fleet import RUN, RUN_NAME
from wattfleet.core.choosing import Front
from wattfleet.core.modes import BOARDS
from wattfleet_proto.convert import front_to_message, mode_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import planning_pb2, power_pb2, session_pb2

DEVICES = {f"{board}-{k}": (board, k) for board in ("agx-orin", "orin-nano") for k in range(1, 5)}
HOT, THROTTLED, OVER_BUDGET, SLOWEST = "agx-orin-3", "orin-nano-3", "agx-orin-2", "orin-nano-4"
_NODE = 2**63


_CIRCUITS = """
[supplies.site]
budget = { watts = 160.0 }
[supplies.rack]
parent = "site"
budget = { query = "watts", url = "http://127.0.0.1:9", fallback_w = 110.0 }
devices = ["agx-orin-*"]
[supplies.roof]
parent = "site"
budget = { watts = 60.0 }
devices = ["orin-nano-*"]
"""


def with_circuits(config: CoordinatorSettings, folder: Path) -> CoordinatorSettings:
    """The AGX Orins behind a rack whose budget is on its fallback, the Orin Nanos behind a roof."""
    path = folder / "site.toml"
    path.write_text(_CIRCUITS)
    return config.with_values(site={"budget_w": None, "file": path})


class Trained:
    """Eight devices, and a run whose first round they have trained."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.agents: dict[str, Agent] = {}
        address = client.bound.http_address
        self.host = address
        self.url = f"http://{address}"
        self.training_j = 0.0
        self.trainings = self.observed = 0

    async def ready(self) -> None:
        for device_id, (board, k) in DEVICES.items():
            agent = self.agents[device_id] = self.client.agent()
            hello = hello_of(device_id, board)
            hello.mode_count = 18_096
            await agent.greet(hello)
            await agent.lease()
            speed = 10.0 + 2 * k + (15 if board == "orin-nano" else 0)
            watts = 18.0 if board == "agx-orin" else 8.0
            points = [(speed * slow, watts / slow**0.8 + 6) for slow in (1.0, 1.3, 1.7, 2.4)]
            report = session_pb2.FrontReport(
                front=front_message(board, points),
                idle_w=4.0,
                presets=preset_messages(board, points),
                minibatches_per_epoch=100,
            )
            await agent.send(front=report)
            await agent.send(
                state=session_pb2.StateReport(
                    state=session_pb2.DEVICE_STATE_READY, profiled_modes=50, detail="ready to train"
                )
            )
        bindings = [planning_pb2.NodeBinding(node_id=_NODE + k, device_id=each) for k, each in enumerate(DEVICES)]
        planning = self.client.planning
        await planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
        start = planning_pb2.StartRunRequest(
            run_id=RUN, strategy="FedAvg", rounds=3, name=RUN_NAME, labels={"site": "lab", "lr": "0.1"}
        )
        await planning.StartRun(start)

    async def sense(self) -> None:
        """Let all boards report their sensor values; one is hot, and one throttles."""
        for k, (device_id, agent) in enumerate(self.agents.items()):
            for throttle_events in (2, 3 if device_id == THROTTLED else 2):
                sample = session_pb2.BoardSample(
                    power_w=4.2 + 0.3 * k,
                    temperature_c=88.0 if device_id == HOT else 48.0 + k,
                    mode=power_pb2.PowerMode(cores=4, cpu_khz=1_500_000, gpu_hz=600_000_000, mem_hz=2_133_000_000),
                    throttle_events=throttle_events,
                    fan_share=0.35,
                    gpu_use_share=0.02,
                    energy_j=52_300.0 + 1_000 * k,
                )
                await agent.lease(agent.phase, agent.keeps_to, sample)

    async def shown(self) -> None:
        """Wait until the page, whose snapshots are taken at intervals, shows what the last device has reported."""
        async with httpx.AsyncClient() as browser, asyncio.timeout(60):
            while "6.3" not in (await browser.get(self.url, params={"text": [*DEVICES][-1]})).text:
                await asyncio.sleep(0.05)

    async def plan(self, number: int) -> planning_pb2.PlanRoundResponse:
        nodes = [_NODE + k for k in range(len(DEVICES))]
        request = planning_pb2.PlanRoundRequest(run_id=RUN, round=number, node_ids=nodes, epochs=1.0)
        plan: planning_pb2.PlanRoundResponse = await self.client.planning.PlanRound(request)
        return plan

    async def train(self, plan: planning_pb2.PlanRoundResponse, failing: str = "") -> None:
        """Let the selected devices train within some percent of the prediction; one may fail."""
        results = []
        self.trainings += len(plan.assignments)
        for k, part in enumerate(plan.assignments):
            agent = self.agents[part.device_id]
            grant = await agent.grant()
            await agent.lease(GrantPhase.TRAINING, grant)
            is_failing = part.device_id == failing
            power_w = part.power_w * (1.2 if part.device_id == OVER_BUDGET else 0.97)
            if not is_failing:
                observation = session_pb2.Observation(
                    plan_id=plan.plan_id, epoch_s=part.epoch_s * (0.96 + 0.02 * k), power_w=power_w
                )
                self.observed += 1
                self.training_j += power_w * (part.warmup_s + observation.epoch_s)
                await agent.send(observation=observation)
            await agent.lease(GrantPhase.OVER, grant)
            failure = "the app raised ValueError" if is_failing else ""
            results.append(
                planning_pb2.DeviceResult(device_id=part.device_id, failure=failure, num_examples=100, share=1.0)
            )
        finish = planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=plan.duration_s + 2, results=results)
        await self.client.planning.FinishRound(finish)


def front_message(board: str, points: list[tuple[float, float]]) -> power_pb2.Front:
    """A front of modes that the board has, from its highest CPU clock downwards."""
    space = BOARDS[board].space
    made = columns_of(front(*points, power_log_sd=0.04))
    clocks = sorted(space.cpu_khz, reverse=True)[: 3 * len(points) : 3]
    made["modes"] = np.array([[max(space.cores), khz, max(space.gpu_hz), max(space.mem_hz)] for khz in clocks], float)
    return front_to_message(Front(**made))


def preset_messages(board: str, points: list[tuple[float, float]]) -> list[power_pb2.PresetPoint]:
    """The board's presets, none of which is on the front: each is slower than the front at the same power."""
    highest, *lower = BOARDS[board].presets.items()
    places = [
        (highest, points[0][0], 1.15 * points[0][1]),
        *((each, 1.5 * points[-1][0], 1.05 * points[-1][1]) for each in lower[:1]),
    ]
    return [
        power_pb2.PresetPoint(
            name=name,
            point=power_pb2.FrontPoint(mode=mode_to_message(mode), epoch_s=epoch_s, power_w=power_w),
            is_measured=k == 0,
        )
        for k, ((name, mode), epoch_s, power_w) in enumerate(places)
    ]


@asynccontextmanager
async def trained(config: CoordinatorSettings) -> AsyncIterator[Trained]:
    # The devices do not renew their leases while the browser is slow.
    async with serving(config.with_values(sessions={"lease_s": 60.0})) as client:
        fleet = Trained(client)
        await fleet.ready()
        await fleet.train(await fleet.plan(1), failing="orin-nano-2")
        await fleet.sense()
        await fleet.shown()
        yield fleet
