"""The web page in a real browser, of a coordinator whose devices say what real ones would."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.browser import Browsed, browsing
from tests.fakes.fronts import columns_of, front
from tests.fakes.served import Agent, Client, hello_of, serving
from tests.fakes.small_fleet import RUN
from wattfleet.choosing import Front
from wattfleet.modes import BOARDS
from wattfleet_proto.convert import front_to_message, mode_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import planning_pb2, power_pb2, session_pb2
from wattfleet_proto.version import WORKLOADS_MINOR

_PICTURES = os.environ.get("PAGE_PICTURES")
_DESK, _PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
_PICTURED = ("fleet", "fleet-dark", "run", "device", "what-if", "phone")
_FLEET = {f"{board}-{k}": (board, k) for board in ("agx-orin", "orin-nano") for k in range(1, 5)}
_NODE = 2**63
HOT, THROTTLED, OVER_BUDGET, SLOWEST = "agx-orin-3", "orin-nano-3", "agx-orin-2", "orin-nano-4"


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
        self.training_j = 0.0
        self.trainings = self.observed = 0

    async def ready(self) -> None:
        for device_id, (board, k) in _FLEET.items():
            agent = self.agents[device_id] = self.client.agent()
            hello = hello_of(device_id, board)
            hello.mode_count, hello.protocol.minor = 18_096, WORKLOADS_MINOR - 1  # one front for every workload
            await agent.greet(hello)
            await agent.lease()
            speed = 10.0 + 2 * k + (15 if board == "orin-nano" else 0)
            watts = 18.0 if board == "agx-orin" else 8.0
            points = [(speed * slow, watts / slow**0.8 + 6) for slow in (1.0, 1.3, 1.7, 2.4)]
            report = session_pb2.FrontReport(
                front=front_message(board, points), idle_w=4.0, presets=preset_messages(board, points)
            )
            await agent.send(front=report)
            await agent.send(
                state=session_pb2.StateReport(
                    state=session_pb2.DEVICE_STATE_READY, profiled_modes=50, detail="ready to train"
                )
            )
        bindings = [planning_pb2.NodeBinding(node_id=_NODE + k, device_id=each) for k, each in enumerate(_FLEET)]
        planning = self.client.planning
        await planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
        await planning.StartRun(planning_pb2.StartRunRequest(run_id=RUN, strategy="FedAvg", rounds=3))

    async def sense(self) -> None:
        """Let all boards say what their sensors read; one is hot, and one throttles itself."""
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

    async def plan(self, number: int) -> planning_pb2.PlanRoundResponse:
        nodes = [_NODE + k for k in range(len(_FLEET))]
        request = planning_pb2.PlanRoundRequest(run_id=RUN, round=number, node_ids=nodes, epochs=1.0)
        plan: planning_pb2.PlanRoundResponse = await self.client.planning.PlanRound(request)
        return plan

    async def train(self, plan: planning_pb2.PlanRoundResponse, failing: str = "") -> None:
        """Let the selected devices train as predicted, within some percent; one may fail."""
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
    """A front with modes that the board has, from its highest CPU clock downwards."""
    space = BOARDS[board].space
    made = columns_of(front(*points, power_log_sd=0.04))
    clocks = sorted(space.cpu_khz, reverse=True)[: 3 * len(points) : 3]
    made["modes"] = np.array([[max(space.cores), khz, max(space.gpu_hz), max(space.mem_hz)] for khz in clocks], float)
    return front_to_message(Front(**made))


def preset_messages(board: str, points: list[tuple[float, float]]) -> list[power_pb2.PresetPoint]:
    """The board's presets, none of which is on the front: each is slower than the front at its watts."""
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
    # The devices renew no lease while the browser is slow.
    async with serving(config.with_values(sessions={"lease_s": 60.0})) as client:
        fleet = Trained(client)
        await fleet.ready()
        await fleet.train(await fleet.plan(1), failing="orin-nano-2")
        await fleet.sense()
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
        for number in (2, 3):
            await fleet.train(await fleet.plan(number))
        for modes in (12, 15):
            profiling.profiled_modes = modes
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


async def listed(tab: Browsed) -> list[str]:
    """The devices of the list, from top to bottom."""
    names: list[str] = await tab.page.locator("#devices tbody th a").all_inner_texts()
    return names


async def test_an_operator_finds_who_is_slow_hot_or_over_budget_and_what_a_run_cost(
    config: CoordinatorSettings,
) -> None:
    async with trained(config) as fleet, browsing(fleet.host, viewport=_DESK) as tab:
        plan = await fleet.plan(2)
        [part] = [each for each in plan.assignments if each.device_id == OVER_BUDGET]
        await fleet.train(plan)
        await tab.page.goto(fleet.url)
        assert set((await listed(tab))[:3]) == {HOT, THROTTLED, OVER_BUDGET}, "the worst first"
        for words, device_id in (("hot", HOT), ("throttled", THROTTLED), ("over budget", OVER_BUDGET)):
            await tab.page.goto(fleet.url)
            await tab.page.click(f"#summary a:has-text('{words}')")
            assert await listed(tab) == [device_id]
        drawn = f"{1.2 * part.power_w:.1f}\nof {part.power_limit_w:.1f} allowed"
        assert drawn in await tab.page.locator("#devices td").all_inner_texts()

        await tab.page.goto(fleet.url)
        await tab.page.click("#devices thead a:has-text('1 epoch')")
        assert (await listed(tab))[0] == SLOWEST
        await tab.page.click("#devices thead a:has-text('°C')")
        assert (await listed(tab))[0] == HOT
        await tab.page.select_option("[name=order]", "name")
        await tab.page.click(".filters button")
        assert await listed(tab) == sorted(_FLEET)

        await tab.page.click("nav >> text=Runs")
        row = await tab.page.inner_text("#runs tbody tr")
        assert f"{fleet.training_j / 1e3:.1f} kJ\nof {fleet.observed} of {fleet.trainings} trainings" in row
        await tab.page.click("#runs tbody th a")
        assert (
            f"{fleet.training_j / 1e3:.1f} kJ\nfor {fleet.observed} of {fleet.trainings} trainings"
            in await tab.page.inner_text("#run .tiles")
        )
        over = tab.page.locator("#run td.bad", has_text=f"{part.power_limit_w:.1f} allowed")
        assert await over.count() == 1


async def test_a_device_shows_its_sensors_its_bounds_and_its_rounds(config: CoordinatorSettings) -> None:
    async with trained(config) as fleet, browsing(fleet.host, viewport=_DESK) as tab:
        await tab.page.goto(f"{fleet.url}/devices/{THROTTLED}")
        facts = await tab.page.inner_text("dl.facts")
        for words in ("6.0 W, 54 °C, 4c 1.50/0.60/2.13, fan 35%, GPU 2% used", "3 times since it booted"):
            assert words in facts
        assert re.search(r"throttled itself \d+ s ago", facts)
        assert "58.3 kJ since its agent started" in facts
        assert await tab.page.locator("svg[aria-label^='Watts in its trainings'] circle.actual").count() == 1
        highest, lower = list(BOARDS["orin-nano"].presets)[:2]
        marks = await tab.page.locator(".preset-mark title").all_text_contents()
        assert [each.partition("preset ")[2] for each in marks] == [f"{highest}, measured", f"{lower}, predicted"]
        await tab.page.goto(f"{fleet.url}/devices/{OVER_BUDGET}")
        assert await tab.page.locator("svg[aria-label^='Watts in its trainings'] rect.failed").count() == 1
        await tab.page.click("#front-modes summary")
        await tab.page.wait_for_selector(".connection.live")
        await fleet.agents[OVER_BUDGET].lease(sample=session_pb2.BoardSample(power_w=31.5))
        await tab.page.wait_for_selector("dd:has-text('31.5 W')")
        assert await tab.page.locator("#front-modes[open]").count() == 1, "what was opened stays open"


async def test_profiling_is_shown_with_what_is_left(config: CoordinatorSettings) -> None:
    async with trained(config) as fleet, browsing(fleet.host, viewport=_DESK) as tab:
        agent = fleet.agents["agx-orin-4"]
        for modes in (1, 2):
            await agent.send(
                state=session_pb2.StateReport(state=session_pb2.DEVICE_STATE_PROFILING, profiled_modes=modes)
            )
        await tab.page.goto(f"{fleet.url}/?state=profiling")
        row = await tab.page.inner_text("#devices tbody tr")
        assert "2 of 20" in row and "≤ " in row and "left" in row


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
