"""`wattfleet agent profile`: modes measured by hand, without a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.cli.options import (
    USUAL_TOLERANCE,
    DeviceOption,
    JsonOption,
    MinibatchOption,
    ProcessorOption,
    SeedOption,
    StateDirOption,
    ToleranceOption,
    WorkloadOption,
    open_named,
    print_json,
)
from edge_agent.runtime.paths import DEFAULT_STATE_DIRECTORY, PREDICTOR_DIRECTORY, PROFILE_FILE

if TYPE_CHECKING:
    from edge_agent.profiling.manual_profile import HandProfile
    from edge_agent.profiling.profiling_plan import Progress

_USUAL_REFERENCE = "agx_orin_resnet18"


def profile(
    device: DeviceOption = "auto",
    modes: Annotated[
        int, typer.Option(min=1, help="Modes to measure in all, at most; those of earlier runs count.")
    ] = 50,
    tolerance: ToleranceOption = USUAL_TOLERANCE,
    workload: WorkloadOption = None,
    minibatch: MinibatchOption = 16,
    processor: ProcessorOption = "cuda",
    reference: Annotated[
        str, typer.Option(help="The predictor to transfer from: a shipped one, or the directory of another.")
    ] = _USUAL_REFERENCE,
    device_id: Annotated[
        str | None,
        typer.Option(help="The device's name in its fleet.  [default: that of a profile already begun, or the host's]"),
    ] = None,
    minibatches_per_epoch: Annotated[
        int | None,
        typer.Option(min=1, help="Minibatches in one pass over the device's data; the reference's if not given."),
    ] = None,
    seed: SeedOption = 0,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Measure power modes and fit the device's predictor to them, as the daemon does; the device is put back after.

    Every measured mode is on disk before the next begins: stop it at any time, and the same command goes on.
    """
    import platform

    from edge_agent.cli.mode_names import counted
    from edge_agent.devices.selection import folder_of_device
    from edge_agent.learning.reference_choice import named_reference
    from edge_agent.profiling.manual_profile import HandProfileSettings, profile_by_hand
    from edge_agent.profiling.profile_state import read_profile
    from edge_agent.profiling.profiled_workload import profiled_workload
    from edge_agent.training.knob_backup import safekept
    from wattfleet_io.stop_signals import StoppedBySignal, StopSignals

    board = open_named(device, state_dir, seed)
    profiled = profiled_workload(board, workload, minibatch, processor)
    begun_before = read_profile(state_dir)
    name = device_id or (begun_before.header.device_id if begun_before else platform.node())
    settings = HandProfileSettings(name, minibatches_per_epoch, modes, tolerance, seed)
    transferred = named_reference(reference)
    shown = _Measured()
    try:
        with StopSignals.held() as signals, safekept(board, folder_of_device(device, state_dir)):
            with signals.interrupting(), _live(shown) as (begun, report):
                found = profile_by_hand(settings, board, profiled, transferred, state_dir, begun, report)
    except StoppedBySignal as stopped:
        typer.echo(
            f"stopped with {counted(shown.modes)} measured and kept; the device is as it was, the same command goes on",
            err=True,
        )
        raise typer.Exit(stopped.exit_code) from None
    if json_:
        print_json(_content(found, state_dir))
    else:
        _print(found, state_dir)


class _Measured:
    """How many modes are measured by now."""

    modes = 0


@contextmanager
def _live(shown: _Measured) -> Iterator[tuple[Callable[[int, int], None], Callable[[Progress], None]]]:
    """Show how far it is and how long it will take at most; where nobody watches, a line for every mode."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from edge_agent.cli.mode_names import counted

    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("at most"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    # A mode takes about a minute: the pace of a few of them tells what is left.
    with Bar(*columns, console=console, speed_estimate_period=900, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring the first mode", total=None)

        def begun(already: int, most: int) -> None:
            shown.modes = already
            if already:
                console.print(f"{counted(already)} measured before")
            bar.reset(task, total=most, completed=already)

        def report(progress: Progress) -> None:
            shown.modes = progress.done
            bar.update(task, completed=progress.done, description=progress.detail)
            if not console.is_terminal:
                console.print(f"{progress.done} of at most {progress.total}: {progress.detail}", soft_wrap=True)

        yield begun, report


def _content(found: HandProfile, state_directory: Path) -> dict[str, Any]:
    from edge_agent.cli.mode_names import written

    return {
        "device_id": found.header.device_id,
        "board": found.header.board_kind,
        "provenance": found.header.provenance,
        "workload": found.header.workload,
        "minibatch": found.header.minibatch,
        "at_most": found.most,
        "seconds": found.seconds,
        "modes": [
            {
                "mode": record.mode._asdict(),
                "argument": written(record.mode),
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
            {"argument": written(given.mode), "label": given.mode.label(), "reason": given.reason}
            for given in found.discarded
        ],
        "predictor": {"kind": found.artefact.details.predictor, "digest": found.artefact.digest},
        "journal_file": str(state_directory / PROFILE_FILE),
        "predictor_directory": str(state_directory / PREDICTOR_DIRECTORY),
    }


def _print(found: HandProfile, state_directory: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from edge_agent.cli.mode_names import counted

    content = _content(found, state_directory)
    console = Console(highlight=False)
    table = Table(
        title=f"{content['device_id']} ({content['board']}, {content['provenance']}), {content['workload']}, minibatch"
        f" {content['minibatch']}",
        title_justify="left",
    )
    table.add_column("mode", no_wrap=True)
    for name in ("ms", "spread", "W", "spread", "took s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in content["modes"]:
        table.add_row(
            row["label"],
            f"{row['minibatch_ms']:.1f}",
            f"{row['minibatch_spread']:.1%}",
            f"{row['power_w']:.1f}",
            f"{row['power_spread']:.1%}",
            f"{row['seconds']:.0f}",
        )
    console.print(table)
    for given in content["discarded"]:
        console.print(f"discarded {given['label']}: {given['reason']}", style="yellow", soft_wrap=True)
    measured, most = len(content["modes"]), content["at_most"]
    early = "" if measured >= most else f" of at most {most}: more promise no better choice"
    console.print(
        f"{counted(measured)}{early}. `wattfleet agent front` shows what they lead to expect.", soft_wrap=True
    )
