"""Choose mode and batch size together on two simulated boards: time and energy to an accuracy under power limits.

    python -m benchmarks.joint [--json FILE] [--png FILE]
    python -m benchmarks.joint --train [--data ../shared/data] [--out out/joint]

Boards are simulated. How many samples training needs with each batch size comes from 150 trainings of small networks on
a CPU, whose results are committed. `--train` repeats them, continues where it was interrupted, and uses its own runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from threadpoolctl import threadpool_limits

from benchmarks.joint.compare import compare
from benchmarks.joint.picture import write_picture
from benchmarks.joint.runs import COMMITTED, read_runs, train_all
from benchmarks.joint.summary import result_of
from benchmarks.joint.tables import tables
from wattfleet.common.console import print_line, terminal
from wattfleet.core.errors import WattfleetError


def main(arguments: Sequence[str] | None = None) -> int:
    """Train if requested, compare, and print the tables; return 0, or 1 if something is missing."""
    options = _parser().parse_args(arguments)
    try:
        runs = read_runs(train_all(options.data, options.out, _report) if options.train else COMMITTED)
        with threadpool_limits(1):  # the time of one core, also on larger machines
            result = result_of(runs, *compare(runs, _report))
    except WattfleetError as error:
        _report(f"error: {error}")
        return 1
    console = terminal()
    for table in tables(result):
        console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if options.png is not None:
        write_picture(result, options.png)
    return 0


def _report(line: str) -> None:
    print_line(line, to_stderr=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.joint",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--train", action="store_true", help="train again instead of using the committed runs")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="read the images from this folder")
    parser.add_argument("--out", type=Path, default=Path("out/joint"), help="write trained runs to this folder")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--png", type=Path, help="draw the plots to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
