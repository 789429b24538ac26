"""The name and the labels of a run: chosen by the app's author, or by the user who starts the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wattfleet.errors import InvalidInputError
from wattfleet_proto.message_sizes import MAX_ID_CHARACTERS
from wattfleet_proto.run_names import label_of, require_labels, require_run_name

NAME_KEY, LABELS_KEY = "run-name", "run-labels"
"""Keys of the run config: `flwr run -c 'run-name="night" run-labels="site=lab lr=0.1"'`."""


@dataclass(frozen=True)
class RunNames:
    """What a run is called.

    Attributes:
        name: its name; empty to let the coordinator make one from `app` and the time.
        app: Flower's id of the app; empty if it has none.
        labels: words by which people find the run.
    """

    name: str = ""
    app: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


class RunNaming:
    """Names runs: the run config counts more than what the app states."""

    def __init__(self, name: str | None = None, labels: Mapping[str, str | int | float | bool] | None = None) -> None:
        """State the name and the labels of the app's runs.

        Args:
            name: the name; None to let the coordinator make one.
            labels: words by which people find the runs.

        Raises:
            InvalidInputError: the name or a label is not valid.
        """
        if name is not None:
            if not isinstance(name, str):
                raise InvalidInputError(f"run_name must be a text, not {name!r}: leave it out for a default name")
            require_run_name(name)
        if labels is not None and not isinstance(labels, Mapping):
            raise InvalidInputError(f"labels must be a dictionary such as {{'site': 'lab'}}, not {labels!r}")
        self._name = name or ""
        self._labels = {key: _text_of(value) for key, value in (labels or {}).items()}
        require_labels(self._labels)

    def of(self, run: Any) -> RunNames:
        """The name and the labels of one run.

        Args:
            run: Flower's run.

        Raises:
            InvalidInputError: the run config has an invalid name or label.
        """
        # A grid made by the app may return a run that has nothing but its id.
        config = getattr(run, "override_config", {})
        name = str(config.get(NAME_KEY, "")) or self._name
        labels = {**self._labels, **dict(map(label_of, str(config.get(LABELS_KEY, "")).split()))}
        if name:
            require_run_name(name)
        require_labels(labels)
        return RunNames(name, str(getattr(run, "fab_id", "") or "")[:MAX_ID_CHARACTERS], labels)


def _text_of(value: Any) -> Any:
    """A number as text, so that `labels={"lr": 0.1}` works; everything else stays as it is."""
    return str(value) if isinstance(value, (bool, int, float)) else value
