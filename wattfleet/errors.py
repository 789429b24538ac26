"""Errors of the domain; the type says what the caller should do about it."""


class WattfleetError(Exception):
    """Base of every error that Wattfleet raises on purpose; its text says what is wrong and what to do."""


class InvalidInputError(WattfleetError):
    """What was given cannot be used as it is: correct it and try again."""


class InfeasibleBudgetError(InvalidInputError):
    """No device can work within the watts that were given."""


class CorruptReferenceError(WattfleetError):
    """A stored or received predictor is not what its manifest says: fetch it again."""
