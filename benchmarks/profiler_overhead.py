"""Measure what the profiler adds to a minibatch, by running the same steps with and without it in alternation.

A step is about 20 ms of arithmetic, as long as a fast minibatch of the measured boards. The overhead does not depend
on this length. A meter samples the power five times a second, as on a Jetson, and the conditions come from a file.
The benchmark compares the processor time of the whole process, including the meter's thread, so that a busy machine
does not change the result.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np

from edge_agent.devices.device import Activity, Knobs
from edge_agent.devices.host import PhysicalBoard
from edge_agent.devices.meters import PolledMeter
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.mode_measurement import ModeMeasurement, ProfilerSettings
from edge_agent.profiling.profiler import ProductiveProfiler
from edge_agent.workloads.loading import StepTimes
from wattfleet.common.clock import SystemClock
from wattfleet.core.modes import JournalHeader, ModeArray, PowerMode, Provenance, modes_to_array
from wattfleet_proto.device_state import BoardSample

_MODE = PowerMode(1, 1_000_000, 1_000_000_000, 1_000_000_000)
_POWER_MW = 10_000.0
_TIMES = StepTimes(fetch_stall_ms=0.0, compute_ms=1.0)


class ThisMachine(PhysicalBoard):
    """A `Device` with this machine's clock, one mode, and a file that is read for every sample."""

    board_kind = "bench"
    provenance: Provenance = "hardware"

    def __init__(self, sensor: Path) -> None:
        self._sensor = sensor
        sensor.write_text(f"{_POWER_MW}\n", encoding="ascii")
        self.clock = SystemClock()
        self.modes: ModeArray = modes_to_array([_MODE])

    def current_mode(self) -> PowerMode:
        """Return the only mode."""
        return _MODE

    def apply(self, mode: PowerMode) -> None:
        """Do nothing."""

    def differences(self, mode: PowerMode) -> list[str]:
        """Return no differences."""
        return []

    def start_meter(self) -> PolledMeter:
        """Sample the file."""
        return PolledMeter(self._read, self.clock)

    def conditions(self) -> BoardSample:
        """Return the file's value as a temperature."""
        return BoardSample(temperature_c=self._read() / _POWER_MW * 50, throttle_events=0)

    def activity(self) -> Activity:
        """Return the file's value as a power."""
        return Activity(self._read())

    def measuring(self) -> AbstractContextManager[None]:
        """Do nothing: there is no fan."""
        return nullcontext()

    def knobs(self) -> Knobs:
        """Return no knobs."""
        return {}

    def restore(self, knobs: Knobs) -> None:
        """Do nothing."""

    def _read(self) -> float:
        return float(self._sensor.read_text(encoding="ascii"))


def measure(step_ms: float, minibatches: int, runs: int) -> dict[str, float]:
    """Time minibatches with and without the profiler.

    Args:
        step_ms: duration of a minibatch without the profiler, ms.
        minibatches: number of minibatches of each kind in a run.
        runs: number of runs. Each begins with another kind, so that changes of the machine affect all kinds equally.

    Returns:
        The measured `step_ms`, and for each kind of measurement by how many percent the median minibatch takes longer.
    """
    step = _step(step_ms)
    with tempfile.TemporaryDirectory() as folder:
        device = ThisMachine(Path(folder) / "sensor")
        # The minimum is never reached, so the measurement goes on until it is stopped.
        endless = ProfilerSettings(minibatches=10**9)
        header = JournalHeader("bench", "bench", "hardware", "arithmetic", 1)
        with Journal.open(Path(folder) / "journal.jsonl", header) as journal:

            def profiler() -> float:
                with ModeMeasurement(device, _MODE, endless) as measurement:
                    return _ms_each(lambda: (step(), measurement.minibatch_ended(_TIMES)), minibatches)

            def productive() -> float:
                loader = ProductiveProfiler(device, [_MODE], journal, endless).profiled(range(minibatches + 1))
                next(loader)
                begun_s = process_time()
                for _ in range(minibatches):
                    step()
                    next(loader)
                took_ms = (process_time() - begun_s) * 1e3 / minibatches
                loader.close()
                return took_ms

            kinds = {"plain": lambda: _ms_each(step, minibatches), "profiler": profiler, "productive": productive}
            took_ms: dict[str, list[float]] = {name: [] for name in kinds}
            for run in range(runs):
                names = list(kinds)
                for name in names[run % 3 :] + names[: run % 3]:
                    took_ms[name].append(kinds[name]())
    plain_ms = median(took_ms["plain"])
    return {
        "step_ms": plain_ms,
        "profiler_percent": 100 * (median(took_ms["profiler"]) / plain_ms - 1),
        "productive_percent": 100 * (median(took_ms["productive"]) / plain_ms - 1),
    }


def _ms_each(step: Callable[[], object], count: int) -> float:
    begun_s = process_time()
    for _ in range(count):
        step()
    return (process_time() - begun_s) * 1e3 / count


def _step(step_ms: float) -> Callable[[], None]:
    """Return a function whose arithmetic takes about `step_ms`."""
    values = np.random.default_rng(0).standard_normal(20_000)

    def once() -> None:
        np.sin(values)

    once()
    rounds = max(1, math.ceil(step_ms / _ms_each(once, 200)))

    def step() -> None:
        for _ in range(rounds):
            once()

    return step


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profiler_overhead",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="set the duration of a minibatch without the profiler, in ms"
    )
    parser.add_argument(
        "--minibatches", type=int, default=10, help="set the number of minibatches of each kind in a run"
    )
    parser.add_argument("--runs", type=int, default=60, help="set the number of alternating runs of each kind")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if not options.step_ms > 0 or options.minibatches < 1 or options.runs < 1:
        parser.error("give a step above 0 ms, and 1 or more minibatches and runs")
    figures = measure(options.step_ms, options.minibatches, options.runs)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:<20}{value:8.3f}")


if __name__ == "__main__":
    main()
