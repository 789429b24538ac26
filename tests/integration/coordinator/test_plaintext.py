"""Fleets without identity: warnings of plaintext that others can reach, and the steps to certificates."""

from __future__ import annotations

import asyncio
import io
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from coordinator import listeners
from coordinator.cli import options
from coordinator.settings import CoordinatorSettings
from tests.fakes.served import READY, Agent, CertifiedFleet, Client, calling, certified, command, joined, serving
from tests.fakes.small_fleet import ORIN_FRONT
from wattfleet.common.identity import channels
from wattfleet.common.identity.channels import PLAINTEXT_WARNING, Endpoint
from wattfleet.common.identity.identity_folder import Identity, write_identity
from wattfleet.common.identity.joining import Applicant
from wattfleet.common.identity.peers import Role
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import identity_pb2_grpc, planning_pb2, power_pb2, session_pb2

# --- Plaintext warnings -----------------------------------------------------------------------------------------------
# Warnings of plaintext that other machines can reach: at every start, on every screen, and in the metrics.


METRIC = "wattfleet_exposed_plaintext_addresses"
COMMANDS = (["devices"], ["rounds"], ["workloads"], ["budget", "show"], ["reference", "list"])


@pytest.fixture
def others_reach_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat 127.0.0.1 as an address that other machines can reach; nothing listens on a real one."""
    for module in (channels, listeners):
        monkeypatch.setattr(module, "is_loopback", lambda host: False)


@pytest.fixture
async def exposed(config: CoordinatorSettings, others_reach_us: None) -> AsyncIterator[Client]:
    """A coordinator in plaintext on an address that other machines can reach."""
    async with serving(config.with_values(identity={"insecure": True})) as served:
        yield served


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def metric_at(address: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
        lines = response.read().decode().splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith(METRIC + " ")]
    return float(value)


async def coordinator(*words: str) -> Any:
    """An operator's command against the coordinator that is served here."""
    return await asyncio.to_thread(command, *words)


async def test_every_command_over_an_exposed_connection_warns(exposed: Client) -> None:
    for words in COMMANDS:
        options_ = ("--coordinator", exposed.bound.address, "--insecure")
        done = await coordinator(*words, *options_)
        warning = f"warning: the connection to {exposed.bound.address} is {PLAINTEXT_WARNING}"
        assert warning in " ".join(done.stderr.split()), (words, done.output)
        with pytest.raises(InvalidInputError, match="or pass --insecure for plaintext"):
            await coordinator(*words, "--coordinator", exposed.bound.address)
    assert await asyncio.to_thread(metric_at, exposed.bound.http_address) == 2, "RPCs, and the page with the metrics"


async def test_a_watched_screen_keeps_the_warning(exposed: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, drawn = io.StringIO(), []
    monkeypatch.setattr(options, "terminal", lambda: Console(file=shown, force_terminal=True, width=150))

    def slept(_: float) -> None:
        drawn.append(shown.getvalue())
        shown.truncate(0)
        if len(drawn) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", slept)
    await coordinator("devices", "--watch", "--coordinator", exposed.bound.address, "--insecure")
    assert len(drawn) == 3 and all(PLAINTEXT_WARNING in screen for screen in drawn)


async def test_loopback_and_tls_warn_of_nothing(config: CoordinatorSettings, tmp_path: Path) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    write_identity(tmp_path / "operator", fleet.identity(Role.OPERATOR))
    assert Endpoint("site.example:7070", tmp_path / "operator").warning is None
    assert Endpoint("site.example:7070", is_insecure=True).warning is not None
    async with serving(config) as served:
        done = await coordinator("devices", "--coordinator", served.bound.address)
        assert (done.exit_code, done.stderr) == (0, "")
        assert await asyncio.to_thread(metric_at, served.bound.http_address) == 0


def test_a_fleet_that_moves_over_counts_its_plaintext_address(config: CoordinatorSettings, tmp_path: Path) -> None:
    moving = certified(config, tmp_path, plaintext_address="0.0.0.0:7070", insecure=True)
    assert listeners.exposed_plaintext(moving, has_authority=True) == ["0.0.0.0:7070"]
    protected = certified(config.with_values(server={"address": "0.0.0.0:7070"}), tmp_path)
    assert listeners.exposed_plaintext(protected, has_authority=True) == []


# --- Moving over ------------------------------------------------------------------------------------------------------
# A fleet without identity moves to certificates step by step, as in docs/security.md, while rounds continue.

NODES = {11: "orin-0", 12: "orin-1", 13: "orin-2", 14: "orin-3"}
RUN, TOKEN = "7", "a secret of the app"


@dataclass
class Board:
    """A device, its current session, and its identity once it has one."""

    device_id: str
    session: Agent
    identity: Identity | None = None


def hello_of(device_id: str) -> session_pb2.Hello:
    return session_pb2.Hello(
        device_id=device_id,
        board="agx-orin",
        provenance=power_pb2.PROVENANCE_SIMULATED,
        mode_count=7,
        installation=f"of {device_id}",
        protocol=own_version(),
    )


async def connected(client: Client, device_id: str) -> Agent:
    """A session that reports the device's front."""
    session = client.agent()
    await session.greet(hello_of(device_id))
    await session.lease()
    await session.send(
        front=session_pb2.FrontReport(front=front_to_message(ORIN_FRONT), idle_w=5.0, minibatches_per_epoch=100)
    )
    await session.send(state=READY)
    return session


class Flower:
    """The ServerApp's side of a run, in whose rounds all of its devices train."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.planned: list[set[str]] = []

    async def start(self, client: Client) -> None:
        """Start the run, or continue it over another connection."""
        self.client = client
        bindings = [planning_pb2.NodeBinding(node_id=node, device_id=name) for node, name in NODES.items()]
        await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
        start = planning_pb2.StartRunRequest(run_id=RUN, strategy="FedAvg", rounds=9, run_token=TOKEN)
        await client.planning.StartRun(start)

    @asynccontextmanager
    async def round(self, boards: list[Board]) -> AsyncIterator[dict[str, session_pb2.Grant]]:
        """A round: every board is planned and trains; the round ends after the block."""
        number = len(self.planned) + 1
        request = planning_pb2.PlanRoundRequest(
            run_id=RUN, round=number, node_ids=list(NODES), epochs=1.0, run_token=TOKEN
        )
        plan = await self.client.planning.PlanRound(request)
        assigned = {each.device_id: each for each in plan.assignments}
        self.planned.append(set(assigned))
        grants = {board.device_id: await board.session.grant() for board in boards}
        for board in boards:
            await board.session.lease(GrantPhase.WAITING, grants[board.device_id])
            await board.session.lease(GrantPhase.TRAINING, grants[board.device_id])
        yield grants
        for board in boards:
            planned = assigned[board.device_id]
            seen = session_pb2.Observation(plan_id=plan.plan_id, epoch_s=planned.epoch_s, power_w=planned.power_w)
            await board.session.send(observation=seen)
            await board.session.lease(GrantPhase.OVER, grants[board.device_id])
        done = planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=10.0, run_token=TOKEN)
        await self.client.planning.FinishRound(done)


async def enrol(operator: Client, board: Board) -> None:
    """Do what `coordinator invite` and `agent join` do."""
    service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
    applicant = Applicant(board.device_id, "agx-orin", f"of {board.device_id}")
    board.identity = await joined(service, Role.DEVICE, applicant, board.device_id)


async def move_over(opened: Any, served: Client, operator: Client, board: Board, grant: session_pb2.Grant) -> None:
    """Enrol a board during its training, and restart its agent's session over TLS."""
    await enrol(operator, board)
    await board.session.lease(GrantPhase.TRAINING, grant)  # in plaintext until its agent connects again
    former = board.session
    client = await opened(calling(served, board.identity))
    board.session = await connected_in_training(client, board.device_id, grant)
    assert await former.call.code() is grpc.StatusCode.ABORTED, "its plaintext session has ended"


async def connected_in_training(client: Client, device_id: str, grant: session_pb2.Grant) -> Agent:
    session = client.agent()
    await session.greet(hello_of(device_id))
    await session.lease(GrantPhase.TRAINING, grant)
    await session.send(
        front=session_pb2.FrontReport(front=front_to_message(ORIN_FRONT), idle_w=5.0, minibatches_per_epoch=100)
    )
    return session


@pytest.mark.timeout(240)
async def test_a_fleet_moves_over_board_by_board_while_its_rounds_go_on(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    tls_only = certified(config.with_values(site={"budget_w": 400.0}), fleet.authority.folder)
    both = certified(tls_only, fleet.authority.folder, plaintext_address="127.0.0.1:0")
    old_fleet = certified(tls_only, tmp_path / "no authority")
    everybody = set(NODES.values())

    # Before: only plaintext.
    async with serving(old_fleet) as served:
        flower, boards = Flower(served), [Board(name, await connected(served, name)) for name in NODES.values()]
        await flower.start(served)
        async with flower.round(boards):
            pass

    async with AsyncExitStack() as stack:
        opened = stack.enter_async_context
        # 1. The old address stays open in plaintext, and boards and the app reconnect to it by themselves.
        served = await opened(serving(both))
        operator = await opened(calling(served, fleet.identity(Role.OPERATOR)))
        plaintext = await opened(calling(served, None, served.bound.plaintext_address))
        for board in boards:
            board.session = await connected(plaintext, board.device_id)
        await flower.start(plaintext)
        async with flower.round(boards):
            pass
        # 2. Half of the boards enrol during a round.
        async with flower.round(boards) as grants:
            for board in boards[:2]:
                await move_over(opened, served, operator, board, grants[board.device_id])
        # A board that has a certificate is refused in plaintext; the others are not.
        with pytest.raises(grpc.aio.AioRpcError, match="has a certificate") as refused:
            await plaintext.agent().greet(hello_of("orin-0"))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await ready_again(boards[:2])
        async with flower.round(boards):
            pass
        # 3. Flower's server enrols: the run that it began in plaintext continues.
        await flower.start(await opened(calling(served, fleet.identity(Role.FLOWER, "app"))))
        async with flower.round(boards) as grants:
            for board in boards[2:]:
                await move_over(opened, served, operator, board, grants[board.device_id])
        await ready_again(boards[2:])
        async with flower.round(boards):
            pass

    # 4. The plaintext address is closed.
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(tls_only))
        assert served.bound.plaintext_address is None
        for board in boards:
            client = await stack.enter_async_context(calling(served, board.identity))
            board.session = await connected(client, board.device_id)
        app = fleet.identity(Role.FLOWER, "app")
        await flower.start(await stack.enter_async_context(calling(served, app)))
        async with flower.round(boards):
            pass
        in_plaintext = await stack.enter_async_context(calling(served, None))
        with pytest.raises(grpc.aio.AioRpcError):
            await in_plaintext.agent().greet(hello_of("orin-3"))
    assert flower.planned == [everybody] * 7, "every board trained in every round"


async def ready_again(boards: list[Board]) -> None:
    for board in boards:
        await board.session.send(state=READY)
