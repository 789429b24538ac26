"""Agents in processes of their own, which can be killed, on boards that outlive them."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.devices import selection
from edge_agent.devices.device import Knobs
from edge_agent.devices.sysfs import SysfsDevice, mode_argument
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.paths import device_folder
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.runtime.agent import run_agent
from edge_agent.runtime.readiness import parked_mode
from edge_agent.training.mode_change import backed_up
from edge_agent.training.training import TrainingRunner
from tests.fakes.agent_settings import agent_settings
from tests.fakes.boards import Trained
from tests.fakes.faked_jetson import FakedBoard, FakedJetson
from wattfleet.common import cli
from wattfleet.common.clock import SystemClock
from wattfleet.core.modes import PowerMode

# --- Mortal agent -----------------------------------------------------------------------------------------------------
# Agents in processes of their own, on a faked Jetson that outlives them; they can be killed at each step.


KERNEL_LOCK, OUTPUT_FILE, BEGUN_FILE, FOUND_FILE = "kernel.lock", "output.log", "begun", "found.json"

_FILE_STEPS = ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate")


@dataclass(frozen=True)
class Bench:
    """The folder of a board, and the kind of board.

    `write_takes_s` is the duration of a write in the kernel; above 0, random moments fall between any two writes.
    """

    folder: Path
    board: FakedBoard
    write_takes_s: float = 0.0

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def device_folder(self) -> Path:
        return selection.folder_of_device(self.spec, self.folder)

    @property
    def spec(self) -> str:
        return f"sysfs:{self.root}"

    @contextmanager
    def outside_of_the_kernel(self) -> Iterator[None]:
        """Hold a lock during a write: a process that is killed during a write dies only once it has finished."""
        with open(self.folder / KERNEL_LOCK, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class Steps:
    """Counts the steps that change files or the board, and dies before the step of a given number."""

    def __init__(self, bench: Bench, fatal: int | None) -> None:
        self.taken = 0
        self._fatal = fatal
        self._folder = str(bench.device_folder)
        self._begun = bench.folder / BEGUN_FILE
        sys.addaudithook(self._look)

    def take(self) -> None:
        if self.taken == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.taken += 1
        if self.taken == 1:
            self._begun.touch()

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FILE_STEPS and str(arguments[0]).startswith(self._folder):
            self.take()


class SteppedJetson(FakedJetson):
    """A board on which each write, and each command to the fan's service, is a step."""

    def __init__(self, bench: Bench, steps: Steps) -> None:
        super().__init__(bench.root, bench.board)
        self._bench = bench
        self._steps = steps

    def write(self, path: Any, text: Any) -> None:
        with self._step():
            super().write(path, text)

    def run(self, command: Any, answer: Any) -> Any:
        with self._step():
            return super().run(command, answer)

    @contextmanager
    def _step(self) -> Iterator[None]:
        self._steps.take()
        time.sleep(self._bench.write_takes_s)
        with self._bench.outside_of_the_kernel():
            yield


def agent(bench: Bench, work: Callable[[Bench, SteppedJetson], object], fatal: int | None = None) -> None:
    """The process: does one of the works below; dies before the step `fatal`, or else stores the number of steps."""
    output = os.open(bench.folder / OUTPUT_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    steps = Steps(bench, fatal)
    jetson = SteppedJetson(bench, steps)
    selection.open_device = lambda *_, **__: _opened(jetson)
    found = work(bench, jetson)
    (bench.folder / FOUND_FILE).write_text(json.dumps({"steps": steps.taken, "found": found}))


def apply(bench: Bench, jetson: SteppedJetson) -> None:
    """`wattfleet agent apply` of the lowest mode."""
    _command("apply", mode_argument(_opened(jetson).space.lowest), "--device", bench.spec)


def restore(bench: Bench, jetson: SteppedJetson) -> None:
    """`wattfleet agent restore`."""
    _command("restore", "--device", bench.spec)


def train(bench: Bench, jetson: SteppedJetson) -> None:
    """The daemon's actions on the board during a round in which a mode is measured."""
    device = _opened(jetson)
    highest = device.space.highest
    with backed_up(device, bench.device_folder):
        watch = TrainingRunner(device, parked_mode(device))
        watch.park()
        watch.start(Trained(), highest, epochs=1, power_limit_w=20)
        with device.measuring():
            device.apply(device.space.lowest._replace(cores=3))
        device.apply(highest)
        watch.abandon()


def start(bench: Bench, jetson: SteppedJetson) -> Any:
    """The daemon's start: what it restores once it controls the board."""
    with backed_up(_opened(jetson), bench.device_folder):
        return jetson.everything()


def _opened(jetson: SteppedJetson) -> SysfsDevice:
    return SysfsDevice(jetson, SystemClock(), jetson.run)


def _command(*arguments: str) -> None:
    sys.argv = ["wattfleet", "agent", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise


# --- Lasting agent ----------------------------------------------------------------------------------------------------
# An agent in a process of its own, on a simulated board that outlives it: `python -m tests.fakes.lasting_agent`.
#
# In its folder, `mode.json` holds the mode of the board, which a real board would keep itself, and `board_named.log`
# lists the actions on the board, one JSON object a line.

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
