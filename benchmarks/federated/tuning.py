"""The settings that a run may tune, and the methods that are compared for each of them."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.federated.methods import METHODS
from benchmarks.federated.server_steps import STEPPINGS, is_asynchronous

LEVERS = ("batch", "work", "epochs")
"""What can be tuned in addition to the modes."""

_TUNED = frozenset(f"progress-{lever}" for lever in (*LEVERS, "all"))
_MORE_EPOCHS = ("presets-4", "presets-8")


def is_tuned(name: str) -> bool:
    """Whether a method chooses more than devices and modes."""
    return name.removeprefix("oracle-") in _TUNED


MODES_ALONE = tuple(
    name for name in METHODS if not is_tuned(name) and not is_asynchronous(name) and name not in _MORE_EPOCHS
)
"""The methods that choose devices and modes."""

_ASYNCHRONOUS = tuple(f"{knows}{name}" for name in STEPPINGS for knows in ("", "oracle-"))

_COMPARED = ("progress", "presets", "presets-equal", "oracle-progress")

TUNES: Mapping[str, tuple[str, ...]] = {
    "modes": MODES_ALONE,
    "batch": (*_COMPARED, "progress-batch", "oracle-progress-batch"),
    "work": (*_COMPARED, "progress-work", "oracle-progress-work"),
    "epochs": (*_COMPARED, *_MORE_EPOCHS, "progress-epochs", "oracle-progress-epochs"),
    "async": (*_COMPARED, *_ASYNCHRONOUS),
    "all": (
        *_COMPARED,
        *_MORE_EPOCHS,
        *_ASYNCHRONOUS,
        *(f"{knows}progress-{lever}" for lever in (*LEVERS, "all") for knows in ("", "oracle-")),
    ),
}
"""The methods that are compared by what is tuned."""
