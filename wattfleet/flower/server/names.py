"""The names of a run and of its workload."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import ArrayRecord

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Task, Workload
from wattfleet_proto.limits import MAX_ID_CHARACTERS
from wattfleet_proto.names import label_of, require_labels, require_run_name

# --- Run naming -------------------------------------------------------------------------------------------------------
# The name and the labels of a run: chosen by the app's author, or by the user who starts the run.


NAME_KEY, LABELS_KEY = "run-name", "run-labels"
"""Keys of the run config: `flwr run -c 'run-name="night" run-labels="site=lab lr=0.1"'`."""


@dataclass(frozen=True)
class RunTitle:
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

    def of(self, run: Any) -> RunTitle:
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
        return RunTitle(name, str(getattr(run, "fab_id", "") or "")[:MAX_ID_CHARACTERS], labels)


def _text_of(value: Any) -> Any:
    """A number as text, so that `labels={"lr": 0.1}` works; everything else stays as it is."""
    return str(value) if isinstance(value, (bool, int, float)) else value


# --- Workload naming --------------------------------------------------------------------------------------------------
# The workload of a run: named by the app, or derived from the app, its run config and its arrays.

WORKLOAD_KEYS = (
    "model",
    "model-name",
    "network",
    "architecture",
    "backbone",
    "dataset",
    "image-size",
    "sequence-length",
    "precision",
)
"""Keys of the run config that change the work of a step. The batch size does not: it is a fact of a workload."""

_DIGEST_CHARACTERS = 8
# Flower has no app name if a strategy runs without a bundle, in a test for example.
_UNKNOWN_APP = "app"


class WorkloadNaming:
    """Names the workload of a run."""

    def __init__(self, stated: str | Workload | None = None, keys: Iterable[str] = WORKLOAD_KEYS) -> None:
        """Use a stated workload, or derive it.

        Args:
            stated: the workload, or its name; None to derive it.
            keys: keys of the run config whose overridden values become part of a derived name. Hyphens and underscores
                count as the same.

        Raises:
            InvalidInputError: the name is not valid, the workload is not a training, or the keys are a single string.
        """
        if isinstance(stated, str):
            stated = Workload(stated)
        if not (stated is None or isinstance(stated, Workload)):
            raise InvalidInputError(
                f"workload must be a name or a wattfleet.core.modes.Workload, not {stated!r}: name what the app trains,"
                " or leave it out to derive the name"
            )
        if stated is not None and stated.facts.task is not Task.TRAINING:
            raise InvalidInputError(
                f"the workload {stated.name!r} is {stated.facts.task}, but a Flower app trains: state Task.TRAINING"
            )
        if isinstance(keys, str):
            raise InvalidInputError(f"workload_keys must be a sequence of keys, such as ({keys!r},), not a string")
        self._stated = stated
        self._keys = frozenset(map(_plain_key, keys))

    def workload(self, run: Any, arrays: ArrayRecord) -> Workload:
        """The workload of a run, with the number of its parameters.

        Args:
            run: Flower's run.
            arrays: the network that the run starts from.

        Raises:
            InvalidInputError: the derived name is not valid.
        """
        named = self._stated or self._derived(run, arrays)
        parameters = sum(math.prod(array.shape) for array in arrays.values())
        if named.facts.parameters is not None or not parameters:
            return named
        return replace(named, facts=replace(named.facts, parameters=parameters))

    def _derived(self, run: Any, arrays: ArrayRecord) -> Workload:
        # A grid made by the app may return a run that has nothing but its id.
        app = getattr(run, "fab_id", "") or _UNKNOWN_APP
        config = sorted((_plain_key(key), value) for key, value in getattr(run, "override_config", {}).items())
        listed = [f"{key}={value}" for key, value in config if key in self._keys]
        try:
            return Workload(" ".join([app, *listed, f"#{_digest(arrays)}"]))
        except InvalidInputError as error:
            raise InvalidInputError(
                f"no valid workload name can be derived from the app and its run config: {error}. State it in the app:"
                " PowerAware(strategy, workload='...')"
            ) from None


def _plain_key(key: str) -> str:
    return str(key).replace("_", "-")


def _digest(arrays: ArrayRecord) -> str:
    """Return a digest of a network's structure: the names, shapes and number formats of its arrays."""
    layout = sorted([str(name), list(array.shape), str(array.dtype)] for name, array in arrays.items())
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()[:_DIGEST_CHARACTERS]
