"""The shipped reference predictors."""

from __future__ import annotations

import re
from importlib import resources

import numpy as np
import pytest

import reference_models
from wattfleet.errors import InvalidInputError
from wattfleet.modes import board_named
from wattfleet.prediction import restore_predictor


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
