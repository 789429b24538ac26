"""The workload that an agent trains while it measures modes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from edge_agent.devices.device import Device
from edge_agent.profiling.known_workload import UNNAMED
from edge_agent.workloads.loading import SHIPPED, OpenSteps, Processor, Step, StepTimes
from edge_agent.workloads.process import workload_steps
from wattfleet.core.errors import InvalidInputError


class StoppedError(Exception):
    """Ends a profile or a fit because the agent or command is stopping; finished measurements are kept."""


@dataclass(frozen=True)
class ProfiledWorkload:
    """A workload to be measured.

    Attributes:
        open_steps: starts the workload; None if only apps can train it.
        trained: its name, and samples in a minibatch; None for the built-in workload of a virtual device.
    """

    open_steps: OpenSteps | None
    trained: tuple[str, int] | None

    def stopped_by(self, stopping: threading.Event) -> ProfiledWorkload:
        """Return a copy whose next minibatch raises `StoppedError` once `stopping` is set."""
        opened = self.open_steps
        if opened is None:
            return self

        @contextmanager
        def open_steps() -> Iterator[Step]:
            with opened() as step:

                def step_unless_stopped() -> StepTimes | None:
                    if stopping.is_set():
                        raise StoppedError
                    return step()

                yield step_unless_stopped

        return replace(self, open_steps=open_steps)

    def in_turns(self, turn: Callable[[], AbstractContextManager[None]]) -> ProfiledWorkload:
        """Return a copy whose minibatches each hold a turn of the device."""
        opened = self.open_steps
        return self if opened is None else replace(self, open_steps=steps_in_turns(opened, turn))


def steps_in_turns(opened: OpenSteps, turn: Callable[[], AbstractContextManager[None]]) -> OpenSteps:
    """Wrap a workload so that every minibatch holds a turn of the device.

    Args:
        opened: starts the workload.
        turn: makes a context that is entered once the device is free.
    """

    @contextmanager
    def open_steps() -> Iterator[Step]:
        with opened() as step:

            def step_in_turn() -> StepTimes | None:
                with turn():
                    return step()

            yield step_in_turn

    return open_steps


def built_in_workload(step: Callable[[], None]) -> ProfiledWorkload:
    """Return the workload that is built into a device.

    Args:
        step: trains one minibatch of it, such as `Device.built_in_workload`.
    """
    return ProfiledWorkload(lambda: nullcontext(step), None)


def profiled_workload(device: Device, spec: str | None, minibatch: int, processor: Processor) -> ProfiledWorkload:
    """Return the workload to measure a device with.

    Args:
        device: the board.
        spec: the workload by name, or as `module:function`; None if not given.
        minibatch: samples in a minibatch.
        processor: where it computes.

    Raises:
        InvalidInputError: a workload was given for a virtual device or omitted for hardware, or there is no such
            workload.
    """
    built_in = device.built_in_workload()
    if built_in is not None:
        if spec is not None:
            raise InvalidInputError(
                f"{device.board_kind} is {device.provenance} and needs no workload; omit --workload"
            )
        return built_in_workload(built_in)
    if spec is None:
        raise InvalidInputError(
            f"{device.board_kind} needs a workload to train while measuring; pass --workload {', '.join(SHIPPED)},"
            " or your own module:function"
        )
    return ProfiledWorkload(workload_steps(spec, minibatch, processor), (spec, minibatch))


def daemon_workload(device: Device, spec: str | None, minibatch: int, processor: Processor) -> ProfiledWorkload:
    """Return the workload of runs that do not name one; on hardware, only apps can train it unless `spec` is given.

    Args:
        device: the board.
        spec: the workload by name, or as `module:function`; None if not given.
        minibatch: samples in a minibatch.
        processor: where it computes.

    Raises:
        InvalidInputError: a workload was given for a virtual device, or there is no such workload.
    """
    if spec is None and device.built_in_workload() is None:
        return ProfiledWorkload(None, (UNNAMED, minibatch))
    return profiled_workload(device, spec, minibatch, processor)
