"""What the options of `evaluate duty` and `evaluate interleave` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wattfleet.errors import InvalidInputError

if TYPE_CHECKING:
    from wattfleet.modes import Profile, Task
    from wattfleet_evaluation.corpus_predictions import Fit

DEFAULT_REFERENCE = "agx_orin_resnet18"
"""The shipped reference that strategies transfer from."""


def require_measurements(measure: int, seed: int, fewest: int) -> None:
    """Check `--measure` and `--seed`.

    Raises:
        InvalidInputError: one is out of range.
    """
    if measure < fewest:
        raise InvalidInputError(f"--measure must be {fewest} or more, not {measure}")
    if seed < 0:
        raise InvalidInputError(f"--seed must be 0 or more, not {seed}")


def require_task(option: str, profile: Profile, task: Task) -> None:
    """Check that the file of an option is of a task.

    Raises:
        InvalidInputError: it is of the other task.
    """
    if profile.task is not task:
        raise InvalidInputError(f"{option}: the file is of {profile.task}: give measurements of {task}")


def fit_named(path: Path, target: Profile, names: Sequence[str] | None) -> Fit:
    """The function that fits the predictor to rows of a target, from references that know nothing of its network.

    Args:
        path: the target's file, for errors.
        target: all measured rows in the file.
        names: shipped references, or files of corpora; None for the default.

    Raises:
        InvalidInputError: a reference is unknown, was trained on the target, or is of the other task.
    """
    from wattfleet.modes import board_with_modes, stated_facts
    from wattfleet.prediction import DEFAULT_PREDICTOR, fit_from, predictor_class
    from wattfleet_evaluation.judging.reference_source import find_reference, references_of

    facts = stated_facts(str(path), target)
    sources = [find_reference(name, target) for name in dict.fromkeys(names or [DEFAULT_REFERENCE])]
    known = references_of(sources, DEFAULT_PREDICTOR, board_with_modes(target.modes))
    return lambda profile: fit_from(predictor_class(DEFAULT_PREDICTOR), profile, known, facts)
