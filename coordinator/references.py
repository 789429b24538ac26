"""The reference predictors that the coordinator hands out, and which of them agents are to transfer from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import reference_models
from coordinator.errors import UnknownRecordError
from coordinator.state.records import PinnedReference, PublishedReference
from wattfleet.errors import CorruptReferenceError, InvalidInputError
from wattfleet.prediction import Artefact, read_artefact, restore_predictor

MAX_BYTES = 16 * 1024 * 1024
"""Bytes that the weights of a published reference may have."""

MAX_MANIFEST_BYTES = 1000 * 1024
"""Bytes that its manifest may have, which comes whole in one message."""

_SHORTEST_BEGINNING = 6


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


def open_reference(name: str) -> Reference:
    """A reference that ships with Wattfleet, by name, or one in a directory, by path.

    Raises:
        InvalidInputError: neither exists.
        CorruptReferenceError: its files are not what its manifest says.
    """
    if name in reference_models.shipped():
        return Reference(name, reference_models.load(name))
    return Reference(Path(name).name, read_artefact(Path(name)))


class ReferenceShelf:
    """The reference predictors that are handed out, by content: the one of the start, and those that were published.

    Attributes:
        from_start: digest of the one that the coordinator was started with.
        pinned: digest of the one that counts instead; None for none.
        artefacts: all of them, by digest.
    """

    def __init__(
        self, from_start: Artefact, published: Sequence[PublishedReference] = (), pinned: str | None = None
    ) -> None:
        """Start from what a store holds.

        Args:
            from_start: what the coordinator was started with.
            published: what was published before.
            pinned: digest of the one that is pinned.

        Raises:
            CorruptReferenceError: a published one is not what its manifest says, or the pinned one is missing.
        """
        self.from_start = from_start.digest
        self.artefacts = {from_start.digest: from_start}
        for each in published:
            artefact = Artefact(each.manifest, each.weights)
            if artefact.digest != each.digest:
                raise CorruptReferenceError(f"the store's reference {each.digest} is another one, {artefact.digest}")
            self.artefacts[each.digest] = artefact
        if pinned is not None and pinned not in self.artefacts:
            raise CorruptReferenceError(f"the store lacks the reference {pinned}, which is pinned")
        self.pinned = pinned
        self._stored = {each.digest for each in published}

    @property
    def digest(self) -> str:
        """Of the one that agents are to transfer from now."""
        return self.pinned or self.from_start

    def of_digest(self, digest: str) -> Artefact:
        """The artefact of a digest.

        Raises:
            UnknownRecordError: none is handed out here.
        """
        if digest not in self.artefacts:
            raise UnknownRecordError(f"no reference predictor with digest {digest!r} is handed out here")
        return self.artefacts[digest]

    def publish(self, artefact: Artefact) -> list[PublishedReference]:
        """Hand out a reference that was checked.

        Returns:
            What is to be stored; nothing where it is stored already.
        """
        self.artefacts[artefact.digest] = artefact
        if artefact.digest in self._stored:
            return []
        return [PublishedReference(artefact.digest, artefact.manifest, artefact.weights)]

    def stored(self, records: Sequence[PublishedReference | PinnedReference]) -> None:
        """What was to be stored is on disk."""
        self._stored |= {record.digest for record in records if isinstance(record, PublishedReference)}

    def pin(self, beginning: str) -> list[PublishedReference | PinnedReference]:
        """Have agents transfer from a reference from now on.

        Args:
            beginning: its digest, or what no other digest begins with; empty for the one of the start.

        Returns:
            What is to be stored.

        Raises:
            UnknownRecordError: no digest begins like that.
            InvalidInputError: several do, or too little of it is given.
        """
        if not beginning:
            self.pinned = None
            return [PinnedReference(None)]
        digest = self._completed(beginning)
        # One of a start, too: the next start may be with another.
        stored = self.publish(self.artefacts[digest])
        self.pinned = digest
        return [*stored, PinnedReference(digest)]

    def _completed(self, beginning: str) -> str:
        if len(beginning) < _SHORTEST_BEGINNING:
            raise InvalidInputError(f"give at least {_SHORTEST_BEGINNING} characters of the digest, not {beginning!r}")
        matching = [digest for digest in self.artefacts if digest.startswith(beginning.lower())]
        if not matching:
            raise UnknownRecordError(f"no reference predictor's digest begins with {beginning!r}: publish it first")
        if len(matching) > 1:
            raise InvalidInputError(f"several digests begin with {beginning!r}: give more of it")
        return matching[0]


def checked(manifest: bytes, weights: bytes) -> Artefact:
    """The reference predictor that was sent, once it has shown that it predicts; this takes a moment.

    Raises:
        CorruptReferenceError: it is not what its manifest says, or it does not predict.
        InvalidInputError: it is of a kind that cannot be used here.
    """
    artefact = Artefact(manifest, weights)
    try:
        restore_predictor(artefact)
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"a predictor of the kind {artefact.details.predictor!r} cannot be checked here without {error.name}:"
            " install it beside the coordinator"
        ) from None
    return artefact
