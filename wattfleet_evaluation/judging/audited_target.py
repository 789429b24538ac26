"""The audit of an evaluation's target: which of its rows can be trusted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import Profile
from wattfleet.prediction import MIN_CORPUS_MODES, NoAuditError, Predictor, RooflinePredictor, audit_rows, passing_rows

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class AuditedTarget:
    """The result of a target's audit.

    Attributes:
        trusted: `[n]` whether each row passes; None if the target cannot be audited.
        no_audit_reason: why the target cannot be audited, as text for people; None if it was audited.
    """

    trusted: NDArray[np.bool_] | None
    no_audit_reason: str | None = None

    @property
    def suspect_rows(self) -> int | None:
        """Number of rows that do not pass; None if the target cannot be audited."""
        return None if self.trusted is None else int((~self.trusted).sum())


def audited(target: Profile, known: Predictor | None) -> AuditedTarget:
    """Audit a target if possible.

    Args:
        target: measured modes.
        known: the reference. The audit's fit uses it if the target is smaller than a corpus and the reference is a
            roofline predictor.
    """
    reference = known if isinstance(known, RooflinePredictor) and len(target) < MIN_CORPUS_MODES else None
    try:
        return AuditedTarget(passing_rows(target, audit_rows(target, reference)))
    except NoAuditError as error:
        return AuditedTarget(None, str(error))
