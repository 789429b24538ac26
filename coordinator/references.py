"""The reference predictor that the coordinator hands out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import reference_models
from coordinator.errors import UnknownRecordError
from wattfleet.artefact import Artefact, read_directory


@dataclass(frozen=True)
class Reference:
    """A reference predictor by name.

    Attributes:
        name: as it was asked for.
        artefact: manifest and weights.
    """

    name: str
    artefact: Artefact

    @property
    def digest(self) -> str:
        """What agents check it by."""
        return self.artefact.digest

    def of_digest(self, digest: str) -> Artefact:
        """The artefact of a digest.

        Raises:
            UnknownRecordError: it is another one's.
        """
        if digest != self.digest:
            raise UnknownRecordError(f"no reference predictor with digest {digest!r} is handed out here")
        return self.artefact


def open_reference(name: str) -> Reference:
    """A reference that ships with Wattfleet, by name, or one in a directory, by path.

    Raises:
        InvalidInputError: neither exists.
        CorruptReferenceError: its files are not what its manifest says.
    """
    if name in reference_models.shipped():
        return Reference(name, reference_models.load(name))
    return Reference(Path(name).name, read_directory(Path(name)))
