"""Loads a workload and trains it minibatch by minibatch.

A workload is a generator function `workload(*, minibatch, device)`. It yields a `StepTimes` or None after every
minibatch, endlessly. On a GPU, it waits for its queued work before it yields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from wattfleet.common.named_functions import import_function
from wattfleet.core.errors import InvalidInputError

# --- Step -------------------------------------------------------------------------------------------------------------
# One minibatch of a profiled workload.


@dataclass(frozen=True)
class StepTimes:
    """The parts of one minibatch's time.

    Attributes:
        fetch_stall_ms: time that training waited for its data, ms.
        compute_ms: time that it computed once it had the data, ms.
    """

    fetch_stall_ms: float
    compute_ms: float


Step = Callable[[], StepTimes | None]
"""Trains one minibatch and then returns its times; None if it does not measure them."""

OpenSteps = Callable[[], AbstractContextManager[Step]]
"""Starts a training; leaving the block releases its resources."""


# --- Loading ----------------------------------------------------------------------------------------------------------

Processor = Literal["cpu", "cuda"]
"""Where a workload computes."""

SHIPPED: Mapping[str, str] = {
    "resnet18": "edge_agent.workloads.resnet:resnet18",
    "mobilenet": "edge_agent.workloads.mobilenet:mobilenet",
    "lstm": "edge_agent.workloads.lstm:lstm",
    "bert": "edge_agent.workloads.bert:bert",
}
"""The workloads that ship with the agent, by name."""


class RunningWorkload:
    """A running workload; as a context manager, it ends the workload.

    Args:
        spec: the workload's name, for messages.
        steps: yields after every minibatch.
    """

    def __init__(self, spec: str, steps: Iterator[object]) -> None:
        self._spec = spec
        self._steps = steps
        self._trained = 0

    def step(self) -> StepTimes | None:
        """Train one minibatch.

        Raises:
            InvalidInputError: the workload has ended, or yields something other than a `StepTimes` or None.
        """
        try:
            times = next(self._steps)
        except StopIteration:
            raise InvalidInputError(
                f"workload {self._spec} ended after {self._trained} minibatches: it must start its data again and"
                " yield minibatches without end"
            ) from None
        self._trained += 1
        if times is not None and not isinstance(times, StepTimes):
            raise InvalidInputError(
                f"workload {self._spec} yielded a {type(times).__name__}: yield None, or an"
                " edge_agent.workloads.loading.StepTimes"
            )
        return times

    def __enter__(self) -> RunningWorkload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()


def open_workload(spec: str, minibatch: int, device: Processor) -> RunningWorkload:
    """Start the workload named by `spec`; nothing is trained before its first step.

    Args:
        spec: one of `SHIPPED`, or `module:function`.
        minibatch: samples in a minibatch.
        device: where it computes.

    Raises:
        InvalidInputError: the module or function does not exist, a dependency is missing, or the function is
            not a valid workload.
    """
    module_name, function_name = require_workload(spec, minibatch)
    function = import_function(f"workload {spec}", module_name, function_name)
    try:
        inspect.signature(function).bind(minibatch=minibatch, device=device)
    except TypeError as error:
        raise InvalidInputError(
            f"workload {spec}: {function_name} must take minibatch and device as keyword arguments: {error}"
        ) from None
    steps = function(minibatch=minibatch, device=device)
    if not isinstance(steps, Iterator):
        raise InvalidInputError(
            f"workload {spec}: {function_name} returned a {type(steps).__name__}, not a generator: yield after every"
            " minibatch"
        )
    return RunningWorkload(spec, steps)


def require_workload(spec: str, minibatch: int) -> tuple[str, str]:
    """Check a workload without loading it.

    Returns:
        The names of its module and its function.

    Raises:
        InvalidInputError: `spec` names neither a shipped workload nor a `module:function`, or the minibatch is empty.
    """
    if minibatch < 1:
        raise InvalidInputError(f"--minibatch must be at least 1, not {minibatch}")
    module_name, colon, function_name = SHIPPED.get(spec, spec).partition(":")
    if not colon or not module_name or not function_name:
        raise InvalidInputError(
            f"unknown workload {spec!r}; use one of {', '.join(SHIPPED)}, or your own module:function"
        )
    return module_name, function_name
