"""The choices of Wattfleet's own method on the measured corpora."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattfleet.modes import read_profile
from wattfleet.prediction import RooflinePredictor
from wattfleet_evaluation.choice_methods import MeasureWhatMatters
from wattfleet_evaluation.judging.transfer import evaluate_choice


@pytest.fixture(scope="module")
def reference(corpora: Path) -> RooflinePredictor:
    return RooflinePredictor.fit(read_profile(corpora / "agx_orin_resnet18.csv"))


@pytest.mark.data
@pytest.mark.parametrize(
    ("target", "limit", "budgets", "over_pct", "over_1w_pct", "median_pct", "mean_pct"),
    [
        ("agx_orin_mobilenetv3", 10, range(17, 51), 8, 2, 4, 7),
        pytest.param("agx_orin_mobilenetv3", 50, range(17, 51), 2, 0, 1.5, 3, marks=pytest.mark.slow),
        ("orin_nano_resnet18", 50, range(8, 21), 2, 0, 1, 7),
    ],
)
def test_choices_on_the_corpora_stay_within_known_penalties(
    corpora: Path,
    reference: RooflinePredictor,
    target: str,
    limit: int,
    budgets: range,
    over_pct: float,
    over_1w_pct: float,
    median_pct: float,
    mean_pct: float,
) -> None:
    method = MeasureWhatMatters(lambda profile: RooflinePredictor.fit(profile, reference))
    cases = evaluate_choice(read_profile(corpora / f"{target}.csv"), method, limit, budgets, runs=2, seed=0)
    assert 100 * (cases.excess_w > 0).mean() <= over_pct
    assert 100 * (cases.excess_w > 1).mean() <= over_1w_pct
    assert np.median(cases.penalty_pct) <= median_pct
    assert cases.penalty_pct.mean() <= mean_pct
    assert (cases.modes_measured <= limit).all()
