"""A whole agent beside the test's own thread, on a simulated board."""

import asyncio
import os
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from flwr.app import ConfigRecord, Context, Message, RecordDict

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.learning.fitting import FittingHere
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.runtime.agent import run_agent
from edge_agent.runtime.config import AgentConfig
from tests.fakes.coordinator_in_process import on_loop, until
from tests.fakes.flower_task import be_task
from wattfleet.modes import array_to_modes
from wattfleet_flower import power_mode_mod
from wattfleet_proto.assignment import RECORD_KEY, RoundAssignment


class BoardThatBecomesSlower(SimulatedDevice):
    """As if something blocked its fan."""

    slowdown = 1.0

    def _load_at(self, mode):
        load = super()._load_at(mode)
        return replace(load, minibatch_ms=self.slowdown * load.minibatch_ms)


def new_board(kind=SimulatedDevice):
    """One in some mode of its owner's."""
    device = kind("orin-nano", 1)
    device.apply(array_to_modes(device.modes)[777])
    return device


def fitting_here(transfer, modes, stopping):
    """In place of `fitting_process`: without a process to start for every round."""
    fitting = FittingHere(transfer, modes)
    return lambda: nullcontext(fitting)


def may_connect(socket):
    return os.path.exists(socket)


class RunningAgent:
    """An agent beside the test's own thread."""

    def __init__(self, config, device):
        self.config = config
        self._stop = asyncio.Event()
        self._running = on_loop(run_agent(config, device, built_in_workload(device.step), self._stop))

    @property
    def has_ended(self):
        return self._running.done()

    @property
    def error(self):
        """What it ended with, once it has."""
        return self._running.exception(60)

    def end(self):
        on_loop(self._set_stop()).result(60)
        wait([self._running], 60)

    async def _set_stop(self):
        self._stop.set()

    def round(self, plan_id, mode, train=lambda: None):
        """Train for a round as Flower would, with `train` for the app's own work; whether it went well."""
        be_task(run_id=7, node_id=1)
        record = RoundAssignment(plan_id, "orin-nano-0", mode, epochs=1.0, power_limit_w=20.0).to_record()
        message = Message(RecordDict({RECORD_KEY: ConfigRecord(record)}), dst_node_id=5, message_type="train")
        message.metadata.__dict__["_message_id"] = "1"
        node = {"device-id": "orin-nano-0", "agent-socket": str(self.config.socket)}
        context = Context(run_id=7, node_id=5, node_config=node, state=RecordDict(), run_config={})

        def app(request, _):
            train()
            return Message(RecordDict(), reply_to=request)

        return not power_mode_mod(message, context, app).has_error()


@contextmanager
def agent(coordinator, folder, device, state="state"):
    config = AgentConfig(
        device_id="orin-nano-0",
        coordinator=coordinator.address,
        state_directory=folder / state,
        device_folder=folder / "device",
        socket=folder / f"{state}.sock",
        minibatches_per_epoch=100,
        seed=0,
    )
    running = RunningAgent(config, device)
    try:
        yield running
    finally:
        running.end()


@contextmanager
def ready_agent(coordinator, folder, device):
    coordinator.reports.clear()
    with agent(coordinator, folder, device) as running:
        until(lambda: coordinator.is_ready() or running.has_ended)
        assert not running.has_ended
        yield running
    assert running.error is None
