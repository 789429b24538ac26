"""What runs are called, and texts about their labels and their rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from wattfleet_proto.plan_ids import plan_in_words

if TYPE_CHECKING:
    from coordinator.display.view_values import Values


class RunNames:
    """The names of known runs by id."""

    def __init__(self, runs: Iterable[Values]) -> None:
        """Collect the names.

        Args:
            runs: values of runs, as from `run_values`.
        """
        self._names = {each["run_id"]: each["name"] for each in runs}

    def of(self, run_id: str) -> str:
        """A run's name; its id if the run is unknown, for example because it was deleted."""
        name: str = self._names.get(run_id, run_id)
        return name

    def round_of(self, plan_id: str) -> str:
        """The round of a plan, such as "round 3 of run digits-0714-1532", or a run's measurements."""
        return plan_in_words(plan_id, self.of(plan_id.rpartition("/")[0]))


def run_title(run: Values) -> str:
    """A run's name, with its id if that differs."""
    return run["name"] if run["name"] == run["run_id"] else f"{run['name']} ({run['run_id']})"


def labels_text(labels: Mapping[str, str]) -> str:
    """A run's labels in one line, such as "lr=0.1 site=lab"; empty without any."""
    return " ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def has_labels(run: Values, wanted: Mapping[str, str]) -> bool:
    """Whether a run has all of the given labels."""
    return all(run["labels"].get(key) == value for key, value in wanted.items())
