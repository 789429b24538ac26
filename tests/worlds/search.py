"""Searches random worlds for a broken invariant, and shrinks the world that breaks it.

python -m tests.worlds.search --worlds 30000 --first 0
python -m tests.worlds.search --worlds 1 --first 4711   # one world again, with all that happens in it
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.worlds.oracle import BrokenPromiseError
from tests.worlds.rules import NOTHING, Step, steps_of
from tests.worlds.world import run


class BrokenWorldError(AssertionError):
    """A broken invariant, with the smallest world found that breaks it."""

    def __init__(self, seed: int, error: BrokenPromiseError, steps: Sequence[Step], energy: Mapping[str, bool]) -> None:
        notes: list[str] = []
        shrunk = run(seed, steps, notes, **energy)
        lines = [
            f"world {seed}: {error}",
            f"after shrinking to {len(steps)} steps: {shrunk}",
            *(f"  {step}" for step in steps),
            "what happened:",
            *(f"  {note}" for note in notes),
        ]
        super().__init__("\n".join(lines))


def search(first: int, count: int, profiling: bool = False, **energy: bool) -> None:
    """Run random worlds.

    Args:
        first: seed of the first world.
        count: number of worlds.
        profiling: whether devices are also profiled again, which is not granted.
        energy: which energy budgets there are, as for `run`.

    Raises:
        BrokenWorldError: an invariant does not hold.
    """
    for seed in range(first, first + count):
        steps = steps_of(seed, profiling)
        error = run(seed, steps, **energy)
        if error is not None:
            raise BrokenWorldError(seed, error, shrink(seed, steps, error, **energy), energy)


def shrink(seed: int, steps: Sequence[Step], error: BrokenPromiseError, **energy: bool) -> list[Step]:
    """Empty steps, then remove them, as long as the same invariant is broken (delta debugging)."""

    def is_broken(fewer: Sequence[Step]) -> bool:
        broken = run(seed, fewer, **energy)
        return broken is not None and broken.promise == error.promise

    def idle(some: Sequence[Step]) -> list[Step]:
        return [replace(step, rule=NOTHING) for step in some]

    def none(some: Sequence[Step]) -> list[Step]:
        return []

    kept = list(steps)
    for instead in (idle, none):
        size = max(1, len(kept) // 2)
        while True:
            begin = 0
            while begin < len(kept):
                fewer = kept[:begin] + instead(kept[begin : begin + size]) + kept[begin + size :]
                if fewer != kept and is_broken(fewer):
                    kept = fewer
                    begin += size if instead is idle else 0
                else:
                    begin += size
            if size == 1:
                break
            size //= 2
    return kept


def main() -> int:
    """Search from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--profiling", action="store_true", help="devices also profile again")
    parser.add_argument("--energy", action="store_true", help="each run has an energy budget")
    parser.add_argument("--shared-energy", action="store_true", help="the site has an energy budget for each day")
    options = parser.parse_args()
    energy = {"has_energy": options.energy, "shares_energy": options.shared_energy}
    began_s = time.process_time()
    try:
        search(options.first, options.worlds, options.profiling, **energy)
    except BrokenWorldError as broken:
        print(broken)
        return 1
    if options.worlds == 1:
        notes: list[str] = []
        run(options.first, steps_of(options.first, options.profiling), notes, **energy)
        print("\n".join(notes))
    print(f"{options.worlds:,} worlds: every promise holds ({time.process_time() - began_s:.0f} s of one core)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
