"""What can go wrong at the coordinator, and the gRPC status that a client sees for it."""

from __future__ import annotations

import grpc

from coordinator.store.errors import NotOwnerError, StoreFullError, StoreUnavailableError
from wattfleet.errors import (
    CorruptReferenceError,
    InfeasibleBudgetError,
    InvalidInputError,
    NoCandidatesError,
    WattfleetError,
)
from wattfleet_proto.error_boundary import StatusTable
from wattfleet_proto.version import ProtocolVersionError


class UnknownRecordError(WattfleetError):
    """Something was named that the coordinator does not know."""


class DuplicateSessionError(WattfleetError):
    """A device of this id is connected already."""


class OversizedMessageError(WattfleetError):
    """A message is larger than any of its kind has to be."""


class NoDevicesError(WattfleetError):
    """No connected device is ready to train: wait, or look at the devices' states."""


class FleetReturningError(WattfleetError):
    """The coordinator has just restarted, or called its devices back, and waits for them: ask again."""


class BudgetSourceError(WattfleetError):
    """The source of a budget gives no watts now: its last ones stay in force until they are stale."""


class SourceFailedError(BudgetSourceError):
    """The source cannot be reached, or what answers there is not what was expected."""


class NoReadingError(BudgetSourceError):
    """The source answers that it has measured nothing lately."""


class UnusableReadingError(BudgetSourceError):
    """What the source answers is not a number of watts."""


class StaleReadingError(BudgetSourceError):
    """What the source answers is too old."""


class AmbiguousQueryError(BudgetSourceError):
    """A query answers many series: change it so that it answers one."""

    caller_must_correct = True


class UnsuitableQueryError(BudgetSourceError):
    """The source refuses a query, or it cannot answer watts: change it."""

    caller_must_correct = True


STATUS: StatusTable = {
    InfeasibleBudgetError: grpc.StatusCode.FAILED_PRECONDITION,
    InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    CorruptReferenceError: grpc.StatusCode.DATA_LOSS,
    UnknownRecordError: grpc.StatusCode.NOT_FOUND,
    DuplicateSessionError: grpc.StatusCode.ALREADY_EXISTS,
    OversizedMessageError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NoDevicesError: grpc.StatusCode.UNAVAILABLE,
    NoCandidatesError: grpc.StatusCode.UNAVAILABLE,
    FleetReturningError: grpc.StatusCode.UNAVAILABLE,
    # As of a method that is not there: repeating the request is of no use to either side.
    ProtocolVersionError: grpc.StatusCode.UNIMPLEMENTED,
    StoreFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoreUnavailableError: grpc.StatusCode.UNAVAILABLE,
    # The same request may be answered by the coordinator that took over.
    NotOwnerError: grpc.StatusCode.UNAVAILABLE,
}
