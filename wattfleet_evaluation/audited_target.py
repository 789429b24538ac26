"""Which rows of a target an evaluation may trust."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import Profile
from wattfleet.prediction import MIN_CORPUS_MODES, NoAuditError, Predictor, RooflinePredictor, audit_rows, passing_rows


@dataclass(frozen=True)
class AuditedTarget:
    """What the audit of a target found.

    Attributes:
        trusted: `[n]` rows that pass; None where the target cannot be audited.
        why_not: why it cannot be, for people; None where it was.
    """

    trusted: NDArray[np.bool_] | None
    why_not: str | None = None

    @property
    def suspect_rows(self) -> int | None:
        """Rows that do not pass; None where the target cannot be audited."""
        return None if self.trusted is None else int((~self.trusted).sum())


def audited(target: Profile, known: Predictor | None) -> AuditedTarget:
    """Audit a target, as well as it can be.

    Args:
        target: measured modes.
        known: what is transferred from. It helps where the target is smaller than a corpus and it is of the kind that
            the audit fits.
    """
    helping = known if isinstance(known, RooflinePredictor) and len(target) < MIN_CORPUS_MODES else None
    try:
        return AuditedTarget(passing_rows(target, audit_rows(target, helping)))
    except NoAuditError as error:
        return AuditedTarget(None, str(error))
