"""An agent in a process of its own, on a simulated board that outlives it: `python -m tests.fakes.lasting_agent`.

In its folder, `mode.json` holds the mode of the board, which a real board would keep itself, and `board_named.log`
lists the actions on the board, one JSON object a line.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from edge_agent.devices.device import Knobs
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.paths import device_folder
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.runtime.agent import run_agent
from tests.fakes.agent_settings import agent_settings
from wattfleet.modes import PowerMode

MODE_FILE, LOG_FILE = "mode.json", "board_named.log"


class LastingBoard(SimulatedDevice):
    """A simulated board that keeps its mode when another process opens it."""

    def __init__(self, folder: Path, seed: int = 1) -> None:
        super().__init__("orin-nano", seed)
        self._folder = folder
        self._note = "find"
        self.apply(PowerMode(*json.loads((folder / MODE_FILE).read_text())))
        self._note = "apply"

    def apply(self, mode: PowerMode) -> None:
        super().apply(mode)
        draft = self._folder / f".{MODE_FILE}"
        draft.write_text(json.dumps(mode))
        os.replace(draft, self._folder / MODE_FILE)
        with (self._folder / LOG_FILE).open("a") as log:
            log.write(json.dumps({self._note: mode}) + "\n")

    def restore(self, knobs: Knobs) -> None:
        self._note = "restore"
        super().restore(knobs)
        self._note = "apply"


async def main(
    folder: Path,
    coordinator: str,
    device_id: str = "orin-nano-0",
    seed: int = 1,
    socket: Path | None = None,
    minibatches_per_epoch: int | None = 100,
    metrics_address: str | None = None,
) -> None:
    """Run until stopped."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    board = LastingBoard(folder, seed)
    state = folder / "state"
    settings = agent_settings(
        state,
        device_id,
        coordinator=coordinator,
        socket=socket or folder / "agent.sock",
        minibatches_per_epoch=minibatches_per_epoch,
        metrics_address=metrics_address,
    )
    await run_agent(settings, board, built_in_workload(board.step), device_folder(state), stop)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
