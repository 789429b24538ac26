"""Measure the overhead of a round of a real Flower deployment in addition to its training, with and without Wattfleet.

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

from benchmarks.round_overhead.deployment import Setup, run_rounds
from benchmarks.round_overhead.timeline import STAGES, round_seconds, stage_seconds
from wattfleet.simulation.flower import SUPERNODE, program

FLOWERS = (program("flower-supernode"),)
SETUPS = {
    "flower": Setup("Flower alone", FLOWERS, "flower"),
    "grid": Setup("with the grid's waiting", FLOWERS, "wattfleet"),
    "wattfleet": Setup("with wattfleet-supernode, too", SUPERNODE, "wattfleet"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run each setup, and print medians; return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.round_overhead",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=20, help="set how many rounds are counted")
    parser.add_argument("--devices", type=int, default=2, help="set how many SuperNodes there are")
    parser.add_argument("--torch", action="store_true", help="let the app import torch")
    parser.add_argument("--ways", default=",".join(SETUPS), help="run only these setups, separated by commas")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--keep", type=Path, help="keep the logs in this new folder")
    options = parser.parse_args(arguments)
    chosen = options.ways.split(",")
    if unknown := sorted(set(chosen) - set(SETUPS)):
        parser.error(f"--ways: unknown {', '.join(unknown)}; choose from {', '.join(SETUPS)}")
    with tempfile.TemporaryDirectory(prefix="wattfleet-") as scratch:
        folder = options.keep or Path(scratch)
        figures = {name: _measure(SETUPS[name], folder / name, options) for name in chosen}
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        Console().print(_table(figures))
    return 0


def _measure(setup: Setup, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    rounds, logs = run_rounds(setup, scratch, options.rounds + 1, options.devices, options.torch)
    seconds = round_seconds(rounds)
    return {
        "first_round_s": seconds[0],
        "round_s": median(seconds[1:]),
        "slowest_round_s": max(seconds[1:]),
        "stages_s": stage_seconds(rounds[1:], logs),
    }


def _table(figures: dict[str, dict[str, Any]]) -> Table:
    table = Table("seconds, medians", *(SETUPS[name].name for name in figures))
    for stage in STAGES:
        table.add_row(stage, *(f"{each['stages_s'][stage]:.2f}" for each in figures.values()))
    table.add_section()
    for label, key in (("a round", "round_s"), ("slowest", "slowest_round_s"), ("first", "first_round_s")):
        table.add_row(label, *(f"{each[key]:.2f}" for each in figures.values()))
    return table


if __name__ == "__main__":
    raise SystemExit(main())
