"""Explaining which resources bound a training step, in plain text for operators.

The resources are those of the model in `wattfleet.prediction.roofline.physics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields

import numpy as np

from wattfleet.modes import PowerMode, array_to_modes
from wattfleet.prediction.roofline.physics import Settings, StepShares, TimeParameters, step_shares

_RESOURCES: Mapping[str, tuple[str, str]] = {
    "loading": ("loading the data", "Faster with more cores or a higher CPU clock."),
    "launch": ("launching the GPU's work from the CPU", "Faster with a higher CPU clock; more cores do not help."),
    "compute": ("computing on the GPU", "Faster with a higher GPU clock."),
    "memory": ("moving data between GPU and memory", "Faster with a higher memory clock."),
    "fixed": ("work that no clock changes", "No knob makes it faster."),
}
# Smallest share of a further resource that is mentioned.
_MIN_MENTIONED = 0.2


@dataclass(frozen=True)
class Explanation:
    """The resources that bound a step at one mode.

    Attributes:
        mode: the mode.
        shares: shares of `loading`, `launch`, `compute`, `memory` and `fixed`, the largest first; they sum to 1.
            Speeding a resource up by 1 % shortens the step by its share of 1 %.
    """

    mode: PowerMode
    shares: Mapping[str, float]

    @property
    def bound(self) -> str:
        """The resource with the largest share."""
        return next(iter(self.shares))

    def words(self) -> str:
        """Two sentences: what bounds the step, and what would make it faster."""
        (first, share), *rest = self.shares.items()
        also = [f"{_RESOURCES[name][0]} ({value:.0%})" for name, value in rest if value >= _MIN_MENTIONED]
        text = f"Bound by {_RESOURCES[first][0]} ({share:.0%} of the step)"
        if also:
            text += f", then by {' and '.join(also)}"
        return f"{text}. {_RESOURCES[first][1]}"


def explain(time: TimeParameters, settings: Settings) -> list[Explanation]:
    """Explain the step at each of `[n, 5]` settings."""
    names = [field.name for field in fields(StepShares)]
    shares = np.stack(astuple(step_shares(time, settings)), axis=1)
    found = []
    for mode, row in zip(array_to_modes(settings[:, :4]), shares, strict=True):
        order = np.argsort(-row, kind="stable")
        found.append(Explanation(mode, {names[k]: float(row[k]) for k in order}))
    return found
