"""Answer requests while training, in real time and through a real agent, on this machine or a simulated board.

    python -m benchmarks.duty_live [--device host] [--seconds 600] [--inference-share 0.55] [--latency-ms 400]
        [--quantile 0.95] [--largest-batch 32] [--json]

An agent (`wattfleet agent run`) hands the device to two processes in turns: an inference server with `DutyServer`, to
which requests arrive at random (a Poisson process), and a training with `share_device`. With `--device host`, both use
convolutional networks on one thread and are bound to the same core. With `--device simulated`, the agent has an AGX
Orin in real time, which slows both down to its physics of ResNet-18's training and ResNet's inference.

The same is then repeated without `share_device`. On the host, the operating system shares the core between them. For
the simulated board, it also does so: both processes compute on one core for as long as the board would.

- `arrival_per_s`: requests per second, chosen so that inference alone, in batches of the largest size, would use
  `--inference-share` of the device.
- `planned_per_s`: training minibatches per second that `wattfleet.core.duties.keep_duty` plans, from the times of a
  minibatch, of inference batches, and of a switch between both. The times are measured on the host, or come from the
  simulated board's physics.
- `trained_per_s`: trained minibatches per second; `of_plan_pct` is this relative to the plan.
- `training_pct`, `inference_pct`: the share of the time in which each of them computed.
- `within_pct`: the share of the requests that were answered within the latency.
- `latency_ms`: median, 95 % and 99 % quantile of the latency. Requests that still wait at the end count with the time
  waited so far.

Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from edge_agent.devices.virtual.simulated import SimulatedDevice
from wattfleet.core.choosing import KnownModes
from wattfleet.core.duties import Demand, keep_duty
from wattfleet.core.modes import Task, Workload, WorkloadFacts
from wattfleet.serving import DutyServer, share_device

_WARM_UP, _MEASURED = 5, 40
_IMAGE = (3, 64, 64)
_MINIBATCH = 8
_WIDTH, _FURTHER_LAYERS = 32, 6
_BOARD, _SERVED = "agx-orin", "resnet"


def main() -> None:
    """Run the benchmark, or one of its child processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--device", choices=("host", "simulated"), default="host")
    parser.add_argument("--inference-share", type=float, default=0.55)
    parser.add_argument("--latency-ms", type=float, default=400.0)
    parser.add_argument("--quantile", type=float, default=0.95)
    parser.add_argument("--largest-batch", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=("server", "training", "times"), help=argparse.SUPPRESS)
    parser.add_argument("--arrival-per-s", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    parser.add_argument("--without-sharing", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        roles: dict[str, Callable[[argparse.Namespace], object]] = {
            "server": _serve,
            "training": _train,
            "times": _measure_times,
        }
        print(json.dumps(roles[options.role](options)))
        return
    figures = _figures(options)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    table = Table("figure", *(name for name in figures if name != "times"))
    rows = [figures["with_sharing"], figures["without_sharing"]]
    for key in rows[0]:
        table.add_row(key, *(str(row[key]) for row in rows))
    Console().print(figures["times"], table)


def _figures(options: argparse.Namespace) -> dict[str, Any]:
    times = _run(options, "times")
    inference_ms = {int(batch): ms for batch, ms in times["inference_ms"].items()}
    largest = max(inference_ms)
    options.arrival_per_s = round(options.inference_share * 1e3 * largest / inference_ms[largest], 1)
    planned_per_s = _planned_per_s(options, inference_ms, times["minibatch_ms"], times["switch_ms"])
    figures: dict[str, Any] = {"times": {**times, "arrival_per_s": options.arrival_per_s}}
    for name in ("with_sharing", "without_sharing"):
        with TemporaryDirectory() as folder, _agent(options, Path(folder)) as socket:
            shared = [] if name == "with_sharing" else ["--without-sharing"]
            processes = [_started(options, role, socket, *shared) for role in ("server", "training")]
            try:
                served, trained = (json.loads(process.communicate()[0]) for process in processes)
            finally:
                for process in processes:
                    process.kill()
        trained_per_s = trained["minibatches"] / trained["seconds"]
        figures[name] = {
            "planned_per_s": round(planned_per_s, 2),
            "trained_per_s": round(trained_per_s, 2),
            "of_plan_pct": round(100 * trained_per_s / planned_per_s, 1),
            "training_pct": round(100 * trained["computed_s"] / trained["seconds"], 1),
            **served,
        }
    return figures


def _planned_per_s(
    options: argparse.Namespace, inference_ms: dict[int, float], minibatch_ms: float, switch_ms: float
) -> float:
    """Return the training minibatches per second that a plan for one fully measured mode has."""
    batches = sorted(inference_ms)
    mode = np.ones((1, 4))

    def known(ms: list[float], batch: list[int] | None) -> KnownModes:
        none = np.zeros(len(ms))
        modes = np.repeat(mode, len(ms), axis=0)
        is_measured = np.ones(len(ms), dtype=bool)
        return KnownModes(
            modes, np.array(ms), none + 1.0, none, none, is_measured, None if batch is None else np.array(batch)
        )

    demand = Demand(options.arrival_per_s, options.latency_ms, options.quantile)
    inference = known([inference_ms[batch] for batch in batches], batches)
    kept = keep_duty(known([minibatch_ms], None), inference, demand, switch_ms)
    return 1e3 / kept.fastest(float("inf")).minibatch_ms


@contextmanager
def _agent(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Run an agent with the duty in force; yields its socket."""
    socket = str(folder / "agent.sock")
    command = [sys.executable, "-c", "from wattfleet.common.cli import main; main()", "agent"]
    spec = "host" if options.device == "host" else f"simulated:{_BOARD}:real-time"
    run = ["run", "--device", spec, "--device-id", "here", "--coordinator", "127.0.0.1:9"]
    with (folder / "agent.log").open("w") as log:
        agent = subprocess.Popen([*command, *run, "--state-dir", str(folder), "--socket", socket], stderr=log)
        try:
            while not os.path.exists(socket):
                if agent.poll() is not None:
                    raise SystemExit(f"the agent has ended: {(folder / 'agent.log').read_text()}")
                time.sleep(0.05)
            duty = ["duty", "set", "--workload", _SERVED, "--socket", socket]
            limits = {
                "--arrivals-per-s": options.arrival_per_s,
                "--latency-ms": options.latency_ms,
                "--quantile": options.quantile,
            }
            given = [str(part) for pair in limits.items() for part in pair]
            subprocess.run([*command, *duty, *given], check=True, stdout=subprocess.DEVNULL)
            yield socket
        finally:
            agent.terminate()
            agent.wait(30)


def _started(options: argparse.Namespace, role: str, socket: str, *more: str) -> subprocess.Popen[str]:
    names = ("device", "seconds", "arrival_per_s", "latency_ms", "quantile", "largest_batch")
    values = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    given = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "benchmarks.duty_live", "--role", role, "--socket", socket, *given, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _run(options: argparse.Namespace, role: str) -> Any:
    return json.loads(_started(options, role, "").communicate()[0])


def _bind() -> None:
    """Limit this process to one thread on the core that inference and training share."""
    import torch

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _network() -> Any:
    from torch import nn

    further = [nn.Sequential(nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1), nn.ReLU()) for _ in range(_FURTHER_LAYERS)]
    return nn.Sequential(
        *(nn.Conv2d(3, _WIDTH, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *further,
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_WIDTH, 10)),
    )


def _physics(batch: int | None) -> float:
    """Return how long the simulated board takes for a batch of requests, or for a minibatch (None), ms."""
    board = SimulatedDevice(_BOARD, seed=0)
    served = None if batch is None else Workload(_SERVED, WorkloadFacts(batch=batch, task=Task.INFERENCE))
    return board.load(board.current_mode(), served).minibatch_ms


def _compute_for(ms: float) -> None:
    """Compute for the given CPU time, however long that takes while other processes use the core."""
    end_s = time.thread_time() + ms / 1e3
    numbers = np.ones(20_000)
    while time.thread_time() < end_s:
        np.sin(numbers)


def _model(options: argparse.Namespace) -> Callable[[list[Any]], list[Any]]:
    if options.device == "simulated":
        batches = range(1, options.largest_batch + 1)
        own_ms = {batch: _physics(batch) if options.without_sharing else 0.0 for batch in batches}

        def wait(images: list[Any]) -> list[Any]:
            _compute_for(own_ms[len(images)])
            return images

        return wait

    import torch

    network = _network().eval()

    def answer(images: list[Any]) -> list[Any]:
        with torch.inference_mode():
            return list(network(torch.stack(images)).argmax(dim=1))

    return answer


def _step(options: argparse.Namespace) -> Callable[[], None]:
    if options.device == "simulated":
        return partial(_compute_for, _physics(None) if options.without_sharing else 0.0)

    import torch

    network = _network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    images, labels = torch.rand(_MINIBATCH, *_IMAGE), torch.arange(_MINIBATCH) % 10

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()

    return step


def _serve(options: argparse.Namespace) -> dict[str, Any]:
    """Answer requests that arrive at random, and print their latencies."""
    import torch

    _bind()
    drawn = np.random.default_rng(0)
    image, latencies_ms = torch.rand(_IMAGE), []
    noted = threading.Lock()
    network, computed_s, batches = _model(options), 0.0, 0
    for batch in range(1, options.largest_batch + 1):
        network([image] * batch)

    def model(images: list[Any]) -> list[Any]:
        nonlocal computed_s, batches
        began_s = time.monotonic()
        answers = network(images)
        computed_s += time.monotonic() - began_s
        batches += 1
        return answers

    with DutyServer(
        model, largest_batch=options.largest_batch, agent_socket=options.socket, max_waiting=10**6
    ) as server:
        ends_s = next_s = time.monotonic()
        ends_s += options.seconds
        while (next_s := next_s + drawn.exponential(1 / options.arrival_per_s)) < ends_s:
            time.sleep(max(0.0, next_s - time.monotonic()))

            def note(answer: Any, arrived_s: float = next_s) -> None:
                with noted:
                    latencies_ms.append(1e3 * (time.monotonic() - arrived_s))

            server.submit(image).add_done_callback(note)
        # Requests that have waited longer than the limit missed it. They count with the time until the server is
        # closed.
        time.sleep(options.latency_ms / 1e3)
    found = np.array(latencies_ms)
    return {
        "requests": len(found),
        "within_pct": round(100 * float((found <= options.latency_ms).mean()), 2),
        "mean_batch": round(len(found) / batches, 2),
        "inference_pct": round(100 * computed_s / (time.monotonic() - ends_s + options.seconds), 1),
        "latency_ms": {f"p{q}": round(float(np.percentile(found, q)), 1) for q in (50, 95, 99)},
    }


def _train(options: argparse.Namespace) -> dict[str, float]:
    """Train until the time is over, and print the number of minibatches."""
    _bind()
    step = _step(options)
    for _ in range(_WARM_UP):
        step()
    began_s = time.monotonic()

    def until_over() -> Iterator[int]:
        number = 0
        while time.monotonic() - began_s < options.seconds:
            yield number
            number += 1

    minibatches, computed_s = 0, 0.0
    loader = until_over() if options.without_sharing else share_device(until_over(), agent_socket=options.socket)
    for _ in loader:
        step_began_s = time.monotonic()
        step()
        computed_s += time.monotonic() - step_began_s
        minibatches += 1
    return {"minibatches": minibatches, "seconds": time.monotonic() - began_s, "computed_s": computed_s}


def _measure_times(options: argparse.Namespace) -> dict[str, Any]:
    """Return the median times of a minibatch, of inference batches and of a switch, each measured alone."""
    import torch

    batches = [2**power for power in range(options.largest_batch.bit_length()) if 2**power <= options.largest_batch]

    if options.device == "simulated":
        inference = {batch: round(_physics(batch), 2) for batch in batches}
        return {"minibatch_ms": round(_physics(None), 2), "inference_ms": inference, "switch_ms": 0.0}

    _bind()
    model, step, image = _model(options), _step(options), torch.rand(_IMAGE)

    def median_ms(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        took = []
        for number in range(_WARM_UP + _MEASURED):
            before()
            began_s = time.perf_counter()
            work()
            if number >= _WARM_UP:
                took.append(1e3 * (time.perf_counter() - began_s))
        return float(np.median(took))

    inference_ms = {batch: median_ms(partial(model, [image] * batch)) for batch in batches}
    after_ms = median_ms(lambda: model([image] * batches[-1]), before=step)
    return {
        "minibatch_ms": round(median_ms(step), 2),
        "inference_ms": {batch: round(ms, 2) for batch, ms in inference_ms.items()},
        "switch_ms": round(max(0.0, after_ms - inference_ms[batches[-1]]), 2),
    }


if __name__ == "__main__":
    main()
