"""The reference predictors that the coordinator serves, and which of them are in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import reference_models
from coordinator.errors import QuotaExceededError, UnknownRecordError
from coordinator.references.check import check_in_child
from coordinator.state.names import require_name
from coordinator.state.records import PinnedReferences, PublishedReference, RemovedReference
from wattfleet.core.errors import CorruptReferenceError, InvalidInputError
from wattfleet.core.prediction import MANIFEST_FILE, WEIGHTS_FILE, Artefact, read_artefact
from wattfleet_proto.limits import MAX_MANIFEST_BYTES, MAX_REFERENCES_IN_FORCE, MAX_WEIGHTS_BYTES

MAX_REFERENCES = 32
"""The most references that are kept, because all are in memory."""

_MIN_PREFIX = 6


@dataclass(frozen=True)
class Reference:
    """A reference predictor with its name.

    Attributes:
        name: as requested.
        artefact: manifest and weights.
    """

    name: str
    artefact: Artefact

    @property
    def digest(self) -> str:
        """The digest with which agents verify it."""
        return self.artefact.digest


def open_reference(name: str) -> Reference:
    """Open a reference that ships with Wattfleet, by name, or one in a directory, by path.

    Raises:
        InvalidInputError: neither exists, or agents would refuse it as too large.
        CorruptReferenceError: its files do not match its manifest.
    """
    if name in reference_models.shipped():
        return Reference(name, reference_models.load(name))
    artefact = read_artefact(Path(name))
    require_size(name, artefact)
    return Reference(Path(name).name, artefact)


def require_size(name: str, artefact: Artefact) -> None:
    """Check that a reference is small enough to be sent.

    Raises:
        InvalidInputError: it is too large.
    """
    for file, content, most in (
        (MANIFEST_FILE, artefact.manifest, MAX_MANIFEST_BYTES),
        (WEIGHTS_FILE, artefact.weights, MAX_WEIGHTS_BYTES),
    ):
        if len(content) > most:
            raise InvalidInputError(f"{name}: {file} has {len(content):,} bytes; the limit is {most:,}")


class ServedReferences:
    """The reference predictors to serve: the one from `serve --reference`, and the published ones.

    Attributes:
        from_start: digest of the one from `serve --reference`.
        pinned: digests of those in force instead, the first of them for agents that accept only one; empty if none is
            pinned.
        artefacts: all of them, by digest.
    """

    def __init__(
        self, from_start: Artefact, published: Sequence[PublishedReference] = (), pinned: Sequence[str] = ()
    ) -> None:
        """Start from what a store holds.

        Args:
            from_start: the reference from `serve --reference`.
            published: the references published before.
            pinned: digests of the pinned references.

        Raises:
            CorruptReferenceError: a published reference does not match its digest, or a pinned one is missing.
        """
        self.from_start = from_start.digest
        self.artefacts = {from_start.digest: from_start}
        for each in published:
            artefact = Artefact(each.manifest, each.weights)
            if artefact.digest != each.digest:
                raise CorruptReferenceError(
                    f"the store's reference {each.digest} has another digest, {artefact.digest}: restore the store from"
                    " a backup"
                )
            self.artefacts[each.digest] = artefact
        for digest in pinned:
            if digest not in self.artefacts:
                raise CorruptReferenceError(
                    f"the pinned reference {digest} is missing in the store: restore the store from a backup"
                )
        self.pinned = tuple(pinned)
        self._stored = {each.digest for each in published}

    @property
    def in_force(self) -> tuple[str, ...]:
        """The digests of the references in force, the first of them for agents that accept only one."""
        return self.pinned or (self.from_start,)

    def of_digest(self, digest: str) -> Artefact:
        """Get the artefact with a digest.

        Raises:
            UnknownRecordError: no reference has this digest.
        """
        if digest not in self.artefacts:
            raise UnknownRecordError(f"unknown reference predictor {digest!r}")
        return self.artefacts[digest]

    def publish(self, artefact: Artefact) -> list[PublishedReference]:
        """Serve a reference that was checked.

        Returns:
            The records to store; none if it is stored already.

        Raises:
            QuotaExceededError: too many references are kept.
        """
        self.require_room(artefact.digest)
        self.artefacts[artefact.digest] = artefact
        if artefact.digest in self._stored:
            return []
        return [PublishedReference(artefact.digest, artefact.manifest, artefact.weights)]

    def require_room(self, digest: str) -> None:
        """Check that a reference is known, or that another one may be kept.

        Raises:
            QuotaExceededError: too many references are kept.
        """
        if digest not in self.artefacts and len(self.artefacts) >= MAX_REFERENCES:
            raise QuotaExceededError(
                f"{MAX_REFERENCES} reference predictors are kept, which is the limit: remove one with"
                " `wattfleet coordinator reference remove`"
            )

    def remove(self, prefix: str) -> RemovedReference:
        """Remove a published reference.

        Args:
            prefix: its digest, or a unique prefix of it.

        Returns:
            The record to store.

        Raises:
            UnknownRecordError: no digest has this prefix.
            InvalidInputError: several digests have this prefix, it is too short, or the reference is in use.
        """
        digest = self._completed(prefix)
        if digest in self.pinned:
            raise InvalidInputError(f"reference predictor {digest[:12]} is pinned: unpin it first")
        if digest == self.from_start:
            raise InvalidInputError(
                f"reference predictor {digest[:12]} comes from `serve --reference`: it cannot be removed"
            )
        del self.artefacts[digest]
        self._stored.discard(digest)
        return RemovedReference(digest)

    def stored(self, records: Sequence[PublishedReference | PinnedReferences]) -> None:
        """Record that records are on disk."""
        self._stored |= {record.digest for record in records if isinstance(record, PublishedReference)}

    def pin(self, prefixes: Sequence[str]) -> list[PublishedReference | PinnedReferences]:
        """Put references in force.

        Args:
            prefixes: their digests, or unique prefixes of them; empty for the one from `serve --reference`.

        Returns:
            The records to store.

        Raises:
            UnknownRecordError: no digest has a prefix.
            InvalidInputError: several digests have this prefix, it is too short, or too many references are named.
        """
        if len(prefixes) > MAX_REFERENCES_IN_FORCE:
            raise InvalidInputError(f"{len(prefixes)} references are too many: pin at most {MAX_REFERENCES_IN_FORCE}")
        digests = tuple(dict.fromkeys(self._completed(prefix) for prefix in prefixes))
        # Store the one from `serve --reference` as well, because the next start may not name it.
        stored = [record for digest in digests for record in self.publish(self.artefacts[digest])]
        self.pinned = digests
        return [*stored, PinnedReferences(digests)]

    def _completed(self, prefix: str) -> str:
        if len(prefix) < _MIN_PREFIX:
            raise InvalidInputError(f"give at least {_MIN_PREFIX} characters of the digest, not {prefix!r}")
        matching = [digest for digest in self.artefacts if digest.startswith(prefix.lower())]
        if not matching:
            raise UnknownRecordError(f"no reference predictor's digest begins with {prefix!r}: publish it first")
        if len(matching) > 1:
            raise InvalidInputError(f"several digests begin with {prefix!r}: give more characters")
        return matching[0]


def check_published(artefact: Artefact) -> None:
    """Check a published reference predictor: its names, and that it works; this blocks for some seconds.

    Raises:
        CorruptReferenceError: the reference cannot predict, or needs too much memory.
        InvalidInputError: a name is too long, or the reference needs a package that is not installed.
        UncheckedReferenceError: the reference could not be checked now.
    """
    details = artefact.details
    for what, name in (
        ("kind of predictor", details.predictor),
        ("board", details.board),
        ("workload", details.workload.name),
    ):
        require_name(f"a reference's {what}", name)
    check_in_child(artefact)
