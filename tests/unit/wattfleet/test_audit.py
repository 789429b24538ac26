"""Rows that lie: the audit finds them, and fitting is little moved by them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import reference_models
import wattfleet.prediction.row_audit as audit_module
from reference_models.commands import app
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, Profile, board, read_csv, write_csv
from wattfleet.prediction import NoAuditError, RooflinePredictor, Suspect, audit, passing_rows, restore_predictor

SPACE = board("agx-orin").space.array()


@cache
def reference() -> RooflinePredictor:
    found = restore_predictor(reference_models.load("agx_orin_resnet18"))
    assert isinstance(found, RooflinePredictor)
    return found


def measured(count: int, seed: int) -> Profile:
    """The reference's own board and workload, 1.5 times slower, with 1.5 % noise."""
    rng = np.random.default_rng(seed)
    modes = SPACE[rng.choice(len(SPACE), count, replace=False)]
    truth = reference().predict(modes)
    noise = np.exp(0.015 * rng.standard_normal((2, count)))
    return Profile(modes, 1.5 * truth.minibatch_ms * noise[0], truth.power_mw * noise[1])


def plant(profile: Profile, share: float, seed: int, one_knob: bool) -> tuple[Profile, list[int]]:
    """Rows that hold another row's time and power; where `one_knob`, one whose mode differs by one knob."""
    rng = np.random.default_rng(seed)
    rows = rng.choice(len(profile), round(share * len(profile)), replace=False)
    time, power = profile.minibatch_ms.copy(), profile.power_mw.copy()
    for row in rows:
        differing = (profile.modes != profile.modes[row]).sum(1)
        others = np.flatnonzero(differing == 1) if one_knob else np.empty(0)
        other = rng.choice(others if len(others) else np.flatnonzero(differing))
        time[row], power[row] = profile.minibatch_ms[other], profile.power_mw[other]
    return Profile(profile.modes, time, power), [int(row) for row in rows]


def off(profile: Profile, planted: Profile, rows: list[int]) -> set[int]:
    """The rows whose planted values differ enough to matter."""
    time = np.abs(np.log(planted.minibatch_ms / profile.minibatch_ms))
    power = np.abs(np.log(planted.power_mw / profile.power_mw))
    return {row for row in rows if time[row] > 0.2 or power[row] > 0.12}


def found_rows(suspects: list[Suspect]) -> set[int]:
    return {suspect.row for suspect in suspects}


def mape(predictor: RooflinePredictor, clean: Profile) -> tuple[float, float]:
    found = predictor.predict(clean.modes)
    return (
        float(100 * np.abs(found.minibatch_ms / clean.minibatch_ms - 1).mean()),
        float(100 * np.abs(found.power_mw / clean.power_mw - 1).mean()),
    )


@pytest.mark.parametrize("one_knob", [True, False])
def test_finds_what_was_planted_in_a_corpus_and_little_else(one_knob: bool) -> None:
    clean = measured(4_368, 0)
    false, rows = plant(clean, 0.02, 1, one_knob)
    found = found_rows(audit(false))
    wanted = off(clean, false, rows)
    assert len(wanted) > 30
    assert len(found & wanted) >= 0.9 * len(wanted)
    assert len(found - set(rows)) <= 0.002 * len(clean)


@pytest.mark.parametrize("share", [0.05, 0.12, 0.25])
def test_many_false_rows_do_not_hide_each_other(share: float) -> None:
    clean = measured(600, 2)
    false, rows = plant(clean, share, 2, one_knob=False)
    wanted = off(clean, false, rows)
    found = found_rows(audit(false))
    assert len(found & wanted) >= 0.9 * len(wanted)
    assert len(found - set(rows)) <= 0.01 * len(clean)


def test_finds_the_one_false_row_among_fifty() -> None:
    hits, wanted, others = 0, 0, 0
    for seed in range(8):
        clean = measured(50, seed)
        false, rows = plant(clean, 0.02, seed, one_knob=False)
        found = found_rows(audit(false, reference()))
        wanted += len(off(clean, false, rows))
        hits += len(found & off(clean, false, rows))
        others += len(found - set(rows))
    assert wanted >= 6
    assert hits >= wanted - 1
    assert others <= 4


def test_tells_the_setting_whose_values_a_row_holds() -> None:
    clean = measured(1_000, 3)
    named, applied = (
        PowerMode(2, 268_800, 1_300_500_000, 2_133_000_000),
        PowerMode(2, 729_600, 1_300_500_000, 2_133_000_000),
    )
    there = reference().predict(np.array([applied], dtype=np.float64))
    kept = ~(clean.modes == np.array(named)).all(1)
    modes = np.concatenate([clean.modes[kept], [named]])
    time = np.append(clean.minibatch_ms[kept], 1.5 * there.minibatch_ms)
    power = np.append(clean.power_mw[kept], there.power_mw)
    (suspect,) = (s for s in audit(Profile(modes, time, power)) if s.row == len(modes) - 1)
    assert suspect.mode == named
    assert suspect.applied is not None
    assert suspect.applied._replace(cpu_khz=0) == named._replace(cpu_khz=0)
    assert 652_800 <= suspect.applied.cpu_khz <= 806_400
    assert suspect.reason.startswith("mode not applied: time ")
    assert "instead of CPU 268,800 kHz" in suspect.looks_like


def test_rows_that_pass_are_the_others() -> None:
    profile = measured(450, 4)
    false, _ = plant(profile, 0.02, 4, one_knob=False)
    suspects = audit(false)
    passing = passing_rows(false, suspects)
    assert set(np.flatnonzero(~passing)) == found_rows(suspects)


def test_truthful_rows_pass() -> None:
    assert len(audit(measured(50, 6), reference())) <= 1
    assert not audit(measured(5, 6).rows(np.arange(1)), reference())


def test_too_few_rows_need_a_reference() -> None:
    with pytest.raises(NoAuditError, match="4 measured modes are too few to audit: .* or give a reference"):
        audit(measured(4, 0))


def six_with_two_false() -> Profile:
    """Without the two, four are left, which no fit without a reference can do with."""
    clean = measured(6, 6)
    wrong = np.array([[2.0, 1.6], [0.5, 0.6], [1, 1], [1, 1], [1, 1], [1, 1]])
    return Profile(clean.modes, clean.minibatch_ms * wrong[:, 0], clean.power_mw * wrong[:, 1])


@pytest.mark.parametrize("known", [None, reference])
def test_few_rows_are_not_fitted_again_without_the_false_ones(known: Callable[[], RooflinePredictor] | None) -> None:
    assert len(audit(six_with_two_false(), known and known())) == 2


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_few_rows_can_be_audited_with_a_reference(count: int) -> None:
    assert audit(measured(count, 3), reference()) == []


def test_a_fit_that_contradicts_most_rows_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "POWER_THRESHOLD", 1e-6)
    monkeypatch.setattr(audit_module, "_SURE", 1e-6)
    with pytest.raises(NoAuditError, match=r"of 60 rows contradict the audit's fit, which cannot be believed"):
        audit(measured(60, 0), reference())


@pytest.mark.parametrize("one_knob", [True, False])
def test_false_rows_among_4368_hardly_move_the_figures(one_knob: bool) -> None:
    clean = measured(4_368, 0)
    false, rows = plant(clean, 0.02, 1, one_knob)
    held_out = measured(4_000, 9)
    before, after = mape(RooflinePredictor.fit(clean), held_out), mape(RooflinePredictor.fit(false), held_out)
    for one, other in zip(before, after, strict=True):
        assert other < 1.1 * one


def test_a_false_row_among_50_hardly_moves_the_figures() -> None:
    before, after = [], []
    for seed in range(10):
        clean = measured(50, seed)
        false, _ = plant(clean, 0.02, seed, one_knob=False)
        truth = measured(1_000, 100 + seed)
        before.append(mape(RooflinePredictor.fit(clean, reference()), truth))
        after.append(mape(RooflinePredictor.fit(false, reference()), truth))
    for one, other in zip(np.median(before, axis=0), np.median(after, axis=0), strict=True):
        assert other < 1.1 * one


@pytest.mark.data
def test_false_rows_hardly_move_the_figures_of_measured_corpora(corpora: Path) -> None:
    mobilenet = read_csv(corpora / "agx_orin_mobilenetv3.csv")
    false, rows = plant(mobilenet, 0.02, 1, one_knob=False)
    clean = passing_rows(mobilenet, audit(mobilenet))
    clean[rows] = False
    # Among 4,368 modes.
    before = mape(RooflinePredictor.fit(mobilenet), mobilenet.rows(clean))
    after = mape(RooflinePredictor.fit(false), mobilenet.rows(clean))
    assert after[0] < 1.1 * before[0]
    assert after[1] < 1.1 * before[1]
    # Among 50 modes.
    figures = []
    for seed in range(10):
        drawn = np.random.default_rng(seed).choice(len(mobilenet), 50, replace=False)
        part = mobilenet.rows(drawn)
        planted, _ = plant(part, 0.02, seed, one_knob=False)
        fits = [RooflinePredictor.fit(profile, reference()) for profile in (part, planted)]
        figures.append([mape(fit, mobilenet.rows(clean)) for fit in fits])
    medians = np.median(figures, axis=0)
    assert (medians[1] < 1.1 * medians[0]).all()


@pytest.mark.data
def test_finds_the_rows_known_to_lie(corpora: Path) -> None:
    corpus = read_csv(corpora / "agx_orin_resnet18.csv")
    suspects = audit(corpus)
    assert 40 <= len(suspects) <= 90
    known = PowerMode(2, 268_800, 1_300_500_000, 2_133_000_000)
    (found,) = (suspect for suspect in suspects if suspect.mode == known)
    assert found.applied == known._replace(cpu_khz=729_600)
    assert found.looks_like == "time and power of CPU 729,600 kHz instead of CPU 268,800 kHz"


def command(*arguments: object):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    profile = measured(60, 0)
    power = profile.power_mw.copy()
    power[7] *= 2
    write_csv(Profile(profile.modes, profile.minibatch_ms, power), tmp_path / "profile.csv")
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
    write_csv(six_with_two_false(), tmp_path / "six.csv")
    result = command(tmp_path / "six.csv")
    assert result.exit_code == 0, result.output
    assert "2 of 6 rows are suspect" in result.stdout


def test_the_command_says_that_it_cannot_judge(csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "POWER_THRESHOLD", 1e-6)
    monkeypatch.setattr(audit_module, "_SURE", 1e-6)
    result = command(csv, "--json")
    assert isinstance(result.exception, NoAuditError)
    assert result.stdout == ""


def test_the_command_refuses_an_unknown_reference(csv: Path) -> None:
    assert isinstance(command(csv, "--reference", "nowhere").exception, InvalidInputError)
