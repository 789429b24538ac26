"""Determines the profiling method and its number of modes from the options of `wattfleet agent profile`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import typer

from wattfleet.choosing import ProfilingMethod, WorkloadChanges
from wattfleet.errors import InvalidInputError

if TYPE_CHECKING:
    from edge_agent.devices.device import Device
    from edge_agent.profiling.stored_profile import MeasuredProfile
    from wattfleet.choosing import BoardFigures
    from wattfleet.prediction import Artefact

_MODES = 50
_ASK_FROM_S = 3600.0
"""Brute force that is expected to take longer than this has to be confirmed, s."""


class MethodOption(str, Enum):
    """The values of `--method`."""

    AUTO = "auto"
    TRANSFER = str(ProfilingMethod.TRANSFER)
    SCRATCH = str(ProfilingMethod.SCRATCH)
    BINARY_SEARCH = str(ProfilingMethod.BINARY_SEARCH)
    BRUTE_FORCE = str(ProfilingMethod.BRUTE_FORCE)


@dataclass(frozen=True)
class MethodRequest:
    """The method as requested on the command line.

    Attributes:
        method: the method, or `auto`.
        modes: maximum of modes to measure; None for the method's own number.
        budgets_w: budgets to search for, W.
        training_h: hours of all training planned; None if not stated.
        changes: how often the workload changes; None if not stated.
        confirmed: whether a long brute force runs without a question.

    Raises:
        InvalidInputError: an option is missing for the method, or does not apply to it.
    """

    method: MethodOption
    modes: int | None
    budgets_w: tuple[float, ...]
    training_h: float | None
    changes: WorkloadChanges | None
    confirmed: bool

    def __post_init__(self) -> None:
        auto = self.method is MethodOption.AUTO
        searches = self.method is MethodOption.BINARY_SEARCH
        if auto and self.training_h is None:
            raise InvalidInputError("--method auto needs --training-hours: the total hours that the device will train")
        if searches and not self.budgets_w:
            raise InvalidInputError("--method binary-search needs a budget: pass --budget-w once for each budget")
        for given, allowed, option, methods in (
            (self.training_h is not None, auto, "--training-hours", "auto"),
            (self.changes is not None, auto, "--workload-changes", "auto"),
            (bool(self.budgets_w), auto or searches, "--budget-w", "auto and binary-search"),
            (
                self.modes is not None,
                not auto and self.method is not MethodOption.BRUTE_FORCE,
                "--modes",
                "transfer, scratch and binary-search",
            ),
        ):
            if given and not allowed:
                raise InvalidInputError(f"{option} applies only to --method {methods}; omit it")


@dataclass(frozen=True)
class PlannedMethod:
    """The method to measure with.

    Attributes:
        method: the method.
        modes: maximum of modes to measure.
        reason: the reason for the choice of `auto`; None if the method was not chosen by it.
    """

    method: ProfilingMethod
    modes: int
    reason: str | None = None


def planned_method(
    request: MethodRequest, device: Device, reference: Artefact, begun_before: MeasuredProfile | None
) -> PlannedMethod:
    """Decide on the method, and ask for confirmation of a brute force of more than an hour.

    Args:
        request: the method as requested on the command line.
        device: the board.
        reference: the predictor to transfer from.
        begun_before: the interrupted profile; None if there is none.

    Raises:
        InvalidInputError: a long brute force is not confirmed, and there is no terminal to ask.
        typer.Abort: the user answered no.
    """
    from edge_agent.learning.method_advice import advised_profile, board_figures

    reason = None
    if request.method is MethodOption.AUTO:
        figures = board_figures(reference, device.board_kind, device.modes)
        changes = request.changes or WorkloadChanges.RARELY
        assert request.training_h is not None, "checked when the request was made"
        advice = advised_profile(figures, request.training_h, changes, len(request.budgets_w))
        method, most, reason = advice.recommended.method, advice.recommended.modes, advice.reason
    else:
        method, most = ProfilingMethod(request.method.value), request.modes or _MODES
    if method is ProfilingMethod.BRUTE_FORCE or (method is ProfilingMethod.BINARY_SEARCH and request.modes is None):
        # A search ends by itself; the advice only estimates its number of modes.
        most = len(device.modes)
    planned = PlannedMethod(method, most, reason)
    if planned.method is ProfilingMethod.BRUTE_FORCE and not request.confirmed:
        _confirm(board_figures(reference, device.board_kind, device.modes), begun_before)
    return planned


def _confirm(figures: BoardFigures, begun_before: MeasuredProfile | None) -> None:
    import numpy as np

    from wattfleet.modes import array_to_modes
    from wattfleet_io.console import count_of, duration_text

    measured = set() if begun_before is None else set(array_to_modes(begun_before.profile.modes))
    missing = np.array([mode not in measured for mode in array_to_modes(figures.modes)])
    seconds = float(figures.mode_s[missing].sum())
    if seconds <= _ASK_FROM_S:
        return
    long = f"brute force measures {count_of(int(missing.sum()), 'mode')}, which takes about {duration_text(seconds)}"
    if not sys.stdin.isatty():
        raise InvalidInputError(f"{long}: pass --yes to confirm, or another --method")
    typer.confirm(f"{long}. Continue?", abort=True, err=True)
