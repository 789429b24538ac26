"""Under any sequence of failures, devices draw no more than the budget and the grants from before its last decrease.

`WORLDS=30000 pytest tests/worlds` is the long form (`make worlds`). The test reports the seed of a failing world,
shrinks it, and lists its events.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds.search import search

WORLDS = int(os.environ.get("WORLDS", "200"))
PARTS = 10
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(120 + WORLDS)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_watts_hold_in_random_worlds(part: int) -> None:
    count = -(-WORLDS // PARTS)
    search(part * count, count)


def test_a_world_is_the_same_in_every_process() -> None:
    def told(hash_seed: str) -> list[str]:
        command = [sys.executable, "-m", "tests.worlds.search", "--worlds", "1", "--first", "1"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.check_output(command, cwd=ROOT, env=environment, text=True, timeout=100).splitlines()[:-1]

    events = told("0")
    assert len(events) > 40, "a world with little in it shows nothing"
    assert told("5") == events
