"""The coordinator's errors, and the gRPC status that a client sees for each."""

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
    """The coordinator does not know a device, round, run, supply or reference of this name."""


class DuplicateSessionError(WattfleetError):
    """A device with this id is already connected."""


class OversizedMessageError(WattfleetError):
    """A message exceeds the size limit of its kind."""


class NoDevicesError(WattfleetError):
    """No connected device is ready to train: wait, or check the devices' states."""


class FleetReturningError(WattfleetError):
    """The coordinator waits for devices to reconnect after a restart or a new reference: ask again."""


class BudgetSourceError(WattfleetError):
    """A budget's source gives no usable watts; its last reading stays in force until it is stale."""


class SourceFailedError(BudgetSourceError):
    """The source cannot be reached, or does not answer as Prometheus does."""


class NoReadingError(BudgetSourceError):
    """The source has no recent measurement."""


class UnusableReadingError(BudgetSourceError):
    """The source's answer is not a number of watts."""


class StaleReadingError(BudgetSourceError):
    """The source's answer is too old."""


class AmbiguousQueryError(BudgetSourceError):
    """A query selects many series: change it to select one."""

    caller_must_correct = True


class UnsuitableQueryError(BudgetSourceError):
    """The source refuses a query, or the query cannot yield watts: change it."""

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
    # As for a missing method: a retry cannot succeed.
    ProtocolVersionError: grpc.StatusCode.UNIMPLEMENTED,
    StoreFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoreUnavailableError: grpc.StatusCode.UNAVAILABLE,
    # The coordinator that took over may answer the same request.
    NotOwnerError: grpc.StatusCode.UNAVAILABLE,
}
