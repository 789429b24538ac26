"""Loads the reference predictor named on a command line, without a coordinator."""

from __future__ import annotations

from pathlib import Path

from edge_agent.paths import REFERENCES_DIRECTORY
from reference_models import load, shipped
from wattfleet.errors import InvalidInputError
from wattfleet.prediction import Artefact, read_artefact


def named_reference(name: str) -> Artefact:
    """Load a reference by its name.

    Args:
        name: the name of a shipped reference, or a directory with an artefact.

    Raises:
        InvalidInputError: there is no such reference, or its format is unknown.
        CorruptReferenceError: it is damaged.
    """
    if name in shipped():
        return load(name)
    directory = Path(name)
    if not directory.is_dir():
        raise InvalidInputError(
            f"unknown reference {name!r}: choose one of {', '.join(shipped())}, or a directory that"
            " `wattfleet reference train` has written"
        )
    return read_artefact(directory)


def reference_of(digest: str, state_directory: Path) -> Artefact:
    """Load the reference from which a stored predictor was fitted.

    Args:
        digest: the reference's digest.
        state_directory: the agent's state directory.

    Raises:
        InvalidInputError: the reference is not on this machine.
        CorruptReferenceError: it is damaged.
    """
    kept = state_directory / REFERENCES_DIRECTORY / digest
    if kept.is_dir():
        return read_artefact(kept)
    for name in shipped():
        if (reference := load(name)).digest == digest:
            return reference
    raise InvalidInputError(f"{kept}: the predictor's reference is missing: pass one with --reference")
