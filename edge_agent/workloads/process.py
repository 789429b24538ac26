"""Runs a workload in a separate process for as long as a profile needs it.

The agent idles for days, and torch, a CUDA context and data-loading processes would keep their memory. They end with
this process, and a workload that crashes does not crash the agent. The process trains one minibatch per request.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from edge_agent.workloads.loading import OpenSteps, Processor, Step, StepTimes, open_workload, require_workload
from wattfleet.common.child_process import ChildEndedError, ChildProcess, parent_connection
from wattfleet.core.errors import InvalidInputError, WattfleetError

_ENDS_WITHIN_S = 20.0
"""Long enough for a process that is training a minibatch in the slowest mode, s."""


class WorkloadFailedError(WattfleetError):
    """The process of a workload ended; its message is in the agent's log."""


def workload_steps(spec: str, minibatch: int, processor: Processor) -> OpenSteps:
    """Return a function that starts a workload in a new process each time it is called.

    Args:
        spec: one of `edge_agent.workloads.loading.SHIPPED`, or `module:function`.
        minibatch: samples in a minibatch.
        processor: where it computes.

    Raises:
        InvalidInputError: `spec` does not have this form, or the minibatch is empty. If the workload cannot be loaded,
            its first minibatch reports it.
    """
    require_workload(spec, minibatch)

    @contextmanager
    def open_steps() -> Iterator[Step]:
        with ChildProcess(__name__, spec, str(minibatch), processor, ends_within_s=_ENDS_WITHIN_S) as process:

            def step() -> StepTimes | None:
                try:
                    times: StepTimes | None = process.ask("train a minibatch")
                except ChildEndedError as ended:
                    raise WorkloadFailedError(
                        f"workload {spec}: its process {ended}; see its own message in this log"
                    ) from None
                return times

            yield step

    return open_steps


def main() -> None:
    """Serve the agent that started this process."""
    spec, minibatch, processor = sys.argv[1:]
    with parent_connection() as parent:
        try:
            with open_workload(spec, int(minibatch), "cuda" if processor == "cuda" else "cpu") as workload:
                for _ in parent.requests():
                    parent.answer(workload.step())
        except InvalidInputError as error:
            parent.answer(error)


if __name__ == "__main__":
    main()
