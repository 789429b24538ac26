"""Auditing a few rows: what is refused, and what passes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import wattfleet.prediction.row_audit as audit_module
from tests.fakes.damaged_profiles import measured_profile, shipped_reference, six_rows_with_two_wrong
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


def test_a_fit_that_contradicts_most_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "POWER_THRESHOLD", 1e-6)
    monkeypatch.setattr(audit_module, "_MIN_DEVIATIONS", 1e-6)
    with pytest.raises(NoAuditError, match=r"of 60 rows contradict the audit's fit, so the fit is not credible"):
        audit_rows(measured_profile(60, 0), shipped_reference())
