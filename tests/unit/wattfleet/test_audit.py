"""Auditing profiles with few rows: which ones are refused, and which ones pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import wattfleet.prediction.row_audit as audit_module
from tests.fakes.damaged_profiles import measured_profile, shipped_reference, six_rows_with_two_wrong
from wattfleet.modes import Profile, Task
from wattfleet.prediction import NoAuditError, RooflinePredictor, audit_rows


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
