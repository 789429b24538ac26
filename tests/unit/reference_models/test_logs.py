"""Importing logs of jtop and tegrastats as a profile."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from reference_models.commands import app
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import read_profile

MODE = (4, 729_600, 510_000_000, 2_133_000_000)
MINIBATCHES_MS = [4000.0, *[250.0] * 40]  # it ends after 14 s
IDLE, TRAINING = 3100, 7262

ORIN = (
    "RAM 2361/7620MB (lfb 4x4MB) SWAP 0/3810MB (cached 0MB) CPU [{cpus}] EMC_FREQ 5%@2133 GR3D_FREQ 99%@[{gpu}]"
    " cpu@46.6C tj@47.1C VDD_IN {mw}mW/{mw}mW VDD_CPU_GPU_CV 2000mW/2000mW VDD_SOC 1500mW/1500mW"
)
XAVIER = (
    "RAM 1903/31928MB (lfb 7000x4MB) CPU [{cpus}] EMC_FREQ 0% GR3D_FREQ 99% AO@38C GPU 900/900 CPU 310/310"
    " SOC {mw}/{mw} CV 0/0 VDDRQ 155/155 SYS5V 1361/1361"
)
FOUR_CORES = "12%@729,99%@729,0%@729,3%@729,off,off"


def tegrastats(line: str = ORIN, cpus: str = FOUR_CORES, gpu: int = 510, stamped: bool = True) -> str:
    """A log of 15 s with a line each second, or with two if the lines state no time."""
    times = np.arange(0, 15, 1.0 if stamped else 0.5)
    stamp = "11-28-2026 18:00:{:02.0f} " if stamped else ""
    return "\n".join(
        stamp.format(at) + line.format(cpus=cpus, gpu=gpu, mw=IDLE if at < 4.5 else TRAINING) for at in times
    )


def jtop(power: str = "Power VDD_IN", online: int = 4) -> str:
    cpus = [f"CPU{core + 1}" for core in range(6)]
    used = ["12" if core < online else "OFF" for core in range(6)]
    rows = [
        ",".join([f"2026-11-28 18:00:{at:02}.371830", *used, str(IDLE if at < 4.5 else TRAINING), "46.6"])
        for at in range(15)
    ]
    return "\n".join([",".join(["time", *cpus, power, "Temp CPU"]), *rows])


def write_run(folder: Path, content: str, file: str = "tegrastats.log", mode: tuple[int, ...] = MODE) -> Path:
    run = folder / ("pm_" + "_".join(map(str, mode)))
    run.mkdir()
    (run / "minibatch.csv").write_text("\n".join(["minibatch_ms", *map(str, MINIBATCHES_MS)]))
    (run / file).write_text(content)
    return run


def imported(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["import", str(folder), "--out", str(folder / "profile.csv"), *options])


@pytest.mark.parametrize(
    ("file", "content", "options"),
    [
        ("tegrastats.log", tegrastats(), ()),
        ("tegrastats.log", tegrastats(stamped=False), ("--interval-s", "0.5")),
        ("jtop.csv", jtop(), ()),
        ("jtop.csv", jtop("power cur"), ()),
    ],
)
def test_a_log_becomes_a_row_without_the_first_minibatch_and_the_rise_of_power(
    tmp_path: Path, file: str, content: str, options: tuple[str, ...]
) -> None:
    write_run(tmp_path, content, file)
    result = imported(tmp_path, *options)
    assert result.exit_code == 0, result.exception
    profile = read_profile(tmp_path / "profile.csv")
    assert profile.modes.tolist() == [list(MODE)]
    assert (profile.minibatch_ms[0], profile.power_mw[0]) == (250, TRAINING)


BEGUN_S = datetime(2026, 11, 28, 18).timestamp()
JTOP_IN_UNIX_SECONDS = "\n".join(
    ["log_time,Power VDD_IN", *(f"{BEGUN_S + at},{IDLE if at < 4.5 else TRAINING}" for at in range(15))]
)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize(
    ("file", "content"),
    [("tegrastats.log", tegrastats()), ("jtop.csv", jtop()), ("jtop.csv", JTOP_IN_UNIX_SECONDS)],
)
def test_a_power_log_with_dates_fits_minibatches_with_and_without(
    tmp_path: Path, file: str, content: str, timed: bool
) -> None:
    run = write_run(tmp_path, content, file)
    if timed:
        ends_s = BEGUN_S + np.cumsum(MINIBATCHES_MS) / 1e3
        lines = [f"{ms},{end_s}" for ms, end_s in zip(MINIBATCHES_MS, ends_s, strict=True)]
        (run / "minibatch.csv").write_text("\n".join(["minibatch_ms,log_time", *lines]))
    result = imported(tmp_path)
    assert result.exit_code == 0, result.exception
    assert read_profile(tmp_path / "profile.csv").power_mw[0] == TRAINING


def test_without_an_input_rail_the_rails_have_to_be_named_and_are_added(tmp_path: Path) -> None:
    write_run(tmp_path, tegrastats(XAVIER))
    result = imported(tmp_path)
    assert isinstance(result.exception, InvalidInputError)
    assert "no rail of the board's input, but GPU, CPU, SOC, CV, VDDRQ, SYS5V: give --rail" in str(result.exception)
    assert "shows no rail 'VDD_IN'" in str(imported(tmp_path, "--rail", "VDD_IN").exception)
    rails = [word for rail in ("GPU", "CPU", "SOC", "SYS5V") for word in ("--rail", rail)]
    assert imported(tmp_path, *rails).exit_code == 0
    assert read_profile(tmp_path / "profile.csv").power_mw[0] == 900 + 310 + TRAINING + 1361


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tegrastats.log", tegrastats(cpus=FOUR_CORES.replace("off", "5%@729")), "its log shows cores 6, not 4"),
        ("jtop.csv", jtop(online=2), "its log shows cores 2, not 4"),
        ("tegrastats.log", tegrastats(gpu=624), "its log shows gpu_hz 624000000, not 510000000"),
        ("tegrastats.log", tegrastats(cpus=FOUR_CORES.replace("729", "1510")), "its log shows cpu_khz 1510000"),
        ("tegrastats.log", "\n".join(tegrastats().splitlines()[:9]), "too few power samples"),
    ],
)
def test_a_run_that_was_not_in_its_mode_is_left_out_and_named(
    tmp_path: Path, file: str, content: str, said: str
) -> None:
    write_run(tmp_path, content, file)
    assert "no mode is left to import" in str(imported(tmp_path).exception)
    write_run(tmp_path, tegrastats(), mode=(4, 729_600, 510_000_000, 3_199_000_000))
    result = imported(tmp_path)
    assert result.exit_code == 0, result.exception
    assert "left out" in result.stderr and said in result.stderr
    assert len(read_profile(tmp_path / "profile.csv")) == 1


def test_a_clock_below_its_limit_is_no_contradiction(tmp_path: Path) -> None:
    write_run(tmp_path, tegrastats(cpus=FOUR_CORES.replace("729", "268"), gpu=306))
    assert imported(tmp_path).exit_code == 0


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tegrastats.log", "", "no line of tegrastats with a power rail"),
        ("jtop.csv", "time,Power VDD_IN\n", "jtop.csv has no sample"),
        ("jtop.csv", "log_time,Power VDD_IN\n", "jtop.csv has no sample"),
        ("minibatch.csv", "seconds\n3\n4\n", "has no column minibatch_ms or epochtime_ms"),
        ("minibatch.csv", "minibatch_ms\n4000\n", "logs no minibatch after the first"),
        ("minibatch.csv", "minibatch_ms\n4000\nlong\n", "its raw logs cannot be read"),
    ],
)
def test_a_log_that_cannot_be_read_is_named(tmp_path: Path, file: str, content: str, said: str) -> None:
    (write_run(tmp_path, tegrastats()) / file).write_text(content)
    result = imported(tmp_path)
    assert isinstance(result.exception, InvalidInputError)
    assert said in str(result.exception) and "pm_4_729600" in str(result.exception)


def test_a_folder_without_runs_and_a_bad_interval_are_refused(tmp_path: Path) -> None:
    assert "make one for each mode" in str(imported(tmp_path).exception)
    assert "--interval-s must be finite" in str(imported(tmp_path, "--interval-s", "0").exception)


def test_a_missing_folder_of_the_output_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, tegrastats())
    error = imported(tmp_path, "--out", str(tmp_path / "none" / "profile.csv")).exception
    assert isinstance(error, InvalidInputError)
    assert "cannot be written: Cannot save file into a non-existent directory" in str(error)


@pytest.mark.data
def test_the_raw_logs_of_an_orin_nano_become_their_published_rows(corpora: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.csv"
    result = CliRunner().invoke(app, ["import", str(corpora / "orin_nano_resnet18_telemetry"), "--out", str(out)])
    assert result.exit_code == 0, result.exception
    table = {row.mode: row for row in read_profile(corpora / "orin_nano_resnet18.csv").measurements()}
    rows = read_profile(out).measurements()
    assert len(rows) == 25 and "too few power samples" in result.stderr
    for row in rows:
        assert row.minibatch_ms == pytest.approx(table[row.mode].minibatch_ms, rel=0.001)
        assert row.power_mw == pytest.approx(table[row.mode].power_mw, rel=0.01)
