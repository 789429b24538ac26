"""The workload of a run: named by the app, or derived from the app, its run config and its arrays."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Task, Workload

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
                f"workload must be a name or a wattfleet.modes.Workload, not {stated!r}: name what the app trains, or"
                " leave it out to derive the name"
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
