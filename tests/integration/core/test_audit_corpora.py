"""Wrong rows in large profiles: the audit finds them, and they hardly change a fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.fakes.profiles import (
    clearly_wrong_rows,
    measured_profile,
    shipped_reference,
    suspect_indices,
    with_wrong_rows,
)
from tests.fakes.short_forms import first
from wattfleet.core.modes import PowerMode, Profile, read_profile
from wattfleet.core.prediction import RooflinePredictor, audit_rows, passing_rows


def mape(predictor: RooflinePredictor, clean: Profile) -> tuple[float, float]:
    found = predictor.predict(clean.modes)
    return (
        float(100 * np.abs(found.minibatch_ms / clean.minibatch_ms - 1).mean()),
        float(100 * np.abs(found.power_mw / clean.power_mw - 1).mean()),
    )


@pytest.mark.parametrize("one_knob", first(1, [False, True]))
@pytest.mark.slow
def test_audit_finds_most_wrong_rows_of_a_corpus_and_few_others(one_knob: bool) -> None:
    clean = measured_profile(4_368, 0)
    damaged, rows = with_wrong_rows(clean, 0.02, 1, one_knob)
    found = suspect_indices(audit_rows(damaged))
    wanted = clearly_wrong_rows(clean, damaged, rows)
    assert len(wanted) > 30
    assert len(found & wanted) >= 0.9 * len(wanted)
    assert len(found - set(rows)) <= 0.002 * len(clean)


@pytest.mark.parametrize("share", first(1, [0.12, 0.05, 0.25]))
def test_many_wrong_rows_do_not_hide_each_other(share: float) -> None:
    clean = measured_profile(600, 2)
    damaged, rows = with_wrong_rows(clean, share, 2, one_knob=False)
    wanted = clearly_wrong_rows(clean, damaged, rows)
    found = suspect_indices(audit_rows(damaged))
    assert len(found & wanted) >= 0.9 * len(wanted)
    assert len(found - set(rows)) <= 0.01 * len(clean)


def test_audit_finds_one_wrong_row_among_fifty() -> None:
    hits, wanted, others = 0, 0, 0
    for seed in range(8):
        clean = measured_profile(50, seed)
        damaged, rows = with_wrong_rows(clean, 0.02, seed, one_knob=False)
        found = suspect_indices(audit_rows(damaged, shipped_reference()))
        wanted += len(clearly_wrong_rows(clean, damaged, rows))
        hits += len(found & clearly_wrong_rows(clean, damaged, rows))
        others += len(found - set(rows))
    assert wanted >= 6
    assert hits >= wanted - 1
    assert others <= 4


@pytest.mark.parametrize(("count", "one_knob"), first(1, [(1_000, False), (4_368, False), (4_368, True)]))
def test_wrong_rows_of_a_corpus_hardly_change_a_fits_errors(count: int, one_knob: bool) -> None:
    clean = measured_profile(count, 0)
    damaged, rows = with_wrong_rows(clean, 0.02, 1, one_knob)
    held_out = measured_profile(4_000, 9)
    before, after = mape(RooflinePredictor.fit(clean), held_out), mape(RooflinePredictor.fit(damaged), held_out)
    for one, other in zip(before, after, strict=True):
        assert other < 1.1 * one


def test_a_wrong_row_among_50_hardly_changes_a_fits_errors() -> None:
    before, after = [], []
    for seed in range(10):
        clean = measured_profile(50, seed)
        damaged, _ = with_wrong_rows(clean, 0.02, seed, one_knob=False)
        truth = measured_profile(1_000, 100 + seed)
        before.append(mape(RooflinePredictor.fit(clean, shipped_reference()), truth))
        after.append(mape(RooflinePredictor.fit(damaged, shipped_reference()), truth))
    for one, other in zip(np.median(before, axis=0), np.median(after, axis=0), strict=True):
        assert other < 1.1 * one


# The short forms are the two tests before.
@pytest.mark.data
@pytest.mark.slow
def test_wrong_rows_hardly_change_errors_on_measured_corpora(corpora: Path) -> None:
    mobilenet = read_profile(corpora / "agx_orin_mobilenetv3.csv")
    damaged, rows = with_wrong_rows(mobilenet, 0.02, 1, one_knob=False)
    clean = passing_rows(mobilenet, audit_rows(mobilenet))
    clean[rows] = False
    # Among 4,368 modes.
    before = mape(RooflinePredictor.fit(mobilenet), mobilenet.rows(clean))
    after = mape(RooflinePredictor.fit(damaged), mobilenet.rows(clean))
    assert after[0] < 1.1 * before[0]
    assert after[1] < 1.1 * before[1]
    # Among 50 modes.
    figures = []
    for seed in range(10):
        drawn = np.random.default_rng(seed).choice(len(mobilenet), 50, replace=False)
        part = mobilenet.rows(drawn)
        damaged, _ = with_wrong_rows(part, 0.02, seed, one_knob=False)
        fits = [RooflinePredictor.fit(profile, shipped_reference()) for profile in (part, damaged)]
        figures.append([mape(fit, mobilenet.rows(clean)) for fit in fits])
    medians = np.median(figures, axis=0)
    assert (medians[1] < 1.1 * medians[0]).all()


# The short form is `test_audit_finds_most_wrong_rows_of_a_corpus_and_few_others`.
@pytest.mark.data
@pytest.mark.slow
def test_audit_finds_the_known_wrong_rows_of_a_measured_corpus(corpora: Path) -> None:
    corpus = read_profile(corpora / "agx_orin_resnet18.csv")
    suspects = audit_rows(corpus)
    assert 40 <= len(suspects) <= 90
    known = PowerMode(2, 268_800, 1_300_500_000, 2_133_000_000)
    (found,) = (suspect for suspect in suspects if suspect.mode == known)
    assert found.applied == known._replace(cpu_khz=729_600)
    assert found.looks_like == "time and power of CPU 729,600 kHz instead of CPU 268,800 kHz"


def test_audit_names_the_setting_whose_values_a_row_holds() -> None:
    clean = measured_profile(1_000, 3)
    named, applied = (
        PowerMode(2, 268_800, 1_300_500_000, 2_133_000_000),
        PowerMode(2, 729_600, 1_300_500_000, 2_133_000_000),
    )
    there = shipped_reference().predict(np.array([applied], dtype=np.float64))
    kept = ~(clean.modes == np.array(named)).all(1)
    modes = np.concatenate([clean.modes[kept], [named]])
    time = np.append(clean.minibatch_ms[kept], 1.5 * there.minibatch_ms)
    power = np.append(clean.power_mw[kept], there.power_mw)
    (suspect,) = (s for s in audit_rows(Profile(modes, time, power)) if s.row == len(modes) - 1)
    assert suspect.mode == named
    assert suspect.applied is not None
    assert suspect.applied._replace(cpu_khz=0) == named._replace(cpu_khz=0)
    assert 652_800 <= suspect.applied.cpu_khz <= 806_400
    assert suspect.reason.startswith("mode not applied: time ")
    assert "instead of CPU 268,800 kHz" in suspect.looks_like


def test_passing_rows_are_those_that_are_not_suspect() -> None:
    profile = measured_profile(450, 4)
    damaged, _ = with_wrong_rows(profile, 0.02, 4, one_knob=False)
    suspects = audit_rows(damaged)
    passing = passing_rows(damaged, suspects)
    assert set(np.flatnonzero(~passing)) == suspect_indices(suspects)
