"""The coordinator's errors; the type says what the caller should do."""

from __future__ import annotations

from wattfleet.core.errors import InvalidInputError, WattfleetError


class UnknownRecordError(WattfleetError):
    """No device, round, run, supply or reference has this name."""


class DuplicateSessionError(WattfleetError):
    """A device with this id is already connected."""


class TooManyDevicesError(WattfleetError):
    """A connection or a host enrols too many new devices: use another one, or raise the limit."""


class OversizedMessageError(WattfleetError):
    """A message exceeds the size limit of its kind."""


class StillInUseError(WattfleetError):
    """A device or run is still in use and cannot be removed yet; the message states what has to end first."""


class NotRunOwnerError(WattfleetError):
    """A run was started by another app: start a run of your own."""


class RunEndedError(WattfleetError):
    """A run has ended, so that none of its rounds can be planned any more: start another run."""


class ForeignDeviceError(WattfleetError):
    """An agent's device id differs from that of its certificate: use the device's own certificate."""


class QuotaExceededError(WattfleetError):
    """A peer, or all peers together, request more than is allowed: wait, or remove something."""


class UploadTimeoutError(WattfleetError):
    """An upload took too long."""


class UncheckedReferenceError(WattfleetError):
    """An uploaded reference could not be checked: try again later."""


class NoDevicesError(WattfleetError):
    """No connected device is ready to train: wait, or check the devices' states."""


class FleetReturningError(WattfleetError):
    """The coordinator waits for devices to reconnect after a restart or a new reference: try again."""


class InvalidInviteError(WattfleetError):
    """A token does not permit enrolment. All reasons look the same to callers, so that guessing reveals nothing."""

    caller_must_correct = True

    def __init__(
        self,
        text: str = "this invite cannot be used: it is unknown, has expired, or was used up. Ask the operator for a new"
        " one from `wattfleet coordinator invite`",
    ) -> None:
        super().__init__(text)


class UnknownInviteError(InvalidInviteError):
    """No invite has this token."""


class ExpiredInviteError(InvalidInviteError):
    """The invite of this token has expired."""


class UsedUpInviteError(InvalidInviteError):
    """The invite of this token was used as often as allowed, or was cancelled."""


class AlreadyEnrolledError(WattfleetError):
    """Another machine has this device id and a valid certificate."""

    caller_must_correct = True


class RotationError(WattfleetError):
    """The authority cannot be replaced now; the message states what has to happen first."""

    caller_must_correct = True


class BudgetSourceError(WattfleetError):
    """A budget's source returned no usable watts; its last reading stays in force until it is stale."""


class SourceFailedError(BudgetSourceError):
    """The source cannot be reached, or its answer is not in Prometheus' format."""


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


# --- Errors -----------------------------------------------------------------------------------------------------------
# Errors of the store; the type shows whether to retry, to correct something, or to stop.


class StoreUnavailableError(WattfleetError):
    """The store is unavailable now: retry later."""


class StoreFullError(StoreUnavailableError):
    """The disk or the database is full: free some space."""


class UnstorableRecordError(InvalidInputError):
    """The database cannot store a value; other records are not affected."""


class DamagedStoreError(InvalidInputError):
    """The store's file does not contain what was written to it: restore a backup."""


class StoreInUseError(WattfleetError):
    """Another coordinator uses this store."""


class NotOwnerError(WattfleetError):
    """Another coordinator has taken this store over: this one must stop, or rounds would be planned twice."""
