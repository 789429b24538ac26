"""Signed metadata of references as bytes: signing it, parsing it, and checking its signatures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, Root, Snapshot, Targets, Timestamp

from wattfleet.errors import InvalidInputError
from wattfleet_proto.message_sizes import MAX_METADATA_BYTES
from wattfleet_proto.signed_references import MAX_ROOTS

Role = TypeVar("Role", Root, Targets, Snapshot, Timestamp)


def signed_bytes(content: Role, signers: Sequence[CryptoSigner]) -> bytes:
    """Sign metadata with keys, and return the bytes of its file."""
    metadata = Metadata(content)
    for signer in signers:
        metadata.sign(signer, append=True)
    return metadata.to_bytes()


def expiry(now: datetime, valid_for: timedelta) -> datetime:
    """When metadata that is signed now expires; TUF counts whole seconds."""
    return (now + valid_for).replace(microsecond=0)


def next_root(before: Root | None, content: bytes, root: Root) -> Root:
    """Parse the root that follows another one.

    Raises:
        InvalidInputError: it is not the next version, or lacks signatures.
    """
    expected = 1 if before is None else before.version + 1
    if root.version != expected:
        raise InvalidInputError(f"the root has version {root.version}, but version {expected} comes next: publish all")
    if root.version > MAX_ROOTS:
        raise InvalidInputError(f"agents follow at most {MAX_ROOTS} versions of a root: start again with new keys")
    if before is not None:
        require_signed(before, content, Root)
    require_signed(root, content, Root)
    return root


def require_signed(by: Root, content: bytes, kind: type[Role]) -> None:
    """Check that parsed metadata is signed with enough of the keys that a root trusts.

    Raises:
        InvalidInputError: signatures are missing.
    """
    metadata = Metadata[Role].from_bytes(content)
    try:
        by.verify_delegate(kind.type, metadata.signed_bytes, metadata.signatures)
    except (RepositoryError, ValueError) as error:
        raise InvalidInputError(f"the signed {kind.type} lacks signatures of the keys that the root trusts") from error


def parsed(content: bytes, kind: type[Role]) -> Role:
    """Parse a file of metadata without checking its signatures.

    Raises:
        InvalidInputError: it is too large, damaged or of another kind.
    """
    if len(content) > MAX_METADATA_BYTES:
        raise InvalidInputError(
            f"the signed {kind.type} has {len(content):,} bytes; the limit is {MAX_METADATA_BYTES:,}"
        )
    try:
        signed = Metadata[Role].from_bytes(content).signed
    except (RepositoryError, RecursionError):
        raise InvalidInputError(f"the signed {kind.type} is damaged") from None
    if not isinstance(signed, kind):
        raise InvalidInputError(f"the signed {kind.type} has another type")
    return signed
