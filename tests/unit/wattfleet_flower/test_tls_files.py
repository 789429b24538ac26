"""TLS files of a server that are replaced while it runs."""

from __future__ import annotations

import ssl
from datetime import timedelta
from pathlib import Path

import pytest

from tests.fakes.certified import CertifiedFleet
from wattfleet_flower.superlink.server_certificate import load_pair
from wattfleet_identity.certificates import new_key, request_certificate
from wattfleet_io.clock import utc_now


def shown(server: ssl.SSLContext, trusted_pem: bytes) -> bytes | None:
    """The certificate that a server's context presents to a client."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cadata=trusted_pem.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return ends[0].getpeercert(binary_form=True)


def test_a_pair_that_does_not_match_leaves_the_one_of_before_in_use(tmp_path: Path) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    pem, key = tmp_path / "server.pem", tmp_path / "server.key"

    def write(key_pem: bytes, of_pem: bytes) -> None:
        key.write_bytes(key_pem)
        request, day = request_certificate(of_pem), timedelta(days=1)
        pem.write_bytes(fleet.authority.authority.issue_superlink(request, ["localhost"], day, utc_now()))

    first, second = new_key(), new_key()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    write(first, first)
    load_pair(context, pem, key)
    before = shown(context, fleet.authority.trusted_pem)
    assert before == ssl.PEM_cert_to_DER_cert(pem.read_text())
    write(first, second)  # the key is not replaced yet
    with pytest.raises(OSError, match="KEY_VALUES_MISMATCH"):
        load_pair(context, pem, key)
    assert shown(context, fleet.authority.trusted_pem) == before
    write(second, second)
    load_pair(context, pem, key)
    assert shown(context, fleet.authority.trusted_pem) == ssl.PEM_cert_to_DER_cert(pem.read_text())
