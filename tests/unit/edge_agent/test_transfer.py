"""Transfers from several references to one device."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import reference_models
from edge_agent.learning.transfer import Transfer, references_of
from edge_agent.profiling.journal import JournalHeader
from wattfleet.modes import BOARDS, FittedWorkload, Profile, WorkloadFacts
from wattfleet.prediction import Artefact, RooflinePredictor, pack_artefact, predictor_class, restore_predictor

SHIPPED = reference_models.load("agx_orin_resnet18")
HEADER = JournalHeader("jetson-07", "agx-orin", "hardware", "bert", 16)
FACTS = WorkloadFacts(batch=16)
MODES = np.array([[4, 2_201_600, 1_300_500_000, 3_199_000_000], [12, 729_600, 306_000_000, 2_133_000_000]], float)
PROFILE = Profile(MODES, np.array([40.0, 160.0]), np.array([30_000.0, 14_000.0]))


def known_profile() -> Profile:
    """Ten modes whose measurements equal the shipped reference's predictions."""
    modes = np.array([[4, 2_201_600, clock * 1e6, 3_199_000_000] for clock in np.linspace(306, 1300, 10)])
    predicted = known(SHIPPED).predict(modes)
    return Profile(modes, predicted.minibatch_ms, predicted.power_mw)


def another_reference() -> Artefact:
    fitted = RooflinePredictor.fit(PROFILE, known(SHIPPED), FACTS)
    return pack_artefact(fitted, FittedWorkload("speech", 16, 10), "agx-orin", {}, {}, FACTS)


def known(artefact: Artefact) -> RooflinePredictor:
    predictor = restore_predictor(artefact, BOARDS["agx-orin"])
    assert isinstance(predictor, RooflinePredictor)
    return predictor


def test_several_references_are_mixed_and_named_in_the_fitted_predictor() -> None:
    references = (SHIPPED, another_reference())
    transfer = Transfer(references, HEADER, 100)
    fitted = transfer.fitted(PROFILE, transfer.priors())
    mixed = RooflinePredictor.fit_mixed(PROFILE, [known(each) for each in references], FACTS)
    assert fitted.save() == mixed.save() != Transfer((SHIPPED,), HEADER, 100).fitted(PROFILE, [known(SHIPPED)]).save()
    assert references_of(transfer.packed(fitted, 2)) == [each.digest for each in references]
    assert references_of(Transfer((), HEADER, 100).packed(fitted, 2)) == []


def test_a_further_reference_of_another_kind_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    of_trees = predictor_class("tree").fit(known_profile(), None, FACTS)
    other = pack_artefact(of_trees, FittedWorkload("speech", 16, 10), "agx-orin", {}, {}, FACTS)
    with caplog.at_level(logging.ERROR):
        (prior,) = Transfer((SHIPPED, other), HEADER, 100).priors()
    assert isinstance(prior, RooflinePredictor)
    assert f"the reference {other.digest[:12]} is not used: it cannot be mixed with the first" in caplog.text
