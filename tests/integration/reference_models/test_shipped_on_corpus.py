"""The shipped reference against the corpus that it was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import reference_models
from wattfleet.modes import read_profile
from wattfleet.prediction import RooflinePredictor, restore_predictor


@pytest.mark.data
def test_the_shipped_reference_matches_a_fit_to_its_corpus(corpora: Path) -> None:
    artefact = reference_models.load("agx_orin_resnet18")
    corpus = read_profile(corpora / "agx_orin_resnet18.csv")
    shipped, refitted = (
        restore_predictor(artefact).predict(corpus.modes),
        RooflinePredictor.fit(corpus).predict(corpus.modes),
    )
    # Not bit for bit: another numerical library may round differently.
    np.testing.assert_allclose(shipped.minibatch_ms, refitted.minibatch_ms, rtol=0.01)
    np.testing.assert_allclose(shipped.power_mw, refitted.power_mw, rtol=0.01)
    error = 100 * np.abs(shipped.minibatch_ms / corpus.minibatch_ms - 1)
    stated = json.loads(artefact.manifest)["figures"]["corpus"]
    assert error.mean() == pytest.approx(stated["time_mape_pct"], abs=0.01)
    assert np.median(error) == pytest.approx(stated["time_median_ape_pct"], abs=0.01)
