"""Profiles of modes, batch sizes and inference, and errors in their CSV files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.short_forms import examples
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    PROFILE_COLUMNS,
    Measurement,
    PowerMode,
    Profile,
    Task,
    read_profile,
    require_one_training,
    require_same_task,
    write_profile,
)

# --- Profile ----------------------------------------------------------------------------------------------------------
# Profiles, and errors in their CSV files.


HEADER = "cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw"
ROWS = [
    "12,2201600,1300500000,3199000000,57.25,36500",
    "8,1420800,828750000,2133000000,91.5,24750",
    "4,729600,318750000,665600000,260.75,13200",
]


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


def test_a_file_is_read_row_by_row(tmp_path: Path) -> None:
    assert read_profile(csv(tmp_path, HEADER, *ROWS)).measurements() == [
        Measurement(PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000), 57.25, 36_500),
        Measurement(PowerMode(8, 1_420_800, 828_750_000, 2_133_000_000), 91.5, 24_750),
        Measurement(PowerMode(4, 729_600, 318_750_000, 665_600_000), 260.75, 13_200),
    ]


def test_columns_may_be_in_any_order_among_others(tmp_path: Path) -> None:
    path = csv(
        tmp_path,
        "power_mw,note,mem_hz,gpu_hz,cpu_khz,cores,minibatch_ms",
        "36500,warm,3199000000,1300500000,2201600,12,57.25",
    )
    assert read_profile(path).measurements() == [
        Measurement(PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000), 57.25, 36_500)
    ]


@examples(25)
@given(
    st.dictionaries(
        st.builds(
            PowerMode,
            st.integers(1, 256),
            st.integers(50_000, 10_000_000),
            st.integers(50_000_000, 10_000_000_000),
            st.integers(50_000_000, 20_000_000_000),
        ),
        st.tuples(st.floats(0.01, 1e7), st.floats(200, 2e6)),
        min_size=1,
        max_size=8,
    )
)
def test_a_written_profile_is_read_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, measured: dict[PowerMode, tuple[float, float]]
) -> None:
    profile = Profile.of(Measurement(mode, *values) for mode, values in measured.items())
    path = tmp_path_factory.mktemp("profile") / "profile.csv"
    write_profile(profile, path)
    assert path.read_text().splitlines()[0] == HEADER
    back = read_profile(path)
    assert np.array_equal(back.modes, profile.modes)
    assert back.minibatch_ms == pytest.approx(profile.minibatch_ms, rel=1e-12)
    assert back.power_mw == pytest.approx(profile.power_mw, rel=1e-12)


@pytest.mark.parametrize("missing", PROFILE_COLUMNS)
def test_a_missing_column_is_named(tmp_path: Path, missing: str) -> None:
    kept = [k for k, name in enumerate(PROFILE_COLUMNS) if name != missing]
    lines = [",".join(line.split(",")[k] for k in kept) for line in (HEADER, *ROWS)]
    text = refusal(csv(tmp_path, *lines))
    assert f"missing columns {missing};" in text
    assert "needed are " + ", ".join(PROFILE_COLUMNS) in text


@pytest.mark.parametrize(
    ("column", "value", "unit"),
    [
        ("cores", "0", "a number of cores"),
        ("cores", "9" * 400, "a number of cores"),
        ("cpu_khz", "1420.8", "kHz"),  # MHz
        ("cpu_khz", "1420800000", "kHz"),  # Hz
        ("gpu_hz", "828.75", "Hz"),  # MHz
        ("gpu_hz", "828750", "Hz"),  # kHz
        ("mem_hz", "2133", "Hz"),  # MHz
        ("minibatch_ms", "-91.5", "milliseconds"),
        ("minibatch_ms", "0", "milliseconds"),
        ("power_mw", "24.75", "milliwatts"),  # watts
        ("power_mw", "-24750", "milliwatts"),
        ("power_mw", "inf", "milliwatts"),
    ],
)
def test_a_value_outside_its_units_range_is_refused_with_its_line(
    tmp_path: Path, column: str, value: str, unit: str
) -> None:
    cells = ROWS[1].split(",")
    cells[PROFILE_COLUMNS.index(column)] = value
    text = refusal(csv(tmp_path, HEADER, ROWS[0], ",".join(cells), ROWS[2]))
    assert f", line 3: {column} is {float(value):g}, expected {unit} between" in text
    assert "correct the value or its unit" in text


@pytest.mark.parametrize(
    ("column", "value"),
    [("cores", "2.5"), ("cpu_khz", "1420800.5"), ("gpu_hz", "828750000.25"), ("mem_hz", "2133000000.5")],
)
def test_a_mode_with_fractions_is_refused_with_its_line(tmp_path: Path, column: str, value: str) -> None:
    cells = ROWS[1].split(",")
    cells[PROFILE_COLUMNS.index(column)] = value
    text = refusal(csv(tmp_path, HEADER, ROWS[0], ",".join(cells), ROWS[2]))
    assert f", line 3: {column} is {value}, expected a whole number (1 such rows)" in text


def test_whole_numbers_may_have_a_decimal_point(tmp_path: Path) -> None:
    assert read_profile(csv(tmp_path, HEADER, ROWS[0].replace("12,", "12.0,", 1))).modes[0, 0] == 12


@pytest.mark.parametrize("column", PROFILE_COLUMNS)
@pytest.mark.parametrize(("cell", "quoted"), [("", "nan"), ("NaN", "nan"), ("fast", "fast"), ("9,5", "9,5")])
def test_a_non_numeric_cell_is_quoted_in_the_error(tmp_path: Path, column: str, cell: str, quoted: str) -> None:
    cells = ROWS[2].split(",")
    cells[PROFILE_COLUMNS.index(column)] = f'"{cell}"'
    text = refusal(csv(tmp_path, HEADER, *ROWS[:2], ",".join(cells)))
    assert f", line 4: {column} is {quoted}, expected " in text


def test_line_numbers_match_an_editors(tmp_path: Path) -> None:
    text = refusal(csv(tmp_path, HEADER, "", ROWS[0], "", "", ROWS[1].replace("24750", "24.75"), ""))
    assert ", line 6: power_mw is 24.75" in text


def test_the_error_states_how_many_rows_are_wrong(tmp_path: Path) -> None:
    watts = [row.rsplit(",", 1)[0] + ",30.5" for row in ROWS]
    assert "(3 such rows)" in refusal(csv(tmp_path, HEADER, *watts))


def test_a_repeated_mode_is_refused_at_its_second_line(tmp_path: Path) -> None:
    again = ROWS[0].replace("57.25", "58.5")
    text = refusal(csv(tmp_path, HEADER, *ROWS, again))
    assert ", line 5: this mode is repeated" in text
    assert "keep one row per mode" in text


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    assert "no rows found; a profile needs at least one measured mode" in refusal(csv(tmp_path, HEADER))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(bytes(range(256)) * 4, id="binary"),
        pytest.param(f"{HEADER}\n{ROWS[0]},1,2\n{ROWS[1]},1,2,3,4\n".encode(), id="ragged"),
    ],
)
def test_a_file_that_is_not_csv_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.csv"
    path.write_bytes(content)
    assert "cannot be read as CSV" in refusal(path)


@pytest.mark.parametrize(
    "rows", [[f"{row}," for row in ROWS], [row.replace(".", ",") for row in ROWS]], ids=["comma at the end", "decimals"]
)
def test_rows_longer_than_the_header_are_refused(tmp_path: Path, rows: list[str]) -> None:
    assert "more values than the header has columns" in refusal(csv(tmp_path, HEADER, *rows))


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent.csv")
    assert "cannot be read as CSV" in refusal(tmp_path)


def profile_of(**changes: np.ndarray) -> Profile:
    values = {
        "modes": np.array([[4, 1e6, 1e9, 2e9], [2, 1e6, 1e9, 2e9]]),
        "minibatch_ms": np.array([50.0, 80.0]),
        "power_mw": np.array([9_000.0, 7_000.0]),
    }
    return Profile(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"power_mw": np.array([9_000.0])}, "n times and powers"),
        ({"modes": np.ones((2, 3))}, r"\[n, 4\] modes"),
        ({"modes": np.array([[4, 1e6, 1e9, 2e9]] * 2)}, "each mode once"),
        ({"modes": np.array([[4, 1e6, 1e9, 2e9], [0, 1e6, 1e9, 2e9]])}, "modes: every value"),
        ({"minibatch_ms": np.array([50.0, np.nan])}, "minibatch_ms: every value"),
        ({"power_mw": np.array([np.inf, 1.0])}, "power_mw: every value"),
        ({"power_mw": np.array([-5.0, 1.0])}, "power_mw: every value"),
    ],
)
def test_impossible_profiles_are_refused(changes: dict[str, np.ndarray], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        profile_of(**changes)


def test_the_sha256_depends_on_the_rows_and_not_on_the_file(tmp_path: Path) -> None:
    profile = read_profile(csv(tmp_path, HEADER, *ROWS))
    turned = read_profile(csv(tmp_path, "note," + HEADER, *(f"x,{row.replace('12,', '12.0,')}" for row in ROWS[::-1])))
    assert turned.sha256() == profile.sha256()
    write_profile(profile, tmp_path / "again.csv")
    assert read_profile(tmp_path / "again.csv").sha256() == profile.sha256()
    assert read_profile(csv(tmp_path, HEADER, *ROWS[:2])).sha256() != profile.sha256()
    assert (
        read_profile(csv(tmp_path, HEADER, *ROWS[:2], ROWS[2].replace("260.75", "260.76"))).sha256() != profile.sha256()
    )


def test_selected_rows_make_a_profile() -> None:
    profile = profile_of()
    assert profile.rows(np.array([False, True])).measurements() == profile.measurements()[1:]
    assert len(Profile.of([])) == 0


# --- Profile batches --------------------------------------------------------------------------------------------------
# Profiles of several batch sizes and of inference, and errors in their CSV files.

BATCH_HEADER = "cores,cpu_khz,gpu_hz,mem_hz,batch,batch_ms,power_mw"
FAST = "12,2201600,1300500000,3199000000"
SLOW = "4,729600,318750000,665600000"
BATCH_ROWS = [f"{FAST},1,9.5,21000", f"{FAST},32,57.25,36500", f"{SLOW},1,40.5,12000"]
FAST_MODE = PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000)
SLOW_MODE = PowerMode(4, 729_600, 318_750_000, 665_600_000)


def test_a_mode_may_have_a_row_for_each_batch(tmp_path: Path) -> None:
    profile = read_profile(csv(tmp_path, BATCH_HEADER, *BATCH_ROWS))
    assert profile.measurements() == [
        Measurement(FAST_MODE, 9.5, 21_000, 1),
        Measurement(FAST_MODE, 57.25, 36_500, 32),
        Measurement(SLOW_MODE, 40.5, 12_000, 1),
    ]
    assert profile.batches == (1, 32)


@pytest.mark.parametrize(("column", "task"), [("batch_ms", Task.INFERENCE), ("minibatch_ms", Task.TRAINING)])
def test_the_times_column_names_the_task(tmp_path: Path, column: str, task: Task) -> None:
    assert read_profile(csv(tmp_path, BATCH_HEADER.replace("batch_ms", column), *BATCH_ROWS)).task is task


def test_inference_needs_no_batch_column(tmp_path: Path) -> None:
    profile = read_profile(csv(tmp_path, BATCH_HEADER.replace("batch,", ""), f"{FAST},9.5,21000"))
    assert profile.measurements() == [Measurement(FAST_MODE, 9.5, 21_000)]
    assert (profile.task, profile.batch, profile.batches) == (Task.INFERENCE, None, ())


@pytest.mark.parametrize("header", [BATCH_HEADER, BATCH_HEADER.replace("batch_ms", "minibatch_ms")])
def test_a_file_is_written_as_it_was_read(tmp_path: Path, header: str) -> None:
    path = csv(tmp_path, header, *BATCH_ROWS)
    write_profile(read_profile(path), tmp_path / "again.csv")
    lines = (tmp_path / "again.csv").read_text().splitlines()
    assert lines[0] == header
    assert [line.removesuffix(".0") for line in lines[1:]] == BATCH_ROWS


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
    text = refusal(csv(tmp_path, BATCH_HEADER, BATCH_ROWS[0], f"{FAST},{cell},57.25,36500", BATCH_ROWS[2]))
    assert f", line 3: {problem}" in text
    assert "correct the value or its unit" in text


def test_rows_of_two_batches_without_the_column_get_a_hint(tmp_path: Path) -> None:
    text = refusal(csv(tmp_path, BATCH_HEADER.replace("batch,", ""), f"{FAST},9.5,21000", f"{FAST},57.25,36500"))
    assert ", line 3: this mode is repeated (1 such rows)" in text
    assert text.endswith("or add a column 'batch' if the rows are of several batch sizes")


def test_a_repeated_mode_and_batch_is_refused_at_its_second_line(tmp_path: Path) -> None:
    text = refusal(csv(tmp_path, BATCH_HEADER, *BATCH_ROWS, f"{SLOW},1,41,12100"))
    assert ", line 5: this mode and batch are repeated (1 such rows); keep one row per mode and batch" in text


def test_both_times_are_refused(tmp_path: Path) -> None:
    text = refusal(csv(tmp_path, BATCH_HEADER + ",minibatch_ms", f"{BATCH_ROWS[0]},20"))
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
    profile = read_profile(csv(tmp_path, BATCH_HEADER, *BATCH_ROWS))
    selected = profile.rows(np.array([1, 2]))
    assert selected.measurements() == profile.measurements()[1:]
    assert selected.task is Task.INFERENCE
    assert Profile.of(profile.measurements(), profile.task).sha256() == profile.sha256()


def test_measurements_that_partly_state_their_batch_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="1 of 2 measurements state their batch: state it for all, or for none"):
        Profile.of([Measurement(FAST_MODE, 9.5, 21_000, 1), Measurement(SLOW_MODE, 40.5, 12_000)])


def test_the_sha256_tells_batches_and_tasks_apart(tmp_path: Path) -> None:
    row = f"{FAST},16,57.25,36500"
    headers = (BATCH_HEADER, BATCH_HEADER.replace("batch_ms", "minibatch_ms"), BATCH_HEADER.replace("batch,", "note,"))
    digests = {read_profile(csv(tmp_path, header, row)).sha256() for header in headers}
    digests.add(read_profile(csv(tmp_path, BATCH_HEADER, row.replace(",16,", ",32,"))).sha256())
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
