"""Detects passwords in URLs, such as a database's, and removes them from texts."""

from __future__ import annotations

import re

_OF_USER = re.compile(r"(?<=://)([^:/@\s]*):\S+@")
_OF_PARAMETER = re.compile(r"([?&](?:ssl)?password=)[^&#\s]+", re.IGNORECASE)
_HIDDEN = "***"


def has_password(text: str) -> bool:
    """Return whether a text has a URL with a password, for its user or among its parameters."""
    return bool(_OF_USER.search(text) or _OF_PARAMETER.search(text))


def without_passwords(text: str) -> str:
    """Return a text with `***` in place of passwords in URLs."""
    return _OF_PARAMETER.sub(rf"\1{_HIDDEN}", _OF_USER.sub(rf"\1:{_HIDDEN}@", text))
