"""What an agent keeps of the viewers who were revoked."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent.session.certificate_keeper import RevokedCertificates


def test_they_are_known_after_a_restart_until_the_coordinator_names_others(tmp_path: Path) -> None:
    file = tmp_path / "state" / "revoked.json"
    RevokedCertificates(file).receive(["1f", "a0"])
    after = RevokedCertificates(file)
    assert [each for each in ("1f", "a0", "b1") if after.is_revoked(each)] == ["1f", "a0"]
    after.receive(["b1"])
    assert [each for each in ("1f", "a0", "b1") if RevokedCertificates(file).is_revoked(each)] == ["b1"]


def test_a_damaged_file_is_reported_and_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "revoked.json"
    file.write_text("{")
    found = RevokedCertificates(file)
    assert not found.is_revoked("1f") and f"{file}: cannot be read" in caplog.text
    found.receive(["1f"])
    assert RevokedCertificates(file).is_revoked("1f")


def test_they_count_even_if_they_cannot_be_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("not a folder")
    found = RevokedCertificates(tmp_path / "state" / "revoked.json")
    found.receive(["1f"])
    assert found.is_revoked("1f") and "revoked viewers may read until the coordinator is reached" in caplog.text
