"""Reference predictors that ship with Wattfleet, and how they were trained."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from wattfleet.errors import InvalidInputError
from wattfleet.prediction import MANIFEST_FILE, Artefact, read_artefact


def shipped() -> tuple[str, ...]:
    """Names of the reference predictors that come with this installation."""
    folder = resources.files(__name__)
    return tuple(sorted(entry.name for entry in folder.iterdir() if (entry / MANIFEST_FILE).is_file()))


def load(name: str) -> Artefact:
    """The reference predictor of a name.

    Raises:
        InvalidInputError: none of this name ships.
        CorruptReferenceError: its files are damaged.
    """
    if name not in shipped():
        raise InvalidInputError(f"no reference predictor {name!r} ships: choose one of {', '.join(shipped())}")
    with resources.as_file(resources.files(__name__) / name) as folder:
        return read_artefact(Path(folder))
