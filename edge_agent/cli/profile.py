"""`wattfleet agent profile`: measure modes without a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    ToleranceOption,
    WorkloadOption,
    open_named,
    repeated_options,
)
from edge_agent.cli.profile_method import MethodOption, MethodRequest, planned_method
from edge_agent.paths import DEFAULT_STATE_DIRECTORY, PREDICTOR_DIRECTORY, PROFILE_FILE
from wattfleet.choosing import ProfilingMethod, WorkloadChanges
from wattfleet.modes import LARGEST_COUNT
from wattfleet_io.console import MODE_LEGEND, print_json, terminal

if TYPE_CHECKING:
    from edge_agent.cli.profile_method import PlannedMethod
    from edge_agent.learning.manual_profile import ManualProfile
    from edge_agent.learning.profiling_plan import Progress


def profile(
    device: DeviceOption = "auto",
    method: Annotated[
        MethodOption,
        typer.Option(
            help="Set the method that selects the modes. transfer: those that matter most, starting from the reference."
            " scratch: the same without a reference. binary-search: a search for each --budget-w. brute-force: every"
            " mode. auto: the method that `wattfleet advise` recommends."
        ),
    ] = MethodOption.TRANSFER,
    modes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Set the maximum number of modes to measure, including those of earlier runs. By default, 50 for"
            " transfer and scratch. binary-search ends by itself.",
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
            "--yes", allow_from_autoenv=False, help="Do not ask before a brute force that takes more than an hour."
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
    from edge_agent.learning.reference_choice import named_reference
    from edge_agent.profiling.known_workload import BUILT_IN
    from edge_agent.profiling.profiled_workload import profiled_workload
    from edge_agent.profiling.stored_profile import read_device_id, read_profile
    from edge_agent.profiling.workload_folders import WorkloadFolders
    from edge_agent.training.knob_backup import backed_up
    from wattfleet_io.console import count_of
    from wattfleet_io.stop_signals import StoppedBySignal, StopSignals

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


class _Measured:
    """Counts the modes measured so far."""

    modes = 0


@contextmanager
def _live(measured: _Measured) -> Iterator[tuple[Callable[[int, int], None], Callable[[Progress], None]]]:
    """Show a progress bar with an upper bound on the time left; without a terminal, one line per mode."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from wattfleet_io.console import count_of

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

        def report(progress: Progress) -> None:
            measured.modes = progress.done
            bar.update(task, completed=progress.done, description=progress.detail)
            if not console.is_terminal:
                console.print(f"{progress.done} of at most {progress.total}: {progress.detail}", soft_wrap=True)

        yield begun, report


def _content(found: ManualProfile, planned: PlannedMethod) -> dict[str, Any]:
    from edge_agent.devices.mode_names import mode_argument

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
    from wattfleet_io.console import count_of
    from wattfleet_io.tables import FittingTable, columns, numbers

    content = _content(found, planned)
    console = terminal()
    table = FittingTable(
        columns(
            "mode",
            numbers("ms"),
            numbers("time spread", rank=2),
            numbers("W"),
            numbers("power spread", rank=2),
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
            f"{row['seconds']:.0f}",
        )
    console.print(table)
    console.print(MODE_LEGEND, style="dim")
    for entry in content["discarded"]:
        console.print(f"discarded {entry['label']}: {entry['reason']}", style="yellow", soft_wrap=True)
    measured, most = len(content["modes"]), content["at_most"]
    searched = planned.method is ProfilingMethod.BINARY_SEARCH
    why = "all searches have ended" if searched else "stopped early: more modes would not help"
    early = "" if measured >= most else f" of at most {most:,}; {why}"
    console.print(
        f"{count_of(measured, 'mode')}{early}. See the predicted front with: wattfleet agent front{repeated_options()}",
        soft_wrap=True,
    )
