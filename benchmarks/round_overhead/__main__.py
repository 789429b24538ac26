"""Measure what a round of a real Flower deployment costs beside its training: Flower alone, and with Wattfleet.

    python -m benchmarks.round_overhead [--torch] [--rounds 20] [--devices 2] [--json]

A real SuperLink and SuperNodes run an app that trains nothing; with `--torch`, it imports torch. The first round, in
which SuperNodes fetch the app, is not counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.round_overhead.deployment import Way, run_rounds
from benchmarks.round_overhead.timeline import STAGES, round_seconds, stage_seconds
from wattfleet_simulation.flower import SUPERNODE
from wattfleet_simulation.processes import program

FLOWERS = (program("flower-supernode"),)
WAYS = {
    "flower": Way("Flower alone", FLOWERS, "flower"),
    "grid": Way("with the grid's waiting", FLOWERS, "wattfleet"),
    "wattfleet": Way("with wattfleet-supernode, too", SUPERNODE, "wattfleet"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run each way, and print medians; 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.round_overhead",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=20, help="set how many rounds are counted")
    parser.add_argument("--devices", type=int, default=2, help="set how many SuperNodes there are")
    parser.add_argument("--torch", action="store_true", help="let the app import torch")
    parser.add_argument("--ways", default=",".join(WAYS), help="choose ways, separated by commas")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--keep", type=Path, help="keep the logs in this new folder")
    options = parser.parse_args(arguments)
    chosen = options.ways.split(",")
    if unknown := sorted(set(chosen) - set(WAYS)):
        parser.error(f"unknown ways: {', '.join(unknown)}; there are {', '.join(WAYS)}")
    with tempfile.TemporaryDirectory(prefix="wattfleet-") as scratch:
        folder = options.keep or Path(scratch)
        figures = {name: _measure(WAYS[name], folder / name, options) for name in chosen}
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        Console().print(_table(figures))
    return 0


def _measure(way: Way, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    rounds, logs = run_rounds(way, scratch, options.rounds + 1, options.devices, options.torch)
    seconds = round_seconds(rounds)
    return {
        "first_round_s": seconds[0],
        "round_s": median(seconds[1:]),
        "slowest_round_s": max(seconds[1:]),
        "stages_s": stage_seconds(rounds[1:], logs),
    }


def _table(figures: dict[str, dict[str, Any]]) -> Table:
    table = Table("seconds, medians", *(WAYS[name].name for name in figures))
    for stage in STAGES:
        table.add_row(stage, *(f"{each['stages_s'][stage]:.2f}" for each in figures.values()))
    table.add_section()
    for label, key in (("a round", "round_s"), ("slowest", "slowest_round_s"), ("first", "first_round_s")):
        table.add_row(label, *(f"{each[key]:.2f}" for each in figures.values()))
    return table


if __name__ == "__main__":
    raise SystemExit(main())
