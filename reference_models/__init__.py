"""The reference predictors that ship with Wattfleet: stored models, how to load them and how they were trained."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.prediction import MANIFEST_FILE, Artefact, read_artefact


def shipped() -> tuple[str, ...]:
    """Names of the reference predictors in this installation."""
    folder = resources.files(__name__)
    return tuple(sorted(entry.name for entry in folder.iterdir() if (entry / MANIFEST_FILE).is_file()))


def load(name: str) -> Artefact:
    """Load a shipped reference predictor by name.

    Raises:
        InvalidInputError: no reference of this name ships.
        CorruptReferenceError: its files are damaged.
    """
    if name not in shipped():
        raise InvalidInputError(f"unknown reference predictor {name!r}: choose one of {', '.join(shipped())}")
    with resources.as_file(resources.files(__name__) / name) as folder:
        return read_artefact(Path(folder))


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
