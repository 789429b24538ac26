"""Valid names: devices, boards, installations, runs, metrics and tags are stored, displayed and compared by name.

Everybody reads lists that contain the names of any one caller, so the number of names is limited as well.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from itertools import count

from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.limits import MAX_ID_CHARACTERS
from wattfleet_proto.names import LONGEST_RUN_NAME

LONGEST_NAME = MAX_ID_CHARACTERS

MAX_METRICS = 100
"""The most metrics of one round."""

_UNKNOWN_APP = "run"

MAX_TAGS = 20
"""The most tags that the operator's commands may add to one device."""


def require_name(what: str, name: str, longest: int = LONGEST_NAME) -> None:
    """Check that a name is valid.

    Args:
        what: what it names, for the error message.
        name: the name.
        longest: the most characters allowed.

    Raises:
        InvalidInputError: it is empty or too long, has characters that are not printable, or is "." or "..", which
            would be resolved in the address of a page or in a SPIFFE id.
    """
    if name in (".", ".."):
        raise InvalidInputError(f"{what} must not be {name!r}, which an address cannot name: choose another one")
    if not (name.strip() and len(name) <= longest and name.isprintable()):
        raise InvalidInputError(f"{what} must have 1 to {longest} printable characters, not {abbreviate(name)}")


def require_metrics(run_id: str, number: int, metrics: Collection[str], known: Collection[str] = ()) -> None:
    """Check the names and the number of a round's metrics.

    Args:
        run_id: the round's run.
        number: the round's number.
        metrics: names of the reported metrics.
        known: names of the metrics reported before.

    Raises:
        InvalidInputError: there are too many metrics, or a name is not valid.
    """
    count = len({*known, *metrics})
    if count > MAX_METRICS:
        raise InvalidInputError(
            f"run {run_id}, round {number}: a round has at most {MAX_METRICS} metrics, not {count:,}: report fewer"
        )
    for name in metrics:
        require_name("a metric's name", name)


def require_tag(word: str) -> None:
    """Check that a tag is valid.

    Raises:
        InvalidInputError: it is empty or too long, or has spaces or characters that are not printable.
    """
    if not (word and len(word) <= LONGEST_NAME and word.isprintable() and not any(map(str.isspace, word))):
        raise InvalidInputError(
            f"a tag must have 1 to {LONGEST_NAME} printable characters and no spaces, not {abbreviate(word)}"
        )


def default_run_name(app: str, at: datetime) -> str:
    """The name of a run that its app gives none: the app's own name, and the local date and time of its start.

    Args:
        app: Flower's id of the app, such as acme/digits; empty if it is unknown.
        at: the time, with an offset.
    """
    when = f"-{at.astimezone():%m%d-%H%M}"
    name = app.rpartition("/")[2]
    word = "".join(sign if sign.isprintable() and not sign.isspace() else "-" for sign in name)
    return (word[: LONGEST_RUN_NAME - len(when)] or _UNKNOWN_APP) + when


def distinct_run_name(wanted: str, taken: Collection[str]) -> str:
    """A name for a run that no other run has: the wanted one, or the same with a number, such as `digits-2`."""
    if wanted not in taken:
        return wanted
    return next(
        name
        for number in count(2)
        if (name := f"{wanted[: LONGEST_RUN_NAME - len(f'-{number}')]}-{number}") not in taken
    )


def abbreviate(text: str) -> str:
    """Quote a text for a message, and shorten a long one."""
    return repr(text) if len(text) <= LONGEST_NAME else f"{text[:20]!r}... of {len(text):,} characters"
