"""What bounds a training step, in words an operator reads.

The resources are those of the physics behind the predictor (`wattfleet.prediction.roofline.physics`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields

import numpy as np

from wattfleet.modes import ModeArray, PowerMode, array_to_modes
from wattfleet.prediction.roofline.physics import StepShares, TimeParameters, step_shares

_WHAT: Mapping[str, tuple[str, str]] = {
    "loading": ("loading the data", "more cores or a higher CPU clock"),
    "launch": ("launching the GPU's work from the CPU", "a higher CPU clock; more cores do not help"),
    "compute": ("computing on the GPU", "a higher GPU clock"),
    "memory": ("moving data between GPU and memory", "a higher memory clock"),
    "fixed": ("what no clock changes", "no knob"),
}
# A share from which a second resource is worth naming.
_WORTH_NAMING = 0.2


@dataclass(frozen=True)
class Explanation:
    """Which resources a step waits for at one mode.

    Attributes:
        mode: the mode.
        shares: `loading`, `launch`, `compute`, `memory` and `fixed`, the largest first; they sum to 1. Making a
            resource 1 % faster makes the step its share of 1 % faster.
    """

    mode: PowerMode
    shares: Mapping[str, float]

    @property
    def bound(self) -> str:
        """The resource of the largest share."""
        return next(iter(self.shares))

    def words(self) -> str:
        """A sentence on what bounds the step, and one on what would make it faster."""
        (first, share), *rest = self.shares.items()
        also = [f"{_WHAT[name][0]} ({value:.0%})" for name, value in rest if value >= _WORTH_NAMING]
        text = f"Bound by {_WHAT[first][0]} ({share:.0%} of the step)"
        if also:
            text += f", then by {' and '.join(also)}"
        return f"{text}. Faster with {_WHAT[first][1]}."


def explain(time: TimeParameters, modes: ModeArray) -> list[Explanation]:
    """Explain each of `[n, 4]` modes."""
    names = [field.name for field in fields(StepShares)]
    shares = np.stack(astuple(step_shares(time, modes)), axis=1)
    found = []
    for mode, row in zip(array_to_modes(modes), shares, strict=True):
        order = np.argsort(-row, kind="stable")
        found.append(Explanation(mode, {names[k]: float(row[k]) for k in order}))
    return found
