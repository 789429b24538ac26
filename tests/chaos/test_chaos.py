"""An agent that is killed at any moment loses at most the mode being measured, and the next start restores the device.

A few kills with every check; `make chaos` does it 50 times.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.paths import PROFILE_FILE, WORKLOADS_DIRECTORY, device_folder
from edge_agent.runtime.readiness import parked_mode
from edge_agent.training.mode_change import BACKUP_FILE
from tests.fakes.coordinator_in_process import CoordinatorInProcess
from tests.fakes.lasting_agent import LOG_FILE, MODE_FILE
from tests.fakes.polling import until
from wattfleet.modes import array_to_modes

MODES = 12
KILLS = int(os.environ.get("CHAOS_KILLS", "2"))
REPOSITORY = Path(__file__).resolve().parents[2]
BOARD = SimulatedDevice("orin-nano", seed=1)
OWNERS, PARKED = list(array_to_modes(BOARD.modes)[777]), list(parked_mode(BOARD))


class Bench:
    """A board in its owner's mode, and a series of agents that run on it."""

    def __init__(self, folder, coordinator):
        folder.mkdir()
        (folder / MODE_FILE).write_text(json.dumps(OWNERS))
        (folder / LOG_FILE).touch()
        self.folder = folder
        self.coordinator = coordinator
        self.kept = device_folder(folder / "state") / BACKUP_FILE

    def done(self):
        """The actions on the board, in order: pairs of the action and the mode."""
        complete = (self.folder / LOG_FILE).read_text().rpartition("\n")[0]
        return [pair for line in complete.splitlines() for pair in json.loads(line).items()]

    def journalled(self):
        """The measured rows of the profile."""
        paths = list((self.folder / "state" / WORKLOADS_DIRECTORY).glob(f"*/{PROFILE_FILE}"))
        return paths[0].read_text().rpartition("\n")[0].splitlines() if paths else []

    def in_force(self):
        return json.loads((self.folder / MODE_FILE).read_text())

    @contextmanager
    def agent(self):
        self.coordinator.reports.clear()
        command = [sys.executable, "-m", "tests.fakes.lasting_agent", str(self.folder), self.coordinator.address]
        with subprocess.Popen(command, cwd=REPOSITORY) as process:
            try:
                yield process
            finally:
                process.kill()

    def kill_at(self, changes, then_s):
        """Kill an agent `then_s` after its nth mode change, or after it was ready if that is earlier.

        Returns:
            Whether it was ready.
        """
        before = len(self.done())
        held, was_kept = self.journalled(), self.kept.exists()
        with self.agent() as process:
            until(lambda: len(self.done()) - before >= changes or self.coordinator.is_ready())
            time.sleep(then_s)
            was_ready = self.coordinator.is_ready()
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._check(self.done()[before:], held, was_kept)
        return was_ready

    def _check(self, done, held, was_kept):
        assert done[0][0] == "find"
        if was_kept:
            assert done[1] == ("restore", OWNERS), "the settings are restored before anything else"
        assert json.loads(self.kept.read_text())["knobs"] == {"mode": json.dumps(OWNERS)}
        assert self.journalled()[: len(held)] == held, "the file on disk is unchanged"
        records = [json.loads(line) for line in self.journalled()[1:]]
        measured = [record["mode"] for record in records]
        assert len(set(map(tuple, measured))) == len(measured) <= MODES, "none is measured twice"
        begun = [mode for what, mode in done if what == "apply"]
        lost = [mode for mode in begun[:-1] if mode not in measured and mode != PARKED]
        assert lost == [], "only the mode in flight may be lost"

    def finish(self):
        """Stop an agent with SIGTERM, as systemd does."""
        with self.agent() as process:
            until(self.coordinator.is_ready)
            assert self.in_force() == PARKED
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert self.in_force() == OWNERS
        assert not self.kept.exists()
        assert len(self.journalled()) == 1 + MODES


def test_kills_at_random_moments_lose_at_most_the_mode_in_flight(tmp_path):
    rng = random.Random(0)
    with CoordinatorInProcess(tmp_path, MODES).running() as coordinator:
        bench = Bench(tmp_path / "0", coordinator)
        for kill in range(KILLS):
            was_ready = bench.kill_at(rng.randint(2, 6), rng.uniform(0, 0.1))
            if was_ready:
                bench.finish()
                bench = Bench(tmp_path / str(kill + 1), coordinator)
        bench.finish()
