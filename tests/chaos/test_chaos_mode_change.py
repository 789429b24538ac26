"""An agent that is killed while it changes a board's mode: the next start restores every setting.

Real processes are killed at each of their steps, and at random moments; `make chaos` does the latter 50 times.
"""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest

from tests.fakes import mortal_agent
from tests.fakes.jetson_boards import ORIN_NANO, XAVIER_AGX
from tests.fakes.jetson_tree import CPU, FakedJetson
from tests.fakes.mortal_agent import BEGUN_FILE, FOUND_FILE, OUTPUT_FILE, Bench
from tests.fakes.polling import until

KILLS = int(os.environ.get("CHAOS_KILLS", "4"))
THOROUGH = KILLS >= 50

# Importing takes a second, and each killed agent is a new process: all are forked from one that has imported
# everything.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["__main__", mortal_agent.__name__])


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
        process = PROCESSES.Process(target=mortal_agent.agent, args=(self.bench, work, fatal), daemon=True)
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
        if next_start is mortal_agent.start:
            assert self.found()["found"] == self.owners
        assert self.jetson.everything() == self.owners
        assert list(self.bench.device_folder.glob("*.json")) == []


def next_start(number):
    """Use the command and the daemon in turn."""
    return (mortal_agent.restore, mortal_agent.start)[number % 2]


def test_a_mode_change_killed_at_any_step_is_undone(tmp_path):
    board, step = Board(tmp_path / "board"), 0
    while board.do(mortal_agent.apply, fatal=step):
        if step % 4 == 3:
            assert not board.do(mortal_agent.apply), "a second change keeps the first backup"
        board.restored_by(next_start(step))
        step += 1 if THOROUGH else 3
    assert step >= board.found()["steps"] > 20
    assert board.jetson.everything() != board.owners, "the last one was not killed"
    board.restored_by(next_start(step))


def test_a_restoring_killed_at_any_step_is_done_by_the_next_start(tmp_path):
    board, step = Board(tmp_path / "board", XAVIER_AGX), 0
    board.do(mortal_agent.apply)
    while board.do(mortal_agent.restore, fatal=step):
        board.restored_by(next_start(step))
        board.do(mortal_agent.apply)
        step += 1 if THOROUGH else 4
    assert board.jetson.everything() == board.owners
    assert step > 20


def test_a_training_killed_at_any_step_is_undone_the_fan_included(tmp_path):
    board, step = Board(tmp_path / "board"), 0
    while board.do(mortal_agent.train, fatal=step):
        board.restored_by(next_start(step))
        step += 1 if THOROUGH else 7
    assert board.jetson.everything() == board.owners
    assert step > 80


@pytest.mark.parametrize("number", range(KILLS))
def test_a_mode_change_killed_at_a_random_moment_is_undone(tmp_path, number):
    work = (mortal_agent.apply, mortal_agent.train, mortal_agent.restore)[number % 3]
    moments = random.Random(number)
    board = Board(tmp_path / "board", write_takes_s=0.002)
    before = mortal_agent.apply if work is mortal_agent.restore else mortal_agent.start
    board.do(before)
    process, begun_s = board.begun(work), time.monotonic()
    process.join()
    latest_s, killed = time.monotonic() - begun_s, False
    while not killed:
        board.restored_by(mortal_agent.start)
        board.do(before)
        moment_s = moments.uniform(0, latest_s)
        killed = board.killed_after(moment_s, work)
        # On a busy machine, an agent may have finished in less time than the first one took.
        latest_s = moment_s
    board.restored_by(next_start(number))
