"""Errors that Wattfleet raises on purpose; the type shows what the caller should do."""

from collections.abc import Sequence

MAX_LISTED = 10
"""Maximum number of items that an error message lists; further ones are only counted."""


def first_few(texts: Sequence[str], separator: str = ", ") -> str:
    """Join the first few texts, and add the number of further ones."""
    more = len(texts) - MAX_LISTED
    return separator.join([*texts[:MAX_LISTED], *([f"and {more:,} more"] if more > 0 else [])])


class WattfleetError(Exception):
    """Base of all errors that Wattfleet raises on purpose; the text says what is wrong and what to do.

    Attributes:
        caller_must_correct: whether the input has to change, so that a retry cannot help.
    """

    caller_must_correct = False


class InvalidInputError(WattfleetError):
    """The input cannot be used as it is: correct it and try again."""

    caller_must_correct = True


class ImplausibleError(InvalidInputError):
    """A device reports a value that no device can have: it is left out until it reports a plausible one."""


class InfeasibleBudgetError(InvalidInputError):
    """No device can work within the given watts."""


class EnergySpentError(WattfleetError):
    """What is left of an energy budget does not suffice for another training: raise the budget, or end the run."""


class NoCandidatesError(WattfleetError):
    """The operator, limits or failures exclude every device that is ready: wait for other devices."""


class CorruptReferenceError(WattfleetError):
    """A stored or received predictor does not match its manifest: fetch it again."""

    caller_must_correct = True
