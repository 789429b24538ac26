"""Files that another user may have written: no link is followed, and parsing them ends in one short line."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from wattfleet.common.atomic_files import (
    make_state_folder,
    open_regular_file,
    read_regular_file,
    replace_file,
    require_file_of,
    require_own_folder,
)
from wattfleet.common.parsing import parse_json, parse_json_object, parse_toml

# --- Atomic files -----------------------------------------------------------------------------------------------------
# Files in folders that another user can write to: no write or read follows that user's links.


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
def test_a_file_is_replaced_without_following_a_planted_link(precious: Path, folder: Path, link: object) -> None:
    assert callable(link)
    link(precious, folder / "outbox.jsonl")
    replace_file(folder / "outbox.jsonl", b"new")
    assert precious.read_text() == "of root"
    assert (folder / "outbox.jsonl").read_bytes() == b"new" and not (folder / "outbox.jsonl").is_symlink()
    assert [path.name for path in folder.iterdir()] == ["outbox.jsonl"]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_place_of_the_draft_is_not_followed(
    precious: Path, folder: Path, link: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(link)
    monkeypatch.setattr("wattfleet.common.atomic_files.secrets.token_hex", lambda count: "guessed")
    link(precious, folder / ".outbox.jsonl.guessed.draft")
    with pytest.raises(FileExistsError):
        replace_file(folder / "outbox.jsonl", b"new")
    assert precious.read_text() == "of root"


def test_two_writers_do_not_mix(folder: Path) -> None:
    path, contents = folder / "outbox.jsonl", {"first": b"first " * 100, "second": b"second " * 100}

    def interrupted(descriptor: int, content: bytes) -> int:
        """Write a part of the content, after another writer has replaced the file."""
        if len(content) == len(contents["first"]):
            replace_file(path, contents["second"], part)
        return part(descriptor, content)

    def part(descriptor: int, content: bytes) -> int:
        return os.write(descriptor, content[:50])

    replace_file(path, contents["first"], interrupted)
    assert path.read_bytes() == contents["first"]
    assert [each.name for each in folder.iterdir()] == ["outbox.jsonl"]


def test_the_draft_of_a_killed_writer_is_removed_and_that_of_a_live_one_is_not(folder: Path) -> None:
    killed, live = folder / ".outbox.jsonl.0a0a0a0a.draft", folder / ".outbox.jsonl.0b0b0b0b.draft"
    for each in (killed, live, folder / ".other.0a0a0a0a.draft"):
        each.write_text("half")
    for each in (killed, folder / ".other.0a0a0a0a.draft"):
        os.utime(each, (0, 0))
    replace_file(folder / "outbox.jsonl", b"new")
    assert not killed.exists()
    assert sorted(each.name for each in folder.iterdir()) == [".other.0a0a0a0a.draft", live.name, "outbox.jsonl"]


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


def test_a_file_that_others_can_change_or_replace_is_told_with_what_to_run(folder: Path) -> None:
    path, me = folder / "file", os.geteuid()
    path.write_text("mine")
    folder.chmod(0o755)
    path.chmod(0o644)
    require_file_of(path, me)
    for each, mode in ((path, 0o664), (path, 0o646), (folder, 0o775), (folder, 0o777)):
        before = mode_of(each)
        each.chmod(mode)
        with pytest.raises(OSError, match=f"other users may write to {each}: run `chmod go-w {each}`"):
            require_file_of(path, me)
        each.chmod(before)
    (folder / "link").symlink_to(path)
    with pytest.raises(OSError, match="is a symbolic link"):
        require_file_of(folder / "link", me)


def test_a_file_of_another_user_is_told_with_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("theirs")
    as_theirs = os.stat_result((0o100644, 0, 0, 1, 1234, 1234, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda path, **_: as_theirs)
    with pytest.raises(OSError, match="belongs to user 1234, not to root: run `chown root "):
        require_file_of(tmp_path / "file")


def test_an_ordinary_user_may_use_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    require_own_folder(folder)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_other_users_may_not_enter_a_new_state_folder(folder: Path) -> None:
    make_state_folder(folder / "state" / "workloads")
    make_state_folder(folder / "state" / "workloads")
    assert [mode_of(folder / each) for each in ("state", "state/workloads")] == [0o750, 0o750]
    (folder / "file").write_text("in the way")
    with pytest.raises(OSError, match="exists"):
        make_state_folder(folder / "file")


# --- Parsing ----------------------------------------------------------------------------------------------------------
# Parsing JSON and TOML files: every error is a ValueError with one short line.


@pytest.mark.parametrize("content", [{"mode": [6, 1510400, -5, 2**63 - 1]}, [1.5, None, True, "text"], 3, {}])
def test_ordinary_documents_are_parsed(content: object) -> None:

    assert parse_json(json.dumps(content)) == content
    assert parse_json(json.dumps(content).encode()) == content


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested"),
        ("[" * 500 + "]" * 500, "nested"),
        ('{"a":' * 17 + "1" + "}" * 17, "nested"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
        ("-" + "9" * 20, "digits"),
        ("{", "Expecting"),
        (b"\xff\xfe\xfd", "decode"),
    ],
)
def test_what_cannot_be_used_is_a_value_error(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        parse_json(text)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "text",
    [
        "a." * 100_000 + "a = 1",
        "[" + "a." * 100_000 + "a]",
        "b = {" + '"a" . ' * 100_000 + "a = 1}",
        "b = {c = 1, " + "'a'." * 100_000 + "a = 1}",
    ],
)
def test_a_toml_key_of_100000_parts_is_refused_before_it_is_parsed(text: str) -> None:
    with pytest.raises(ValueError, match="a key has more than 16 parts"):
        parse_toml(text.encode())


def test_toml_strings_may_have_any_number_of_dots() -> None:
    text = "a." * 100
    assert parse_toml(f'a.b.c = "{text}"\nd = ["{text}", \'{text}\']\n'.encode()) == {
        "a": {"b": {"c": text}},
        "d": [text, text],
    }


@pytest.mark.parametrize("text", ["[1]", "null", "{", b"\xff"])
def test_what_is_no_json_object_is_refused(text: str | bytes) -> None:
    assert parse_json_object('{"a": 1}') == {"a": 1}
    with pytest.raises(ValueError):
        parse_json_object(text)
