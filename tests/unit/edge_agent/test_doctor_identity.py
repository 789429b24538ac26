"""The findings of `wattfleet agent doctor` about certificate, key, clock and plaintext connections."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from edge_agent.diagnosis import Finding, identity_findings
from edge_agent.systemd.installation import SETTINGS_PATH, InstalledConnection, ServiceSettings
from wattfleet_identity.authority import CertificateAuthority
from wattfleet_identity.certificates import new_key, request_certificate
from wattfleet_identity.identity_folder import Identity, write_identity
from wattfleet_identity.peers import Peer, Role
from wattfleet_identity.renewal import note_time

ENROLLED = datetime(2027, 3, 1, 12, tzinfo=timezone.utc)
LIFETIME = timedelta(days=30)
AWAY, HERE = "site.example:7070", "127.0.0.1:7070"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "identity"


def enrol(folder: Path, role: Role = Role.DEVICE) -> None:
    """Store an identity that was issued at ENROLLED."""
    authority, key = CertificateAuthority.create("farm", ENROLLED), new_key()
    peer = Peer("farm", role, "orin-3", board="orin-nano" if role is Role.DEVICE else "")
    certificate = authority.issue(request_certificate(key), peer, LIFETIME, ENROLLED)
    write_identity(folder, Identity(key, certificate, authority.certificate_pem, AWAY))
    note_time(folder, ENROLLED)


def look(
    folder: Path, now: datetime = ENROLLED + timedelta(days=1), service: InstalledConnection | None = None
) -> dict[str, Finding]:
    return {finding.topic: finding for finding in identity_findings(folder, service, now)}


def levels(found: dict[str, Finding]) -> dict[str, str]:
    return {topic: finding.level for topic, finding in found.items()}


def test_an_enrolled_board_is_in_order(folder: Path) -> None:
    enrol(folder)
    found = look(folder, service=InstalledConnection(AWAY, is_insecure=False))
    assert levels(found) == {"key file": "ok", "certificate": "ok", "clock": "ok", "connection": "ok"}
    assert "orin-3" in found["certificate"].found and "expires on 2027-03-31, in 29 days" in found["certificate"].found
    assert found["connection"].found == "mutual TLS"


def test_a_board_without_identity_is_told_how_to_enrol(folder: Path) -> None:
    found = look(folder)
    assert levels(found) == {"certificate": "limited", "clock": "ok", "connection": "limited"}
    assert "wattfleet agent join" in found["certificate"].advice
    assert not folder.exists()


@pytest.mark.parametrize(
    ("days", "level", "says"),
    [
        (19, "ok", "in 11 days"),
        (21, "limited", "its renewal is due"),
        (31, "fails", "expired on 2027-03-31"),
    ],
)
def test_a_certificate_near_its_end_is_pointed_out(folder: Path, days: int, level: str, says: str) -> None:
    enrol(folder)
    certificate = look(folder, ENROLLED + timedelta(days=days))["certificate"]
    assert certificate.level == level and says in certificate.found


@pytest.mark.parametrize(
    ("now", "level"),
    [
        (datetime(1970, 1, 1, 0, 5, tzinfo=timezone.utc), "fails"),
        (datetime(2023, 6, 1, tzinfo=timezone.utc), "limited"),
        (ENROLLED - timedelta(hours=1), "ok"),
    ],
)
def test_a_clock_behind_the_enrolment_is_pointed_out(folder: Path, now: datetime, level: str) -> None:
    enrol(folder)
    clock = look(folder, now)["clock"]
    assert clock.level == level and f"{now:%Y-%m-%d %H:%M} UTC" in clock.found
    assert level == "ok" or "timedatectl" in clock.advice


def test_a_clock_before_all_certificates_is_pointed_out_before_the_enrolment(folder: Path) -> None:
    assert look(folder, datetime(1970, 1, 1, tzinfo=timezone.utc))["clock"].level == "fails"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_has_to_be_repaired(folder: Path, mode: int) -> None:
    enrol(folder)
    os.chmod(folder / "key.pem", mode)
    found = look(folder)
    assert found["key file"].level == "fails" and "chmod 600" in found["key file"].advice


def test_a_folder_that_others_may_enter_is_pointed_out(folder: Path) -> None:
    enrol(folder)
    os.chmod(folder, 0o755)
    found = look(folder)
    assert found["key file"].level == "limited" and f"chmod 700 {folder}" in found["key file"].advice
    assert found["certificate"].level == "ok"


def test_a_damaged_identity_has_to_be_repaired(folder: Path) -> None:
    enrol(folder)
    (folder / "certificate.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    found = look(folder)
    assert found["certificate"].level == "fails" and "wattfleet agent join" in found["certificate"].advice


def test_a_certificate_of_another_role_is_refused(folder: Path) -> None:
    enrol(folder, Role.VIEWER)
    certificate = look(folder)["certificate"]
    assert certificate.level == "fails" and "not one of a device" in certificate.found


def installed(root: Path, coordinator: str, is_insecure: bool) -> InstalledConnection | None:
    """The connection settings of an installed service, as read back from below `root`."""
    path = root / SETTINGS_PATH.lstrip("/")
    path.parent.mkdir(parents=True)
    path.write_text(ServiceSettings("host", "orin-3", coordinator, is_insecure=is_insecure).text())
    return InstalledConnection.read(root)


def test_plaintext_to_another_machine_is_pointed_out(folder: Path, tmp_path: Path) -> None:
    connection = look(folder, service=installed(tmp_path, AWAY, is_insecure=True))["connection"]
    assert connection.level == "limited" and "anybody on the network" in connection.found


def test_plaintext_to_a_coordinator_on_this_machine_is_in_order(folder: Path, tmp_path: Path) -> None:
    connection = look(folder, service=installed(tmp_path, HERE, is_insecure=False))["connection"]
    assert connection.level == "ok" and HERE in connection.found


def test_plaintext_that_is_still_allowed_after_the_enrolment_is_pointed_out(folder: Path, tmp_path: Path) -> None:
    enrol(folder)
    connection = look(folder, service=installed(tmp_path, AWAY, is_insecure=True))["connection"]
    assert connection.level == "limited" and SETTINGS_PATH in connection.advice


def test_no_service_is_installed(tmp_path: Path) -> None:
    assert InstalledConnection.read(tmp_path) is None


@pytest.mark.parametrize(
    ("address", "is_enrolled", "is_insecure", "level", "says"),
    [
        ("127.0.0.1:9466", False, False, "ok", "for this machine only"),
        ("0.0.0.0:9466", True, False, "ok", "for viewers and operators"),
        ("0.0.0.0:9466", False, True, "limited", "anybody on the network can read"),
        ("0.0.0.0:9466", False, False, "fails", "has no certificate to protect it"),
        ("9466", False, False, "fails", "'9466' is not an address"),
    ],
)
def test_who_may_read_the_services_metrics_is_checked(
    folder: Path, address: str, is_enrolled: bool, is_insecure: bool, level: str, says: str
) -> None:
    if is_enrolled:
        enrol(folder)
    metrics = look(folder, service=InstalledConnection(HERE, is_insecure, address))["metrics"]
    assert metrics.level == level and says in metrics.found
    assert bool(metrics.advice) == (level != "ok")
