"""A whole fleet inside the test's process: real gRPC on loopback, real agents, no SuperLink."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from coordinator.cli.client import CoordinatorClient
from coordinator.server import BoundAddresses
from coordinator.settings import (
    CoordinatorSettings,
    PolicySettings,
    ProfilingSettings,
    ServerSettings,
    SiteSettings,
    StoreSettings,
)
from edge_agent.devices.selection import open_virtual_board
from edge_agent.paths import device_folder
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.runtime.agent import run_agent
from tests.fakes.agent_settings import agent_settings
from tests.fakes.one_run_grid import OneRunGrid
from tests.fakes.polling import until
from tests.fakes.served import serving
from wattfleet_identity.channels import Endpoint
from wattfleet_proto.v1 import session_pb2
from wattfleet_simulation.flower_task import be_task
from wattfleet_simulation.run import CoordinatorView, RunSeen

RUN_ID = 7
_WITHIN_S = 60.0


class InProcessGrid(OneRunGrid):
    """A grid whose nodes run the ClientApp immediately, in the caller's thread."""

    def __init__(
        self,
        app: ClientApp,
        nodes: Mapping[int, Mapping[str, Any]],
        run_config: Mapping[str, Any],
        run_id: int = RUN_ID,
    ) -> None:
        super().__init__(run_id)
        self.sent: list[Message] = []
        self.broken: set[int] = set()
        self._app = app
        self._nodes = nodes
        self._node_run_config = dict(run_config)
        self._replies: dict[str, Message] = {}
        be_task(run_id, node_id=1)

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=self._run_id)  # only its id, as a grid supplied by an app may return

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def _send(self, messages: list[Message]) -> None:
        """Run the app on each node."""
        self._replies.update({message.metadata.message_id: self._answer(message) for message in messages})

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(message_id) for message_id in message_ids]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        self.sent.append(message)
        node_id = message.metadata.dst_node_id
        try:
            if node_id in self.broken:
                raise ConnectionError("the node is gone")
            # As over the network, the node gets a copy of its own.
            copy = Message(RecordDict(dict(message.content)), reply_to=message)
            copy.metadata.__dict__.update(message.metadata.__dict__)
            context = Context(
                run_id=self._run_id,
                node_id=node_id,
                node_config=dict(self._nodes[node_id]),
                state=RecordDict(),
                run_config=self._node_run_config,
            )
            return self._app(copy, context)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)


@dataclass
class RunningFleet:
    """A coordinator and its agents on an event loop in a thread of its own."""

    addresses: BoundAddresses
    directory: Path
    device_ids: list[str]
    view: CoordinatorView
    loop: asyncio.AbstractEventLoop
    errors: list[BaseException] = field(default_factory=list)

    def socket(self, device_id: str) -> Path:
        return self.directory / f"{device_id}.sock"

    def newest_run(self) -> RunSeen:
        """The newest run; Flower's id has a suffix if the id was used before."""
        with CoordinatorClient(Endpoint(self.addresses.address)) as client:
            return self.view.run(client.runs()[-1].run_id)

    def nodes(self) -> dict[int, dict[str, Any]]:
        """Flower nodes, one per device, with ids as large as Flower's."""
        return {
            2**63 + 11 * k: {"device-id": device, "partition-id": k, "agent-socket": str(self.socket(device))}
            for k, device in enumerate(self.device_ids)
        }


@contextmanager
def running_fleet(
    directory: Path,
    specs: Mapping[str, str],
    *,
    policy: PolicySettings,
    site_budget_w: float,
    profile_modes: int = 12,
    modes_first: int | None = 10_000,
    minibatches_per_epoch: int | None = 100,
    duty: str | None = None,
) -> Iterator[RunningFleet]:
    """A coordinator and agents, with every agent ready to train.

    All modes are measured before the first round, unless `modes_first` says otherwise; with None, they are measured
    while apps train.
    """
    loop = asyncio.new_event_loop()
    stop, bound = asyncio.Event(), threading.Event()
    found: list[BoundAddresses] = []
    errors: list[BaseException] = []

    async def everything() -> None:
        settings = CoordinatorSettings(
            server=ServerSettings(address="127.0.0.1:0", metrics_address="127.0.0.1:0", stop_grace_s=0.05),
            store=StoreSettings(location=str(directory / "coordinator.db")),
            site=SiteSettings(budget_w=site_budget_w),
            policy=policy,
            profiling=ProfilingSettings(modes=profile_modes),
        )
        async with serving(settings) as client:
            found.append(client.bound)
            bound.set()
            boards = {device_id: open_virtual_board(spec, k) for k, (device_id, spec) in enumerate(specs.items())}
            agents = [
                run_agent(
                    agent_settings(
                        directory / device_id,
                        device_id,
                        coordinator=client.bound.address,
                        socket=directory / f"{device_id}.sock",
                        seed=k,
                        modes_first=modes_first,
                        minibatches_per_epoch=minibatches_per_epoch,
                        simulated_duty=duty,
                    ),
                    board,
                    built_in_workload(board.step),
                    device_folder(directory / device_id),
                    stop,
                )
                for k, (device_id, board) in enumerate(boards.items())
            ]
            await asyncio.gather(*agents)

    def run() -> None:
        try:
            loop.run_until_complete(everything())
        except BaseException as error:  # made available to the test's own thread below
            errors.append(error)
            bound.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert bound.wait(_WITHIN_S)
        if errors:
            raise errors[0]
        with CoordinatorView(Endpoint(found[0].address)) as view:
            until(lambda: all_ready(view, len(specs)) or bool(errors))
            yield RunningFleet(found[0], directory, list(specs), view, loop, errors)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_WITHIN_S)
        loop.close()
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def all_ready(view: CoordinatorView, count: int) -> bool:
    return [device.state for device in view.devices()].count(session_pb2.DEVICE_STATE_READY) == count
