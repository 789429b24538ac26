"""`wattfleet agent ...`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from edge_agent.cli.apply import apply, restore
from edge_agent.cli.choose import choose
from edge_agent.cli.doctor import doctor
from edge_agent.cli.explain import explain
from edge_agent.cli.fit import fit
from edge_agent.cli.front import front
from edge_agent.cli.install import install
from edge_agent.cli.modes import modes
from edge_agent.cli.options import (
    DEVICES,
    USUAL_TOLERANCE,
    MinibatchOption,
    ProcessorOption,
    SeedOption,
    StateDirOption,
    ToleranceOption,
    WorkloadOption,
    open_named,
)
from edge_agent.cli.profile import profile
from edge_agent.cli.status import status
from edge_agent.cli.uninstall import uninstall
from edge_agent.cli.watch import watch
from edge_agent.runtime.paths import DEFAULT_STATE_DIRECTORY
from wattfleet_proto.local_socket import DEFAULT_SOCKET

app = typer.Typer(no_args_is_help=True, help="The agent of one device.")


@app.callback()
def group() -> None:
    """The agent of one device."""


for command in (doctor, modes, status, watch, profile, fit, apply, restore, choose, explain, front, install, uninstall):
    app.command()(command)


@app.command()
def run(
    device: Annotated[str, typer.Option(help=f"The device: {DEVICES}.")],
    device_id: Annotated[str, typer.Option(help="The device's name, unlike any other in the fleet.")],
    minibatches_per_epoch: Annotated[int, typer.Option(help="Minibatches in one pass over the device's data.")],
    coordinator: Annotated[str, typer.Option(help="host:port of the coordinator.")] = "127.0.0.1:7070",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    socket: Annotated[Path, typer.Option(help="Unix socket for Flower's ClientApp.")] = Path(DEFAULT_SOCKET),
    seed: SeedOption = 0,
    modes_first: Annotated[
        int | None,
        typer.Option(help="Modes to measure before the first round, the others during training; all if not given."),
    ] = None,
    tolerance: ToleranceOption = USUAL_TOLERANCE,
    workload: WorkloadOption = None,
    minibatch: MinibatchOption = 16,
    processor: ProcessorOption = "cuda",
) -> None:
    """Profile the device, report its front, and serve its trainings until stopped."""
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
