"""NVIDIA's preset modes, chosen by the watts in their names, such as `15W`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, nearest_mode
from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.measurement_session import MeasurementSession


@dataclass(frozen=True)
class Presets:
    """Chooses the preset with the most watts in its name that the budget covers, without measuring.

    A preset such as `30W` caps clocks, not watts, so it may draw more or far less. A preset without watts in its name
    (`MAXN`) is never chosen.

    Attributes:
        presets: the board's preset modes by name. If a preset cannot be set, the nearest mode takes its place.

    Raises:
        InvalidInputError: no preset has watts in its name.
    """

    presets: Mapping[str, PowerMode]
    name: str = "presets"

    def __post_init__(self) -> None:
        if not self._labelled():
            raise InvalidInputError(f"none of the presets {', '.join(self.presets)} has watts in its name")

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure nothing."""
        labelled = {watts: nearest_mode(session.modes, mode) for watts, mode in self._labelled().items()}

        def choose(budget_w: float) -> PowerMode | None:
            covered = [watts for watts in labelled if watts <= budget_w]
            return labelled[max(covered)] if covered else None

        return choose

    def _labelled(self) -> dict[int, PowerMode]:
        """The presets by the watts in their names, such as 15 for `15W`."""
        labels = {name: name.removesuffix("W") for name in self.presets}
        return {int(watts): self.presets[name] for name, watts in labels.items() if watts.isdecimal()}
