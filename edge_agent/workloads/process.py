"""A workload in a process of its own, as long as a profile needs it.

The agent is a daemon that idles for days: torch, a CUDA context and processes that load data would stay with it. They
end with this process, and a workload that crashes does not take the agent with it. The process trains a minibatch
for every line that it reads, answers each with one line of JSON, and ends when there is nothing more to read: also when
the agent was killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO

from edge_agent.workloads.loading import Processor, open_workload, require_workload
from edge_agent.workloads.step import OpenSteps, Step, StepTimes
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_io.child_process import python_process

_ENDS_WITHIN_S = 20.0
"""A minibatch of the slowest mode may be in hand when the process is to end."""


class WorkloadFailedError(WattfleetError):
    """The process of a workload failed; its own message is in the agent's log."""


def workload_steps(spec: str, minibatch: int, processor: Processor) -> OpenSteps:
    """What begins the workload that `spec` names, each time in a new process.

    Args:
        spec: one of `edge_agent.workloads.loading.SHIPPED`, or `module:function`.
        minibatch: samples in a minibatch.
        processor: where it computes.

    Raises:
        InvalidInputError: `spec` names nothing, or the minibatch is empty. Whether the workload can be loaded shows
            when it trains its first minibatch.
    """
    require_workload(spec, minibatch)

    @contextmanager
    def open_steps() -> Iterator[Step]:
        process = python_process(__name__, spec, str(minibatch), processor, encoding="utf-8")
        try:
            yield lambda: _step(spec, process)
        finally:
            _end(process)

    return open_steps


def _step(spec: str, process: subprocess.Popen[str]) -> StepTimes | None:
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    try:
        process.stdin.write("\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        raise WorkloadFailedError(
            f"workload {spec}: its process ended with exit code {process.wait()}; see its own message in this log"
        )
    trained = json.loads(answer)
    if "refused" in trained:
        raise InvalidInputError(trained["refused"])
    return StepTimes(**trained["times"]) if trained["times"] else None


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass
    try:
        process.wait(_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        process.stdout.close()


def _answer(spec: str, minibatch: int, processor: Processor, asked: IO[str], answers: IO[str]) -> None:
    """Train a minibatch for every line of `asked`."""
    try:
        with open_workload(spec, minibatch, processor) as workload:
            while asked.readline():
                times = workload.step()
                answers.write(json.dumps({"times": asdict(times) if times else None}) + "\n")
                answers.flush()
    except InvalidInputError as error:
        answers.write(json.dumps({"refused": str(error)}) + "\n")


def main() -> None:
    """Serve the agent that started this process."""
    spec, minibatch, processor = sys.argv[1:]
    # What a workload prints must not come between the answers.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        _answer(spec, int(minibatch), "cuda" if processor == "cuda" else "cpu", sys.stdin, answers)


if __name__ == "__main__":
    main()
