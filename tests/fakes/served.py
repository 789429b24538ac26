"""A coordinator served in the test's own event loop, and its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from coordinator.display.values import state_word
from coordinator.server import BoundAddresses, serve
from coordinator.settings import CoordinatorSettings
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN, RUN_NAME
from wattfleet.choosing import Front
from wattfleet_proto.convert import front_to_message, phase_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.names import MAJOR, WORKLOADS_MINOR, own_version
from wattfleet_proto.v1 import (
    operator_pb2_grpc,
    planning_pb2,
    planning_pb2_grpc,
    power_pb2,
    session_pb2,
    session_pb2_grpc,
    view_pb2,
    view_pb2_grpc,
)
from wattfleet_simulation.run import RunSeen

_WITHIN_S = 20.0
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]
READY = session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY, profiled_modes=50, detail="parked")


def hello_of(device_id: str, board: str = "agx-orin", installation: str = "") -> session_pb2.Hello:
    """The Hello of an agent of this version on a simulated board."""
    return session_pb2.Hello(
        device_id=device_id,
        board=board,
        provenance=power_pb2.PROVENANCE_SIMULATED,
        mode_count=7,
        installation=installation,
        protocol=own_version(),
    )


class Agent:
    """A device's side of a session, message by message."""

    def __init__(self, sessions: Any) -> None:
        self.call = sessions.Session()
        self.grants: list[session_pb2.Grant] = []
        self.announced: list[session_pb2.WorkloadsAnnounced] = []
        self.profile_orders: list[session_pb2.ProfileOrder] = []
        self.revocations: list[session_pb2.RevokedCertificates] = []
        self.refusals: list[str] = []
        self._sequence = 100
        self._leases = 0
        self.is_welcome = False
        self.keeps_to: session_pb2.Grant | None = None
        self.phase = GrantPhase.OVER

    async def hello(
        self,
        device_id: str,
        kind: str = "agx-orin",
        provenance: Any = power_pb2.PROVENANCE_SIMULATED,
        knows_workloads: bool = False,
    ) -> Any:
        """Connect; unless the agent knows workloads, its one front counts for every workload in later sessions too."""
        minor = WORKLOADS_MINOR if knows_workloads else WORKLOADS_MINOR - 1
        protocol = session_pb2.ProtocolVersion(major=MAJOR, minor=minor)
        return await self.greet(
            session_pb2.Hello(device_id=device_id, board=kind, provenance=provenance, mode_count=7, protocol=protocol)
        )

    async def greet(self, hello: session_pb2.Hello) -> Any:
        if not hello.HasField("protocol"):
            hello.protocol.CopyFrom(own_version())
        await self.call.write(session_pb2.SessionRequest(hello=hello))
        response = await self.call.read()
        if response is _END:
            await self.refused()
        self.is_welcome = True
        return response.welcome

    async def send(self, **body: Any) -> None:
        """Send a message and wait for its acknowledgement; grants that arrive before it are recorded."""
        self._sequence += 7
        await self.call.write(session_pb2.SessionRequest(sequence=self._sequence, **body))
        ack = await self.ack()
        assert ack.sequence == self._sequence
        if ack.refusal:
            self.refusals.append(ack.refusal)

    async def lease(
        self,
        phase: GrantPhase = GrantPhase.OVER,
        grant: session_pb2.Grant | None = None,
        sample: session_pb2.BoardSample | None = None,
    ) -> None:
        """Report the grant in force (none by default), the progress of its training, and the sensor values."""
        self._leases += 1
        self.keeps_to, self.phase = grant, phase
        lease = session_pb2.Lease(number=self._leases, phase=phase_to_message(phase), sample=sample)
        if grant is not None:
            lease.grant_id, lease.plan_id = grant.id, grant.plan_id
        await self.call.write(session_pb2.SessionRequest(lease=lease))
        assert (await self.ack()).lease_number == self._leases

    async def ack(self) -> session_pb2.Ack:
        """The next acknowledgement; orders that arrive before it are recorded."""
        while not (response := await self._read()).HasField("ack"):
            self._note(response)
        ack: session_pb2.Ack = response.ack
        return ack

    async def _read(self) -> Any:
        response = await self.call.read()
        if response is _END:
            await self.refused()
        return response

    def _note(self, response: Any) -> None:
        """Record an order."""
        kinds: dict[str, list[Any]] = {
            "grant": self.grants,
            "announced": self.announced,
            "profile": self.profile_orders,
            "revoked": self.revocations,
        }
        kind = response.WhichOneof("body")
        kinds[kind].append(getattr(response, kind))

    async def hear(self, orders: list[Any]) -> Any:
        """The next order of a kind, unless one has arrived already."""
        while not orders:
            self._note(await self._read())
        return orders.pop(0)

    async def trained(self, plan_id: str = "") -> None:
        """Accept the grant of a round (the next one unless its plan is named), and report its training as finished."""
        grant = await self.grant()
        while plan_id and grant.plan_id != plan_id:
            grant = await self.grant()
        await self.lease(GrantPhase.OVER, grant)

    async def obey(self, phase: GrantPhase = GrantPhase.WAITING) -> None:
        """Put the newest grant in force, if one has arrived, and report the progress of its training."""
        await self.lease(self.phase, self.keeps_to)
        while self.grants:
            newest = self.grants.pop()
            self.grants.clear()
            await self.lease(phase if newest.HasField("mode") else GrantPhase.OVER, newest)

    async def grant(self) -> session_pb2.Grant:
        """The next grant, unless one arrived with an acknowledgement already."""
        grant: session_pb2.Grant = await self.hear(self.grants)
        return grant

    async def refused(self) -> None:
        raise grpc.aio.AioRpcError(await self.call.code(), None, None, await self.call.details())  # type: ignore

    async def become_ready(self, device_id: str, device_front: Front, idle_w: float) -> None:
        await self.hello(device_id)
        await self.lease()
        await self.send(front=session_pb2.FrontReport(front=front_to_message(device_front), idle_w=idle_w))
        await self.send(state=READY)

    async def goodbye(self) -> None:
        await self.call.done_writing()
        while (response := await self.call.read()) is not _END:
            self._note(response)


@dataclass
class Client:
    """All kinds of clients of a coordinator."""

    bound: BoundAddresses
    channel: grpc.aio.Channel
    stop: asyncio.Event
    running: asyncio.Task[None]
    agents: list[Agent] = field(default_factory=list)

    @property
    def sessions(self) -> Any:
        return session_pb2_grpc.SessionServiceStub(self.channel)

    @property
    def planning(self) -> Any:
        return planning_pb2_grpc.PlanningServiceStub(self.channel)

    @property
    def view(self) -> Any:
        return view_pb2_grpc.ViewServiceStub(self.channel)

    def agent(self) -> Agent:
        agent = Agent(self.sessions)
        self.agents.append(agent)
        return agent

    async def obey(self, phase: GrantPhase = GrantPhase.WAITING) -> None:
        """Let all devices with a session put their newest grants in force and report their progress."""
        for agent in self.agents:
            if agent.is_welcome and not agent.call.done():
                await agent.obey(phase)

    async def end_trainings(self) -> None:
        """Let all devices with a session finish what they were granted."""
        await self.obey(GrantPhase.OVER)

    @property
    def operator(self) -> Any:
        return operator_pb2_grpc.OperatorServiceStub(self.channel)

    async def devices(self) -> dict[str, view_pb2.DeviceView]:
        answers = self.view.ListDevices(view_pb2.ListDevicesRequest(with_fronts=True))
        return {device.device_id: device async for answer in answers for device in answer.devices}

    async def states(self) -> dict[str, str]:
        return {device_id: state_word(device.state) for device_id, device in (await self.devices()).items()}

    async def two_ready(self) -> tuple[Agent, Agent]:
        """The Orin and the Nano, ready and paired with their nodes, and a run that has begun."""
        orin, nano = self.agent(), self.agent()
        await orin.become_ready("orin", ORIN_FRONT, 5.0)
        await nano.become_ready("nano", NANO_FRONT, 3.0)
        bindings = [
            planning_pb2.NodeBinding(node_id=ORIN_NODE, device_id="orin"),
            planning_pb2.NodeBinding(node_id=NANO_NODE, device_id="nano"),
        ]
        await self.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
        start = planning_pb2.StartRunRequest(run_id=RUN, strategy="FedAvg", rounds=3, name=RUN_NAME)
        await self.planning.StartRun(start)
        return orin, nano

    async def plan(self, number: int = 1, run_id: str = RUN) -> planning_pb2.PlanRoundResponse:
        request = planning_pb2.PlanRoundRequest(run_id=run_id, round=number, node_ids=NODES, epochs=1.0)
        plan: planning_pb2.PlanRoundResponse = await self.planning.PlanRound(request)
        return plan

    async def runs(self, with_times: bool = False) -> list[view_pb2.RunView]:
        answers = self.view.ListRuns(view_pb2.ListRunsRequest(with_times=with_times))
        return [run async for answer in answers for run in answer.runs]

    async def rounds(self, run_id: str = "") -> RunSeen:
        """A run (the newest unless it is named) with its rounds."""
        runs = await self.runs()
        if not runs:
            return RunSeen()
        run = next(each for each in reversed(runs) if run_id in ("", each.run_id))
        streamed = self.view.StreamRounds(view_pb2.StreamRoundsRequest(run_id=run.run_id))
        return RunSeen(run, [view async for view in streamed])


@asynccontextmanager
async def serving(config: CoordinatorSettings) -> AsyncIterator[Client]:
    """A coordinator from its start to a clean stop."""
    stop = asyncio.Event()
    bound: asyncio.Future[BoundAddresses] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(config, bound.set_result, stop))
    waited_for: list[asyncio.Future[Any]] = [running, bound]
    await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        await running
    try:
        async with grpc.aio.insecure_channel((await bound).address) as channel:
            yield Client(await bound, channel, stop, running)
    finally:
        stop.set()
        await running


@asynccontextmanager
async def serving_client(config: CoordinatorSettings) -> AsyncIterator[Client]:
    """`serving`, with a time limit."""
    async with asyncio.timeout(_WITHIN_S), serving(config) as client:
        yield client


def status(refused: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> tuple[grpc.StatusCode, str]:
    return refused.value.code(), refused.value.details() or ""


def fetch(digest: str) -> session_pb2.FetchReferenceRequest:
    return session_pb2.FetchReferenceRequest(digest=digest)
