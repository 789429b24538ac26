"""A round that was trimmed while it ran: the command and the page show the current plan and the original one."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import Any

import numpy as np

from coordinator.settings import CoordinatorSettings
from tests.fakes.fronts import columns_of
from tests.fakes.shell import asked, served_with_shell
from tests.fakes.small_fleet import ORIN_FRONT, RUN
from wattfleet.choosing import Front
from wattfleet.modes import PowerMode
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.v1 import planning_pb2, session_pb2

_SLOWER = np.array([[0, 300_000 * k, 0, 0] for k in range(len(ORIN_FRONT))])
DISTINCT = Front(**{**columns_of(ORIN_FRONT), "modes": ORIN_FRONT.modes - _SLOWER})
"""The front of the Orin, with modes that differ in their labels."""


def label(part: planning_pb2.Assignment) -> str:
    mode = part.mode
    return PowerMode(mode.cores, mode.cpu_khz, mode.gpu_hz, mode.mem_hz).label()


async def page_of(client: Any, path: str) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{client.bound.page_address}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(read)


async def test_the_plan_in_force_is_shown_with_the_first_where_it_differs(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await orin.send(front=session_pb2.FrontReport(front=front_to_message(DISTINCT), idle_w=5.0))
        plan = await client.plan()
        await client.obey()
        await shell("budget", "set", "site", "35", columns=100)
        await client.obey()
        [now] = [each for each in (await client.rounds()).rounds[0].plan.assignments if each.device_id == "orin"]
        [first] = [each for each in plan.assignments if each.device_id == "orin"]
        assert label(now) != label(first), "the budget was lowered for this"
        await orin.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=31.0, power_w=20.0))

        selected = {each["device_id"]: each for each in (await asked(shell, "round", RUN, "1"))["selected"]}
        assert PowerMode(**selected["orin"]["mode"]).label() == label(now)
        assert selected["orin"]["planned_w"] == now.power_limit_w
        assert PowerMode(**selected["orin"]["first"]["mode"]).label() == label(first)
        assert selected["orin"]["first"]["predicted_s"] == first.warmup_s + first.epoch_s
        assert selected["orin"]["observed_s"] == now.warmup_s + 31.0
        assert selected["nano"]["first"] is None
        assert f"{label(now)} (first {label(first)})" in (await shell("round", RUN, "1", columns=160)).stdout
        for path in (f"/runs/{RUN}", "/devices/orin"):
            text = await page_of(client, path)
            assert label(now) in text and f"at first {label(first)}" in text, path


async def test_a_stopped_device_keeps_its_row(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        await client.two_ready()
        plan = await client.plan()
        await shell("budget", "set", "site", "7", columns=100)
        selected = {each["device_id"]: each for each in (await asked(shell, "round", RUN, "1"))["selected"]}
        assert {each["outcome"] for each in selected.values()} == {"stopped"}
        for part in plan.assignments:
            assert selected[part.device_id]["planned_w"] == part.power_limit_w
            text = await page_of(client, f"/devices/{part.device_id}")
            assert label(part) in text and "stopped" in text
        assert (await page_of(client, f"/runs/{RUN}")).count('<span class="bad">stopped</span>') == 2
