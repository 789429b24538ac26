"""The errors that the agent's sockets return, and their gRPC statuses."""

from __future__ import annotations

import grpc

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.learning.fitting_process import FittingFailedError
from edge_agent.profiling.journal import JournalError
from edge_agent.runtime.app_requests import AppNotStoppingError, StreamEndedError
from edge_agent.runtime.peer_credentials import PeerNotAllowedError
from edge_agent.serving.duty_service import TooManyAppsError
from edge_agent.session.held_grant import NoGrantError
from edge_agent.training.training_power import PowerNotReadError
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_proto.error_boundary import StatusTable


class BusyError(WattfleetError):
    """The device cannot train now."""


class OwnerOnlyError(WattfleetError):
    """Only the agent's own user may do this: run the command as that user."""


STATUS: StatusTable = {
    PeerNotAllowedError: grpc.StatusCode.PERMISSION_DENIED,
    OwnerOnlyError: grpc.StatusCode.PERMISSION_DENIED,
    InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    ModeNotAppliedError: grpc.StatusCode.ABORTED,
    PowerNotReadError: grpc.StatusCode.UNAVAILABLE,
    BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TooManyAppsError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NoGrantError: grpc.StatusCode.FAILED_PRECONDITION,
    StreamEndedError: grpc.StatusCode.ABORTED,
    AppNotStoppingError: grpc.StatusCode.ABORTED,
    JournalError: grpc.StatusCode.INTERNAL,
    FittingFailedError: grpc.StatusCode.INTERNAL,
}
