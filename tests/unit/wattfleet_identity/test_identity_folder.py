"""The folder of an identity when an enrolment and a renewal write to it at the same time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.certified import CertifiedFleet
from wattfleet_identity import identity_folder
from wattfleet_identity.certificates import request_certificate
from wattfleet_identity.identity_folder import TRUSTED, Identity, read_identity, write_identity
from wattfleet_identity.peers import Role
from wattfleet_identity.renewal import RenewalError, store_renewed
from wattfleet_io.atomic_files import replace_file
from wattfleet_io.clock import utc_now
from wattfleet_proto.v1 import enrolment_pb2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "identity"


def renewal_of(fleet: CertifiedFleet, identity: Identity) -> enrolment_pb2.RenewResponse:
    """The coordinator's response to the renewal of an identity."""
    request, remaining = request_certificate(identity.key_pem), identity.certificate.remaining(utc_now())
    pem = fleet.authority.authority.issue(request, identity.peer, remaining, utc_now())
    return enrolment_pb2.RenewResponse(certificate_pem=pem, trusted_pem=fleet.authority.trusted_pem)


def test_a_late_renewal_leaves_the_identity_of_a_new_enrolment_alone(fleet: CertifiedFleet, folder: Path) -> None:
    old, new = fleet.identity(Role.FLOWER, "app"), fleet.identity(Role.FLOWER, "app")
    write_identity(folder, old)
    answer = renewal_of(fleet, old)
    write_identity(folder, new)
    with pytest.raises(RenewalError, match="now has another identity"):
        store_renewed(folder, old, answer)
    found = read_identity(folder)
    assert found is not None and (found.key_pem, found.certificate_pem) == (new.key_pem, new.certificate_pem)


def test_an_enrolment_in_the_midst_of_a_renewal_comes_after_it(
    fleet: CertifiedFleet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fleet.identity(Role.FLOWER, "app"), fleet.identity(Role.FLOWER, "app")
    write_identity(folder, old)
    enrolling = threading.Thread(target=write_identity, args=(folder, new))

    def interrupted(path: Path, *content: Any, **options: Any) -> None:
        replace_file(path, *content, **options)
        if path.name == TRUSTED and not enrolling.ident:
            enrolling.start()
            enrolling.join(0.5)  # the enrolment waits for the renewal

    monkeypatch.setattr(identity_folder, "replace_file", interrupted)
    store_renewed(folder, old, renewal_of(fleet, old))
    enrolling.join()
    found = read_identity(folder)
    assert found is not None and (found.key_pem, found.certificate_pem) == (new.key_pem, new.certificate_pem)
