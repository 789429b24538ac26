"""The shipped reference predictors, and the command `wattfleet reference audit`."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

import reference_models
import wattfleet.core.prediction.row_audit as audit_module
from reference_models.commands import app
from tests.fakes.profiles import measured_profile, six_rows_with_two_wrong
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Profile, board_named, write_profile
from wattfleet.core.prediction import NoAuditError, restore_predictor

# --- Shipped ----------------------------------------------------------------------------------------------------------
# The shipped reference predictors.


def text_of(name: str, file: str) -> str:
    return (resources.files(reference_models) / name / file).read_text()


def test_the_reference_of_agx_orin_ships() -> None:
    assert "agx_orin_resnet18" in reference_models.shipped()


@pytest.mark.parametrize("name", reference_models.shipped())
def test_every_shipped_reference_loads_and_predicts_its_board(name: str) -> None:
    artefact = reference_models.load(name)
    space = board_named(artefact.details.board).space
    prediction = restore_predictor(artefact).predict(space.array())
    assert np.isfinite(prediction.minibatch_ms).all()
    # The last mode does not have the highest value of every knob, but it is fast and draws much power.
    assert prediction.minibatch_ms[-1] < 2 * prediction.minibatch_ms.min()
    assert prediction.power_mw[-1] > 0.8 * prediction.power_mw.max()


@pytest.mark.parametrize("name", reference_models.shipped())
def test_the_model_card_states_the_figures_and_the_digest(name: str) -> None:
    artefact, card = reference_models.load(name), text_of(name, "MODEL_CARD.md")
    assert artefact.digest in card
    held_out = artefact.details.figures["held_out"]
    assert f"{held_out['time_mape_pct']} / {held_out['time_median_ape_pct']}" in card
    assert f"{held_out['power_mape_pct']} / {held_out['power_median_ape_pct']}" in card
    assert "doi:10.1016/j.future.2024.07.001" in card
    assert "wattfleet reference train" in card


@pytest.mark.parametrize("name", reference_models.shipped())
def test_shipped_files_contain_no_local_path_or_url(name: str) -> None:
    for file in ("MODEL_CARD.md", "manifest.json"):
        text = text_of(name, file)
        assert not re.search(r"(^|[\s'\"=(])/\w", text), file
        assert not re.search(r"https?://", text), file


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="'agx_orin_vgg': choose one of .*agx_orin_resnet18"):
        reference_models.load("agx_orin_vgg")


# --- Audit command ----------------------------------------------------------------------------------------------------
# The command `wattfleet reference audit`.


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
