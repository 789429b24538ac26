"""The command `wattfleet reference audit`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import wattfleet.prediction.row_audit as audit_module
from reference_models.commands import app
from tests.fakes.damaged_profiles import measured_profile, six_rows_with_two_wrong
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile, write_profile
from wattfleet.prediction import NoAuditError


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    profile = measured_profile(60, 0)
    power = profile.power_mw.copy()
    power[7] *= 2
    write_profile(Profile(profile.modes, profile.minibatch_ms, power), tmp_path / "profile.csv")
    return tmp_path / "profile.csv"


def test_the_command_prints_json(csv: Path) -> None:
    result = command(csv, "--reference", "agx_orin_resnet18", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["rows"] == 60
    worst = found["suspects"][0]
    assert worst["row"] == 7
    assert set(worst["mode"]) == {"cores", "cpu_khz", "gpu_hz", "mem_hz"}
    assert "power" in worst["reason"]


def test_the_command_prints_a_table(csv: Path) -> None:
    result = command(csv)
    assert result.exit_code == 0, result.output
    assert "of 60 rows are suspect" in result.stdout


def test_the_command_audits_six_rows(tmp_path: Path) -> None:
    write_profile(six_rows_with_two_wrong(), tmp_path / "six.csv")
    result = command(tmp_path / "six.csv")
    assert result.exit_code == 0, result.output
    assert "2 of 6 rows are suspect" in result.stdout


def test_the_command_reports_an_impossible_audit(csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "POWER_THRESHOLD", 1e-6)
    monkeypatch.setattr(audit_module, "_MIN_DEVIATIONS", 1e-6)
    result = command(csv, "--json")
    assert isinstance(result.exception, NoAuditError)
    assert result.stdout == ""


def test_the_command_refuses_an_unknown_reference(csv: Path) -> None:
    assert isinstance(command(csv, "--reference", "nowhere").exception, InvalidInputError)
