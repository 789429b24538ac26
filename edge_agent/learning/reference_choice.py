"""Which reference predictor a command line means, without a coordinator to name one."""

from __future__ import annotations

from pathlib import Path

from edge_agent.paths import REFERENCES_DIRECTORY
from reference_models import load, shipped
from wattfleet.errors import InvalidInputError
from wattfleet.prediction import Artefact, read_artefact


def named_reference(name: str) -> Artefact:
    """The reference of a name.

    Args:
        name: that of a shipped reference, or a directory that holds an artefact.

    Raises:
        InvalidInputError: it is neither, or of a format that this version does not know.
        CorruptReferenceError: it is damaged.
    """
    if name in shipped():
        return load(name)
    directory = Path(name)
    if not directory.is_dir():
        raise InvalidInputError(
            f"no reference {name!r}: give one that ships ({', '.join(shipped())}), or the directory of one that"
            " `wattfleet reference train` wrote"
        )
    return read_artefact(directory)


def reference_of(digest: str, state_directory: Path) -> Artefact:
    """The reference that a stored predictor was fitted from.

    Args:
        digest: of the reference.
        state_directory: where the agent keeps those that it used.

    Raises:
        InvalidInputError: it is kept nowhere on this machine.
        CorruptReferenceError: it is damaged.
    """
    kept = state_directory / REFERENCES_DIRECTORY / digest
    if kept.is_dir():
        return read_artefact(kept)
    for name in shipped():
        if (reference := load(name)).digest == digest:
            return reference
    raise InvalidInputError(
        f"{kept}: the reference that the predictor was fitted from is not there: name one with --reference"
    )
