"""`wattfleet agent choose`: the best mode within a power or time limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.cli.options import (
    DeviceOption,
    JsonOption,
    StateDirOption,
    StoredWorkloadOption,
    open_named,
    repeated_options,
)
from edge_agent.paths import DEFAULT_STATE_DIRECTORY
from wattfleet_io.console import MODE_LEGEND, print_json, terminal

if TYPE_CHECKING:
    from edge_agent.profiling.stored_profile import FittedDevice
    from wattfleet.choosing import ChosenMode

_PROBABILITY = 0.95


class Goal(str, Enum):
    """The quantity to minimise under a deadline."""

    energy = "energy"
    power = "power"


def choose(
    budget_w: Annotated[
        float | None, typer.Option(help="Choose the fastest mode that draws at most this many watts while training.")
    ] = None,
    deadline_s: Annotated[
        float | None,
        typer.Option(help="Choose the mode with the least energy whose epoch takes at most this many seconds."),
    ] = None,
    least: Annotated[Goal, typer.Option(help="Set what to minimise under --deadline-s.")] = Goal.energy,
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

    Pass exactly one of --budget-w, --deadline-s.
    """
    from edge_agent.profiling.stored_profile import read_fitted
    from wattfleet.errors import InvalidInputError

    if (budget_w is None) == (deadline_s is None):
        raise InvalidInputError("pass exactly one of --budget-w, --deadline-s")
    board = open_named(device, state_dir)
    with terminal(to_stderr=True).status(f"predicting {len(board.modes):,} modes"):
        fitted = read_fitted(state_dir, board, workload).with_minibatches_per_epoch(minibatches_per_epoch)
        chosen = _chosen(fitted, budget_w, deadline_s, least, probability)
    content = _content(fitted, chosen, budget_w, deadline_s)
    if json_:
        print_json(content)
    else:
        _print(content, board.board_kind)


def _chosen(
    fitted: FittedDevice, budget_w: float | None, deadline_s: float | None, least: Goal, probability: float
) -> ChosenMode:
    from wattfleet.choosing import (
        InfeasibleDeadlineError,
        fastest_within_budget,
        least_energy_by_deadline,
        lowest_power_by_deadline,
    )
    from wattfleet.errors import InvalidInputError

    if budget_w is not None:
        return fastest_within_budget(fitted.choosable, budget_w * 1e3, probability)
    assert deadline_s is not None
    if fitted.is_length_assumed:
        raise InvalidInputError(
            f"the number of minibatches per epoch of {fitted.workload.workload.name!r} is unknown, and so is the "
            f"duration of an epoch: pass --minibatches-per-epoch, or let an app train it with `profiled(...)`"
        )
    by_deadline = {Goal.energy: least_energy_by_deadline, Goal.power: lowest_power_by_deadline}[least]
    count = fitted.minibatches_per_epoch
    try:
        return by_deadline(fitted.choosable, deadline_s * 1e3 / count, probability)
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
    from edge_agent.devices.mode_names import mode_argument
    from edge_agent.learning.expectation import expectation_of

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
    from edge_agent.learning.expectation import assumed_length, lines_of
    from wattfleet_io.tables import facts

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
