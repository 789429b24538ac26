"""Converts an identity to a file for browsers: PKCS #12 with the key, the certificate and its authorities."""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, pkcs12

from wattfleet.errors import InvalidInputError
from wattfleet_identity.certificates import read_key
from wattfleet_identity.http_access import VIEWING
from wattfleet_identity.identity_folder import Identity


def browser_bundle(identity: Identity, password: str) -> bytes:
    """Convert an identity to one file.

    Args:
        identity: the identity of a viewer or an operator.
        password: encrypts the key; a browser prompts for it at the import.

    Returns:
        The file's content, in DER.

    Raises:
        InvalidInputError: the identity's role may not read the coordinator's page.
    """
    peer = identity.peer
    if peer.role not in VIEWING:
        raise InvalidInputError(
            f"the page is only for viewers and operators, but this is the identity of {peer}: name another folder with"
            " --identity, or enrol with an invite from `wattfleet coordinator invite --role viewer`"
        )
    return pkcs12.serialize_key_and_certificates(
        f"Wattfleet {peer}".encode(),
        read_key(identity.key_pem),
        x509.load_pem_x509_certificate(identity.certificate_pem),
        x509.load_pem_x509_certificates(identity.trusted_pem),
        BestAvailableEncryption(password.encode()),
    )
