"""A whole agent on a simulated board, outside the test's own thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from flwr.app import ConfigRecord, Context, Message, RecordDict

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.devices.virtual.virtual_board import Load
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.runtime.agent import run_agent
from edge_agent.settings import AgentSettings
from tests.fakes.agent_settings import agent_settings, waiting_times
from tests.fakes.coordinator_in_process import CoordinatorInProcess, on_loop
from tests.fakes.polling import until
from wattfleet.core.modes import PowerMode, array_to_modes
from wattfleet.flower import power_mode_mod
from wattfleet.simulation.flower_task import be_task
from wattfleet_proto.assignment import RECORD_KEY, RoundAssignment
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc


class BoardThatBecomesSlower(SimulatedDevice):
    """A board that becomes slower, as if its fan were blocked."""

    slowdown = 1.0

    def _load_at(self, mode: PowerMode) -> Load:
        load = super()._load_at(mode)
        return replace(load, minibatch_ms=self.slowdown * load.minibatch_ms)


def new_board(kind: type[SimulatedDevice] = SimulatedDevice) -> SimulatedDevice:
    """A board in a mode of its owner's."""
    device = kind("orin-nano", 1)
    device.apply(array_to_modes(device.modes)[777])
    return device


def may_connect(socket: Path) -> bool:
    return os.path.exists(socket)


def serves_trainings(socket: Path) -> bool:
    """Whether an agent accepts trainings of apps; it refuses them while its device is being prepared."""
    start = local_pb2.StartTraining(device_id="another device")
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        call: Any = local_pb2_grpc.LocalAgentServiceStub(channel).Train(iter([local_pb2.TrainRequest(start=start)]))
        return bool(call.code() is grpc.StatusCode.INVALID_ARGUMENT)


class RunningAgent:
    """An agent outside the test's own thread."""

    def __init__(
        self, settings: AgentSettings, device: SimulatedDevice, folder: Path, coordinator: CoordinatorInProcess
    ) -> None:
        self.coordinator = coordinator
        self.settings = settings
        self._stop = asyncio.Event()
        self._running = on_loop(run_agent(settings, device, built_in_workload(device.step), folder, self._stop))

    @property
    def has_ended(self) -> bool:
        return self._running.done()

    @property
    def error(self) -> BaseException | None:
        """The error with which it ended, or None."""
        return self._running.exception(60)

    def end(self) -> None:
        on_loop(self._set_stop()).result(60)
        wait([self._running], 60)

    async def _set_stop(self) -> None:
        self._stop.set()

    def round(
        self, plan_id: str, mode: PowerMode, train: Callable[[], object] = lambda: None, workload: str = ""
    ) -> bool:
        """Train for a round as Flower would, with `train` for the app's own work; returns whether it succeeded.

        The coordinator grants the round first, unless it is away.
        """
        if self.coordinator.is_up:
            self.coordinator.grant(plan_id, mode, workload=workload)
        be_task(run_id=7, node_id=1)
        record = RoundAssignment(plan_id, "orin-nano-0", epochs=1.0).to_record()
        message = Message(RecordDict({RECORD_KEY: ConfigRecord(record)}), dst_node_id=5, message_type="train")
        message.metadata.__dict__["_message_id"] = "1"
        node = {"device-id": "orin-nano-0", "agent-socket": str(self.settings.device.socket)}
        context = Context(run_id=7, node_id=5, node_config=node, state=RecordDict(), run_config={})

        def app(request: Message, _: Context) -> Message:
            train()
            return Message(RecordDict(), reply_to=request)

        return not power_mode_mod(message, context, app).has_error()


@contextmanager
def agent(
    coordinator: CoordinatorInProcess,
    folder: Path,
    device: SimulatedDevice,
    state: str = "state",
    retry_s: float = 30.0,
    grant_timeout_s: float = 10.0,
    **more: Any,
) -> Iterator[RunningAgent]:
    settings = agent_settings(
        folder / state,
        coordinator=coordinator.address,
        socket=folder / f"{state}.sock",
        **more,
    )
    with waiting_times(retry_s, grant_timeout_s):
        running = RunningAgent(settings, device, folder / "device", coordinator)
        try:
            yield running
        finally:
            running.end()


@contextmanager
def ready_agent(
    coordinator: CoordinatorInProcess, folder: Path, device: SimulatedDevice, retry_s: float = 30.0, **more: Any
) -> Iterator[RunningAgent]:
    coordinator.reports.clear()
    with agent(coordinator, folder, device, retry_s=retry_s, **more) as running:
        until(lambda: coordinator.is_ready() or running.has_ended)
        assert not running.has_ended
        yield running
    assert running.error is None
