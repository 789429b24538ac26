"""Profiles of several batch sizes and of inference, and errors in their CSV files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattfleet.errors import InvalidInputError
from wattfleet.modes import (
    Measurement,
    PowerMode,
    Profile,
    Task,
    read_profile,
    require_one_training,
    require_same_task,
    write_profile,
)

HEADER = "cores,cpu_khz,gpu_hz,mem_hz,batch,batch_ms,power_mw"
FAST = "12,2201600,1300500000,3199000000"
SLOW = "4,729600,318750000,665600000"
ROWS = [f"{FAST},1,9.5,21000", f"{FAST},32,57.25,36500", f"{SLOW},1,40.5,12000"]
FAST_MODE = PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000)
SLOW_MODE = PowerMode(4, 729_600, 318_750_000, 665_600_000)


def csv(directory: Path, *lines: str) -> Path:
    path = directory / "profile.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InvalidInputError) as caught:
        read_profile(path)
    text = str(caught.value)
    assert text.startswith(str(path)), "the file is named first"
    assert "\n" not in text, "a command prints it on one line"
    return text


def test_a_mode_may_have_a_row_for_each_batch(tmp_path: Path) -> None:
    profile = read_profile(csv(tmp_path, HEADER, *ROWS))
    assert profile.measurements() == [
        Measurement(FAST_MODE, 9.5, 21_000, 1),
        Measurement(FAST_MODE, 57.25, 36_500, 32),
        Measurement(SLOW_MODE, 40.5, 12_000, 1),
    ]
    assert profile.batches == (1, 32)


@pytest.mark.parametrize(("column", "task"), [("batch_ms", Task.INFERENCE), ("minibatch_ms", Task.TRAINING)])
def test_the_times_column_names_the_task(tmp_path: Path, column: str, task: Task) -> None:
    assert read_profile(csv(tmp_path, HEADER.replace("batch_ms", column), *ROWS)).task is task


def test_inference_needs_no_batch_column(tmp_path: Path) -> None:
    profile = read_profile(csv(tmp_path, HEADER.replace("batch,", ""), f"{FAST},9.5,21000"))
    assert profile.measurements() == [Measurement(FAST_MODE, 9.5, 21_000)]
    assert (profile.task, profile.batch, profile.batches) == (Task.INFERENCE, None, ())


@pytest.mark.parametrize("header", [HEADER, HEADER.replace("batch_ms", "minibatch_ms")])
def test_a_file_is_written_as_it_was_read(tmp_path: Path, header: str) -> None:
    path = csv(tmp_path, header, *ROWS)
    write_profile(read_profile(path), tmp_path / "again.csv")
    lines = (tmp_path / "again.csv").read_text().splitlines()
    assert lines[0] == header
    assert [line.removesuffix(".0") for line in lines[1:]] == ROWS


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("0", "batch is 0, expected a number of samples between 1 and 1,000,000"),
        ("-4", "batch is -4, expected a number of samples between 1 and"),
        ("2.5", "batch is 2.5, expected a whole number"),
        ("", "batch is nan, expected a number of samples"),
        ("many", "batch is many, expected a number of samples"),
    ],
)
def test_an_impossible_batch_is_refused_with_its_line(tmp_path: Path, cell: str, problem: str) -> None:
    text = refusal(csv(tmp_path, HEADER, ROWS[0], f"{FAST},{cell},57.25,36500", ROWS[2]))
    assert f", line 3: {problem}" in text
    assert "correct the value or its unit" in text


def test_rows_of_two_batches_without_the_column_get_a_hint(tmp_path: Path) -> None:
    text = refusal(csv(tmp_path, HEADER.replace("batch,", ""), f"{FAST},9.5,21000", f"{FAST},57.25,36500"))
    assert ", line 3: this mode is repeated (1 such rows)" in text
    assert text.endswith("or add a column 'batch' if the rows are of several batch sizes")


def test_a_repeated_mode_and_batch_is_refused_at_its_second_line(tmp_path: Path) -> None:
    text = refusal(csv(tmp_path, HEADER, *ROWS, f"{SLOW},1,41,12100"))
    assert ", line 5: this mode and batch are repeated (1 such rows); keep one row per mode and batch" in text


def test_both_times_are_refused(tmp_path: Path) -> None:
    text = refusal(csv(tmp_path, HEADER + ",minibatch_ms", f"{ROWS[0]},20"))
    assert "has both minibatch_ms (training) and batch_ms (inference): keep one of the two columns" in text


def test_a_file_without_any_time_names_both_columns(tmp_path: Path) -> None:
    text = refusal(csv(tmp_path, "cores,cpu_khz,gpu_hz,mem_hz,power_mw", f"{FAST},21000"))
    assert "missing columns minibatch_ms;" in text
    assert "for inference, batch_ms replaces minibatch_ms" in text


def of_batches(batch: object, modes: int = 3) -> Profile:
    array = np.array([FAST_MODE, FAST_MODE, SLOW_MODE], dtype=np.float64)[:modes]
    return Profile(array, np.array([9.5, 57.25, 40.5])[:modes], np.array([21e3, 36.5e3, 12e3])[:modes], batch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ([1, 0, 1], "whole number of samples, from 1 to 1,000,000"),
        ([1, 1.5, 1], "whole number of samples, from 1 to 1,000,000"),
        ([1, 1e300, 1], "whole number of samples, from 1 to 1,000,000"),
        ([1, np.nan, 1], "whole number of samples, from 1 to 1,000,000"),
        ([1, 32], r"3 modes need 3 batch sizes, not an array of shape \[2\]"),
        ([4, 4, 1], "each mode and batch once"),
        (None, "each mode once; merge repeated measurements, or state the batch"),
    ],
)
def test_impossible_batches_of_a_profile_are_refused(batch: list[float] | None, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        of_batches(None if batch is None else np.array(batch))


def test_selected_rows_keep_their_batch_and_task(tmp_path: Path) -> None:
    profile = read_profile(csv(tmp_path, HEADER, *ROWS))
    selected = profile.rows(np.array([1, 2]))
    assert selected.measurements() == profile.measurements()[1:]
    assert selected.task is Task.INFERENCE
    assert Profile.of(profile.measurements(), profile.task).sha256() == profile.sha256()


def test_measurements_that_partly_state_their_batch_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="1 of 2 measurements state their batch: state it for all, or for none"):
        Profile.of([Measurement(FAST_MODE, 9.5, 21_000, 1), Measurement(SLOW_MODE, 40.5, 12_000)])


def test_the_sha256_tells_batches_and_tasks_apart(tmp_path: Path) -> None:
    row = f"{FAST},16,57.25,36500"
    headers = (HEADER, HEADER.replace("batch_ms", "minibatch_ms"), HEADER.replace("batch,", "note,"))
    digests = {read_profile(csv(tmp_path, header, row)).sha256() for header in headers}
    digests.add(read_profile(csv(tmp_path, HEADER, row.replace(",16,", ",32,"))).sha256())
    assert len(digests) == 4


def test_the_sha256_without_batch_is_as_manifests_have_it() -> None:
    # The sha256 of "12,2201600,1300500000,3199000000,57.25,36500", computed with sha256sum.
    expected = "59c608e8ca401fa3ee7b193e2767618115f2ee10a9b25df64dc2203a0e5f99d2"
    profile = Profile.of([Measurement(FAST_MODE, 57.25, 36_500)])
    assert profile.sha256() == expected


def test_another_task_or_several_batches_are_refused_where_a_mode_has_one_time() -> None:
    several = of_batches(np.array([1, 32, 1]))
    require_one_training("a.csv", of_batches(None, modes=1))
    require_one_training("a.csv", several.rows(np.array([0, 2])))
    with pytest.raises(InvalidInputError, match="a.csv: has rows of the batches 1, 32: keep the rows of one"):
        require_one_training("a.csv", several)
    inference = Profile(several.modes, several.minibatch_ms, several.power_mw, several.batch, Task.INFERENCE)
    with pytest.raises(InvalidInputError, match=r"a.csv: has times of inference \(batch_ms\), not of training: give"):
        require_one_training("a.csv", inference)
    require_same_task("the target", inference, "the reference 'r'", Task.INFERENCE)
    with pytest.raises(InvalidInputError, match="but the reference 'r' is of training: give rows of training"):
        require_same_task("the target", inference, "the reference 'r'", Task.TRAINING)
