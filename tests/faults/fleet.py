"""A coordinator, devices and PowerAware in one process, with links between them that can be faulty."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from coordinator.settings import CoordinatorSettings
from edge_agent.session.certificate_keeper import connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.grants import AgentGrant, NoGrantError
from edge_agent.session.outbox import Outbox, OutboxFile
from edge_agent.session.status import SessionNews
from edge_agent.settings import ConnectionSettings
from tests.fakes.connections import FaultyLink, faulty_link
from tests.fakes.fleets import front
from tests.fakes.flower_in_process import OneRunGrid, trained
from tests.fakes.polling import eventually
from tests.fakes.served import CertifiedFleet, Client, calling, certified, serving
from wattfleet.common.identity.channels import Endpoint
from wattfleet.common.identity.identity_folder import write_identity
from wattfleet.common.identity.peers import Role
from wattfleet.common.tasks import stop_tasks, with_timeout
from wattfleet.flower import PowerAware
from wattfleet.simulation.flower_task import be_task
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, RECORD_KEY, RoundAssignment
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import power_pb2, session_pb2, view_pb2

# --- Device -----------------------------------------------------------------------------------------------------------
# A device with the agent's real session, outbox and grants; its training is a wait.


WORKLOAD = "faults"
BOARD = "agx-orin"
IDLE_W = 5.0
EPOCH_S = 1.0
"""Duration of an epoch, short so that rounds end soon."""


@dataclass
class Training:
    """One training of a device.

    Attributes:
        plan_id: the plan that it trains for.
        began_s: when it began, on the loop's clock.
        ended_s: when the device parked; None while it trains.
        stopped: why it was stopped; empty if it was not.
    """

    plan_id: str
    began_s: float
    ended_s: float | None = None
    stopped: str = ""


class News(SessionNews):
    """Records why sessions and attempts ended."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []

    def failed(self, reason: str, cause: str = "") -> None:
        self.failures.append(reason)
        super().failed(reason)


class NoFile(OutboxFile):
    """Stores nothing, because twenty devices on one event loop would wait for each other's disk writes."""

    def load(self) -> list[session_pb2.SessionRequest]:
        return []

    def store(self, requests: list[session_pb2.SessionRequest]) -> None:
        """Keep the records in memory only."""


class Device:
    """One device of a fleet.

    Attributes:
        trains_s: duration of its next trainings, in seconds.
        trainings: its trainings so far.
        news: records why its sessions ended.
        welcomes: number of Welcomes from the coordinator.
    """

    def __init__(self, device_id: str, endpoint: Endpoint, folder: Path, pace: Pace) -> None:
        self.device_id = device_id
        self.trains_s = EPOCH_S
        self.trainings: list[Training] = []
        self.news = News()
        self.welcomes = 0
        self.outbox = Outbox(NoFile(folder))
        self._grant_wait_s = pace.grant_wait_s
        settings = ConnectionSettings(silence_timeout_s=pace.silence_s)
        hello = session_pb2.Hello(
            device_id=device_id,
            board=BOARD,
            provenance=power_pb2.PROVENANCE_SIMULATED,
            mode_count=7,
            installation=installation_of(device_id),
            protocol=own_version(),
        )
        self.session = CoordinatorSession(
            connects_to(endpoint), hello, self._welcomed, self.outbox, settings, self.news
        )
        self._running: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Connect, and report that the device is ready."""
        self.report(modes=10)
        self._running = asyncio.create_task(self.session.run(), name=f"session of {self.device_id}")

    async def end(self) -> None:
        await stop_tasks(self._running)

    def report(self, modes: int) -> None:
        """Report a front, and a state with the number of measured modes."""
        self.session.report_front(
            session_pb2.FrontReport(
                front=front_to_message(front((EPOCH_S, 20.0 + modes / 100), (2 * EPOCH_S, 10.0))),
                idle_w=IDLE_W,
                profiled_modes=modes,
                workload=power_pb2.Workload(name=WORKLOAD),
                minibatches_per_epoch=100,
            )
        )
        self._report_state(session_pb2.DEVICE_STATE_READY, modes, f"ready with {modes} modes")

    def _report_state(self, state: session_pb2.DeviceState.ValueType, modes: int, detail: str) -> None:
        self.session.report_state(session_pb2.StateReport(state=state, profiled_modes=modes, detail=detail))

    @property
    def is_delivered(self) -> bool:
        """Whether it is connected, and all its reports are acknowledged."""
        return self.session.connected and not self.outbox.has_any_up_to(self.outbox.last_sequence)

    @property
    def is_training(self) -> bool:
        return any(each.ended_s is None for each in self.trainings)

    async def train(self, plan_id: str) -> bool:
        """Train for a plan as the agent would: only within its grant. Returns whether the training was completed."""
        grants, loop = self.session.grants, asyncio.get_running_loop()
        await grants.wait_for(plan_id, self._grant_wait_s)
        try:
            grants.begin(plan_id)
        except NoGrantError as error:
            self.trainings.append(Training(plan_id, loop.time(), loop.time(), str(error)))
            return False
        training = Training(plan_id, loop.time())
        self.trainings.append(training)
        while (left_s := training.began_s + self.trains_s - loop.time()) > 0:
            try:
                change = await with_timeout(left_s, grants.next_change())
            except asyncio.TimeoutError:
                break
            if not isinstance(change, AgentGrant):
                training.stopped = change
                break
            grants.applied(change)
        training.ended_s = loop.time()
        grants.ended()
        if training.stopped:
            return False
        self.session.report_observation(session_pb2.Observation(plan_id=plan_id, epoch_s=EPOCH_S, power_w=15.0))
        return True

    async def _welcomed(self, welcome: session_pb2.Welcome) -> None:
        self.welcomes += 1


def installation_of(device_id: str) -> str:
    """The installation of a device's agent."""
    return (device_id.encode().hex() + 32 * "0")[:32]


# --- Node grid --------------------------------------------------------------------------------------------------------
# Flower's grid over a fleet's devices, without Flower's network: each node trains when its message is pushed.

_RUN_IDS = count(1)  # two fleets in one process need different ones
_FIRST_NODE = 2**63 + 5


class NodeGrid(OneRunGrid):
    """A grid whose nodes are devices on an event loop; it is used from another thread.

    Attributes:
        gone: devices whose nodes are gone: they do not reply, and are not listed.
        pushed_s: when the latest messages were pushed, on the monotonic clock.
    """

    def __init__(self, devices: Iterable[Device], loop: asyncio.AbstractEventLoop) -> None:
        run_id = next(_RUN_IDS)
        super().__init__(run_id, "wattfleet/faults")
        be_task(run_id, node_id=1)
        self.gone: set[str] = set()
        self.pushed_s = 0.0
        self._loop = loop
        self._devices = {_FIRST_NODE + number: device for number, device in enumerate(devices)}
        self._trainings: dict[str, tuple[Device, Message, Future[bool] | None]] = {}

    def get_node_ids(self) -> Iterable[int]:
        return [node_id for node_id, device in self._devices.items() if device.device_id not in self.gone]

    def _send(self, messages: list[Message]) -> None:
        self.pushed_s = time.monotonic()
        for message in messages:
            device = self._devices[message.metadata.dst_node_id]
            self._trainings[message.metadata.message_id] = device, message, self._begun(device, message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in message_ids:
            device, message, training = self._trainings.get(message_id, (None, None, None))
            if device is None or message is None or device.device_id in self.gone:
                continue
            if training is None:
                identity = RecordDict({RECORD_KEY: ConfigRecord({DEVICE_ID_KEY: device.device_id})})
                replies.append(Message(identity, reply_to=message))
            elif not training.done():
                continue
            elif training.result():
                replies.append(trained(message))
            else:
                replies.append(Message(Error(2, device.trainings[-1].stopped), reply_to=message))
            del self._trainings[message_id]
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _begun(self, device: Device, message: Message) -> Future[bool] | None:
        """The training of a message; None if the message asks which device the node is."""
        record: Mapping[str, Any] = message.content[RECORD_KEY]
        if IDENTIFY_KEY in record:
            return None
        assignment = RoundAssignment.from_record(record)
        return asyncio.run_coroutine_threadsafe(device.train(assignment.plan_id), self._loop)


# --- Fleet ------------------------------------------------------------------------------------------------------------

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
        server={"address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "stop_grace_s": 0.05},
        store={"location": str(folder / "coordinator.db")},
        site={"budget_w": 100.0 * devices},
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

        patch = held.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("edge_agent.session.coordinator_session.WELCOME_TIMEOUT_S", 12 * pace.lease_s)
        patch.setattr("coordinator.services.orders.TRIM_CHECK_S", 0.2)
        made = []
        for number in range(devices):
            name = f"orin-{number}"
            link = links[_share_of(number / devices, list(shares))]
            at = endpoint(link, Role.DEVICE, name, board=BOARD, installation=installation_of(name))
            made.append(Device(name, at, folder, pace))
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
