"""Every query of the dashboards and the alerts, against a real Prometheus that scrapes a training fleet.

Two devices follow a script that triggers every metric. One device is a real agent on a simulated board.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.settings import CoordinatorSettings
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.exporter import read_url
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.runtime.agent import run_agent
from tests.fakes.agent_settings import agent_settings
from tests.fakes.dashboard_queries import alert_queries, panel_queries
from tests.fakes.fitting_here import fitting_here
from tests.fakes.fronts import front
from tests.fakes.polling import eventually
from tests.fakes.prometheus import Prometheus, plaintext_job, scraping
from tests.fakes.running_agent import new_board
from tests.fakes.served import Agent, Client, serving
from tests.fakes.small_fleet import RUN
from wattfleet.duties import KeptDuty
from wattfleet_proto.convert import front_to_message, kept_duty_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import planning_pb2, power_pb2, session_pb2

RULES = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yml"
MOST_ROUNDS = 25
SCRAPED_S = 1.3
WITHOUT_AUTHORITY = re.compile("wattfleet_certificate_expiry")
"""A coordinator without an authority has no certificates; `test_metrics_access.py` reads these of one that has."""


def selectors(query: str) -> set[str]:
    """The series that an alert reads, since the alert itself has no result while everything is normal."""
    return set(re.findall(r"\b(?:wattfleet_\w+|up)(?:\{[^}]*\})?", query))


def expected_answers() -> dict[str, str]:
    """The queries that must have had a result at least once, by name."""
    of_alerts = {f"{name}: {series}": series for name, query in alert_queries() for series in selectors(query)}
    return {
        name: query
        for name, query in {**dict(panel_queries()), **of_alerts}.items()
        if not WITHOUT_AUTHORITY.search(query)
    }


def sample(number: int) -> session_pb2.BoardSample:
    """The sensor values of a hot board after some rounds."""
    return session_pb2.BoardSample(
        power_w=20.0 + number,
        temperature_c=70.0,
        mode=power_pb2.PowerMode(cores=4, cpu_khz=1_036_800, gpu_hz=510_000_000, mem_hz=2_133_000_000),
        throttle_events=number,
        fan_share=0.5,
        gpu_use_share=0.9,
        energy_j=100.0 * number,
    )


async def others(client: Client) -> Agent:
    """A device that went offline, and one whose front is refused and whose power cannot be read."""
    gone, blind = client.agent(), client.agent()
    await gone.hello("gone")
    await gone.goodbye()
    await blind.hello("blind")
    absurd = front_to_message(front((20, 90_000)))
    await blind.send(front=session_pb2.FrontReport(front=absurd, idle_w=5.0))
    assert blind.refusals
    return blind


async def one_round(client: Client, agents: tuple[Agent, Agent], blind: Agent, number: int) -> None:
    """One round up to its training; the first observation of the Orin contradicts its prediction."""
    plan = await client.plan(number)
    await client.obey(GrantPhase.TRAINING)
    kept = KeptDuty("camera", 500, 0.95, 29.5, 12 * number, number, (*[number] * 11, *[0] * 6), 1e3, 350.0, 4, 0.5, 1)
    lease = session_pb2.Lease(sample=session_pb2.BoardSample(temperature_c=40.0), duty=kept_duty_to_message(kept))
    await blind.send(lease=lease)
    for agent, seconds, watts in zip(agents, (20.5, 36.0), (90.0 if number == 1 else 30.5, 14.5), strict=True):
        seen = session_pb2.Observation(plan_id=plan.plan_id, epoch_s=seconds, power_w=watts)
        await agent.send(observation=seen)
    await client.planning.ReportMetrics(
        planning_pb2.ReportMetricsRequest(run_id=RUN, round=number, metrics={"accuracy": 0.5})
    )


async def end_round(client: Client, agents: tuple[Agent, Agent], number: int) -> None:
    results = [planning_pb2.DeviceResult(device_id=each) for each in ("orin", "nano")]
    await client.planning.FinishRound(
        planning_pb2.FinishRoundRequest(plan_id=f"{RUN}/{number}", results=results, wall_s=1.5)
    )
    await client.end_trainings()
    for agent in agents:
        await agent.send(lease=session_pb2.Lease(sample=sample(number)))


@asynccontextmanager
async def real_agent(client: Client, board: SimulatedDevice, folder: Path) -> AsyncIterator[str]:
    """Run an agent that measures no modes, until its device is ready; yields the address of its own metrics."""
    settings = agent_settings(
        folder / "state", coordinator=client.bound.address, modes_first=0, metrics_address="127.0.0.1:0"
    )
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_agent(settings, board, built_in_workload(board.step), folder / "device", stop), name="agent"
    )

    async def is_ready() -> bool:
        assert not running.done(), running.exception()
        return (await client.states()).get(settings.device.id) == "ready"

    try:
        await eventually(is_ready)
        url = read_url(settings.device.state_dir)
        assert url is not None
        yield url.removeprefix("http://").removesuffix("/metrics")
    finally:
        stop.set()
        await running


def its_board(prometheus: Prometheus, series: str) -> list[float]:
    """The metrics of the real agent's board: those that the coordinator exports, and those that the agent exports."""
    [of_coordinator] = prometheus.values(f'wattfleet_device_{series}{{device="orin-nano-0"}}')
    [of_agent] = prometheus.values(f"wattfleet_board_{series}")
    return [of_coordinator, of_agent]


def answered(prometheus: Prometheus, queries: dict[str, str]) -> set[str]:
    return {name for name, query in queries.items() if prometheus.values(query)}


@pytest.mark.timeout(180)
async def test_every_panel_and_every_alert_answers_while_a_fleet_trains(
    config: CoordinatorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)
    board = new_board()
    async with serving(config) as client, real_agent(client, board, tmp_path / "agent") as own_metrics:
        agents = await client.two_ready()
        for agent, point in zip(agents, ((20, 30), (35, 15)), strict=True):
            uncertain = front_to_message(front(point, epoch_log_sd=0.05, power_log_sd=0.02))
            await agent.send(front=session_pb2.FrontReport(front=uncertain, idle_w=3.0))
        blind = await others(client)
        unanswered = expected_answers()
        assert len(unanswered) > 100
        jobs = [
            plaintext_job("coordinator", client.bound.metrics_address),
            plaintext_job("wattfleet-agents", own_metrics),
        ]
        with scraping(jobs, tmp_path, [RULES]) as prometheus:
            for number in range(1, MOST_ROUNDS):
                await one_round(client, agents, blind, number)
                await asyncio.sleep(SCRAPED_S)  # Prometheus scrapes in real time
                for name in await asyncio.to_thread(answered, prometheus, unanswered):
                    del unanswered[name]
                await end_round(client, agents, number)
                if not unanswered:
                    break
            groups = (await asyncio.to_thread(prometheus.get, "rules"))["groups"]
            mode, power_w = board.current_mode(), board.activity().power_mw / 1e3
            assert await asyncio.to_thread(its_board, prometheus, "cpu_clock_hertz") == [mode.cpu_khz * 1e3] * 2
            assert await asyncio.to_thread(its_board, prometheus, "online_cores") == [mode.cores] * 2
            assert await asyncio.to_thread(its_board, prometheus, "power_watts") == pytest.approx(
                [power_w] * 2, rel=0.2
            )
            assert await asyncio.to_thread(prometheus.values, "up") == [1.0, 1.0]
    assert unanswered == {}
    assert {rule["name"]: rule["health"] for group in groups for rule in group["rules"]} == {
        name: "ok" for name, _ in alert_queries()
    }
