"""What can go wrong between Flower's server and the coordinator."""

from __future__ import annotations

import grpc

from wattfleet.errors import WattfleetError


class PlanningError(WattfleetError):
    """No round can be planned; the text gives the reason."""


class RefusedError(PlanningError):
    """The coordinator answered, and refused.

    Attributes:
        code: the status of its answer.
    """

    def __init__(self, text: str, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN) -> None:
        """Refuse with a status."""
        super().__init__(text)
        self.code = code

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be granted later: devices get ready, budgets rise, a full disk is cleared."""
        return self.code in (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.FAILED_PRECONDITION,
        )


class CoordinatorAwayError(PlanningError):
    """The coordinator does not answer; training goes on without it."""


class NoUpdatesError(WattfleetError):
    """Nothing that a node sent could be aggregated for as long as was allowed."""


class TwoStrategiesError(WattfleetError):
    """Two power-aware strategies at once would each plan with all of the site's watts."""

    caller_must_correct = True
