"""The gRPC status code of each domain error."""

from __future__ import annotations

import grpc

from coordinator.errors import (
    AlreadyEnrolledError,
    DuplicateSessionError,
    FleetReturningError,
    ForeignDeviceError,
    InvalidInviteError,
    NoDevicesError,
    NotRunOwnerError,
    OversizedMessageError,
    QuotaExceededError,
    RotationError,
    RunEndedError,
    StillInUseError,
    TooManyDevicesError,
    UncheckedReferenceError,
    UnknownRecordError,
    UploadTimeoutError,
)
from coordinator.store.errors import DamagedStoreError, NotOwnerError, StoreFullError, StoreUnavailableError
from wattfleet.errors import CorruptReferenceError, InfeasibleBudgetError, InvalidInputError, NoCandidatesError
from wattfleet_identity.certificate_check import InvalidCertificateError
from wattfleet_identity.http_access import AccessDeniedError
from wattfleet_identity.peers import UnknownPeerError
from wattfleet_proto.error_boundary import StatusTable
from wattfleet_proto.version import ProtocolVersionError

STATUS: StatusTable = {
    InfeasibleBudgetError: grpc.StatusCode.FAILED_PRECONDITION,
    InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    CorruptReferenceError: grpc.StatusCode.DATA_LOSS,
    UnknownRecordError: grpc.StatusCode.NOT_FOUND,
    DuplicateSessionError: grpc.StatusCode.ALREADY_EXISTS,
    TooManyDevicesError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    OversizedMessageError: grpc.StatusCode.INVALID_ARGUMENT,
    StillInUseError: grpc.StatusCode.FAILED_PRECONDITION,
    InvalidInviteError: grpc.StatusCode.PERMISSION_DENIED,
    AlreadyEnrolledError: grpc.StatusCode.ALREADY_EXISTS,
    RotationError: grpc.StatusCode.FAILED_PRECONDITION,
    NotRunOwnerError: grpc.StatusCode.PERMISSION_DENIED,
    RunEndedError: grpc.StatusCode.ABORTED,
    AccessDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    ForeignDeviceError: grpc.StatusCode.PERMISSION_DENIED,
    InvalidCertificateError: grpc.StatusCode.UNAUTHENTICATED,
    UnknownPeerError: grpc.StatusCode.UNAUTHENTICATED,
    QuotaExceededError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    # Commands treat UNAVAILABLE and DEADLINE_EXCEEDED as a coordinator that does not answer.
    UploadTimeoutError: grpc.StatusCode.ABORTED,
    UncheckedReferenceError: grpc.StatusCode.ABORTED,
    NoDevicesError: grpc.StatusCode.UNAVAILABLE,
    NoCandidatesError: grpc.StatusCode.UNAVAILABLE,
    FleetReturningError: grpc.StatusCode.UNAVAILABLE,
    # As with a missing method, a retry cannot succeed.
    ProtocolVersionError: grpc.StatusCode.UNIMPLEMENTED,
    DamagedStoreError: grpc.StatusCode.DATA_LOSS,
    StoreFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoreUnavailableError: grpc.StatusCode.UNAVAILABLE,
    # The coordinator that took over may answer the same request.
    NotOwnerError: grpc.StatusCode.UNAVAILABLE,
}
