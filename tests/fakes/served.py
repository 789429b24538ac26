"""A coordinator served in the test's own event loop, with or without certificates, and its clients and commands."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from coordinator.display.values import state_word
from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.server import BoundAddresses, serve
from coordinator.settings import CoordinatorSettings, IdentitySettings
from coordinator.store.store import Store
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN, RUN_NAME
from wattfleet.common import cli
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.certificates import new_key, request_certificate
from wattfleet.common.identity.channels import open_async_channel
from wattfleet.common.identity.identity_folder import Identity, write_identity
from wattfleet.common.identity.invites import Invite
from wattfleet.common.identity.joining import Applicant, join
from wattfleet.common.identity.peers import Peer, Role
from wattfleet.core.choosing import Front
from wattfleet.core.errors import WattfleetError
from wattfleet.simulation.run import RunSeen
from wattfleet_proto.convert import front_to_message, phase_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import (
    identity_pb2,
    operator_pb2_grpc,
    planning_pb2,
    planning_pb2_grpc,
    power_pb2,
    session_pb2,
    session_pb2_grpc,
    view_pb2,
    view_pb2_grpc,
)

# --- Served -----------------------------------------------------------------------------------------------------------
# A coordinator served in the test's own event loop, and its clients.


_WITHIN_S = 60.0
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
    ) -> Any:
        """Connect as an agent of this version."""
        return await self.greet(session_pb2.Hello(device_id=device_id, board=kind, provenance=provenance, mode_count=7))

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

    async def become_ready(self, device_id: str, device_front: Front, idle_w: float, workload: str = "unnamed") -> None:
        await self.hello(device_id)
        await self.lease()
        await self.send(
            front=session_pb2.FrontReport(
                front=front_to_message(device_front),
                idle_w=idle_w,
                workload=power_pb2.Workload(name=workload),
                minibatches_per_epoch=100,
            )
        )
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


# --- Certified --------------------------------------------------------------------------------------------------------
# A coordinator with a certificate authority, and clients with certificates from it.

LIFETIME = timedelta(days=30)


@dataclass(frozen=True)
class CertifiedFleet:
    """A certificate authority, and identities that it has issued."""

    authority: AuthorityFolder

    @classmethod
    def create(cls, folder: Path) -> CertifiedFleet:
        return cls(AuthorityFolder.create(folder, ["127.0.0.1"], utc_now()))

    def identity(self, role: Role, name: str = "somebody", lifetime: timedelta = LIFETIME, **device: str) -> Identity:
        """An identity with a new key; with `device`, it has that device's board and installation."""
        key_pem, fleet = new_key(), self.authority.authority.fleet
        certificate_pem = self.authority.authority.issue(
            request_certificate(key_pem), Peer(fleet, role, name, **device), lifetime, utc_now()
        )
        return Identity(key_pem, certificate_pem, self.authority.trusted_pem)

    def renewed(self, identity: Identity) -> Identity:
        """An identity with a new certificate for the same key."""
        request = request_certificate(identity.key_pem)
        certificate_pem = self.authority.authority.issue(request, identity.peer, LIFETIME, utc_now())
        return replace(identity, certificate_pem=certificate_pem)

    def https_context(self, identity: Identity | None, folder: Path) -> ssl.SSLContext:
        """The TLS context for a client of the fleet's HTTPS servers; the identity's files are written to the folder."""
        context = ssl.create_default_context(cadata=self.authority.trusted_pem.decode())
        if identity is not None:
            write_identity(folder, identity)
            context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
        return context


def certified(config: CoordinatorSettings, folder: Path, **identity: object) -> CoordinatorSettings:
    """Settings of a coordinator whose authority is in this folder."""
    return config.model_copy(update={"identity": IdentitySettings.model_validate({"directory": folder, **identity})})


async def invited(service: Any, role: Role, name: str = "", uses: int = 1) -> Invite:
    """An invite, as `wattfleet coordinator invite` creates it.

    Args:
        service: the coordinator's identity service, as an operator calls it.
        role: the role of the invited machine.
        name: the only name that the invite is valid for; empty for a device of any name.
        uses: how many times it can be used.
    """
    answer = await service.Invite(identity_pb2.InviteRequest(role=role.value, name=name, uses=uses, ttl_s=600))
    return Invite.parse(answer.line)


async def joined(
    service: Any, role: Role, applicant: Applicant, name: str = "", flower_public_key: bytes = b""
) -> Identity:
    """The identity that a machine receives for an invite; arguments as for `invited` and `join`."""
    return await asyncio.to_thread(join, await invited(service, role, name), applicant, flower_public_key)


@asynccontextmanager
async def client_with(config: CoordinatorSettings, identity: Identity) -> AsyncIterator[Client]:
    """A coordinator, and a client with an identity."""
    async with serving(config) as plaintext, calling(plaintext, identity) as client:
        yield client


@asynccontextmanager
async def calling(served: Client, identity: Identity | None, address: str | None = None) -> AsyncIterator[Client]:
    """Another client of a running coordinator, with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with open_async_channel(address or served.bound.address, identity, options) as channel:
        yield Client(served.bound, channel, served.stop, served.running)


# --- Running coordinator ----------------------------------------------------------------------------------------------
# A coordinator process inside the test's event loop, without a client.


class Running:
    """A coordinator in this process."""

    def __init__(self, config: CoordinatorSettings) -> None:
        self.stop = asyncio.Event()
        self.bound: asyncio.Future[BoundAddresses] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(serve(config, self.bound.set_result, self.stop))

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        waited: list[asyncio.Future[Any]] = [self.task, self.bound]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            await self.task
        async with grpc.aio.insecure_channel((await self.bound).address) as channel:
            yield channel

    async def end(self) -> None:
        self.stop.set()
        await self.task


async def start_run(channel: grpc.aio.Channel, run_id: str) -> None:
    planning: Any = planning_pb2_grpc.PlanningServiceStub(channel)
    await planning.StartRun(planning_pb2.StartRunRequest(run_id=run_id, strategy="FedAvg", rounds=3))


def runs_of(config: CoordinatorSettings) -> list[str]:
    store = Store(Path(config.store.location))
    runs = [record.run_id for record in store.load().runs]
    store.close()
    return runs


# --- Shell ------------------------------------------------------------------------------------------------------------
# A shell for a running coordinator: the operator's commands, over real gRPC.

_SITE = """
[supplies.site]
budget = { watts = 100.0 }
[supplies.rack]
parent = "site"
budget = { query = "watts", url = "http://127.0.0.1:9", fallback_w = 60.0 }
devices = ["orin*"]
[supplies.roof]
parent = "site"
budget = { watts = 40.0 }
devices = ["nano*"]
[devices.nano]
limit_w = 20.0
tags = ["lab"]
"""

Shell = Callable[..., Awaitable[Result]]


def command(*arguments: str, columns: int = 80, typed: str | None = None) -> Result:
    """A command in a terminal of the given width; its exceptions are raised.

    Args:
        arguments: words after `wattfleet coordinator`.
        columns: width of the terminal.
        typed: what the user types; None if standard input is not a terminal.
    """
    with pytest.MonkeyPatch.context() as patched:
        if typed is not None:
            patched.setattr("click.testing._NamedTextIOWrapper.isatty", lambda stream: True)
        result = CliRunner().invoke(
            cli.wattfleet, ["coordinator", *arguments], typed, {"COLUMNS": str(columns)}, prog_name="wattfleet"
        )
    if isinstance(result.exception, WattfleetError):
        raise result.exception
    return result


@asynccontextmanager
async def served_with_shell(config: CoordinatorSettings) -> AsyncIterator[tuple[Client, Shell]]:
    """A coordinator, a client of it, and a shell that runs commands against it."""
    async with serving_client(config) as client:

        async def shell(*arguments: str, columns: int = 80) -> Result:
            result = await asyncio.to_thread(
                command, *arguments, "--coordinator", client.bound.address, columns=columns
            )
            assert result.exit_code == 0, result.output
            # The length of a file's path cannot be changed.
            is_laid_out = not {"--json", "export"} & set(arguments)
            assert not is_laid_out or max(map(len, result.stdout.splitlines()), default=0) <= columns
            assert "…" not in result.stdout, "nothing is cut off"
            return result

        yield client, shell


async def asked(shell: Shell, *arguments: str) -> Any:
    return json.loads((await shell(*arguments, "--json")).stdout)


def rack_and_roof(folder: Path) -> dict[str, Any]:
    """Settings of a site with two circuits; the source of one circuit's budget is unreachable."""
    (folder / "site.toml").write_text(_SITE)
    return {"budget_w": None, "file": folder / "site.toml"}


async def a_round(client: Client, orin: Any, number: int = 1) -> planning_pb2.PlanRoundResponse:
    """A round that the Orin finished and the Nano did not."""
    plan = await client.plan(number)
    await orin.obey(GrantPhase.OVER)
    await orin.send(
        observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=20.5, power_w=31.25, beside_duty=True)
    )
    results = [
        planning_pb2.DeviceResult(device_id="orin", num_examples=96, loss=0.125, share=1.0),
        planning_pb2.DeviceResult(device_id="nano", failure="the node, is gone\nfor good", share=0.0),
    ]
    request = planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=41.5, results=results)
    await client.planning.FinishRound(request)
    await client.end_trainings()
    metrics = {"accuracy": 2 / 3, "loss": 1.5, "f1": 0.5, "recall": 0.25}
    await client.planning.ReportMetrics(planning_pb2.ReportMetricsRequest(run_id=RUN, round=number, metrics=metrics))
    return plan
