"""`wattfleet agent choose`, `explain`, `modes`, `apply` and `advise`: the modes of a device, the best one, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.cli.options import (
    DEFAULT_REFERENCE,
    DeviceOption,
    JsonOption,
    StateDirOption,
    StoredWorkloadOption,
    WorkloadChangesOption,
    open_named,
    repeated_options,
)
from edge_agent.paths import DEFAULT_STATE_DIRECTORY
from wattfleet.common.console import MODE_LEGEND, print_json, terminal
from wattfleet.core.choosing import TrainingGoal, WorkloadChanges

if TYPE_CHECKING:
    from edge_agent.devices.device import Device
    from edge_agent.profiling.stored_profile import FittedDevice
    from wattfleet.core.choosing import Advice, BatchEfficiency, ChosenMode, KnownModes, KnownTrainings, MethodCost


# --- Choose -----------------------------------------------------------------------------------------------------------
# `wattfleet agent choose`: the best mode within a limit of power, time or energy.


_PROBABILITY = 0.95
_FRONT_ROWS = 8


def choose(
    budget_w: Annotated[
        float | None, typer.Option(help="Choose the fastest mode that draws at most this many watts while training.")
    ] = None,
    deadline_s: Annotated[
        float | None,
        typer.Option(help="Choose the mode with the least energy whose epoch takes at most this many seconds."),
    ] = None,
    energy_j: Annotated[
        float | None,
        typer.Option(help="Choose the fastest mode whose whole training takes at most this many joules."),
    ] = None,
    finish_within: Annotated[
        str | None,
        typer.Option(
            help="Choose the mode with the least energy that ends the whole training within this time, such as 45m or"
            " 1h30m. With --energy-j, it also keeps those joules.",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Set the length of the training for --energy-j and --finish-within, in epochs. Default: 1.",
            show_default=False,
        ),
    ] = None,
    above_idle: Annotated[
        bool,
        typer.Option(
            "--above-idle", help="Count only energy above the idle power, as the energy budget of a run does."
        ),
    ] = False,
    batch_efficiency: Annotated[
        Path | None,
        typer.Option(
            help="Choose the batch with the mode, by this file of `wattfleet reference proxy`.", show_default=False
        ),
    ] = None,
    peak_w: Annotated[
        float | None, typer.Option(help="Also limit the peak power to this many watts.", show_default=False)
    ] = None,
    least: Annotated[
        TrainingGoal | None,
        typer.Option(
            help="Set what to minimise under a limit of time or energy. Default: energy, or time with --energy-j alone."
            " --deadline-s accepts energy and power.",
            show_default=False,
        ),
    ] = None,
    minibatches_per_epoch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Set the number of minibatches per epoch. By default, use the number that an app or `wattfleet "
            "agent profile` has stated.",
            show_default=False,
        ),
    ] = None,
    probability: Annotated[
        float, typer.Option(help="Set the probability with which a predicted mode must stay within the limit.")
    ] = _PROBABILITY,
    device: DeviceOption = "auto",
    workload: StoredWorkloadOption = None,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Recommend the best measured or predicted power mode within a limit, without applying it.

    Pass --budget-w, --deadline-s, or one or both of --energy-j and --finish-within.
    """
    from edge_agent.profiling.stored_profile import read_fitted, read_idle_mw
    from wattfleet.common.parsing import seconds
    from wattfleet.core.errors import InvalidInputError

    is_training = energy_j is not None or finish_within is not None
    if [budget_w is not None, deadline_s is not None, is_training].count(True) != 1:
        raise InvalidInputError(
            "pass exactly one of --budget-w, --deadline-s, or a training's --energy-j and --finish-within"
        )
    if not is_training and (epochs is not None or above_idle or batch_efficiency is not None):
        raise InvalidInputError(
            "--epochs, --above-idle and --batch-efficiency are for a whole training: pass --energy-j or --finish-within"
        )
    board = open_named(device, state_dir)
    with terminal(to_stderr=True).status(f"predicting {len(board.modes):,} modes"):
        fitted = read_fitted(state_dir, board, workload).with_minibatches_per_epoch(minibatches_per_epoch)
        if is_training:
            request = _TrainingRequest(
                least or (TrainingGoal.TIME if finish_within is None else TrainingGoal.ENERGY),
                energy_j,
                None if finish_within is None else seconds(finish_within),
                1.0 if epochs is None else epochs,
                above_idle,
                peak_w,
                probability,
            )
            content = request.content(fitted, read_idle_mw(board, state_dir), _efficiency(batch_efficiency))
        else:
            chosen = _chosen(fitted, budget_w, deadline_s, least or TrainingGoal.ENERGY, probability, peak_w)
            content = _content(fitted, chosen, budget_w, deadline_s)
    if json_:
        print_json(content)
    elif is_training:
        _print_training(content, board.board_kind)
    else:
        _print(content, board.board_kind)


def _efficiency(path: Path | None) -> BatchEfficiency | None:
    from wattfleet.core.choosing import BatchEfficiency
    from wattfleet.core.errors import InvalidInputError

    if path is None:
        return None
    try:
        return BatchEfficiency.from_json(path.read_bytes())
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None


def _within_peak(fitted: FittedDevice, known: KnownModes, peak_w: float | None, probability: float) -> KnownModes:
    """Return the modes whose peak power keeps a limit."""
    from dataclasses import replace

    from wattfleet.core.errors import InfeasibleBudgetError

    if peak_w is None:
        return known
    safe_mw = replace(known, power_mw=fitted.peaks_mw(known)).safe_power_mw(probability)
    kept = safe_mw <= peak_w * 1e3
    if not kept.any():
        raise InfeasibleBudgetError(
            f"no mode has a peak of at most {peak_w:g} W with a probability of {probability:g}: allow at least"
            f" {math.ceil(safe_mw.min() / 100) / 10:.1f} W"
        )
    return known.among(kept)


def _require_length(fitted: FittedDevice) -> None:
    from wattfleet.core.errors import InvalidInputError

    if fitted.is_length_assumed:
        raise InvalidInputError(
            f"the number of minibatches per epoch of {fitted.workload.workload.name!r} is unknown, and so is the "
            f"duration of an epoch: pass --minibatches-per-epoch, or let an app train it with `profiled(...)`"
        )


def _chosen(
    fitted: FittedDevice,
    budget_w: float | None,
    deadline_s: float | None,
    least: TrainingGoal,
    probability: float,
    peak_w: float | None,
) -> ChosenMode:
    from wattfleet.core.choosing import (
        InfeasibleDeadlineError,
        fastest_within_budget,
        least_energy_by_deadline,
        lowest_power_by_deadline,
    )
    from wattfleet.core.errors import InvalidInputError

    known = _within_peak(fitted, fitted.choosable, peak_w, probability)
    if budget_w is not None:
        return fastest_within_budget(known, budget_w * 1e3, probability)
    assert deadline_s is not None
    _require_length(fitted)
    by_deadline = {TrainingGoal.ENERGY: least_energy_by_deadline, TrainingGoal.POWER: lowest_power_by_deadline}
    if least not in by_deadline:
        raise InvalidInputError("--least time is for --energy-j: with --deadline-s, pass energy or power")
    count = fitted.minibatches_per_epoch
    try:
        return by_deadline[least](known, deadline_s * 1e3 / count, probability)
    except InfeasibleDeadlineError as error:
        # Rounded up, so that allowing this time is enough.
        least_s = math.ceil(error.least_ms * count / 100) / 10
        raise InvalidInputError(
            f"no mode trains an epoch of {count:,} minibatches within {deadline_s:g} s with a"
            f" probability of {probability:g}: allow at least {least_s:.1f} s"
        ) from None


def _content(
    fitted: FittedDevice, chosen: ChosenMode, budget_w: float | None, deadline_s: float | None
) -> dict[str, Any]:
    from edge_agent.devices.sysfs import mode_argument
    from edge_agent.learning.transfer import expectation_of

    expected = expectation_of(fitted, chosen.mode)
    limit = {"budget_w": budget_w} if budget_w is not None else {"deadline_s": deadline_s}
    kept = expected.keeps_power(budget_w) if budget_w is not None else expected.keeps_epoch(deadline_s or 0.0)
    return {
        **limit,
        "mode": chosen.mode._asdict(),
        "argument": mode_argument(chosen.mode),
        "label": chosen.mode.label(),
        **expected.content(),
        "probability_of_keeping_the_limit": kept,
        "minibatches_per_epoch": fitted.minibatches_per_epoch,
        "is_epoch_length_assumed": fitted.is_length_assumed,
    }


def _print(content: Mapping[str, Any], board: str) -> None:
    from edge_agent.learning.transfer import assumed_length, lines_of
    from wattfleet.common.tables import facts

    limit = f"{content['budget_w']:g} W" if "budget_w" in content else f"{content['deadline_s']:g} s per epoch"
    table = facts(title=f"Best mode for {board} within {limit}", has_lines=True)
    table.add_row("mode", f"{content['argument']}\n{content['label']}")
    for what, text in lines_of(content).items():
        table.add_row(what, text)
    kept = content["probability_of_keeping_the_limit"]
    table.add_row("within limit", "yes, measured" if kept is None else f"with probability {kept:.1%}")
    console = terminal()
    console.print(table)
    console.print(MODE_LEGEND, style="dim")
    if content["is_epoch_length_assumed"]:
        console.print(assumed_length(content["minibatches_per_epoch"]), style="dim", soft_wrap=True)
    console.print(f"Apply it with: wattfleet agent apply {content['argument']}{repeated_options()}", soft_wrap=True)


@dataclass(frozen=True)
class _TrainingRequest:
    """What a whole training may take, and what the choice of its mode minimizes."""

    goal: TrainingGoal
    energy_j: float | None
    within_s: float | None
    epochs: float
    is_above_idle: bool
    peak_w: float | None
    probability: float

    def __post_init__(self) -> None:
        from wattfleet.core.budgets import require_joules
        from wattfleet.core.errors import InvalidInputError

        if self.energy_j is not None:
            require_joules("--energy-j", self.energy_j)
        if not 0 < self.epochs < math.inf:
            raise InvalidInputError(f"--epochs must be above 0 and finite, not {self.epochs:g}")

    def content(
        self, fitted: FittedDevice, idle_mw: float | None, efficiency: BatchEfficiency | None
    ) -> dict[str, Any]:
        """Choose, and return the choice and the front of time against energy as a JSON object."""
        from wattfleet.core.errors import InvalidInputError

        _require_length(fitted)
        if self.is_above_idle and idle_mw is None:
            raise InvalidInputError(
                "the device's idle power is not known: run `wattfleet agent profile`, or the agent, which measure it"
            )
        known = fitted.choosable if efficiency is None else fitted.choosable_with(efficiency)
        known = _within_peak(fitted, known, self.peak_w, self.probability)
        free_mw = idle_mw if self.is_above_idle and idle_mw is not None else 0.0
        trainings = fitted.trainings(known, self.epochs, free_mw, efficiency)
        within_s, within_j = (math.inf if limit is None else limit for limit in (self.within_s, self.energy_j))
        best = trainings.best(self.goal, within_s, within_j, self.probability)
        front = trainings.front().tolist()
        rows = _rows(fitted, trainings, [best, *front], idle_mw)
        return {
            "finish_within_s": self.within_s,
            "energy_limit_j": self.energy_j,
            "peak_limit_w": self.peak_w,
            "least": str(self.goal),
            "probability": self.probability,
            "epochs": self.epochs,
            "minibatches_per_epoch": fitted.minibatches_per_epoch,
            "idle_w": None if idle_mw is None else idle_mw / 1e3,
            "counted_energy": "above_idle_j" if self.is_above_idle else "energy_j",
            **rows[0],
            "front": rows[1:],
        }


def _rows(
    fitted: FittedDevice, trainings: KnownTrainings, places: Sequence[int], idle_mw: float | None
) -> list[dict[str, Any]]:
    from edge_agent.devices.sysfs import mode_argument
    from edge_agent.learning.transfer import interval

    known = trainings.known
    peaks_mw = fitted.peaks_mw(known) if fitted.measured.peak_ratio is not None else None
    rows = []
    for place in places:
        chosen = known.chosen(place)
        time_s, power_w = float(trainings.time_s[place]), chosen.power_mw / 1e3
        rows.append(
            {
                "mode": chosen.mode._asdict(),
                "argument": mode_argument(chosen.mode),
                "label": chosen.mode.label(),
                "batch": chosen.batch,
                "measured": chosen.measured,
                "minibatch_ms": chosen.minibatch_ms,
                "training_s": time_s,
                "training_s_interval": interval(time_s, float(known.time_log_sd[place])),
                "power_w": power_w,
                "power_w_interval": interval(power_w, float(known.power_log_sd[place])),
                "peak_w": None if peaks_mw is None else float(peaks_mw[place]) / 1e3,
                "energy_j": power_w * time_s,
                "above_idle_j": None if idle_mw is None else max(0.0, power_w - idle_mw / 1e3) * time_s,
            }
        )
    return rows


def _print_training(content: Mapping[str, Any], board: str) -> None:
    import numpy as np

    from edge_agent.learning.transfer import bracket
    from wattfleet.common.console import duration_text, energy_text
    from wattfleet.common.tables import Column, FittingTable, columns, facts, numbers

    limits = [
        "" if content["finish_within_s"] is None else duration_text(content["finish_within_s"]),
        "" if content["energy_limit_j"] is None else energy_text(content["energy_limit_j"]),
    ]
    epochs = f"{content['epochs']:g} epoch{'' if content['epochs'] == 1 else 's'}"
    title = f"{epochs} on {board} within {' and '.join(filter(None, limits))}"
    table = facts(title=title, has_lines=True)
    table.add_row("mode", f"{content['argument']}\n{content['label']}")
    if content["batch"] is not None:
        table.add_row("batch", str(content["batch"]))
    table.add_row("source", "measured" if content["measured"] else "predicted, with 90% interval")
    table.add_row("training", f"{content['training_s']:.1f} s{bracket(content['training_s_interval'])}")
    table.add_row("power", f"{content['power_w']:.1f} W{bracket(content['power_w_interval'])}")
    if content["peak_w"] is not None:
        table.add_row("peak power", f"{content['peak_w']:.1f} W")
    table.add_row("energy", f"{energy_text(content['energy_j'])} in all")
    if content["above_idle_j"] is not None:
        table.add_row("", f"{energy_text(content['above_idle_j'])} above {content['idle_w']:.1f} W idle")
    console = terminal()
    console.print(table)
    front = content["front"]
    shown = np.unique(np.linspace(0, len(front) - 1, _FRONT_ROWS).round().astype(int)).tolist()
    counted = content["counted_energy"]
    word = "energy above idle" if counted == "above_idle_j" else "energy in all"
    several = content["batch"] is not None
    figures = [*(["batch"] if several else []), "training", "W", word]
    rows = FittingTable(
        columns("mode", Column("argument of `apply`", rank=1), *map(numbers, figures)),
        title="Pareto front of time against energy",
        has_lines=True,
    )
    for place in shown:
        row = front[place]
        rows.add(
            row["label"] + (" x" if row["measured"] else ""),
            row["argument"],
            *([str(row["batch"])] if several else []),
            duration_text(row["training_s"]),
            f"{row['power_w']:.1f}",
            energy_text(row[counted]),
        )
    console.print(rows)
    if len(shown) < len(front):
        console.print(f"{len(shown)} of {len(front)} modes shown; --json lists all", style="dim")
    console.print("x: measured; the others are predicted", style="dim")
    console.print(MODE_LEGEND, style="dim")
    console.print(f"Apply it with: wattfleet agent apply {content['argument']}{repeated_options()}", soft_wrap=True)


# --- Apply ------------------------------------------------------------------------------------------------------------
# `wattfleet agent apply` and `restore`: set a power mode, and undo it.


def apply(
    mode: Annotated[
        str, typer.Argument(help="Apply this mode: cores,CPU kHz,GPU Hz,memory Hz, or the name of a preset.")
    ],
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Apply a power mode. `wattfleet agent restore`, or the next start of the agent, undoes it.

    List modes and presets with `wattfleet agent modes`.
    """
    from edge_agent.devices.selection import folder_of_device
    from edge_agent.devices.sysfs import mode_argument
    from edge_agent.training.mode_change import apply_with_backup
    from wattfleet.common.stop_signals import StoppedBySignal, StopSignals

    board = open_named(device, state_dir)
    try:
        with StopSignals.held() as signals:
            found = apply_with_backup(board, mode, folder_of_device(device, state_dir), signals.interrupting())
    except StoppedBySignal as stopped:
        typer.echo("stopped before the mode was applied; the device was restored", err=True)
        raise typer.Exit(stopped.exit_code) from None
    if json_:
        print_json({"board": board.board_kind, "mode": found._asdict(), "argument": mode_argument(found)})
    else:
        print(f"{board.board_kind}: applied {mode_argument(found)} ({found.label()})")
        print("Undo with: wattfleet agent restore")


def restore(
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Restore the settings from before `apply`. If the device was not changed, do nothing."""
    from edge_agent.devices.selection import folder_of_device
    from edge_agent.devices.sysfs import mode_argument
    from edge_agent.training.mode_change import has_backup, restore_backup
    from wattfleet.common.stop_signals import StopSignals

    folder = folder_of_device(device, state_dir)
    if not has_backup(folder):
        # Does not open the device: the service's stop hook runs this every time, even if the device cannot be opened.
        if json_:
            print_json({"restored": False})
        else:
            print(f"nothing to restore: no backup in {folder}")
        return
    board = open_named(device, state_dir)
    with StopSignals.held():
        # Signals wait: a half-restored device would be in an unknown mode.
        restored = restore_backup(board, folder)
    found = board.current_mode()
    if json_:
        print_json({"restored": restored, "board": board.board_kind, "mode": found._asdict()})
    else:
        print(f"{board.board_kind}: restored {mode_argument(found)} ({found.label()})")


# --- Advise -----------------------------------------------------------------------------------------------------------
# `wattfleet advise`: which profiling method takes the least time on a board.

app = typer.Typer(add_completion=False)


@app.command()
def advise(
    board: Annotated[
        str,
        typer.Option(help="Name the kind of board: agx-orin, orin-nano, orin-nx or xavier-agx.", show_default=False),
    ],
    training_hours: Annotated[
        float,
        typer.Option(help="Set the total hours that the board will train.", show_default=False),
    ],
    workload_changes: WorkloadChangesOption = WorkloadChanges.RARELY,
    reference: Annotated[
        str,
        typer.Option(help="Predict the times with this reference predictor: a shipped one, or a directory."),
    ] = DEFAULT_REFERENCE,
    minibatch_ms: Annotated[
        float | None,
        typer.Option(
            help="State how long a minibatch of your workload takes in the board's highest mode, in milliseconds. By"
            " default, use the reference's workload."
        ),
    ] = None,
    budgets: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="State the number of power budgets that are known in advance. Binary search measures more modes for "
            "each. By default, they are unknown, as in a fleet, and binary search is not recommended.",
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Compare the profiling methods: how long each measures, how much slower it trains, and the total time.

    Nothing is measured: the measuring times are predicted by a reference.
    """
    from edge_agent.learning.profiling_plan import board_figures
    from reference_models import named_reference
    from wattfleet.core.choosing import compare_methods
    from wattfleet.core.modes import board_named

    known = board_named(board)
    source = named_reference(reference)
    figures = board_figures(source, known.kind, known.space.array(), minibatch_ms)
    advice = compare_methods(figures, training_hours, workload_changes, budgets)
    workload = source.details.workload.name if minibatch_ms is None else f"{minibatch_ms:g} ms in the highest mode"
    content = _advice_content(advice, known.kind, training_hours, workload_changes, reference, workload)
    if json_:
        print_json(content)
    else:
        _print_advice(content)


def _advice_content(
    advice: Advice, board: str, training_h: float, changes: WorkloadChanges, reference: str, workload: str
) -> dict[str, Any]:
    from wattfleet.core.choosing import LOSS_SOURCE

    return {
        "board": board,
        "training_hours": training_h,
        "workload_changes": str(changes),
        "workloads": changes.workloads,
        "workload": workload,
        "measuring_source": f"predicted by the reference {reference}: one warm-up minibatch and 20 that count, or until"
        " power has settled",
        "loss_source": LOSS_SOURCE,
        "methods": [_row(cost) for cost in advice.costs],
        "recommended": _row(advice.recommended),
        "reason": advice.reason,
    }


def _row(cost: MethodCost) -> dict[str, Any]:
    return {
        "method": str(cost.method),
        "modes": cost.modes,
        "measuring_s": cost.measuring_s,
        "penalty_pct": cost.penalty_pct,
        "over_1w_pct": cost.over_1w_pct,
        "total_s": cost.total_s,
    }


def _print_advice(content: dict[str, Any]) -> None:
    from wattfleet.common.console import count_of, duration_text
    from wattfleet.common.tables import FittingTable, columns, numbers

    console = terminal()
    figures = ("modes", "measuring", "slower by", "over by > 1 W", "total")
    table = FittingTable(
        columns("method", *map(numbers, figures)),
        title=f"{content['board']}, {content['workload']}, {content['training_hours']:g} h of training",
        has_lines=True,
    )
    for row in content["methods"]:
        table.add(
            row["method"],
            f"{row['modes']:,}",
            duration_text(row["measuring_s"]) if row["modes"] else "-",
            f"{row['penalty_pct']:.1f} %",
            f"{row['over_1w_pct']:.1f} %",
            duration_text(row["total_s"]),
            style="bold" if row == content["recommended"] else "",
        )
    console.print(table)
    workloads = count_of(content["workloads"], "workload")
    for line in (
        f"measuring: time for one workload, {content['measuring_source']}",
        f"slower by, over by > 1 W: mean time penalty and share of choices over the budget; {content['loss_source']}",
        f"total: measuring of {workloads} (the workload changes {content['workload_changes']}), and training",
    ):
        console.print(line, style="dim", soft_wrap=True)
    console.print(f"Recommended: {content['reason']}.", soft_wrap=True)
    if content["recommended"]["modes"]:
        console.print(f"Measure with: wattfleet agent profile {_arguments(content['recommended'])}", soft_wrap=True)


def _arguments(row: dict[str, Any]) -> str:
    from wattfleet.core.modes import ProfilingMethod

    by_method = {
        ProfilingMethod.TRANSFER: f" --modes {row['modes']}",
        ProfilingMethod.SCRATCH: f" --modes {row['modes']}",
        ProfilingMethod.BINARY_SEARCH: " --budget-w ...",
        ProfilingMethod.BRUTE_FORCE: "",
    }
    return f"--method {row['method']}{by_method[ProfilingMethod(row['method'])]}"


# --- Modes ------------------------------------------------------------------------------------------------------------
# `wattfleet agent modes`: the power modes that a device offers.

_UNITS = {"cores": "", "cpu_khz": "kHz", "gpu_hz": "Hz", "mem_hz": "Hz"}
_TITLES = {"cores": "cores", "cpu_khz": "CPU", "gpu_hz": "GPU", "mem_hz": "memory"}


def modes(
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    list_: Annotated[bool, typer.Option("--list", help="Print every mode as CSV instead of tables.")] = False,
    json_: JsonOption = False,
) -> None:
    """List the values of each power setting, and the named presets."""
    board = open_named(device, state_dir)
    if list_:
        print("\n".join(_csv_lines(board)))
        return
    content = _modes_content(board)
    if json_:
        print_json(content)
    else:
        _print_tables(content)


def _csv_lines(board: Device) -> list[str]:
    from wattfleet.core.modes import PowerMode

    rows = board.modes.astype(int).tolist()
    return [",".join(PowerMode._fields), *(",".join(map(str, row)) for row in rows)]


def _modes_content(board: Device) -> dict[str, Any]:
    from edge_agent.devices.sysfs import need_reboot, presets_of
    from wattfleet.core.modes import PowerMode

    columns = zip(PowerMode._fields, board.modes.T, strict=True)
    return {
        "board": board.board_kind,
        "provenance": board.provenance,
        "modes": len(board.modes),
        "values": {knob: sorted({round(value) for value in values.tolist()}) for knob, values in columns},
        "presets": {name: mode._asdict() for name, mode in presets_of(board).items()},
        "need_reboot": dict(need_reboot(board)),
    }


def _print_tables(content: dict[str, Any]) -> None:
    from edge_agent.devices.sysfs import mode_argument
    from wattfleet.common.tables import Column, FittingTable, columns, numbers, texts
    from wattfleet.core.modes import PowerMode

    console = terminal()
    values = FittingTable(
        columns("setting", numbers("count", rank=1), texts("values")),
        title=f"{content['board']}: {content['modes']:,} modes",
        has_lines=True,
    )
    for knob, taken in content["values"].items():
        unit = f" {_UNITS[knob]}" if _UNITS[knob] else ""
        values.add(f"{_TITLES[knob]}{unit}", str(len(taken)), " ".join(map(str, taken)))
    console.print(values)
    if content["presets"]:
        presets = FittingTable(
            columns("name", "cores,CPU kHz,GPU Hz,memory Hz", Column("cores, CPU/GPU/memory GHz", rank=1)),
            title="Presets",
            has_lines=True,
        )
        for name, knobs in content["presets"].items():
            mode = PowerMode(**knobs)
            presets.add(name, mode_argument(mode), mode.label())
        console.print(presets)
    for name, why in content["need_reboot"].items():
        console.print(f"{name} needs a reboot: {why}.")


# --- Explain ----------------------------------------------------------------------------------------------------------
# `wattfleet agent explain`: what limits the speed of a training step in a mode.

_BAR_CELLS = 30


def explain(
    mode: Annotated[
        str, typer.Argument(help="Explain this mode: cores,CPU kHz,GPU Hz,memory Hz, or the name of a preset.")
    ],
    device: DeviceOption = "auto",
    workload: StoredWorkloadOption = None,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Explain which part of the device limits training in a mode, and which setting would speed it up.

    List modes and presets with `wattfleet agent modes`.
    """
    from edge_agent.devices.sysfs import mode_argument, parse_mode
    from edge_agent.learning.transfer import expectation_of
    from edge_agent.profiling.stored_profile import read_fitted
    from wattfleet.core.errors import InvalidInputError
    from wattfleet.core.prediction import RooflinePredictor

    board = open_named(device, state_dir)
    wanted = parse_mode(board, mode)
    with terminal(to_stderr=True).status(f"predicting {len(board.modes):,} modes"):
        fitted = read_fitted(state_dir, board, workload)
    if not isinstance(fitted.predictor, RooflinePredictor):
        raise InvalidInputError(
            f"the fitted predictor is {fitted.predictor.name!r}, which cannot explain its predictions; fit a 'roofline'"
            " predictor with `wattfleet agent fit --reference`"
        )
    explanation = fitted.predictor.explain(wanted)
    content = {
        "mode": wanted._asdict(),
        "argument": mode_argument(wanted),
        "label": wanted.label(),
        "bound": explanation.bound,
        "words": explanation.words(),
        "shares": dict(explanation.shares),
        "measured_data_wait": fitted.measured.data_waits.get(wanted),
        **expectation_of(fitted, wanted).content(),
    }
    if json_:
        print_json(content)
    else:
        _print_explanation(content)


def _print_explanation(content: Mapping[str, Any]) -> None:
    from rich.text import Text

    from edge_agent.learning.transfer import lines_of
    from wattfleet.common.tables import Column, FittingTable, columns, numbers

    console = terminal()
    console.print(f"{content['argument']} ({content['label']})", style="bold")
    console.print(content["words"])
    shares = FittingTable(columns("part", numbers("share"), Column("bar", rank=1)), has_headings=False)
    for name, share in content["shares"].items():
        shares.add(name, f"{share:.0%}", Text("█" * round(share * _BAR_CELLS), style="cyan"))
    console.print()
    console.print(shares)
    console.print()
    wait = content["measured_data_wait"]
    if wait is not None:
        console.print(f"Measured in this mode: a minibatch waits {wait:.0%} of its time for data.")
    lines = lines_of(content)
    console.print(f"{lines['epoch']} per epoch, {lines['power']}: {lines['source']}")
    console.print(MODE_LEGEND, style="dim")
