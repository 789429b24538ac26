"""What can go wrong at the coordinator, and the gRPC status that a client sees for it."""

from __future__ import annotations

import grpc

from wattfleet.errors import CorruptReferenceError, InfeasibleBudgetError, InvalidInputError, WattfleetError
from wattfleet_proto.error_boundary import StatusTable


class UnknownRecordError(WattfleetError):
    """Something was named that the coordinator does not know."""


class DuplicateSessionError(WattfleetError):
    """A device of this id is connected already."""


class NoDevicesError(WattfleetError):
    """No connected device is ready to train: wait, or look at the devices' states."""


STATUS: StatusTable = {
    InfeasibleBudgetError: grpc.StatusCode.FAILED_PRECONDITION,
    InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    CorruptReferenceError: grpc.StatusCode.DATA_LOSS,
    UnknownRecordError: grpc.StatusCode.NOT_FOUND,
    DuplicateSessionError: grpc.StatusCode.ALREADY_EXISTS,
    NoDevicesError: grpc.StatusCode.UNAVAILABLE,
}
