"""`wattfleet agent run`: the agent itself, as the service starts it."""

from __future__ import annotations

import asyncio

import typer

from edge_agent.cli.options import open_named
from wattfleet_io.settings.command import SettingsCommand, effective


class RunCommand(SettingsCommand):
    """The command `run`, with an option for each setting that defines one."""

    model = "edge_agent.settings:AgentSettings"
    prefix = "WATTFLEET_AGENT_"


def run(ctx: typer.Context) -> None:
    """Run the agent: profile the device, report its front, and serve training until stopped."""
    from edge_agent.devices.selection import folder_of_device
    from edge_agent.exporter.protection import is_exposed
    from edge_agent.profiling.profiled_workload import daemon_workload
    from edge_agent.runtime.agent import run_agent
    from edge_agent.settings import AgentSettings
    from wattfleet_io.logs import start_logging
    from wattfleet_io.memory import give_memory_back_early
    from wattfleet_io.stop_signals import handled_signals

    settings: AgentSettings = effective(ctx)
    give_memory_back_early()
    start_logging(settings.log.format, settings.log.level)
    settings.endpoint()  # before the device is opened, and likewise the next
    if settings.metrics.address is not None:
        is_exposed(settings.metrics.address, settings.identity_folder, settings.session.insecure)
    spec, state_dir = settings.device.spec, settings.device.state_dir
    board = open_named(spec, state_dir, settings.device.seed)
    workload = settings.workload
    profiled = daemon_workload(board, workload.name, workload.minibatch, workload.processor)

    async def until_stopped() -> None:
        stop = asyncio.Event()
        for number in handled_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run_agent(settings, board, profiled, folder_of_device(spec, state_dir), stop)

    asyncio.run(until_stopped())
