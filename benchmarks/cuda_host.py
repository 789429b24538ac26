"""Profile the shipped workloads on an NVIDIA GPU, and compare with a plain loop and the GPU's energy counter.

`wattfleet agent profile --device host` measures each workload: minibatch times by the clock and by CUDA events, power
by NVML every 0.2 s. Then a plain loop trains the same workload in this process. It times each minibatch between
two waits for the GPU, and divides the joules that the GPU has counted by the seconds. The two runs follow each other,
so the GPU's clocks may differ between them. Needs a CUDA build of torch and the extras `agent` and `nvml`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from edge_agent.workloads.loading import SHIPPED, open_workload
from wattfleet.core.errors import InvalidInputError

_COMMAND = "from wattfleet.common.cli import main; main()"
_WARM_UP_MINIBATCHES = 100


def profiled(workload: str, minibatch: int) -> dict[str, float]:
    """Return the figures of `wattfleet agent profile`: `minibatch_ms`, `compute_ms`, `power_w`, and `seconds`."""
    with tempfile.TemporaryDirectory() as state:
        options = ["--workload", workload, "--minibatch", str(minibatch), "--modes", "1", "--state-dir", state]
        command = [sys.executable, "-c", _COMMAND, "agent", "profile", "--device", "host", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InvalidInputError(f"`wattfleet agent profile` failed: {done.stderr.strip()}")
        (journal,) = Path(state).rglob("profile.jsonl")
        record: dict[str, Any] = json.loads(journal.read_text(encoding="utf-8").splitlines()[-1])
    return {
        "minibatch_ms": record["minibatch_ms"],
        "compute_ms": record["compute_ms"],
        "power_w": record["power_mw"] / 1e3,
        "seconds": record["seconds"],
    }


def plain(workload: str, minibatch: int, seconds: float) -> dict[str, float]:
    """Return a plain loop's median time of a minibatch, ms, and its mean power by the energy counter, W."""
    import torch

    pynvml = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def counted_j() -> float:
        return float(sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in gpus)) / 1e3

    times_ms = []
    with open_workload(workload, minibatch, "cuda") as opened:
        for _ in range(_WARM_UP_MINIBATCHES):
            opened.step()
        torch.cuda.synchronize()
        begun_s, begun_j = time.perf_counter(), counted_j()
        while (began_s := time.perf_counter()) < begun_s + seconds:
            opened.step()
            torch.cuda.synchronize()
            times_ms.append((time.perf_counter() - began_s) * 1e3)
        power_w = (counted_j() - begun_j) / (time.perf_counter() - begun_s)
    return {"minibatch_ms": median(times_ms), "power_w": power_w}


def main() -> None:
    """Print a line for each workload."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_host",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=sorted(SHIPPED), default=sorted(SHIPPED), help="profile these"
    )
    parser.add_argument("--minibatch", type=int, default=16, help="set the samples in a minibatch")
    parser.add_argument("--seconds", type=float, default=8.0, help="set the duration of the plain loop, in s")
    arguments = parser.parse_args()
    try:
        import torch

        importlib.import_module("pynvml")
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is missing; install `wattfleet[agent,nvml]` and a CUDA build of torch")
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; run this on a machine with an NVIDIA GPU and a CUDA build of torch")
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, minibatches of {arguments.minibatch}")
    print(f"{'workload':<10} {'profile ms':>10} {'CUDA ms':>8} {'plain ms':>9} {'profile W':>10} {'counted W':>10}")
    for workload in arguments.workloads:
        by_agent = profiled(workload, arguments.minibatch)
        by_loop = plain(workload, arguments.minibatch, arguments.seconds)
        print(
            f"{workload:<10} {by_agent['minibatch_ms']:10.2f} {by_agent['compute_ms']:8.2f}"
            f" {by_loop['minibatch_ms']:9.2f} {by_agent['power_w']:10.1f} {by_loop['power_w']:10.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
