"""The folders of an identity and of a device's SuperNode: their files, and who may read and write them."""

from __future__ import annotations

import grp
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from tests.fakes.served import CertifiedFleet
from wattfleet.common.atomic_files import replace_file
from wattfleet.common.clock import utc_now
from wattfleet.common.identity import identity_folder
from wattfleet.common.identity.certificates import request_certificate
from wattfleet.common.identity.identity_folder import Identity, read_identity, write_identity
from wattfleet.common.identity.peers import Role
from wattfleet.common.identity.renewal import RenewalError, store_renewed
from wattfleet.common.identity.supernode_folder import (
    FACTS,
    KEY,
    TRUSTED,
    SuperNodeFacts,
    SuperNodeKey,
    read_facts,
    update_supernode,
    write_supernode,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.v1 import enrolment_pb2

# --- Identity folder --------------------------------------------------------------------------------------------------
# The folder of an identity when an enrolment and a renewal write to it at the same time.


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
        if path.name == identity_folder.TRUSTED and not enrolling.ident:
            enrolling.start()
            enrolling.join(0.5)  # the enrolment waits for the renewal

    monkeypatch.setattr(identity_folder, "replace_file", interrupted)
    store_renewed(folder, old, renewal_of(fleet, old))
    enrolling.join()
    found = read_identity(folder)
    assert found is not None and (found.key_pem, found.certificate_pem) == (new.key_pem, new.certificate_pem)


# --- The folder of a SuperNode ----------------------------------------------------------------------------------------
# The folder of a device's SuperNode: its files, and who may read them.


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    own = CertifiedFleet.create(tmp_path / "authority").identity(Role.DEVICE, "orin-3")
    return replace(own, superlink="site.example:8000")


@pytest.fixture(autouse=True)
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """No group `wattfleet` exists, even if this machine has one."""

    def missing(name: str) -> object:
        raise KeyError(name)

    monkeypatch.setattr(grp, "getgrnam", missing)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_key_is_one_that_flower_takes() -> None:
    key = SuperNodeKey.create()
    private, public = load_ssh_private_key(key.private, None), load_ssh_public_key(key.public)
    assert isinstance(private, ec.EllipticCurvePrivateKey) and isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public


def test_only_its_owner_reads_it_without_the_group(tmp_path: Path, identity: Identity) -> None:
    folder = tmp_path / "state/supernode"
    write_supernode(folder, SuperNodeKey.create(), identity)
    assert (mode(folder), mode(folder / KEY)) == (0o700, 0o600)
    assert read_facts(folder) == SuperNodeFacts("orin-3", "site.example:8000")


def test_the_group_may_read_it_and_nobody_else(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grp, "getgrnam", lambda name: SimpleNamespace(gr_gid=os.getgid()))
    folder = tmp_path / "state/supernode"
    write_supernode(folder, SuperNodeKey.create(), identity)
    assert mode(folder) == 0o750
    assert {mode(folder / name) for name in (KEY, TRUSTED, FACTS)} == {0o640}
    assert (folder / KEY).stat().st_gid == os.getgid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to a group")
@pytest.mark.parametrize(("before", "gid"), [(0o750, 4321), (0o755, 0)])
def test_the_group_may_enter_the_state_directory_if_other_users_may_not(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch, before: int, gid: int
) -> None:
    monkeypatch.setattr(grp, "getgrnam", lambda name: SimpleNamespace(gr_gid=4321))
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(before)
    write_supernode(state / "supernode", SuperNodeKey.create(), identity)
    assert (mode(state), state.stat().st_gid) == (before, gid)
    assert (state / "supernode" / KEY).stat().st_gid == 4321


def test_a_renewal_changes_everything_but_the_key(tmp_path: Path, identity: Identity) -> None:
    folder = tmp_path / "supernode"
    write_supernode(folder, SuperNodeKey.create(), identity)
    key = (folder / KEY).read_bytes()
    other = CertifiedFleet.create(tmp_path / "next").authority.trusted_pem
    renewed = replace(identity, trusted_pem=identity.trusted_pem + other, superlink="10.0.0.5:8000")
    update_supernode(folder, renewed, "/run/other.sock")
    assert read_facts(folder) == SuperNodeFacts("orin-3", "10.0.0.5:8000", "/run/other.sock")
    assert (folder / TRUSTED).read_bytes() == renewed.trusted_pem and (folder / KEY).read_bytes() == key
    update_supernode(folder, replace(renewed, superlink=""))
    assert read_facts(folder) == SuperNodeFacts("orin-3", "10.0.0.5:8000", "/run/other.sock")


def test_a_device_without_a_key_is_left_alone(tmp_path: Path, identity: Identity) -> None:
    update_supernode(tmp_path / "supernode", identity)
    assert read_facts(tmp_path / "supernode") is None and not (tmp_path / "supernode").exists()


def test_a_damaged_folder_names_the_remedy(tmp_path: Path, identity: Identity) -> None:
    folder = tmp_path / "supernode"
    write_supernode(folder, SuperNodeKey.create(), identity)
    (folder / FACTS).write_text("[]")
    with pytest.raises(InvalidInputError, match="enrol again with `wattfleet agent join`"):
        read_facts(folder)
    (folder / FACTS).unlink()
    with pytest.raises(InvalidInputError, match="enrol again"):
        read_facts(folder)
