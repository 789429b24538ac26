"""Measure the memory of an idle agent, compared with a bare Python process that has imported grpc.

The agent runs in its own process on a simulated board, with a coordinator. It profiles, transfers the reference,
becomes ready, and idles. Its resident memory is read some seconds later.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from edge_agent.exporter import read_url
from wattfleet.common.identity.channels import Endpoint
from wattfleet.simulation.flower import Parts, program
from wattfleet.simulation.run import CoordinatorView
from wattfleet_proto.v1 import session_pb2

_READY_WITHIN_S = 120.0
_IDLES_FOR_S = 5
_MIB = 2**20
_BARE = "import grpc, sys; print(flush=True); sys.stdin.read()"
# One thread, as on a board that trains: BLAS reserves memory for each thread.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def measure(board: str, profile_modes: int, with_metrics: bool = False) -> dict[str, float]:
    """Measure the resident memory of the processes.

    Args:
        board: kind of the simulated board. The size of a prediction depends on its mode space.
        profile_modes: modes that the agent measures.
        with_metrics: whether the agent serves metrics, which are read once a second while it idles.

    Returns:
        Resident memory in MiB: of the agent when ready, of the agent after idling, and of the bare Python.
    """
    with tempfile.TemporaryDirectory(prefix="wattfleet-") as folder, ExitStack() as running:
        scratch = Path(folder)
        parts = running.enter_context(Parts(scratch / "logs"))
        announced = scratch / "coordinator.json"
        parts.start("coordinator", _coordinator(scratch, announced, profile_modes), _ONE_THREAD)
        _until(announced.exists, parts)
        address = str(json.loads(announced.read_text())["address"])
        view = running.enter_context(CoordinatorView(Endpoint(address)))
        agent = parts.start("agent", _agent(scratch, board, address, with_metrics), _ONE_THREAD)
        _until(lambda: [device.state for device in view.devices()] == [session_pb2.DEVICE_STATE_READY], parts)
        ready_mib = _resident_mib(agent.process.pid)
        for _ in range(_IDLES_FOR_S):
            if with_metrics:
                _scrape(scratch / "state")
            time.sleep(1)
        idling_mib = _resident_mib(agent.process.pid)
    return {"bare_mib": _bare_mib(), "ready_mib": ready_mib, "idling_mib": idling_mib}


def _coordinator(scratch: Path, announced: Path, profile_modes: int) -> Sequence[str]:
    return [
        program("wattfleet"),
        *("coordinator", "serve", "--address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"),
        *("--store", str(scratch / "coordinator.db"), "--profile-modes", str(profile_modes)),
        *("--announce", str(announced), "--site-budget-w", "60"),
    ]


def _scrape(state_directory: Path) -> None:
    url = read_url(state_directory)
    assert url is not None, "the agent serves metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        response.read()


def _agent(scratch: Path, board: str, address: str, with_metrics: bool) -> Sequence[str]:
    return [
        program("wattfleet"),
        *("agent", "run", "--device", f"simulated:{board}", "--device-id", "bench", "--coordinator", address),
        *("--state-dir", str(scratch / "state"), "--socket", str(scratch / "agent.sock")),
        *("--minibatches-per-epoch", "100", "--modes-first", "10000"),
        *(("--metrics-address", "127.0.0.1:0") if with_metrics else ()),
    ]


def _until(condition: Callable[[], bool], parts: Parts) -> None:
    give_up_s = time.monotonic() + _READY_WITHIN_S
    while not condition():
        parts.check()
        if time.monotonic() > give_up_s:
            raise SystemExit(f"the agent was not ready within {_READY_WITHIN_S:g} s")
        time.sleep(0.1)


def _resident_mib(pid: int) -> float:
    """Return the resident memory of a process and its children, MiB."""
    process = psutil.Process(pid)
    return float(sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))) / _MIB


def _bare_mib() -> float:
    with subprocess.Popen([sys.executable, "-c", _BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bare:
        assert bare.stdin is not None and bare.stdout is not None, "both are pipes"
        bare.stdout.readline()
        resident_mib = _resident_mib(bare.pid)
        bare.stdin.close()
    return resident_mib


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agent_memory",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--board", default="agx-orin", help="simulate this kind of board")
    parser.add_argument("--modes", type=int, default=50, help="set the number of modes that the agent measures")
    parser.add_argument("--metrics", action="store_true", help="have the agent serve metrics, and read them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    figures = measure(options.board, options.modes, options.metrics)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:<20}{value:8.1f}")


if __name__ == "__main__":
    main()
