"""`wattfleet agent run`: the agent itself, as the service starts it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from edge_agent.cli.options import (
    DEFAULT_TOLERANCE,
    DEVICE_HELP,
    MinibatchOption,
    ProcessorOption,
    SeedOption,
    StateDirOption,
    ToleranceOption,
    WorkloadOption,
    open_named,
)
from edge_agent.paths import DEFAULT_STATE_DIRECTORY
from wattfleet_proto.local_socket import DEFAULT_SOCKET


def run(
    device: Annotated[str, typer.Option(help=DEVICE_HELP)],
    device_id: Annotated[str, typer.Option(help="Set the device's unique name in the fleet.")],
    minibatches_per_epoch: Annotated[int, typer.Option(help="Set the minibatches in one pass over the device's data.")],
    coordinator: Annotated[str, typer.Option(help="Address of the coordinator, as host:port.")] = "127.0.0.1:7070",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    socket: Annotated[Path, typer.Option(help="Unix socket to serve Flower's ClientApp on.")] = Path(DEFAULT_SOCKET),
    seed: SeedOption = 0,
    modes_first: Annotated[
        int | None,
        typer.Option(
            help="Set how many modes to measure before the first round; the others follow during training. By default,"
            " measure all of them first."
        ),
    ] = None,
    tolerance: ToleranceOption = DEFAULT_TOLERANCE,
    workload: WorkloadOption = None,
    minibatch: MinibatchOption = 16,
    processor: ProcessorOption = "cuda",
) -> None:
    """Run the agent: profile the device, report its front, and serve training until stopped."""
    import logging

    from edge_agent.devices.selection import folder_of_device
    from edge_agent.profiling.profiled_workload import profiled_workload
    from edge_agent.runtime.agent import run_agent
    from edge_agent.runtime.config import AgentConfig
    from wattfleet_io.addresses import split_address
    from wattfleet_io.memory import give_memory_back_early
    from wattfleet_io.stop_signals import heeded_signals

    give_memory_back_early()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    split_address(coordinator)
    board = open_named(device, state_dir, seed)
    profiled = profiled_workload(board, workload, minibatch, processor)
    config = AgentConfig(
        device_id=device_id,
        coordinator=coordinator,
        state_directory=state_dir,
        device_folder=folder_of_device(device, state_dir),
        socket=socket,
        minibatches_per_epoch=minibatches_per_epoch,
        seed=seed,
        modes_first=modes_first,
        tolerance=tolerance,
    )

    async def until_stopped() -> None:
        stop = asyncio.Event()
        for number in heeded_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run_agent(config, board, profiled, stop)

    asyncio.run(until_stopped())
