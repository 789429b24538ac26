"""`wattfleet agent profile` and `fit`: measure modes without a coordinator, and fit a predictor to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.cli.options import (
    DEFAULT_REFERENCE,
    DEFAULT_TOLERANCE,
    DeviceOption,
    JsonOption,
    MinibatchOption,
    ProcessorOption,
    SeedOption,
    StateDirOption,
    StoredWorkloadOption,
    ToleranceOption,
    WorkloadOption,
    open_named,
    repeated_options,
)
from edge_agent.paths import DEFAULT_STATE_DIRECTORY, PREDICTOR_DIRECTORY, PROFILE_FILE
from wattfleet.common.console import MODE_LEGEND, print_json, terminal
from wattfleet.core.choosing import WorkloadChanges
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import LARGEST_COUNT, ProfilingMethod

if TYPE_CHECKING:
    from edge_agent.devices.device import Device
    from edge_agent.learning.manual_profile import ManualProfile
    from edge_agent.learning.profiling_plan import ProfilingProgress
    from edge_agent.learning.refit import Refit
    from edge_agent.profiling.stored_profile import MeasuredProfile
    from wattfleet.core.choosing import BoardFigures
    from wattfleet.core.prediction import Artefact


# --- Profile method ---------------------------------------------------------------------------------------------------
# Determines the profiling method and its number of modes from the options of `wattfleet agent profile`.


_MODES = 50
_GRID_MODES = 600
"""Maximum of modes of a grid: enough for a reference, for which 400 have to be measured."""
_ASK_FROM_S = 3600.0
"""Brute force or a grid that is expected to take longer than this has to be confirmed, s."""


class MethodOption(str, Enum):
    """The values of `--method`."""

    AUTO = "auto"
    TRANSFER = str(ProfilingMethod.TRANSFER)
    SCRATCH = str(ProfilingMethod.SCRATCH)
    BINARY_SEARCH = str(ProfilingMethod.BINARY_SEARCH)
    GRID = str(ProfilingMethod.GRID)
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
        confirmed: whether a long brute force or grid runs without a question.

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
                "transfer, scratch, binary-search and grid",
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
    """Decide on the method, and ask for confirmation of a brute force or a grid of more than an hour.

    Args:
        request: the method as requested on the command line.
        device: the board.
        reference: the predictor to transfer from.
        begun_before: the interrupted profile; None if there is none.

    Raises:
        InvalidInputError: a long brute force or grid is not confirmed, and there is no terminal to ask.
        typer.Abort: the user answered no.
    """
    from edge_agent.learning.profiling_plan import advised_profile, board_figures
    from wattfleet.core.choosing import grid_modes

    reason = None
    if request.method is MethodOption.AUTO:
        figures = board_figures(reference, device.board_kind, device.modes)
        changes = request.changes or WorkloadChanges.RARELY
        assert request.training_h is not None, "checked when the request was made"
        advice = advised_profile(figures, request.training_h, changes, len(request.budgets_w))
        method, most, reason = advice.recommended.method, advice.recommended.modes, advice.reason
    else:
        method, most = ProfilingMethod(request.method.value), request.modes or _MODES
    if method is ProfilingMethod.BINARY_SEARCH and request.modes is None:
        # A search ends by itself; the advice only estimates its number of modes.
        most = len(device.modes)
    if method in (ProfilingMethod.BRUTE_FORCE, ProfilingMethod.GRID):
        grid = method is ProfilingMethod.GRID
        wanted = grid_modes(device.modes, request.modes or _GRID_MODES) if grid else device.modes
        most = len(wanted)
        if not request.confirmed:
            _confirm(
                "the grid" if grid else "brute force", board_figures(reference, device.board_kind, wanted), begun_before
            )
    return PlannedMethod(method, most, reason)


def _confirm(what: str, figures: BoardFigures, begun_before: MeasuredProfile | None) -> None:
    import numpy as np

    from wattfleet.common.console import count_of, duration_text
    from wattfleet.core.modes import array_to_modes

    measured = set() if begun_before is None else set(array_to_modes(begun_before.profile.modes))
    missing = np.array([mode not in measured for mode in array_to_modes(figures.modes)])
    seconds = float(figures.mode_s[missing].sum())
    if seconds <= _ASK_FROM_S:
        return
    long = f"{what} measures {count_of(int(missing.sum()), 'mode')}, which takes about {duration_text(seconds)}"
    if not sys.stdin.isatty():
        raise InvalidInputError(f"{long}: pass --yes to confirm, or another --method")
    typer.confirm(f"{long}. Continue?", abort=True, err=True)


# --- Profile ----------------------------------------------------------------------------------------------------------
# `wattfleet agent profile`: measure modes without a coordinator.


def profile(
    device: DeviceOption = "auto",
    method: Annotated[
        MethodOption,
        typer.Option(
            metavar="METHOD",
            help="Set the method that selects the modes. transfer: those that matter most, starting from the reference."
            " scratch: the same without a reference. binary-search: a search for each --budget-w. grid: a uniform grid,"
            " to train a reference from. brute-force: every mode. auto: the method that `wattfleet advise` recommends.",
        ),
    ] = MethodOption.TRANSFER,
    modes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Set the maximum number of modes to measure, including those of earlier runs. By default, 50 for"
            " transfer and scratch, and 600 for grid. binary-search ends by itself.",
        ),
    ] = None,
    budget_w: Annotated[
        list[float] | None,
        typer.Option(
            help="Search the fastest mode within this power budget, in watts. Repeatable.", show_default=False
        ),
    ] = None,
    training_hours: Annotated[
        float | None,
        typer.Option(help="For auto, set the total hours that the device will train.", show_default=False),
    ] = None,
    workload_changes: Annotated[
        WorkloadChanges | None,
        typer.Option(
            help="For auto, state how often the device gets another workload, as for `wattfleet advise`. By default,"
            " rarely.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            allow_from_autoenv=False,
            help="Do not ask before a brute force or a grid that takes more than an hour.",
        ),
    ] = False,
    tolerance: ToleranceOption = DEFAULT_TOLERANCE,
    workload: WorkloadOption = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Store the profile under this workload name, such as the one given by a Flower app."
            " By default, use the name of --workload.",
            show_default=False,
        ),
    ] = None,
    minibatch: MinibatchOption = 16,
    processor: ProcessorOption = "cuda",
    reference: Annotated[
        str, typer.Option(help="Set the reference predictor to transfer from: a shipped one, or a directory.")
    ] = DEFAULT_REFERENCE,
    device_id: Annotated[
        str | None,
        typer.Option(
            help="Set the device's name in its fleet. By default, use the name in the profile, or else the host name."
        ),
    ] = None,
    minibatches_per_epoch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Set the number of minibatches in one pass over the device's data. By default, use the reference's"
            " number.",
        ),
    ] = None,
    loader_workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=LARGEST_COUNT,
            help="State the number of processes that load the workload's data; 0 if the training process loads it. "
            "By default, it is unknown.",
        ),
    ] = None,
    seed: SeedOption = 0,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Measure power modes, fit the device's predictor to them, and restore the device afterwards.

    Each mode is saved once measured. After an interruption, the same command continues where it stopped.
    """
    import platform

    from edge_agent.devices.selection import folder_of_device
    from edge_agent.learning.manual_profile import ManualProfileSettings, profile_manually
    from edge_agent.profiling.known_workload import BUILT_IN
    from edge_agent.profiling.profiled_workload import profiled_workload
    from edge_agent.profiling.stored_profile import WorkloadFolders, read_device_id, read_profile
    from edge_agent.training.mode_change import backed_up
    from reference_models import named_reference
    from wattfleet.common.console import count_of
    from wattfleet.common.stop_signals import StoppedBySignal, StopSignals

    request = MethodRequest(method, modes, tuple(budget_w or ()), training_hours, workload_changes, yes)
    board = open_named(device, state_dir, seed)
    profiled = profiled_workload(board, workload, minibatch, processor)
    stored = {each.name: each.folder for each in WorkloadFolders(state_dir).stored()}
    own_name = name or (profiled.trained[0] if profiled.trained else BUILT_IN)
    begun_before = read_profile(stored[own_name]) if own_name in stored else None
    owner = read_device_id(stored.values())
    transferred = named_reference(reference)
    planned = planned_method(request, board, transferred, begun_before)
    if planned.reason is not None:
        typer.echo(f"auto: {planned.reason}", err=True)
    settings = ManualProfileSettings(
        device_id or owner or platform.node(),
        name,
        minibatches_per_epoch,
        planned.modes,
        tolerance,
        seed,
        loader_workers,
        planned.method,
        request.budgets_w,
    )
    progress = _Measured()
    try:
        with StopSignals.held() as signals, backed_up(board, folder_of_device(device, state_dir)):
            with signals.interrupting(), _live(progress) as (begun, report):
                found = profile_manually(settings, board, profiled, transferred, state_dir, begun, report)
                _measure_idle(board, state_dir)
    except StoppedBySignal as stopped:
        typer.echo(
            f"stopped; {count_of(progress.modes, 'mode')} measured and saved, device restored."
            " Run the same command again to continue",
            err=True,
        )
        raise typer.Exit(stopped.exit_code) from None
    if json_:
        print_json(_content(found, planned))
    else:
        _print(found, planned)


def _measure_idle(board: Device, state_dir: Path) -> None:
    """Measure and store the power of the parked device, unless it is known; warn if it cannot be measured."""
    from edge_agent.devices.device import ModeNotAppliedError
    from edge_agent.profiling.mode_measurement import MeasurementError
    from edge_agent.profiling.profiler import Profiler
    from edge_agent.profiling.stored_profile import keep_idle, read_idle_mw
    from edge_agent.runtime.readiness import parked_mode

    if read_idle_mw(board, state_dir) is None:
        try:
            keep_idle(Profiler(board).measure_idle(parked_mode(board)), board, state_dir)
        except (MeasurementError, ModeNotAppliedError) as error:
            typer.echo(f"the idle power is not known: {error}", err=True)


class _Measured:
    """Counts the modes measured so far."""

    modes = 0


@contextmanager
def _live(measured: _Measured) -> Iterator[tuple[Callable[[int, int], None], Callable[[ProfilingProgress], None]]]:
    """Show a progress bar with an upper bound on the time left; without a terminal, one line per mode."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from wattfleet.common.console import count_of

    console = terminal(to_stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("at most"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    # A mode takes about a minute, so the times of a few modes predict the time left.
    with Bar(*columns, console=console, speed_estimate_period=900, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring the first mode", total=None)

        def begun(already: int, limit: int) -> None:
            measured.modes = already
            if already:
                console.print(f"{count_of(already, 'mode')} already measured")
            bar.reset(task, total=limit, completed=already)

        def report(progress: ProfilingProgress) -> None:
            measured.modes = progress.done
            bar.update(task, completed=progress.done, description=progress.detail)
            if not console.is_terminal:
                console.print(f"{progress.done} of at most {progress.total}: {progress.detail}", soft_wrap=True)

        yield begun, report


def _content(found: ManualProfile, planned: PlannedMethod) -> dict[str, Any]:
    from edge_agent.devices.sysfs import mode_argument

    return {
        "device_id": found.header.device_id,
        "board": found.header.board_kind,
        "provenance": found.header.provenance,
        "workload": found.header.workload,
        "minibatch": found.header.minibatch,
        "method": str(planned.method),
        "reason": planned.reason,
        "at_most": found.limit,
        "seconds": found.seconds,
        "modes": [
            {
                "mode": record.mode._asdict(),
                "argument": mode_argument(record.mode),
                "label": record.mode.label(),
                "minibatch_ms": record.minibatch_ms,
                "minibatch_spread": record.minibatch_spread,
                "power_w": record.power_mw / 1e3,
                "power_spread": record.power_spread,
                "peak_w": None if record.peak_mw is None else record.peak_mw / 1e3,
                "seconds": record.seconds,
            }
            for record in found.records
        ],
        "discarded": [
            {"argument": mode_argument(entry.mode), "label": entry.mode.label(), "reason": entry.reason}
            for entry in found.discarded
        ],
        "predictor": {"kind": found.artefact.details.predictor, "digest": found.artefact.digest},
        "journal_file": str(found.folder / PROFILE_FILE),
        "predictor_directory": str(found.folder / PREDICTOR_DIRECTORY),
    }


def _print(found: ManualProfile, planned: PlannedMethod) -> None:
    from wattfleet.common.console import count_of
    from wattfleet.common.tables import FittingTable, columns, numbers

    content = _content(found, planned)
    console = terminal()
    table = FittingTable(
        columns(
            "mode",
            numbers("ms"),
            numbers("time spread", rank=2),
            numbers("W"),
            numbers("power spread", rank=2),
            numbers("W peak", rank=2),
            numbers("seconds", rank=1),
        ),
        title=f"{content['device_id']} ({content['board']}, {content['provenance']}), {content['workload']}, minibatch"
        f" {content['minibatch']}",
        has_lines=True,
    )
    for row in content["modes"]:
        table.add(
            row["label"],
            f"{row['minibatch_ms']:.1f}",
            f"{row['minibatch_spread']:.1%}",
            f"{row['power_w']:.1f}",
            f"{row['power_spread']:.1%}",
            "-" if row["peak_w"] is None else f"{row['peak_w']:.1f}",
            f"{row['seconds']:.0f}",
        )
    console.print(table)
    console.print(MODE_LEGEND, style="dim")
    for entry in content["discarded"]:
        console.print(f"discarded {entry['label']}: {entry['reason']}", style="yellow", soft_wrap=True)
    measured, most = len(content["modes"]), content["at_most"]
    why = {
        ProfilingMethod.BINARY_SEARCH: "all searches have ended",
        ProfilingMethod.GRID: "the others could not be measured",
        ProfilingMethod.BRUTE_FORCE: "the others could not be measured",
    }.get(planned.method, "stopped early: more modes would not help")
    early = "" if measured >= most else f" of at most {most:,}; {why}"
    console.print(
        f"{count_of(measured, 'mode')}{early}. See the predicted front with: wattfleet agent front{repeated_options()}",
        soft_wrap=True,
    )


# --- Fit --------------------------------------------------------------------------------------------------------------
# `wattfleet agent fit`: fit the predictor again to the measured modes.


def fit(
    reference: Annotated[
        str | None,
        typer.Option(
            help="Set the reference predictor to transfer from: a shipped one, or a directory. By default, reuse the"
            " reference of the stored predictor."
        ),
    ] = None,
    minibatches_per_epoch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Set the number of minibatches in one pass over the device's data. By default, keep the stored"
            " number.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    workload: StoredWorkloadOption = None,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Fit the predictor to the modes measured so far, store it, and report its error on each of them."""
    from edge_agent.learning.refit import refit
    from edge_agent.profiling.stored_profile import chosen_workload, read_profile, require_profile_of

    board = open_named(device, state_dir)
    if (measured := read_profile(chosen_workload(state_dir, workload).folder)) is not None:
        require_profile_of(board, measured, state_dir)
    with terminal(to_stderr=True).status("fitting"):
        fitted = refit(state_dir, workload, reference, minibatches_per_epoch)
    content = _fit_content(fitted, board)
    if json_:
        print_json(content)
    else:
        _print_fit(content)


def _fit_content(fitted: Refit, board: Device) -> dict[str, Any]:
    import numpy as np

    from edge_agent.devices.sysfs import mode_argument
    from wattfleet.core.choosing import descending_modes
    from wattfleet.core.modes import array_to_modes
    from wattfleet.core.prediction import RooflinePredictor

    highest = array_to_modes(descending_modes(board.modes)[:1])[0]
    left_out, explanation = None, None
    if fitted.left_out is not None:
        left_out = {
            "median_time_error": float(np.median([abs(mode.time_error) for mode in fitted.left_out])),
            "median_power_error": float(np.median([abs(mode.power_error) for mode in fitted.left_out])),
            "modes": [
                {
                    "argument": mode_argument(mode.mode),
                    "label": mode.mode.label(),
                    "minibatch_ms": mode.minibatch_ms,
                    "time_error": mode.time_error,
                    "power_w": mode.power_w,
                    "power_error": mode.power_error,
                }
                for mode in fitted.left_out
            ],
        }
    if isinstance(fitted.predictor, RooflinePredictor):
        explained = fitted.predictor.explain(highest)
        explanation = {"bound": explained.bound, "words": explained.words(), "shares": dict(explained.shares)}
    details = fitted.artefact.details
    return {
        "device_id": fitted.measured.header.device_id,
        "board": details.board,
        "provenance": fitted.measured.header.provenance,
        "workload": details.workload.name,
        "fitted_to_modes": len(fitted.measured.profile),
        "predictor": {"kind": details.predictor, "digest": fitted.artefact.digest},
        "predictor_directory": str(fitted.folder / PREDICTOR_DIRECTORY),
        "left_out": left_out,
        "highest_mode": {"argument": mode_argument(highest), "label": highest.label(), "explanation": explanation},
    }


def _print_fit(content: dict[str, Any]) -> None:
    from wattfleet.common.console import count_of
    from wattfleet.common.tables import FittingTable, columns, numbers

    console = terminal()
    left_out, highest = content["left_out"], content["highest_mode"]
    if left_out is not None:
        table = FittingTable(
            columns("mode", *map(numbers, ("ms measured", "time error", "W measured", "power error"))),
            title="Error in each measured mode when predicted from all other modes",
            has_lines=True,
        )
        for row in left_out["modes"]:
            table.add(
                row["label"],
                f"{row['minibatch_ms']:.1f}",
                f"{row['time_error']:+.1%}",
                f"{row['power_w']:.1f}",
                f"{row['power_error']:+.1%}",
            )
        console.print(table)
        console.print(
            f"Median error: {left_out['median_time_error']:.1%} in time, {left_out['median_power_error']:.1%} in power."
        )
    if highest["explanation"] is not None:
        console.print(f"The highest mode, {highest['label']}: {highest['explanation']['words']}")
    predictor = content["predictor"]
    console.print(
        f"Stored the {predictor['kind']} predictor for {content['workload']}, fitted to"
        f" {count_of(content['fitted_to_modes'], 'mode')}, in {content['predictor_directory']}"
        f" (digest {predictor['digest'][:12]}...)",
        soft_wrap=True,
    )
