"""The name of an agent's installation: it survives restarts, and errors with its file do not stop the agent."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from edge_agent.runtime.agent import installation_name


def test_the_name_is_made_once_and_differs_from_that_of_another_installation(tmp_path: Path) -> None:
    name = installation_name(tmp_path / "state" / "installation")
    assert installation_name(tmp_path / "state" / "installation") == name
    assert installation_name(tmp_path / "other" / "installation") != name


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff\xfe", b"../../etc/passwd\n"])
def test_a_damaged_name_is_made_anew_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "installation"
    path.write_bytes(content)
    name = installation_name(path)
    assert len(name) == 32
    assert installation_name(path) == name


def test_a_name_that_cannot_be_kept_serves_this_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    assert len(installation_name(tmp_path / "file" / "installation")) == 32
    assert "cannot be written" in caplog.text


def test_other_users_may_not_enter_a_new_or_an_existing_state_directory(tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path / "old"):
        if folder.name == "old":
            installation_name(folder / "installation")
            folder.chmod(0o755)
        installation_name(folder / "installation")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750
