"""A coordinator, devices and PowerAware in one process, with links between them that can be faulty."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg

from coordinator.settings import CoordinatorSettings
from edge_agent.settings import SessionSettings
from tests.fakes.certified import CertifiedFleet, calling, certified
from tests.fakes.faulty_link import FaultyLink, faulty_link
from tests.fakes.polling import eventually
from tests.fakes.served import Client, serving
from tests.faults.device import BOARD, WORKLOAD, Device, installation_of
from tests.faults.node_grid import NodeGrid
from wattfleet_flower import PowerAware
from wattfleet_identity.channels import Endpoint
from wattfleet_identity.identity_folder import write_identity
from wattfleet_identity.peers import Role
from wattfleet_proto.v1 import session_pb2, view_pb2

ARRAYS = ArrayRecord([np.zeros((2, 3)), np.ones(2)])
ALLOWANCE_S = 1.0
"""Time that a round gets beyond twice its planned duration."""


@dataclass(frozen=True)
class Pace:
    """The times of a fleet, in seconds; shorter in the short form than in a real fleet.

    Attributes:
        lease_s: time between leases; a session ends after three without a message.
        silence_s: time without an answer after which an agent reconnects.
        grant_wait_s: time that an agent waits for a grant at the start of a training.
        grant_lifetime_s: how long a device may train without the coordinator.
        latency_s: latency of the slow link, in each direction.
        outage_s: duration of a fault that ends by itself.
    """

    lease_s: float = 1.0
    silence_s: float = 3.0
    grant_wait_s: float = 2.0
    grant_lifetime_s: float = 10.0
    latency_s: float = 1.0
    outage_s: float = 4.5


SHORT = Pace()
REAL = Pace(lease_s=5.0, silence_s=15.0, grant_wait_s=10.0, grant_lifetime_s=120.0, latency_s=5.0, outage_s=40.0)


@dataclass
class Round:
    """One round as Flower's server sees it; times are on the monotonic clock.

    Attributes:
        number: from 1.
        sent_s: when its messages were sent.
        ended_s: when its replies were aggregated.
    """

    number: int
    sent_s: float
    ended_s: float

    @property
    def took_s(self) -> float:
        """Seconds from the messages to the aggregated replies."""
        return self.ended_s - self.sent_s


@dataclass
class Fleet:
    """A running fleet.

    Attributes:
        client: an operator's connection to the coordinator, without faults.
        links: the links between devices and coordinator; the nth share of the devices uses the nth link.
        planning_link: the link between PowerAware and the coordinator.
        devices: the devices.
        rounds: the rounds that have ended.
    """

    client: Client
    links: list[FaultyLink]
    planning_link: FaultyLink
    planning: Endpoint
    devices: list[Device]
    pace: Pace
    grid: NodeGrid
    rounds: list[Round] = field(default_factory=list)

    def run(self, rounds: int, **options: Any) -> asyncio.Task[Any]:
        """Let PowerAware run rounds, in a thread."""
        strategy = PowerAware(
            FedAvg(fraction_evaluate=0.0, min_available_nodes=1, min_train_nodes=1),
            self.planning.address,
            workload=WORKLOAD,
            allowance_s=ALLOWANCE_S,
            identity=self.planning.folder,
            **options,
        )

        def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord:
            if number:
                self.rounds.append(Round(number, self.grid.pushed_s, time.monotonic()))
            return MetricRecord({"round": float(number)})

        return asyncio.create_task(
            asyncio.to_thread(strategy.start, self.grid, ARRAYS, rounds, 600.0, evaluate_fn=evaluated),
            name="PowerAware",
        )

    async def views(self) -> dict[str, view_pb2.DeviceView]:
        """The devices as the coordinator shows them, by id."""
        return await self.client.devices()

    async def is_ready(self) -> bool:
        """Whether every device is connected, has delivered its reports, and is shown as ready."""
        if not all(device.is_delivered for device in self.devices):
            return False
        views = await self.views()
        return len(views) == len(self.devices) and all(
            view.state == session_pb2.DEVICE_STATE_READY for view in views.values()
        )

    async def offline(self) -> int:
        """The number of devices that the coordinator shows as offline."""
        return [view.state for view in (await self.views()).values()].count(session_pb2.DEVICE_STATE_OFFLINE)

    async def observed(self) -> dict[str, list[str]]:
        """The devices with a stored observation, by plan; a device appears twice if it was counted twice."""
        return {
            view.plan_id: sorted(each.device_id for each in view.observations)
            for run in await self.client.runs()
            for view in (await self.client.rounds(run.run_id)).rounds
        }

    async def state(self) -> dict[str, dict[str, Any]]:
        """What the coordinator knows of each device, except for what depends on its rounds."""
        known = {}
        for device_id, view in (await self.views()).items():
            known[device_id] = {
                "state": view.state,
                "detail": view.detail,
                "modes": view.profiled_modes,
                "front": view.front.SerializeToString(deterministic=True),
                "idle_w": view.idle_w,
                "granted_w": view.granted_w,
                "workloads": [each.workload.name for each in view.workloads],
                "left_out": view.left_out,
            }
        return known


def configured(config: CoordinatorSettings, folder: Path, pace: Pace, devices: int) -> CoordinatorSettings:
    """The settings of a fleet's coordinator."""
    return config.with_values(
        server={"address": "127.0.0.1:0", "metrics_address": "127.0.0.1:0", "stop_grace_s": 0.05},
        store={"location": str(folder / "coordinator.db")},
        site={"budget_w": 100.0 * devices, "trim_check_s": 0.2},
        policy={"name": "all"},
        sessions={"lease_s": pace.lease_s, "check_s": pace.lease_s / 5},
        grants={
            "lifetime_s": pace.grant_lifetime_s,
            "confirm_timeout_s": 2 * pace.lease_s,
            "stop_margin_s": pace.lease_s,
        },
    )


@asynccontextmanager
async def running(
    config: CoordinatorSettings,
    folder: Path,
    devices: int,
    *,
    pace: Pace = SHORT,
    is_certified: bool = False,
    shares: Iterable[float] = (1.0,),
) -> AsyncIterator[Fleet]:
    """A fleet whose devices are all ready.

    Args:
        config: configuration of any coordinator; the settings that matter here are changed.
        folder: folder for all files.
        devices: number of devices.
        pace: the times of the fleet.
        is_certified: whether all use mutual TLS.
        shares: the share of the devices behind each link.
    """
    folder.mkdir()
    settings = configured(config, folder, pace, devices)
    async with AsyncExitStack() as held:
        authority: CertifiedFleet | None = None
        if is_certified:
            authority = CertifiedFleet.create(folder / "authority")
            settings = certified(settings, authority.authority.folder)
        client = await held.enter_async_context(serving(settings))
        address = client.bound.address
        if authority is not None:
            operator = authority.identity(Role.OPERATOR)
            client = await held.enter_async_context(calling(client, operator))
        links = [await held.enter_async_context(faulty_link(address, seed)) for seed, _ in enumerate(shares)]
        planning_link = await held.enter_async_context(faulty_link(address, len(links)))

        def endpoint(link: FaultyLink, role: Role, name: str, **device: str) -> Endpoint:
            identity_folder = folder / f"identity-{name}"
            if authority is not None:
                write_identity(identity_folder, authority.identity(role, name, **device))
            return Endpoint(link.address, identity_folder if authority is not None else None)

        session_settings = SessionSettings(
            silence_timeout_s=pace.silence_s,
            welcome_timeout_s=12 * pace.lease_s,
            grant_timeout_s=pace.grant_wait_s,
        )
        made = []
        for number in range(devices):
            name = f"orin-{number}"
            link = links[_share_of(number / devices, list(shares))]
            at = endpoint(link, Role.DEVICE, name, board=BOARD, installation=installation_of(name))
            made.append(Device(name, at, folder, session_settings))
        fleet = Fleet(
            client,
            links,
            planning_link,
            endpoint(planning_link, Role.FLOWER, "flower"),
            made,
            pace,
            NodeGrid(made, asyncio.get_running_loop()),
        )
        for device in made:
            device.begin()
            held.push_async_callback(device.end)
        await eventually(fleet.is_ready)
        yield fleet


def _share_of(position: float, shares: list[float]) -> int:
    """The index of the share that contains a position from 0 to 1."""
    ends = [sum(shares[: index + 1]) for index in range(len(shares))]
    return next((index for index, end in enumerate(ends) if position < end), len(shares) - 1)


async def seconds_until(condition: Callable[[], Any]) -> float:
    """Wait until a condition holds; returns the seconds that this took."""
    began_s = time.monotonic()
    await eventually(condition)
    return time.monotonic() - began_s
