"""Finds the modes that keep a duty in a separate process, since a thread would delay the turns of requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from edge_agent.profiling.profiled_workload import StoppedError
from wattfleet.common.child_process import ChildEndedError, ChildProcess, lower_priority, parent_connection
from wattfleet.common.logs import start_logging
from wattfleet.core.choosing import PROBABILITY, KnownModes
from wattfleet.core.duties import Demand, ModesWithDuty, keep_duty
from wattfleet.core.errors import WattfleetError

_WITHIN_S = 120.0


class DutyProcessError(WattfleetError):
    """The process has failed or takes too long; its message is in the agent's log."""


def keep_duty_in_process(
    is_stopping: Callable[[], bool],
    training: KnownModes,
    inference: KnownModes,
    demand: Demand,
    switch_ms: float,
    probability: float = PROBABILITY,
) -> ModesWithDuty:
    """Run `wattfleet.core.duties.keep_duty` in a new process, and return its result.

    Args:
        is_stopping: returns whether the result is no longer needed; may be called at any time.
        training: see there.
        inference: see there.
        demand: see there.
        switch_ms: see there.
        probability: see there.

    Raises:
        DutyProcessError: the process failed.
        StoppedError: the result is no longer needed.
        InvalidInputError: see there.
    """
    give_up_s = time.monotonic() + _WITHIN_S

    def check() -> None:
        if is_stopping():
            raise StoppedError
        if time.monotonic() > give_up_s:
            raise DutyProcessError(f"the modes that keep the duty were not found within {_WITHIN_S:g} s")

    try:
        with ChildProcess(__name__) as process:
            found: ModesWithDuty = process.ask((training, inference, demand, switch_ms, probability), check)
            return found
    except OSError as error:
        raise DutyProcessError(f"cannot start a process for the duty: {error.strerror}") from None
    except ChildEndedError as ended:
        raise DutyProcessError(f"the process for the duty {ended}; see its own message in this log") from None


def main() -> None:
    """Serve the agent that started this process."""
    lower_priority()
    start_logging()
    with parent_connection() as parent:
        for arguments in parent.requests():
            try:
                parent.answer(keep_duty(*arguments))
            except WattfleetError as error:
                parent.answer(error)


if __name__ == "__main__":
    main()
