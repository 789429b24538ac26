"""What can go wrong with the store; the type says whether to try again, to correct something, or to stop."""

from __future__ import annotations

from wattfleet.errors import InvalidInputError, WattfleetError


class StoreUnavailableError(WattfleetError):
    """Nothing can be stored now; the same may succeed later."""


class StoreFullError(StoreUnavailableError):
    """The disk or the database is full: make room."""


class UnstorableRecordError(InvalidInputError):
    """The database takes no such value; others are not affected."""


class StoreInUseError(WattfleetError):
    """Another coordinator serves from this store."""


class NotOwnerError(WattfleetError):
    """Another coordinator has taken this store over: what this one plans from now on would be planned twice."""
