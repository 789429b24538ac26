"""The reference predictors that ship."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

import reference_models
from wattfleet.errors import InvalidInputError
from wattfleet.modes import board_named, read_profile
from wattfleet.prediction import RooflinePredictor, restore_predictor


def text_of(name: str, file: str) -> str:
    return (resources.files(reference_models) / name / file).read_text()


def test_the_reference_of_agx_orin_ships() -> None:
    assert "agx_orin_resnet18" in reference_models.shipped()


@pytest.mark.parametrize("name", reference_models.shipped())
def test_every_shipped_reference_is_whole_and_predicts_its_board(name: str) -> None:
    artefact = reference_models.load(name)
    space = board_named(artefact.details.board).space
    prediction = restore_predictor(artefact).predict(space.array())
    assert np.isfinite(prediction.minibatch_ms).all()
    # The highest of all modes is not the last in every column, but it is fast and hungry.
    assert prediction.minibatch_ms[-1] < 2 * prediction.minibatch_ms.min()
    assert prediction.power_mw[-1] > 0.8 * prediction.power_mw.max()


@pytest.mark.parametrize("name", reference_models.shipped())
def test_the_card_tells_the_figures_and_the_digest_of_what_ships(name: str) -> None:
    artefact, card = reference_models.load(name), text_of(name, "MODEL_CARD.md")
    assert artefact.digest in card
    held_out = artefact.details.figures["held_out"]
    assert f"{held_out['time_mape_pct']} / {held_out['time_median_ape_pct']}" in card
    assert f"{held_out['power_mape_pct']} / {held_out['power_median_ape_pct']}" in card
    assert "doi:10.1016/j.future.2024.07.001" in card
    assert "wattfleet reference train" in card


@pytest.mark.parametrize("name", reference_models.shipped())
def test_what_ships_names_no_place_of_the_machine_it_was_made_on(name: str) -> None:
    for file in ("MODEL_CARD.md", "manifest.json"):
        text = text_of(name, file)
        assert not re.search(r"(^|[\s'\"=(])/\w", text), file
        assert not re.search(r"https?://", text), file


def test_a_name_that_does_not_ship_is_refused_with_those_that_do() -> None:
    with pytest.raises(InvalidInputError, match="'agx_orin_vgg' ships: choose one of .*agx_orin_resnet18"):
        reference_models.load("agx_orin_vgg")


@pytest.mark.data
def test_what_ships_is_what_its_corpus_gives_and_as_good_as_it_says(corpora: Path) -> None:
    artefact = reference_models.load("agx_orin_resnet18")
    corpus = read_profile(corpora / "agx_orin_resnet18.csv")
    shipped, anew = (
        restore_predictor(artefact).predict(corpus.modes),
        RooflinePredictor.fit(corpus).predict(corpus.modes),
    )
    # Not bit for bit: another numerical library may round otherwise.
    np.testing.assert_allclose(shipped.minibatch_ms, anew.minibatch_ms, rtol=0.01)
    np.testing.assert_allclose(shipped.power_mw, anew.power_mw, rtol=0.01)
    error = 100 * np.abs(shipped.minibatch_ms / corpus.minibatch_ms - 1)
    said = json.loads(artefact.manifest)["figures"]["corpus"]
    assert error.mean() == pytest.approx(said["time_mape_pct"], abs=0.01)
    assert np.median(error) == pytest.approx(said["time_median_ape_pct"], abs=0.01)
