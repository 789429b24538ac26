"""Errors of the domain; the type says what the caller should do about it."""

from collections.abc import Sequence

MAX_LISTED = 10
"""Things of which an error's text names each; of more it names as many and counts the others."""


def first_few(texts: Sequence[str], separator: str = ", ") -> str:
    """The first few of many texts, and how many more there are."""
    more = len(texts) - MAX_LISTED
    return separator.join([*texts[:MAX_LISTED], *([f"and {more:,} more"] if more > 0 else [])])


class WattfleetError(Exception):
    """Base of every error that Wattfleet raises on purpose; its text says what is wrong and what to do.

    Attributes:
        caller_must_correct: trying the same again cannot help, what was given has to change.
    """

    caller_must_correct = False


class InvalidInputError(WattfleetError):
    """What was given cannot be used as it is: correct it and try again."""

    caller_must_correct = True


class InfeasibleBudgetError(InvalidInputError):
    """No device can work within the watts that were given."""


class NoCandidatesError(WattfleetError):
    """Every device that is ready is left out, by the operator, its own limit or its failures: wait for others."""


class CorruptReferenceError(WattfleetError):
    """A stored or received predictor is not what its manifest says: fetch it again."""

    caller_must_correct = True
