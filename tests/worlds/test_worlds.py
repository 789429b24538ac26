"""Whatever fails in whatever order, devices draw no more than the budget and the grants from before its last fall.

`WORLDS=30000 pytest tests/worlds` is the long form (`make worlds`). A world that fails is named by its seed, shrunk and
told event by event.
"""

from __future__ import annotations

import os

import pytest

from tests.worlds.search import search

WORLDS = int(os.environ.get("WORLDS", "200"))
PARTS = 10


@pytest.mark.timeout(120 + WORLDS)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_watts_hold_in_random_worlds(part: int) -> None:
    count = -(-WORLDS // PARTS)
    search(part * count, count)
