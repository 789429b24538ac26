"""The web page in a real browser, of a coordinator whose devices say what real ones would."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.browser import Browsed, browsing
from tests.fakes.fronts import front
from tests.fakes.served import Agent, Client, serving
from tests.fakes.small_fleet import RUN
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import planning_pb2, session_pb2

_PICTURES = os.environ.get("PAGE_PICTURES")
_DESK, _PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
_PICTURED = ("fleet", "fleet-dark", "run", "device", "what-if", "phone")
_FLEET = {f"{board}-{k}": (board, k) for board in ("agx-orin", "orin-nano") for k in range(1, 5)}
_NODE = 2**63


async def picture(tab: Browsed, name: str) -> None:
    """Take one of the documentation's pictures, if there is a folder for them."""
    if _PICTURES and name in _PICTURED:
        await tab.page.screenshot(path=str(Path(_PICTURES) / f"page-{name}.png"), full_page=True)


class Trained:
    """Eight devices, and a run whose first round they have trained."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.agents: dict[str, Agent] = {}
        address = client.bound.page_address
        assert address is not None
        self.host = address
        self.url = f"http://{address}"

    async def ready(self) -> None:
        for device_id, (board, k) in _FLEET.items():
            agent = self.agents[device_id] = self.client.agent()
            await agent.hello(device_id, board)
            await agent.lease()
            speed = 10.0 + 2 * k + (15 if board == "orin-nano" else 0)
            watts = 18.0 if board == "agx-orin" else 8.0
            points = [(speed * slow, watts / slow**0.8 + 6) for slow in (1.0, 1.3, 1.7, 2.4)]
            await agent.send(front=session_pb2.FrontReport(front=front_message(points), idle_w=4.0))
            await agent.send(
                state=session_pb2.StateReport(
                    state=session_pb2.DEVICE_STATE_READY, profiled_modes=50, detail="ready to train"
                )
            )
        bindings = [planning_pb2.NodeBinding(node_id=_NODE + k, device_id=each) for k, each in enumerate(_FLEET)]
        planning = self.client.planning
        await planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
        await planning.StartRun(planning_pb2.StartRunRequest(run_id=RUN, strategy="FedAvg", rounds=3))

    async def plan(self, number: int) -> planning_pb2.PlanRoundResponse:
        nodes = [_NODE + k for k in range(len(_FLEET))]
        request = planning_pb2.PlanRoundRequest(run_id=RUN, round=number, node_ids=nodes, epochs=1.0)
        plan: planning_pb2.PlanRoundResponse = await self.client.planning.PlanRound(request)
        return plan

    async def train(self, plan: planning_pb2.PlanRoundResponse, failing: str = "") -> None:
        """Let the selected devices train as predicted, within some percent; one may fail."""
        results = []
        for k, part in enumerate(plan.assignments):
            agent = self.agents[part.device_id]
            grant = await agent.grant()
            await agent.lease(GrantPhase.TRAINING, grant)
            is_failing = part.device_id == failing
            if not is_failing:
                observation = session_pb2.Observation(
                    plan_id=plan.plan_id, epoch_s=part.epoch_s * (0.96 + 0.02 * k), power_w=part.power_w * 0.97
                )
                await agent.send(observation=observation)
            await agent.lease(GrantPhase.OVER, grant)
            failure = "the app raised ValueError" if is_failing else ""
            results.append(planning_pb2.DeviceResult(device_id=part.device_id, failure=failure, num_examples=100))
        finish = planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=plan.duration_s + 2, results=results)
        await self.client.planning.FinishRound(finish)


def front_message(points: list[tuple[float, float]]) -> Any:
    from wattfleet_proto.convert import front_to_message

    return front_to_message(front(*points))


@asynccontextmanager
async def trained(config: CoordinatorSettings) -> AsyncIterator[Trained]:
    # The devices renew no lease while the browser is slow.
    async with serving(config.with_values(sessions={"lease_s": 60.0})) as client:
        fleet = Trained(client)
        await fleet.ready()
        await fleet.train(await fleet.plan(1), failing="orin-nano-2")
        yield fleet


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_page_loads_without_a_complaint(config: CoordinatorSettings, scheme: str) -> None:
    pages = {
        "fleet": "/",
        "runs": "/runs",
        "run": f"/runs/{RUN}",
        "device": "/devices/agx-orin-1",
        "what-if": "/what-if?budget_w=60",
        "events": "/events",
        "no-device": "/?text=nothing",
    }
    async with trained(config) as fleet, browsing(fleet.host, viewport=_DESK, color_scheme=scheme) as tab:
        profiling = session_pb2.StateReport(
            state=session_pb2.DEVICE_STATE_PROFILING, profiled_modes=12, detail="measures modes of another workload"
        )
        await fleet.agents["orin-nano-4"].send(state=profiling)
        for name, path in pages.items():
            answer = await tab.page.goto(fleet.url + path)
            assert answer.status == 200, path
            if name == "fleet":
                await tab.page.wait_for_selector("#watts canvas")
                await tab.page.wait_for_selector(".connection.live")
                await tab.page.wait_for_timeout(3_000 if _PICTURES else 0)  # for a line in the picture's chart
            await picture(tab, name + ("-dark" if scheme == "dark" else ""))
            assert await tab.accessibility_problems() == [], path
        assert tab.complaints == [] and tab.elsewhere == []


async def test_an_unknown_device_and_a_wrong_number_say_what_to_do(config: CoordinatorSettings) -> None:
    async with serving(config) as client, browsing(str(client.bound.page_address), viewport=_DESK) as tab:
        url = f"http://{client.bound.page_address}"
        await tab.page.goto(url)
        assert "No device has connected yet" in await tab.page.inner_text("main")
        for path, code, text in (
            ("/devices/<b>no", 404, "<b>no"),
            ("/nowhere", 404, "There is no such page"),
            ("/what-if?budget_w=many", 200, "the budget must be a number"),
        ):
            answer = await tab.page.goto(url + path)
            assert answer.status == code
            assert text in await tab.page.inner_text("[role=alert]")
            assert await tab.accessibility_problems() == []


async def test_the_fleet_is_filtered_and_brought_up_to_date_in_a_round(config: CoordinatorSettings) -> None:
    async with trained(config) as fleet, browsing(fleet.host, viewport=_DESK) as tab:
        await tab.page.goto(f"{fleet.url}/?text=nano")
        assert await tab.page.locator("#devices tbody tr").count() == 4
        await tab.page.wait_for_selector(".connection.live")
        plan = await fleet.plan(2)
        for part in plan.assignments:
            agent = fleet.agents[part.device_id]
            await agent.lease(GrantPhase.TRAINING, await agent.grant())
            await agent.send(state=session_pb2.StateReport(state=session_pb2.DEVICE_STATE_TRAINING, profiled_modes=50))
        await tab.page.wait_for_selector("#devices .state.training")
        assert await tab.page.locator("#devices tbody tr").count() == 4
        await tab.page.goto(f"{fleet.url}/runs/{RUN}")
        assert "Round 2, the newest" in await tab.page.inner_text("main")


async def test_what_if_tells_who_drops_out_and_changes_nothing(config: CoordinatorSettings) -> None:
    async with trained(config) as fleet, browsing(fleet.host, viewport=_DESK) as tab:
        before = await fleet.client.devices()
        await tab.page.goto(f"{fleet.url}/what-if")
        await tab.page.fill("[name=budget_w]", "45")
        await tab.page.click("button[type=submit]")
        assert "drops out" in await tab.page.inner_text("#changes")
        assert "45.0" in await tab.page.inner_text("#totals tbody tr:nth-child(2)")
        await tab.page.select_option("[name=policy]", "deadline")
        await tab.page.click("button[type=submit]")
        assert "needs a deadline" in await tab.page.inner_text("[role=alert]")
        assert await fleet.client.devices() == before
        assert len((await fleet.client.rounds()).rounds) == 1


async def test_a_phone_needs_no_sideways_scrolling(config: CoordinatorSettings) -> None:
    async with trained(config) as fleet, browsing(fleet.host, viewport=_PHONE) as tab:
        for path in ("/", "/runs", f"/runs/{RUN}", "/devices/agx-orin-1", "/what-if?budget_w=60", "/events"):
            await tab.page.goto(fleet.url + path)
            assert await tab.overflow_px() <= 0, path
            assert await tab.accessibility_problems() == [], path
            if path == "/":
                await tab.page.wait_for_selector("#watts canvas")
                await picture(tab, "phone")
