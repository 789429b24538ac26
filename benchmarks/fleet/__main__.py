"""Measure many agents on one coordinator and on a bare grpc.aio server: latency, memory, throughput, reconnects.

    python -m benchmarks.fleet [--agents 100,1000,10000] [--workloads 1] [--tls] [--json]

The real coordinator runs with a store in a temporary folder. Every simulated agent has its own connection and sends the
same messages at the same times as a real agent. All processes share two cores, including the load generator, which is
this process. The same load on a bare server with the same options and message sizes shows the share of gRPC and of the
load generator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from benchmarks.fleet.experiment import Settings, run
from benchmarks.fleet.result import Result, result_of
from benchmarks.fleet.servers import reference_of_size
from benchmarks.fleet.tables import tables

_CORES = 2
_DESCRIPTORS_BESIDE = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result; return 0 even if goals are missed, 143 if terminated."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _allow_connections(max(options.agents), parser)
    cores = sorted(os.sched_getaffinity(0))[:_CORES]
    os.sched_setaffinity(0, cores)  # the servers inherit it
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    try:
        result = asyncio.run(_all(options.agents, options.tls, settings, options.reference_kib * 1024, len(cores)))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    if options.json:
        print(json.dumps(result, indent=1, allow_nan=False))
    else:
        console = Console()
        for table in tables(result):
            console.print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--agents", type=_counts, default=[100, 1_000, 10_000], help="set the fleet sizes, separated by commas"
    )
    parser.add_argument(
        "--rate-per-s", type=float, default=Settings.rate_per_s, help="set how many agents connect per second"
    )
    parser.add_argument(
        "--steady-s", type=float, default=Settings.steady_s, help="set how long leases are measured, in seconds"
    )
    parser.add_argument(
        "--limit-s", type=float, default=Settings.limit_s, help="limit the wait for a reconnect storm, in seconds"
    )
    parser.add_argument(
        "--streams", type=int, default=Settings.streams, help="set the number of agents that report in a closed loop"
    )
    parser.add_argument(
        "--downloads", type=int, default=Settings.downloads, help="set the number of concurrent downloads"
    )
    parser.add_argument(
        "--window-s",
        type=float,
        default=Settings.window_s,
        help="set the length of each report and download phase, in seconds",
    )
    parser.add_argument(
        "--repeats", type=int, default=Settings.repeats, help="set the number of such phases per server"
    )
    parser.add_argument(
        "--workloads",
        type=_count,
        default=Settings.workloads,
        help="set the number of workloads: fronts of each agent, and runs that are planned in turn",
    )
    parser.add_argument("--reference-kib", type=int, default=4096, help="set the size of the reference in KiB")
    parser.add_argument(
        "--tls",
        action="store_true",
        help="measure each fleet without TLS, and then with mutual TLS and a certificate of each agent",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _counts(text: str) -> list[int]:
    counts = [int(count) for count in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("give 1 or more")
    return counts


def _count(text: str) -> int:
    [count] = _counts(text)
    return count


def _allow_connections(count: int, parser: argparse.ArgumentParser) -> None:
    """Raise the limit of open files of this process and its children to one for every agent."""
    needed = count + _DESCRIPTORS_BESIDE
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < needed:
        parser.error(f"{count} agents need {needed} open files, and this process may have {most} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, needed), most))


async def _all(counts: Sequence[int], with_tls: bool, settings: Settings, reference_bytes: int, cores: int) -> Result:
    # Ending this process ends its servers, too, even if a shell made it ignore SIGINT in the background.
    own = asyncio.current_task()
    assert own is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, own.cancel)
    artefact = reference_of_size(reference_bytes)
    fleets = []
    for count in counts:
        for is_protected in (False, True) if with_tls else (False,):
            with tempfile.TemporaryDirectory(prefix="wattfleet-fleet-") as folder:
                fleets.append(await run(count, settings, Path(folder), artefact, is_protected))
    return result_of(fleets, settings, cores)


if __name__ == "__main__":
    sys.exit(main())
