"""Files in the agent's state directory: the journal, damaged files, and links that another user planted."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.paths import BACKUP_FILE
from edge_agent.profiling.journal import Journal, JournalError
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.profiling.stored_profile import read_profile
from edge_agent.runtime.agent import installation_name, run_agent
from edge_agent.session.outbox import OutboxFile
from edge_agent.session.status import WelcomeFile
from edge_agent.training.mode_change import LOCK_FILE, KnobBackupError, backed_up
from tests.fakes.agent_settings import agent_settings
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    Discarded,
    JournalHeader,
    JournalledRound,
    MethodRecord,
    ModeRecord,
    PowerMode,
    Profile,
    ProfilingMethod,
    Renewal,
    read_journal,
    to_line,
)
from wattfleet.core.modes import read_profile as read_corpus

# --- Journal ----------------------------------------------------------------------------------------------------------


HEADER = JournalHeader("jetson-07", "orin-nano", "hardware", "resnet18-imagenet", 16)


def record(cores):
    return ModeRecord(
        mode=PowerMode(cores, 1_036_800, 306_000_000, 2_133_000_000),
        minibatch_ms=352.6876 / cores,
        power_mw=12_928.0 + cores,
        minibatch_spread=0.024,
        power_spread=0.013,
        minibatches=48,
        power_samples=12,
        seconds=25.1,
    )


RECORDS = [record(cores) for cores in (1, 2, 3, 4)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "profile.jsonl"


def written(path, records=RECORDS):
    with Journal.open(path, HEADER) as journal:
        for one in records:
            journal.append(one)
    return path.read_bytes()


def test_what_was_appended_is_there_on_the_next_start(path):
    written(path)
    with Journal.open(path, HEADER) as journal:
        assert list(journal.records) == RECORDS


def test_every_record_is_on_disk_before_append_returns(path):
    with Journal.open(path, HEADER) as journal:
        for count, one in enumerate(RECORDS, start=1):
            journal.append(one)
            with Journal.open(path, HEADER) as other:
                assert list(other.records) == RECORDS[:count]


def test_remaining_modes_are_those_not_measured_in_their_order(path):
    written(path, RECORDS[:2])
    modes = [one.mode for one in reversed(RECORDS)]
    with Journal.open(path, HEADER) as journal:
        assert journal.remaining(modes) == [RECORDS[3].mode, RECORDS[2].mode]


def test_a_power_cut_at_any_byte_costs_at_most_the_record_being_written(path):
    whole = written(path)
    ends = [position + 1 for position, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = max(0, sum(end <= cut for end in ends) - 1)
        with Journal.open(path, HEADER) as journal:
            assert list(journal.records) == RECORDS[:complete]
            for one in RECORDS[complete:]:
                journal.append(one)
        assert path.read_bytes() == whole


def test_the_journal_of_another_device_is_refused_and_kept(path):
    before = written(path)
    for change in ({"device_id": "jetson-08"}, {"provenance": "simulated"}, {"board_kind": "orin-nx"}):
        with pytest.raises(InvalidInputError, match=next(iter(change))):
            Journal.open(path, replace(HEADER, **change))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [b"{]\n", b"\x00\xff\n", b"[1, 2]\n", b'{"mode": [2]}\n', b'{"minibatch_ms": 2}\n', b'{"kind": "other"}\n'],
)
def test_damage_before_the_end_is_reported_and_nothing_is_lost(path, damage):
    lines = written(path).splitlines(keepends=True)
    damaged = b"".join([*lines[:2], damage, *lines[3:]])
    path.write_bytes(damaged)
    with pytest.raises(JournalError, match="profile.jsonl"):
        Journal.open(path, HEADER)
    assert path.read_bytes() == damaged


class FullDisk:
    """A disk with `room` bytes left; a write that does not fit is written in part."""

    def __init__(self, room):
        self.room = room

    def write(self, descriptor, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = os.write(descriptor, data[: self.room])
        self.room -= done
        return done


def test_on_a_full_disk_what_was_measured_is_kept_and_the_rest_goes_on_later(path):
    whole = written(path)
    path.unlink()
    disk = FullDisk(len(whole) - 5)
    with Journal.open(path, HEADER, write=disk.write) as journal:
        for one in RECORDS[:3]:
            journal.append(one)
        with pytest.raises(JournalError, match="No space left.*3 records are intact"):
            journal.append(RECORDS[3])
        assert list(journal.records) == RECORDS[:3]
        with Journal.open(path, HEADER) as other:
            assert list(other.records) == RECORDS[:3]
        disk.room = 10_000
        journal.append(RECORDS[3])
    assert path.read_bytes() == whole


def test_of_a_failed_write_nothing_is_left_behind_a_shorter_record(path):
    whole = written(path, RECORDS[:1])
    shorter = replace(RECORDS[0], minibatch_ms=1.0, seconds=1.0)
    path.unlink()
    disk = FullDisk(len(whole) - 1)
    with Journal.open(path, HEADER, write=disk.write) as journal:
        with pytest.raises(JournalError):
            journal.append(RECORDS[0])
        disk.room = 10_000
        journal.append(shorter)
        assert path.read_bytes().endswith(b"\n")
        assert list(journal.records) == [shorter]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(JournalError, match="nowhere.*No such file"):
        Journal.open(tmp_path / "nowhere" / "profile.jsonl", HEADER)


def test_it_is_json_lines_that_begin_with_what_is_measured(path):
    first, second = written(path, RECORDS[:1]).splitlines()
    assert json.loads(first) == {
        "journal": 1,
        "device_id": "jetson-07",
        "board_kind": "orin-nano",
        "provenance": "hardware",
        "workload": "resnet18-imagenet",
        "minibatch": 16,
        "basis": "",
    }
    assert json.loads(second)["mode"] == [1, 1_036_800, 306_000_000, 2_133_000_000]


MODE = RECORDS[0].mode


def test_a_first_minibatch_that_is_measured_later_counts_for_the_whole_journal(path):
    with Journal.open(path, HEADER) as journal:
        journal.append(RECORDS[0])
        assert journal.first_gcycles == 0
        journal.append(replace(RECORDS[1], first_minibatch_ms=6_750.0))
    with Journal.open(path, HEADER) as journal:
        assert journal.first_gcycles == pytest.approx(6.75 * 1.0368)


def test_a_renewal_forgets_what_a_first_minibatch_took(path):
    with Journal.open(path, HEADER) as journal:
        journal.append(replace(RECORDS[0], first_minibatch_ms=6_750.0))
        journal.append(Renewal("slower", 16))
        assert journal.first_gcycles == 0


def test_what_was_discarded_is_on_disk_and_its_mode_is_still_to_be_measured(path):
    discarded = Discarded(MODE, "throttled", 12, 9.5)
    with Journal.open(path, HEADER) as journal:
        journal.append(discarded)
    with Journal.open(path, HEADER) as journal:
        assert journal.discarded == (discarded,)
        assert (journal.records, journal.measurements) == ((), ())
        assert journal.remaining([MODE]) == [MODE]


def test_the_newest_of_a_mode_counts_measured_or_shown_by_a_round(path):
    with Journal.open(path, HEADER) as journal:
        for one in (RECORDS[0], RECORDS[1], JournalledRound(MODE, 400.0, 13_500.0)):
            journal.append(one)
    with Journal.open(path, HEADER) as journal:
        assert [(one.mode.cores, one.minibatch_ms) for one in journal.measurements] == [
            (1, 400.0),
            (2, RECORDS[1].minibatch_ms),
        ]
        assert len(journal.records) == 2


def test_the_warm_up_is_known_from_a_measurement_or_a_round(path):
    with Journal.open(path, HEADER) as journal:
        journal.append(JournalledRound(MODE, 400.0, 13_500.0))
        assert journal.first_gcycles == 0
        journal.append(JournalledRound(MODE, 400.0, 13_500.0, first_minibatch_ms=3_000.0))
    with Journal.open(path, HEADER) as journal:
        assert journal.first_gcycles == pytest.approx(3.0 * MODE.cpu_khz / 1e6)


def test_before_a_renewal_nothing_counts_and_nothing_is_lost(path):
    before = written(path)
    with Journal.open(path, HEADER) as journal:
        journal.append(Renewal("3 of 5 rounds slower", 16))
        journal.append(RECORDS[2])
    with Journal.open(path, HEADER) as journal:
        assert list(journal.records) == [RECORDS[2]]
        assert journal.renewal.modes == 16
        assert journal.remaining([MODE]) == [MODE]
    assert path.read_bytes().startswith(before)


IMPOSSIBLE = [0.0, -1.0, float("nan"), float("inf")]


@pytest.mark.parametrize("name", ["minibatch_ms", "power_mw"])
@pytest.mark.parametrize("value", IMPOSSIBLE)
def test_figures_that_cannot_be_learnt_from_make_no_record(name, value):
    with pytest.raises(InvalidInputError, match=name):
        replace(RECORDS[0], **{name: value})
    with pytest.raises(InvalidInputError, match=name):
        replace(JournalledRound(MODE, 400.0, 13_500.0), **{name: value})


@pytest.mark.parametrize("name", ["seconds", "power_spread", "minibatch_spread", "fetch_stall_ms", "compute_ms"])
@pytest.mark.parametrize("value", IMPOSSIBLE[1:])
def test_what_else_a_record_tells_is_finite_too(name, value):
    with pytest.raises(InvalidInputError, match=name):
        replace(RECORDS[0], **{name: value})
    with pytest.raises(InvalidInputError, match="first_minibatch_ms"):
        JournalledRound(MODE, 400.0, 13_500.0, first_minibatch_ms=value)


@pytest.mark.parametrize("kind", ["mode", "round"])
@pytest.mark.parametrize("name", ["minibatch_ms", "power_mw"])
@pytest.mark.parametrize("value", [*IMPOSSIBLE, "fast"])
def test_a_line_with_impossible_figures_is_refused_by_its_number_and_kept(path, kind, name, value):
    written(path, [RECORDS[0], RECORDS[1] if kind == "mode" else JournalledRound(MODE, 400.0, 13_500.0), RECORDS[2]])
    lines = path.read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), name: value})
    path.write_text("\n".join(lines) + "\n")
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"profile\.jsonl, line 3: "):
        Journal.open(path, HEADER)
    assert path.read_bytes() == before


def test_a_record_keeps_its_batch(path):
    single = replace(RECORDS[0], batch=1)
    written(path, [single, JournalledRound(RECORDS[1].mode, 400.0, 13_500.0, batch=4)])
    with Journal.open(path, HEADER) as journal:
        assert journal.records == (single,)
        assert [measured.batch for measured in journal.measurements] == [1, 4]


def test_records_without_a_batch_are_of_the_headers_minibatch(path):
    written(path, [RECORDS[0], replace(RECORDS[0], batch=4, minibatch_ms=90.0), RECORDS[1]])
    with Journal.open(path, HEADER) as journal:
        profile = Profile.of(journal.measurements)
        assert [(measured.mode.cores, measured.batch) for measured in profile.measurements()] == [
            (1, 16),
            (1, 4),
            (2, 16),
        ]
    assert read_profile(path.parent).profile.batches == (4, 16)


def test_a_newer_record_of_a_mode_and_batch_replaces_the_older(path):
    newer = replace(RECORDS[0], batch=16, minibatch_ms=90.0)
    written(path, [RECORDS[0], newer])
    with Journal.open(path, HEADER) as journal:
        (found,) = journal.measurements
        assert (found.minibatch_ms, found.batch) == (90.0, 16)


def test_a_mode_measured_with_another_batch_remains_to_be_measured(path):
    modes = [one.mode for one in RECORDS]
    written(path, [replace(RECORDS[0], batch=4), RECORDS[1]])
    with Journal.open(path, HEADER) as journal:
        assert journal.remaining(modes) == [modes[0], *modes[2:]]


@pytest.mark.parametrize("batch", [0, -1, 2.5, "4", True])
def test_a_damaged_batch_is_refused_with_its_line(path, batch):
    written(path, RECORDS[:1])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], json.dumps({**json.loads(lines[1]), "batch": batch})]) + "\n")
    with pytest.raises(JournalError, match=r"line 2: .*; move the file away"):
        Journal.open(path, HEADER)


# --- the method that selected the modes ---------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [16, 8])
def test_a_journal_is_read_as_a_corpus_with_what_it_states(path, batch):
    header = replace(HEADER, basis="VDD_IN; 4 of 8 TPCs")
    with Journal.open(path, header) as journal:
        journal.append(record(2))
        journal.append(Renewal("another board", 5))
        journal.batch = batch
        for each in (MethodRecord("grid"), record(2), Discarded(record(6).mode, "hot", 3, 1.0), record(4)):
            journal.append(each)
        journal.append(JournalledRound(record(2).mode, 99.0, 5000.0))
        kept = Profile.of(journal.measurements)
    with path.open("ab") as file:
        file.write(b'{"mode": [2,')
    origin, corpus = read_journal(path)
    assert corpus.canonical_rows() == kept.canonical_rows() == read_corpus(path).canonical_rows()
    assert len(corpus) == 2 and corpus.batches == (() if batch == 16 else (8,))
    assert (origin.board_kind, origin.provenance, origin.basis) == ("orin-nano", "hardware", "VDD_IN; 4 of 8 TPCs")
    assert (origin.workload, origin.minibatch) == ("resnet18-imagenet", 16)


FIRST_LINE = (
    b'{"journal": 1, "device_id": "d", "board_kind": "b", "workload": "w", "provenance": "hardware", "minibatch": 1}\n'
)
LINE = json.dumps(to_line(ModeRecord(PowerMode(1, 2, 3, 4), 5.0, 6.0, 0.1, 0.1, 7, 8, 9.0))).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a whole journal"),
        (b"cores,cpu_khz\n", "is not a whole journal"),
        (b"[]\n", "is not a whole journal"),
        (b'{"mode": [1, 2, 3, 4]}\n', "is not a whole journal"),
        (b'{"journal": 2}\n', "its format is 2, but this version of Wattfleet reads 1"),
        (FIRST_LINE.replace(b'"b"', b"3"), "a field has another type"),
        (FIRST_LINE.replace(b'"device_id"', b'"owner"'), "owner"),
        (FIRST_LINE.replace(b'"hardware"', b'"guessed"'), "provenance must be one of simulated, .*, not 'guessed'"),
        (
            FIRST_LINE + LINE + LINE.replace(b"minibatch_ms", b"batch_ms"),
            "line 3: unknown or missing",
        ),
        (FIRST_LINE + LINE.replace(b"5.0", b"-5.0"), "line 2: minibatch_ms must be"),
        (FIRST_LINE + LINE.replace(b"5.0", b"NaN"), "line 2: minibatch_ms must be"),
        (FIRST_LINE + LINE.replace(b"5.0", b"true"), "line 2: minibatch_ms has another type"),
        (FIRST_LINE + LINE.replace(b"[1, 2, 3, 4]", b"[1, 2, 3]"), "line 2: "),
        (FIRST_LINE + b'{"kind": "renewal"}\n', "line 2: "),
        (FIRST_LINE + b'{"kind": "method", "method": "dice"}\n', "line 2: the method must be one of"),
        (FIRST_LINE, "holds no measured mode"),
        (FIRST_LINE + b'{"kind": "guess"}\n', "line 2: unknown or missing 'guess'"),
    ],
)
def test_a_corpus_that_is_not_a_journal_is_refused_with_what_to_give(path, content, said):
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=said):
        read_journal(path)


def test_a_journal_without_a_method_was_measured_by_transfer(path):
    written(path)
    assert read_profile(path.parent).method is ProfilingMethod.TRANSFER


def test_the_last_method_is_read_back_and_a_renewal_begins_with_transfer(path):
    written(path, [*RECORDS[:1], MethodRecord("scratch"), *RECORDS[1:2], MethodRecord("binary-search")])
    assert read_profile(path.parent).method is ProfilingMethod.BINARY_SEARCH
    assert read_profile(path.parent).measured_modes == 2
    with Journal.open(path, HEADER) as journal:
        journal.append(Renewal("slower", 16))
        assert journal.method is ProfilingMethod.TRANSFER


@pytest.mark.parametrize("method", ['"luck"', "7", "null"])
def test_a_line_with_an_unknown_method_is_damaged(path, method):
    written(path)
    with path.open("a") as file:
        file.write(f'{{"kind": "method", "method": {method}}}\n')
    with pytest.raises(JournalError, match="line 6: .*move the file away to measure again"):
        Journal.open(path, HEADER)


def test_a_closed_journal_writes_into_no_other_file(path, tmp_path):
    journal = Journal.open(path, HEADER)
    journal.close()
    journal.close()
    with open(tmp_path / "other", "wb") as other:  # it gets the file descriptor number that the journal had
        other.write(b"something else")
        other.flush()
        with pytest.raises(JournalError, match="cannot be written"):
            journal.append(RECORDS[0])
    assert (tmp_path / "other").read_bytes() == b"something else"


# --- Damaged state files ----------------------------------------------------------------------------------------------
# State files with arbitrary content: each one gives a typed one-line error or a fresh start.

MODE_ROW = [6, 1_510_400, 624_750_000, 2_133_000_000]
RECORD: dict[str, Any] = {
    "mode": MODE_ROW,
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


# --- Planted links ----------------------------------------------------------------------------------------------------
# Links that another user planted in the state directory: the agent follows none of them.

SECRET = "root:$6$salt$hash:19000::::::\n"


@pytest.fixture
def shadow(tmp_path: Path) -> Path:
    """A file that only root can read."""
    path = tmp_path / "shadow"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def test_a_journal_behind_a_link_is_refused(shadow: Path, state: Path) -> None:
    (state / "profile.jsonl").symlink_to(shadow)
    with pytest.raises(JournalError, match="profile.jsonl: cannot be opened: is a symbolic link"):
        Journal.open(state / "profile.jsonl", HEADER)
    assert shadow.read_text() == SECRET


def test_a_new_journal_is_not_created_behind_a_link(tmp_path: Path, state: Path) -> None:
    (state / "profile.jsonl").symlink_to(tmp_path / "cron.d")
    with pytest.raises(JournalError, match="is a symbolic link"):
        Journal.open(state / "profile.jsonl", HEADER)
    assert not (tmp_path / "cron.d").exists()


def test_a_lock_behind_a_link_is_refused(shadow: Path, state: Path) -> None:
    (state / LOCK_FILE).symlink_to(shadow)
    with pytest.raises(KnobBackupError, match="is a symbolic link"), backed_up(SimulatedDevice("orin-nano", 1), state):
        pass
    assert shadow.read_text() == SECRET


def test_an_outbox_behind_a_link_is_not_copied_to_where_others_can_read_it(shadow: Path, state: Path) -> None:
    (state / "outbox.jsonl").symlink_to(shadow)
    assert OutboxFile(state / "outbox.jsonl").load() == []
    assert not list(state.glob("*.damaged"))


def test_an_installation_name_behind_a_link_is_replaced(shadow: Path, state: Path) -> None:
    (state / "installation").symlink_to(shadow)
    name = installation_name(state / "installation")
    assert installation_name(state / "installation") == name
    assert shadow.read_text() == SECRET


@pytest.mark.skipif(os.geteuid() != 0, reason="an agent of an ordinary user may use any folder")
@pytest.mark.parametrize("which", ["state directory", "device folder"])
def test_an_agent_of_root_refuses_a_directory_that_everybody_can_write_to(tmp_path: Path, which: str) -> None:
    state, device_folder = tmp_path / "state", tmp_path / "device"
    state.mkdir()
    device_folder.mkdir()
    (state if which == "state directory" else device_folder).chmod(0o777)
    board = SimulatedDevice("orin-nano", 1)
    running = run_agent(agent_settings(state), board, built_in_workload(board.step), device_folder, asyncio.Event())
    with pytest.raises((InvalidInputError, KnobBackupError), match="every user may write to the folder"):
        asyncio.run(asyncio.wait_for(running, 30))
