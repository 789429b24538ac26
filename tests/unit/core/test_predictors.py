"""Kinds of predictors, observations that contradict a predictor, and audits of profiles with few rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

import wattfleet.core.prediction.predictor as kinds
import wattfleet.core.prediction.row_audit as audit_module
from tests.fakes.profiles import measured_profile, shipped_reference, six_rows_with_two_wrong
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Measurement, PowerMode, Profile, Task
from wattfleet.core.prediction import (
    DEFAULT_PREDICTOR,
    DriftRule,
    NoAuditError,
    Prediction,
    Residual,
    RooflinePredictor,
    audit_rows,
    detect_drift,
    predictor_class,
    predictor_names,
)

# --- Predictor kinds --------------------------------------------------------------------------------------------------
# Kinds of predictors are found through entry points, and a missing one gives an error with the remedy.


BASELINES = ("boosting", "forest", "linear", "powertrain", "scratch", "tree")
ROOFLINE = ("roofline", "wattfleet.core.prediction.roofline:RooflinePredictor")


@pytest.fixture(autouse=True)
def fresh_registry() -> Iterator[None]:
    kinds.registered_kinds.cache_clear()
    yield
    kinds.registered_kinds.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    """Replace the entry points of the installation by these, each given as a name and a class."""
    found = [EntryPoint(name, value, "wattfleet.predictors") for name, value in entries]
    monkeypatch.setattr(kinds, "entry_points", lambda group: found if group == "wattfleet.predictors" else [])


def test_this_installation_provides_the_default_and_the_baselines() -> None:
    assert predictor_names() == ("roofline", *BASELINES)
    assert DEFAULT_PREDICTOR == "roofline"


def test_every_registered_class_has_the_name_of_its_entry_point() -> None:
    for name in predictor_names():
        assert predictor_class(name).name == name


def test_a_package_can_register_a_kind_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("aardvark", ROOFLINE[1]), ROOFLINE)
    assert predictor_names() == ("roofline", "aardvark")
    assert predictor_class("aardvark") is RooflinePredictor


def test_an_unknown_kind_is_refused_with_the_installed_ones() -> None:
    with pytest.raises(
        InvalidInputError,
        match=f"^unknown predictor 'oracle': installed are roofline, {', '.join(BASELINES)}$",
    ):
        predictor_class("oracle")


def test_the_package_that_provides_the_baselines_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ROOFLINE)
    with pytest.raises(
        InvalidInputError,
        match=f"'wattfleet.evaluation' provides {', '.join(BASELINES)}: install it",
    ):
        predictor_class("powertrain")


def test_a_registered_kind_whose_package_is_absent_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ROOFLINE, ("oracle", "wattfleet_delphi.oracle:Oracle"))
    with pytest.raises(InvalidInputError, match="predictor 'oracle' needs the package 'wattfleet_delphi': install it"):
        predictor_class("oracle")


def test_a_missing_dependency_of_a_kind_is_not_mistaken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("broken", "wattfleet.no_such_module:Broken"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        predictor_class("broken")


# --- Drift ------------------------------------------------------------------------------------------------------------
# Detecting that observations contradict a predictor.

MODE = PowerMode(4, 1_036_800, 510_000_000, 2_133_000_000)
QUIET = Residual(0.3, -0.5)


def test_a_residual_is_in_standard_deviations_of_the_prediction() -> None:
    predicted = Prediction(np.array([100.0]), np.array([20_000.0]), np.array([0.05]), np.array([0.02]))
    residual = Residual.of(Measurement(MODE, 100 * np.exp(0.1), 20_000 * np.exp(-0.02)), predicted)
    assert (residual.time, residual.power) == (pytest.approx(2), pytest.approx(-1))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (Residual(1.7, 0), "4 of the last 6 rounds took longer than the predictor's 90% interval"),
        (Residual(-1.7, 0), "took less time"),
        (Residual(0, 1.7), "drew more power"),
        (Residual(0, -1.7), "drew less power"),
    ],
)
def test_four_of_the_last_six_rounds_beyond_one_end_are_drift(odd: Residual, words: str) -> None:
    found = detect_drift([odd, QUIET, odd, QUIET, odd, odd])
    assert found is not None
    assert words in found
    assert detect_drift([odd, odd, odd]) is None
    assert detect_drift([odd, odd, odd, QUIET, QUIET, QUIET, odd]) is None, "the first is no longer among the last six"


def test_deviations_to_alternating_sides_are_not_drift() -> None:
    assert detect_drift([Residual(1.7, -1.7), Residual(-1.7, 1.7)] * 3) is None


def test_the_interval_ends_at_its_normal_quantile() -> None:
    # The 90 % interval of a normal distribution extends to 1.645 standard deviations.
    assert detect_drift([Residual(1.64, 1.64)] * 6) is None
    assert detect_drift([Residual(1.65, 0)] * 6) is not None


def test_false_alarms_are_rarer_than_one_in_a_thousand_rounds() -> None:
    rng = np.random.default_rng(0)
    rounds = [Residual(*pair) for pair in rng.standard_normal((40_000, 2))]
    alarms = sum(detect_drift(rounds[end - 6 : end]) is not None for end in range(6, len(rounds)))
    assert 0 < alarms / len(rounds) < 1 / 1000


@pytest.mark.parametrize("wrong", [{"interval": 1.0}, {"outside": 0}, {"outside": 7}, {"modes": 0}])
def test_rules_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        DriftRule(**wrong)


# --- Audit ------------------------------------------------------------------------------------------------------------
# Auditing profiles with few rows: which ones are refused, and which ones pass.


def test_correct_rows_pass() -> None:
    assert len(audit_rows(measured_profile(50, 6), shipped_reference())) <= 1
    assert not audit_rows(measured_profile(5, 6).rows(np.arange(1)), shipped_reference())


def test_too_few_rows_need_a_reference() -> None:
    with pytest.raises(NoAuditError, match="4 measured modes are too few to audit: .* or give a reference"):
        audit_rows(measured_profile(4, 0))


@pytest.mark.parametrize("known", [None, shipped_reference])
def test_few_rows_are_not_fitted_again_without_the_wrong_ones(known: Callable[[], RooflinePredictor] | None) -> None:
    assert len(audit_rows(six_rows_with_two_wrong(), known and known())) == 2


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_few_rows_can_be_audited_with_a_reference(count: int) -> None:
    assert audit_rows(measured_profile(count, 3), shipped_reference()) == []


def two_batches(power_factor: float = 1.0, first: int = 40) -> Profile:
    """Rows of batch size 1, and of 64, which take four times as long; `power_factor` changes row 3 of batch size 64."""
    one, other = measured_profile(first, 0), measured_profile(40, 1)
    power = other.power_mw.copy()
    power[3] *= power_factor
    return Profile(
        np.concatenate([one.modes, other.modes]),
        np.concatenate([one.minibatch_ms, 4 * other.minibatch_ms]),
        np.concatenate([one.power_mw, power]),
        np.repeat([1, 64], [first, 40]),
        Task.INFERENCE,
    )


def test_a_false_row_among_several_batches_is_found_with_its_batch() -> None:
    assert audit_rows(two_batches(), shipped_reference()) == []
    (found,) = audit_rows(two_batches(power_factor=0.5), shipped_reference())
    assert (found.row, found.batch) == (43, 64)


def test_a_batch_with_too_few_rows_is_named() -> None:
    with pytest.raises(NoAuditError, match="batch 1: 4 measured modes are too few to audit"):
        audit_rows(two_batches(first=4))


def test_a_fit_that_contradicts_most_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "POWER_THRESHOLD", 1e-6)
    monkeypatch.setattr(audit_module, "_MIN_DEVIATIONS", 1e-6)
    with pytest.raises(NoAuditError, match=r"of 60 rows contradict the audit's fit, so the fit is not credible"):
        audit_rows(measured_profile(60, 0), shipped_reference())
