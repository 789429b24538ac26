"""Runs a real SuperLink with SuperNodes that run the app without training."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.round_overhead.timeline import Seen
from wattfleet.simulation.flower import FlowerDeployment, Parts, SuperNodeConfig

_APP = Path(__file__).parent / "app"
_ROUND_WITHIN_S = 60.0
_LOG_POLL_S = 0.01


@dataclass(frozen=True)
class Setup:
    """A setup to run the rounds with.

    Attributes:
        name: name in the table.
        supernode: the command that runs a SuperNode.
        waiting: whose grid waits for the replies: `flower` or `wattfleet`.
    """

    name: str
    supernode: Sequence[str]
    waiting: str


def run_rounds(
    setup: Setup, scratch: Path, rounds: int, devices: int, torch: bool
) -> tuple[list[dict[str, Any]], list[Seen]]:
    """Run the rounds of one setup.

    Returns:
        The ServerApp's times of each round, and what each SuperNode logged.
    """
    scratch.mkdir(parents=True)
    result = scratch / "rounds.jsonl"
    nodes = [SuperNodeConfig(f"node-{index}", index, scratch / "no-agent.sock") for index in range(devices)]
    with Parts(scratch / "logs") as parts:
        deployment = FlowerDeployment(parts, scratch / "home", nodes, setup.supernode)
        deployment.start()
        logs = [scratch / "logs" / f"supernode-{node.device_id}.log" for node in nodes]
        with _watched(logs) as seen:
            config = {"rounds": rounds, "devices": devices, "torch": torch}
            run_id = deployment.submit(_APP, {**config, "waiting": setup.waiting, "result": str(result)})
            _wait(lambda: _lines(result) >= rounds, deployment, run_id, parts, rounds * _ROUND_WITHIN_S)
    return [json.loads(line) for line in result.read_text().splitlines()], seen


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def _wait(done: Callable[[], bool], deployment: FlowerDeployment, run_id: str, parts: Parts, within_s: float) -> None:
    """Wait until the rounds are done or the run fails. Flower is polled rarely, since this takes CPU time."""
    give_up_s, ask_s = time.monotonic() + within_s, time.monotonic() + 60
    while not done():
        parts.check()
        if time.monotonic() > ask_s:
            deployment.completed(run_id)
            ask_s = time.monotonic() + 60
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"the rounds did not end within {within_s:g} s")
        time.sleep(0.5)


@contextmanager
def _watched(logs: list[Path]) -> Iterator[list[Seen]]:
    """Record when each log gets a line about a message, since Flower's lines have no time."""
    seen = [Seen([], []) for _ in logs]
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(logs, seen, stop), name="log-watcher")
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def _watch(logs: list[Path], seen: list[Seen], stop: threading.Event) -> None:
    files = [log.open(encoding="utf-8", errors="replace") for log in logs]
    while not stop.wait(_LOG_POLL_S):
        now_s = time.time()
        for file, noted in zip(files, seen, strict=True):
            text = file.read()
            noted.received_s.extend([now_s] * text.count("Receiving: "))
            noted.sent_s.extend([now_s] * text.count("Sending: "))
    for file in files:
        file.close()
