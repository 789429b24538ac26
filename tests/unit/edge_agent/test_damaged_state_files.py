"""State files with arbitrary content: each one gives a typed one-line error or a fresh start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.profiling.journal import Journal, JournalError, JournalHeader
from edge_agent.profiling.stored_profile import read_profile
from edge_agent.session.outbox import OutboxFile
from edge_agent.session.status import WelcomeFile
from edge_agent.training.mode_change import BACKUP_FILE, KnobBackupError, backed_up
from wattfleet.errors import InvalidInputError

HEADER = JournalHeader("jetson-07", "orin-nano", "hardware", "resnet18-imagenet", 16)
MODE = [6, 1_510_400, 624_750_000, 2_133_000_000]
RECORD: dict[str, Any] = {
    "mode": MODE,
    "minibatch_ms": 100.0,
    "power_mw": 9000.0,
    "minibatch_spread": 0.1,
    "power_spread": 0.1,
    "minibatches": 40,
    "power_samples": 12,
    "seconds": 20.0,
}
DEEP = [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 400 + b"]" * 400, b'{"mode":' * 90 + b"1" + b"}" * 90]
NUMBERS = [b"9" * 5000, b'{"mode": [1, 2, 3, ' + b"9" * 4200 + b"]}", b'{"minibatch_ms": ' + b"9" * 400 + b"}"]
DAMAGED = [
    *DEEP,
    *NUMBERS,
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"kind": []}',
    b'{"kind": "renewal", "reason": 1, "modes": "x"}',
]


def changed(**values: Any) -> bytes:
    return json.dumps({**RECORD, **values}).encode()


WRONG_RECORDS = [
    changed(mode=None),
    changed(mode=[1, 2, 3]),
    changed(mode=[1, 2, 3, "4"]),
    changed(mode=[1, 2, 3, -4]),
    changed(mode=[1.5, 2, 3, 4]),
    changed(mode={"cores": 1}),
    changed(minibatch_ms="100"),
    changed(minibatch_ms=True),
    changed(minibatches=1.5),
    changed(minibatches=-1),
    changed(seconds=None),
    changed(unknown=1),
    changed(kind="discarded", reason=["x"]),
    b'{"kind": "discarded", "mode": [1, 2, 3, 4], "reason": "x", "minibatches": 1, "seconds": "1"}',
    b'{"kind": "discarded", "mode": [1, 2, 3, 4], "reason": "x", "minibatches": 1, "seconds": NaN}',
    b'{"kind": "renewal", "reason": "x", "modes": 1e300}',
]


def journal_with(path: Path, *lines: bytes) -> Path:
    with Journal.open(path, HEADER):
        pass
    path.write_bytes(path.read_bytes() + b"".join(line + b"\n" for line in lines))
    return path


def require_one_line(error: BaseException) -> None:
    assert "\n" not in str(error) and len(str(error)) < 500


@pytest.mark.parametrize("line", [*DAMAGED, *WRONG_RECORDS], ids=range(len(DAMAGED) + len(WRONG_RECORDS)))
def test_a_damaged_record_is_a_journal_error(tmp_path: Path, line: bytes) -> None:
    path = journal_with(tmp_path / "profile.jsonl", changed(), line)
    before = path.read_bytes()
    with pytest.raises(JournalError, match="line 3") as raised:
        Journal.open(path, HEADER)
    require_one_line(raised.value)
    with pytest.raises(JournalError, match="profile.jsonl, line 3"):
        read_profile(tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_first_line_is_a_typed_error(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "profile.jsonl").write_bytes(line + b"\n")
    with pytest.raises((JournalError, InvalidInputError)) as raised:
        Journal.open(tmp_path / "profile.jsonl", HEADER)
    require_one_line(raised.value)
    with pytest.raises(JournalError, match="line 1"):
        read_profile(tmp_path)


@pytest.mark.parametrize("line", [b'{"journal": 1, "device_id": "%s"}' % (b"x" * 10_000)])
def test_the_journal_of_something_long_is_refused_in_a_short_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "profile.jsonl").write_bytes(line + b"\n")
    with pytest.raises(InvalidInputError) as raised:
        Journal.open(tmp_path / "profile.jsonl", HEADER)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_knob_backup_is_a_typed_error_and_stays(tmp_path: Path, content: bytes) -> None:
    (tmp_path / BACKUP_FILE).write_bytes(content)
    with (
        pytest.raises(KnobBackupError, match="is damaged") as raised,
        backed_up(SimulatedDevice("orin-nano", 1), tmp_path),
    ):
        pass
    require_one_line(raised.value)
    assert (tmp_path / BACKUP_FILE).read_bytes() == content


@pytest.mark.parametrize("mode", ["[" * 100_000, "[6, 1510400, 624750000, " + "9" * 5000 + "]", "[1, 2, 3, 1e400]"])
def test_a_knob_that_holds_no_mode_is_a_typed_error(tmp_path: Path, mode: str) -> None:
    content = {"kept": 1, "board_kind": "orin-nano", "knobs": {"mode": mode}}
    (tmp_path / BACKUP_FILE).write_text(json.dumps(content))
    with pytest.raises(InvalidInputError) as raised, backed_up(SimulatedDevice("orin-nano", 1), tmp_path):
        pass
    require_one_line(raised.value)


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_outbox_or_welcome_is_a_fresh_start(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    for name in ("outbox.jsonl", "welcome.json"):
        (tmp_path / name).write_bytes(content)
    assert OutboxFile(tmp_path / "outbox.jsonl").load() == []
    assert WelcomeFile(tmp_path / "welcome.json").load() is None
    assert "skipped damaged lines" in caplog.text and "welcome.json: is damaged" in caplog.text
    assert all(len(record.getMessage()) < 600 for record in caplog.records)


@pytest.mark.parametrize(
    "line", ['{"front": {"idle_w": %s}}', '{"observation": {"plan_id": "a", "epoch_s": %s, "power_w": 1}}']
)
@pytest.mark.parametrize("number", ["9" * 4200, "9" * 400, '"' + "9" * 5000 + '"', "1e999"])
def test_a_number_that_is_too_large_is_a_damaged_line_of_the_outbox(tmp_path: Path, line: str, number: str) -> None:
    (tmp_path / "outbox.jsonl").write_text(line % number + "\n")
    assert OutboxFile(tmp_path / "outbox.jsonl").load() == []
