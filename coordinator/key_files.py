"""Private keys in files that only their owner may read."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.signer import CryptoSigner, SSlibKey

from wattfleet.errors import InvalidInputError
from wattfleet_identity.identity_folder import require_secret
from wattfleet_io.atomic_files import read_regular_file, sync_folder

SHOWN_DIGITS = 8
"""The number of digits of a key's id that distinguish the keys of one fleet."""


def create_key(folder: Path, name: str) -> CryptoSigner:
    """Create an Ed25519 key in a file `NAME-ID.pem` that only its owner may read, and sync it to disk.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    signer = CryptoSigner.generate_ed25519()
    write_key(key_file(folder, name, signer.public_key.keyid), signer)
    return signer


def key_file(folder: Path, name: str, keyid: str) -> Path:
    """The path of the private key with an id in a folder."""
    return folder / f"{name}-{keyid[:SHOWN_DIGITS]}.pem"


def write_key(path: Path, signer: CryptoSigner) -> None:
    """Write a private key to a new file that only its owner may read.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(signer.private_bytes)
            file.flush()
            os.fsync(descriptor)
        sync_folder(path.parent)
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from None


def load_key(path: Path) -> CryptoSigner:
    """Load a private key.

    Raises:
        InvalidInputError: the file cannot be read, is not a private key of a supported kind, or others may read it.
    """
    try:
        require_secret(path)
        return CryptoSigner(load_pem_private_key(read_regular_file(path), None))
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InvalidInputError(f"{path}: is not an unencrypted private key in PEM format") from None


def public_pem(key: SSlibKey) -> str:
    """Encode a public key as PEM."""
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.keyval["public"]))
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def key_of_pem(pem: str) -> SSlibKey:
    """Decode a public key in PEM format.

    Raises:
        InvalidInputError: the text is not a public key.
    """
    try:
        return SSlibKey.from_crypto(load_pem_public_key(pem.encode()))
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidInputError("the coordinator did not send a public key in PEM format: update it") from None
