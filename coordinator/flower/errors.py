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


class CoordinatorAwayError(PlanningError):
    """The coordinator does not answer; training goes on without it."""


class TwoStrategiesError(WattfleetError):
    """Two power-aware strategies at once would each plan with all of the site's watts."""

    caller_must_correct = True
