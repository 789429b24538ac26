"""Which names and labels a run may have: apps check them before a run starts, and the coordinator when it does."""

from __future__ import annotations

from collections.abc import Mapping

from wattfleet.errors import InvalidInputError

LONGEST_RUN_NAME = 60
"""Characters of a run's name: it fits a column of a table."""

MAX_LABELS = 16
LONGEST_LABEL_KEY, LONGEST_LABEL_VALUE = 40, 100

_SHOWN_CHARACTERS = 80


def require_run_name(name: str) -> None:
    """Check the name that an app gives to its run.

    Raises:
        InvalidInputError: it is empty or too long, has spaces or characters that are not printable, or only digits,
            which would look like Flower's own id of a run.
    """
    if not _is_word(name, LONGEST_RUN_NAME) or name.isdecimal():
        raise InvalidInputError(
            f"a run's name must have 1 to {LONGEST_RUN_NAME} printable characters, no spaces and not only digits, not"
            f" {_shown(name)}"
        )


def require_labels(labels: Mapping[str, str]) -> None:
    """Check the labels that an app gives to its run.

    Raises:
        InvalidInputError: there are too many, or a key or a value is not valid.
    """
    if len(labels) > MAX_LABELS:
        raise InvalidInputError(f"a run has at most {MAX_LABELS} labels, not {len(labels):,}: leave some out")
    for key, value in labels.items():
        if not (isinstance(key, str) and _is_word(key, LONGEST_LABEL_KEY) and "=" not in key):
            raise InvalidInputError(
                f"the key of a label must have 1 to {LONGEST_LABEL_KEY} printable characters, no spaces and no '=', not"
                f" {_shown(key)}"
            )
        if not (isinstance(value, str) and value.strip() and len(value) <= LONGEST_LABEL_VALUE and value.isprintable()):
            raise InvalidInputError(
                f"the label {key!r} must have a text of 1 to {LONGEST_LABEL_VALUE} printable characters, not"
                f" {_shown(value)}"
            )


def label_of(text: str) -> tuple[str, str]:
    """Read a label that was written as `key=value`.

    Raises:
        InvalidInputError: it has another form, or its key or its value is not valid.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise InvalidInputError(f"a label is written as KEY=VALUE, such as site=lab, not {_shown(text)}")
    require_labels({key: value})
    return key, value


def _is_word(text: str, longest: int) -> bool:
    return bool(text) and len(text) <= longest and text.isprintable() and not any(map(str.isspace, text))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
