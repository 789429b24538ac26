"""Passwords in URLs, such as that of a database: found before they are shown to others, and left out of texts."""

from __future__ import annotations

import re

_OF_USER = re.compile(r"(?<=://)([^:/@\s]*):\S+@")
_OF_PARAMETER = re.compile(r"([?&](?:ssl)?password=)[^&#\s]+", re.IGNORECASE)
_HIDDEN = "***"


def has_password(text: str) -> bool:
    """Whether a text has a URL with a password, of its user or among its parameters."""
    return bool(_OF_USER.search(text) or _OF_PARAMETER.search(text))


def without_passwords(text: str) -> str:
    """A text whose URLs have `***` in place of passwords."""
    return _OF_PARAMETER.sub(rf"\1{_HIDDEN}", _OF_USER.sub(rf"\1:{_HIDDEN}@", text))
