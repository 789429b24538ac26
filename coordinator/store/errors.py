"""Errors of the store; the type shows whether to retry, to correct something, or to stop."""

from __future__ import annotations

from wattfleet.errors import InvalidInputError, WattfleetError


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
