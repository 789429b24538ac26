"""Files in folders that another user can write to: nothing is written or read through a link of theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wattfleet_io.atomic_files import open_regular_file, read_regular_file, replace_file, require_own_folder


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("of root")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("name", ["outbox.jsonl", ".outbox.jsonl.draft"])
def test_a_file_is_replaced_without_following_a_planted_link(
    precious: Path, folder: Path, name: str, link: object
) -> None:
    assert callable(link)
    link(precious, folder / name)
    replace_file(folder / "outbox.jsonl", b"new")
    assert precious.read_text() == "of root"
    assert (folder / "outbox.jsonl").read_bytes() == b"new" and not (folder / "outbox.jsonl").is_symlink()
    assert [path.name for path in folder.iterdir()] == ["outbox.jsonl"]


def test_a_link_is_neither_read_nor_opened(precious: Path, folder: Path) -> None:
    (folder / "file").symlink_to(precious)
    for use in (read_regular_file, lambda path: open_regular_file(path, os.O_RDWR | os.O_CREAT)):
        with pytest.raises(OSError, match="is a symbolic link, which is not followed"):
            use(folder / "file")


def test_a_pipe_does_not_block_its_reader(folder: Path) -> None:
    os.mkfifo(folder / "file")
    with pytest.raises(OSError, match="is not a regular file"):
        read_regular_file(folder / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_writes_to_no_file_of_another_user(folder: Path) -> None:
    (folder / "file").write_text("theirs")
    os.chown(folder / "file", 1234, 1234)
    with pytest.raises(OSError, match="belongs to user 1234, not to root"):
        open_regular_file(folder / "file", os.O_RDWR)
    assert read_regular_file(folder / "file") == b"theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_root_uses_no_folder_in_which_others_can_replace_files(folder: Path) -> None:
    require_own_folder(folder)
    require_own_folder(folder / "absent")
    folder.chmod(0o777)
    with pytest.raises(OSError, match="every user may write to the folder .*: run `chmod o-w"):
        require_own_folder(folder)
    folder.chmod(0o755)
    os.chown(folder, 1234, 1234)
    with pytest.raises(OSError, match="belongs to user 1234, not to root"):
        require_own_folder(folder)


def test_an_ordinary_user_may_use_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    require_own_folder(folder)
