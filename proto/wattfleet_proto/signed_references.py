"""How the signed metadata of references names its files and what they describe, for both sides.

The files are those of The Update Framework (TUF) with consistent snapshots: `timestamp.json`, and `VERSION.ROLE.json`
of the other roles.
"""

from __future__ import annotations

import re

TIMESTAMP_FILE = "timestamp.json"

MAX_ROOTS = 256
"""Limit of the root's versions: an agent asks for those that it lacks one after the other."""

_NAME = re.compile(r"timestamp\.json|[1-9][0-9]{0,11}\.(root|snapshot|targets)\.json")


def is_metadata_name(name: str) -> bool:
    """Whether a file of metadata may have this name; it contains no folder."""
    return _NAME.fullmatch(name) is not None


def metadata_name(role: str, version: int) -> str:
    """The name of a version of `root`, `snapshot` or `targets`."""
    return f"{version}.{role}.json"


def target_names(digest: str) -> tuple[str, str]:
    """The names by which the metadata describes a reference's manifest and its weights.

    Args:
        digest: sha256 of the manifest, hexadecimal.
    """
    return f"{digest}/manifest.json", f"{digest}/weights.safetensors"


def digests_named(targets: list[str]) -> list[str]:
    """The digests of the references that are named with both of their files, in order."""
    named = {target.partition("/")[0] for target in targets}
    return sorted(digest for digest in named if set(target_names(digest)) <= set(targets))
