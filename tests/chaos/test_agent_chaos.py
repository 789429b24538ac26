"""An agent that is killed loses at most the mode being measured, and the next start restores the device."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.paths import BACKUP_FILE, PROFILE_FILE, WORKLOADS_DIRECTORY, device_folder
from edge_agent.runtime.readiness import parked_mode
from tests.fakes import lasting_agent
from tests.fakes.coordinator_in_process import CoordinatorInProcess
from tests.fakes.faked_jetson import CPU, ORIN_NANO, XAVIER_AGX, FakedJetson
from tests.fakes.lasting_agent import BEGUN_FILE, FOUND_FILE, LOG_FILE, MODE_FILE, OUTPUT_FILE, Bench
from tests.fakes.polling import until
from wattfleet.core.modes import array_to_modes

# --- Test chaos -------------------------------------------------------------------------------------------------------
# An agent that is killed at any moment loses at most the mode being measured, and the next start restores the device.
#
# A few kills with every check; `make chaos` does it 50 times.


MODES = 12
KILLS = int(os.environ.get("CHAOS_KILLS", "2"))
REPOSITORY = Path(__file__).resolve().parents[2]
BOARD = SimulatedDevice("orin-nano", seed=1)
OWNERS, PARKED = list(array_to_modes(BOARD.modes)[777]), list(parked_mode(BOARD))


class SimulatedBench:
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
        bench = SimulatedBench(tmp_path / "0", coordinator)
        for kill in range(KILLS):
            was_ready = bench.kill_at(rng.randint(2, 6), rng.uniform(0, 0.1))
            if was_ready:
                bench.finish()
                bench = SimulatedBench(tmp_path / str(kill + 1), coordinator)
        bench.finish()


# --- Test chaos mode change -------------------------------------------------------------------------------------------
# An agent that is killed while it changes a board's mode: the next start restores every setting.
#
# Real processes are killed at each of their steps, and at random moments; `make chaos` does the latter 50 times.

KILLS_OF_MODE_CHANGES = int(os.environ.get("CHAOS_KILLS", "3"))
THOROUGH = KILLS_OF_MODE_CHANGES >= 50

# Importing takes a second, and each killed agent is a new process: all are forked from one that has imported
# everything.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["__main__", lasting_agent.__name__])


class Board:
    """A board in its owner's mode, and the agents that run on it one after the other."""

    def __init__(self, folder, board=ORIN_NANO, write_takes_s=0.0):
        folder.mkdir()
        self.bench = Bench(folder, board, write_takes_s)
        self.jetson = FakedJetson(self.bench.root, board)
        last = board.cores - 1
        self.jetson.write(f"{self.jetson.policy(0)}/scaling_max_freq", str(board.cpu_khz[9]))
        self.jetson.write(f"{CPU}/cpu{last}/online", "0")
        self.jetson.write(f"{self.jetson.gpu}/min_freq", str(board.gpu_hz[1]))
        self.jetson.write(f"{self.jetson.gpu}/max_freq", str(board.gpu_hz[3]))
        self.owners = self.jetson.everything()

    def do(self, work, fatal=None):
        """Let an agent do one piece of work; returns whether it was killed at the step `fatal`."""
        process = self.begin(work, fatal)
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), (self.bench.folder / OUTPUT_FILE).read_text()
        return process.exitcode != 0

    def begin(self, work, fatal=None):
        """An agent that has started a piece of work."""
        (self.bench.folder / BEGUN_FILE).unlink(missing_ok=True)
        process = PROCESSES.Process(target=lasting_agent.agent, args=(self.bench, work, fatal), daemon=True)
        process.start()
        return process

    def begun(self, work):
        """An agent at the first step of a piece of work."""
        process = self.begin(work)
        until((self.bench.folder / BEGUN_FILE).exists)
        return process

    def killed_after(self, seconds, work):
        """Kill an agent this long after the first step of its work; returns whether it was still working."""
        process = self.begun(work)
        time.sleep(seconds)
        with self.bench.outside_of_the_kernel():
            process.kill()
            process.join()
        return process.exitcode != 0

    def found(self):
        return json.loads((self.bench.folder / FOUND_FILE).read_text())

    def restored_by(self, next_start):
        """Check that the next start restores the owner's mode, and that it stays restored."""
        assert not self.do(next_start)
        if next_start is lasting_agent.start:
            assert self.found()["found"] == self.owners
        assert self.jetson.everything() == self.owners
        assert list(self.bench.device_folder.glob("*.json")) == []


def next_start(number):
    """Use the command and the daemon in turn."""
    return (lasting_agent.restore, lasting_agent.start)[number % 2]


def test_a_mode_change_killed_at_any_step_is_undone(tmp_path):
    board, step = Board(tmp_path / "board"), 0
    while board.do(lasting_agent.apply, fatal=step):
        if step % 4 == 3:
            assert not board.do(lasting_agent.apply), "a second change keeps the first backup"
        board.restored_by(next_start(step))
        step += 1 if THOROUGH else 5
    assert step >= board.found()["steps"] > 20
    assert board.jetson.everything() != board.owners, "the last one was not killed"
    board.restored_by(next_start(step))


def test_a_restoring_killed_at_any_step_is_done_by_the_next_start(tmp_path):
    board, step = Board(tmp_path / "board", XAVIER_AGX), 0
    board.do(lasting_agent.apply)
    while board.do(lasting_agent.restore, fatal=step):
        board.restored_by(next_start(step))
        board.do(lasting_agent.apply)
        step += 1 if THOROUGH else 7
    assert board.jetson.everything() == board.owners
    assert step > 20


def test_a_training_killed_at_any_step_is_undone_the_fan_included(tmp_path):
    board, step = Board(tmp_path / "board"), 0
    while board.do(lasting_agent.train, fatal=step):
        board.restored_by(next_start(step))
        step += 1 if THOROUGH else 13
    assert board.jetson.everything() == board.owners
    assert step > 80


@pytest.mark.parametrize("number", range(KILLS_OF_MODE_CHANGES))
def test_a_mode_change_killed_at_a_random_moment_is_undone(tmp_path, number):
    work = (lasting_agent.apply, lasting_agent.train, lasting_agent.restore)[number % 3]
    moments = random.Random(number)
    board = Board(tmp_path / "board", write_takes_s=0.002)
    before = lasting_agent.apply if work is lasting_agent.restore else lasting_agent.start
    board.do(before)
    process, begun_s = board.begun(work), time.monotonic()
    process.join()
    latest_s, killed = time.monotonic() - begun_s, False
    while not killed:
        board.restored_by(lasting_agent.start)
        board.do(before)
        moment_s = moments.uniform(0, latest_s)
        killed = board.killed_after(moment_s, work)
        # On a busy machine, an agent may have finished in less time than the first one took.
        latest_s = moment_s
    board.restored_by(next_start(number))
