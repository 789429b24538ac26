"""What may be a name: devices, boards, installations, runs, metrics and tags are kept, shown and compared by theirs."""

from __future__ import annotations

from wattfleet.errors import InvalidInputError

LONGEST_NAME = 200


def require_name(what: str, name: str) -> None:
    """Make sure that something can be a name.

    Args:
        what: it is of, for the error's text.
        name: to be looked at.

    Raises:
        InvalidInputError: it is empty or too long, or has characters that nobody can see.
    """
    if not (name.strip() and len(name) <= LONGEST_NAME and name.isprintable()):
        raise InvalidInputError(f"{what} has 1 to {LONGEST_NAME} printable characters, unlike {shown(name)}")


def require_tag(word: str) -> None:
    """Make sure that something can be a tag.

    Raises:
        InvalidInputError: it is empty or too long, has spaces, or characters that nobody can see.
    """
    if not (word and len(word) <= LONGEST_NAME and word.isprintable() and not any(map(str.isspace, word))):
        raise InvalidInputError(
            f"a tag is a word of up to {LONGEST_NAME} printable characters, without spaces, not {shown(word)}"
        )


def shown(text: str) -> str:
    """A text as it can be shown where it may be anything."""
    return repr(text) if len(text) <= LONGEST_NAME else f"{text[:20]!r}... of {len(text):,}"
