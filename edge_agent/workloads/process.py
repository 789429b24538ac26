"""A workload in a process of its own, for as long as a profile needs it.

The agent idles for days: torch, a CUDA context and data-loading processes would keep their memory. They end with this
process, and a workload that crashes does not take the agent with it. The process trains one minibatch per request.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from edge_agent.workloads.loading import Processor, open_workload, require_workload
from edge_agent.workloads.step import OpenSteps, Step, StepTimes
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_io.child_process import ChildEndedError, ChildProcess, parent_connection

_ENDS_WITHIN_S = 20.0
"""The process may be training a minibatch of the slowest mode when it is to end."""


class WorkloadFailedError(WattfleetError):
    """The process of a workload ended; the agent's log has its own message."""


def workload_steps(spec: str, minibatch: int, processor: Processor) -> OpenSteps:
    """Prepare a workload that starts in a new process each time it is opened.

    Args:
        spec: one of `edge_agent.workloads.loading.SHIPPED`, or `module:function`.
        minibatch: samples in a minibatch.
        processor: where it computes.

    Raises:
        InvalidInputError: `spec` is not of this form, or the minibatch is empty. A workload that cannot be loaded
            is reported by its first minibatch.
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
