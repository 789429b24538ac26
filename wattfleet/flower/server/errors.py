"""Errors that a ServerApp may see."""

from __future__ import annotations

import grpc

from wattfleet.core.errors import WattfleetError


class PlanningError(WattfleetError):
    """No round can be planned; the text gives the reason."""


class CoordinatorRefusedError(PlanningError):
    """The coordinator answered with an error.

    Attributes:
        code: the status of its answer.
    """

    def __init__(self, text: str, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN) -> None:
        """Refuse with a status.

        Args:
            text: what is wrong.
            code: the status of the coordinator's answer.
        """
        super().__init__(text)
        self.code = code

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later: devices get ready, budgets rise, a full disk is cleared."""
        return self.code in (
            grpc.StatusCode.CANCELLED,  # from a coordinator that is shutting down
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.FAILED_PRECONDITION,
        )


class EnergyUsedUpError(PlanningError):
    """What is left of the run's energy budget does not suffice for another training."""


class LostRunError(PlanningError):
    """The coordinator does not know a run any more that was started there, so that the run has to end."""

    def __init__(self, run_id: str, coordinator: str) -> None:
        """Name the run.

        Args:
            run_id: the run.
            coordinator: the coordinator's address.
        """
        super().__init__(
            f"the coordinator at {coordinator} does not know run {run_id} any more, so the run ends: the coordinator's"
            " store was replaced, for example by a backup from before the run, or an operator deleted the run. Start"
            " the run again"
        )


class SuperLinkError(WattfleetError):
    """Flower's SuperLink has answered with errors for too long."""


class NoUpdatesError(WattfleetError):
    """No node sent an update that could be aggregated before the timeout."""


class MismatchedArraysError(WattfleetError):
    """The arrays of a reply do not match those that its training started from, so its update cannot be computed."""


class TwoStrategiesError(WattfleetError):
    """Two power-aware strategies run at once: each would plan with all of the site's watts."""

    caller_must_correct = True
