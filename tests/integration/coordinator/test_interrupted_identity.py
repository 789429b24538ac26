"""A kill between any two writes of an authority or an identity loses nothing, and the command can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography import x509

from coordinator.identity import authority_folder
from coordinator.identity.authority_folder import AuthorityFolder, adopted, folder_of, make_operator
from coordinator.state.identities import Identities
from wattfleet.common import cli
from wattfleet.common.identity import identity_folder
from wattfleet.common.identity.certificates import Certificate, matches, read_certificates
from wattfleet.common.identity.http_access import server_context
from wattfleet.common.identity.identity_folder import read_identity, write_identity
from wattfleet.common.identity.peers import Role
from wattfleet.core.errors import InvalidInputError

NOW = datetime(2026, 11, 25, tzinfo=timezone.utc)
A_DAY = timedelta(days=1)


class KilledError(BaseException):
    """Represents the end of the process."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Raise at the n-th change to a file, counted from 0; -1 for never."""
    left = [-1]

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if left[0] == 0:
                raise KilledError
            left[0] -= 1
            return change(*arguments, **options)

        return run

    for module, name in (
        (authority_folder, "replace_file"),
        (authority_folder, "remove_file"),
        (identity_folder, "replace_file"),
    ):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))

    def at(number: int) -> None:
        left[0] = number

    return at


def require_consistent(folder: AuthorityFolder) -> None:
    """Check that the server's certificate, and those that the issuer signs, are from one trusted authority."""
    trusted = read_certificates(folder.trusted_pem)
    for pem in (folder.server_pem, folder.own_identity(Role.VIEWER, "v", "", A_DAY, NOW).certificate_pem):
        [certificate] = read_certificates(pem)
        assert sum(_is_by(certificate, each) for each in trusted) == 1


def _is_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:
        return False
    return True


def killed(work: Callable[[], Any]) -> bool:
    try:
        work()
    except KilledError:
        return True
    return False


def test_init_can_be_repeated_after_a_kill_at_any_moment(tmp_path: Path, kill_at: Callable[[int], None]) -> None:
    kills = 0
    while True:
        folder = tmp_path / str(kills)
        command = ["coordinator", "init", "--identity", str(folder)]
        kill_at(kills)
        was_killed = killed(lambda command=command: CliRunner().invoke(cli.wattfleet, command))  # type: ignore[misc]
        kill_at(-1)
        before = (folder / "authority.pem").read_bytes() if AuthorityFolder.exists(folder) else None
        assert CliRunner().invoke(cli.wattfleet, command).exit_code == 0
        found, operator = AuthorityFolder.open(folder), read_identity(folder_of(folder))
        require_consistent(found)
        assert before in (None, found.authority.certificate_pem), "an authority that was there stays"
        assert operator is not None and found.authority.has_issued(operator.certificate_pem)
        if not was_killed:
            break
        kills += 1
    assert kills == 9, "five files of the authority, and four of the operator"


def test_a_rotation_can_be_continued_after_a_kill_at_any_moment(tmp_path: Path, kill_at: Callable[[int], None]) -> None:
    for number in range(100):
        folder = tmp_path / str(number)
        AuthorityFolder.create(folder, ["127.0.0.1"], NOW)
        old = AuthorityFolder.open(folder).authority.fingerprint

        def rotate(folder: Path = folder) -> None:
            AuthorityFolder.open(folder).begin_rotation(NOW).finish_rotation(NOW)

        kill_at(number)
        was_killed = killed(rotate)
        kill_at(-1)
        interrupted = AuthorityFolder.open(folder)
        require_consistent(interrupted)
        if interrupted.authority.fingerprint == old:
            if interrupted.successor is None:
                interrupted = interrupted.begin_rotation(NOW)
                require_consistent(AuthorityFolder.open(folder))
            interrupted.finish_rotation(NOW)
        found = AuthorityFolder.open(folder)
        require_consistent(found)
        assert found.successor is None and found.authority.fingerprint != old
        assert found.begin_rotation(NOW).successor is not None, "the next rotation can begin"
        if not was_killed:
            return
    pytest.fail("the rotation never came to its end")


def test_a_server_whose_renewal_was_killed_at_any_moment_serves_and_renews_again(
    tmp_path: Path, kill_at: Callable[[int], None]
) -> None:
    for number in range(100):
        folder = AuthorityFolder.create(tmp_path / str(number), ["127.0.0.1"], NOW)
        kill_at(number)
        was_killed = killed(lambda folder=folder: folder.with_new_server(NOW))  # type: ignore[misc]
        kill_at(-1)
        interrupted = AuthorityFolder.open(folder.folder)
        require_consistent(interrupted)
        require_usable(interrupted)
        renewed = interrupted.with_new_server(NOW)
        require_usable(renewed)
        assert renewed.server_pem == AuthorityFolder.open(folder.folder).server_pem
        assert (folder.folder / "server.key").read_bytes() == renewed.server_key_pem, "earlier keys are removed"
        assert len({each.server_key_pem for each in (folder, renewed)}) == 2, "the key is another one"
        if not was_killed:
            assert number == 3, "the key file twice, and the certificate"
            return
    pytest.fail("the renewal never came to its end")


def require_usable(folder: AuthorityFolder) -> None:
    """Check that key and certificate match, for gRPC and for `/metrics`."""
    assert matches(folder.server_key_pem, folder.server_pem)
    server_context(folder.server_tls)


def test_an_enrolment_can_be_repeated_after_a_kill_at_any_moment(
    tmp_path: Path, kill_at: Callable[[int], None]
) -> None:
    authority = AuthorityFolder.create(tmp_path / "authority", [], NOW)
    first, second = (authority.own_identity(Role.VIEWER, name, "", A_DAY, NOW) for name in ("first", "second"))
    for number in range(4):
        folder = tmp_path / str(number)
        write_identity(folder, first)
        kill_at(number)
        assert killed(lambda folder=folder: write_identity(folder, second))  # type: ignore[misc]
        kill_at(-1)
        with pytest.raises(InvalidInputError, match="interrupted enrolment: enrol again"):
            read_identity(folder)
        write_identity(folder, second)
        assert read_identity(folder) == second


def test_secrets_are_for_their_owner_only(tmp_path: Path) -> None:
    authority = AuthorityFolder.create(tmp_path / "authority", [], NOW)
    make_operator(authority, NOW)
    authority.begin_rotation(NOW)
    for path in (tmp_path / "authority", *(tmp_path / "authority").rglob("*")):
        is_secret = path.is_dir() or path.suffix == ".key" or path.name == "key.pem"
        assert path.stat().st_mode & 0o077 == 0 or not is_secret, path
    key = tmp_path / "authority" / "next.key"
    key.chmod(0o640)
    with pytest.raises(InvalidInputError, match="chmod 600"):
        AuthorityFolder.open(tmp_path / "authority")


def test_an_expired_operators_identity_is_made_anew(tmp_path: Path) -> None:
    authority = AuthorityFolder.create(tmp_path / "authority", [], NOW)
    assert make_operator(authority, NOW)
    assert not make_operator(authority, NOW + 364 * A_DAY)
    assert make_operator(authority, NOW + 365 * A_DAY)
    found = read_identity(folder_of(authority.folder))
    assert found is not None and found.certificate.not_after > NOW + 700 * A_DAY


@pytest.mark.parametrize("is_made_during_rotation", [False, True])
def test_the_first_operators_authority_is_noted(tmp_path: Path, is_made_during_rotation: bool) -> None:
    authority = AuthorityFolder.create(tmp_path / "authority", [], NOW)
    if not is_made_during_rotation:
        make_operator(authority, NOW)
    rotating = authority.begin_rotation(NOW)
    if is_made_during_rotation:
        make_operator(rotating, NOW)
    identities = Identities()
    [record] = adopted(rotating, identities, NOW)
    issuer = rotating.issuer if is_made_during_rotation else rotating.authority
    assert record.issuer == issuer.fingerprint.hex()
    missing = identities.not_issued_by(rotating.issuer.fingerprint.hex(), NOW)
    assert bool(missing) is not is_made_during_rotation
    assert Certificate.from_pem(rotating.server_pem).not_after > NOW
