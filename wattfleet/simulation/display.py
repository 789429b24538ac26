"""Displays the progress of a run in a terminal, and the tables at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from coordinator.display.values import state_word, trainings_words
from wattfleet.common.console import count_of, energy_text
from wattfleet.common.tables import FittingTable, columns, numbers, texts
from wattfleet.core.modes import PowerMode
from wattfleet.simulation.report_figures import percent
from wattfleet.simulation.run import SimulationProgress, left_text
from wattfleet_proto.v1 import planning_pb2, view_pb2

_STATE_STYLE = {
    "enrolled": "dim",
    "profiling": "yellow",
    "ready": "green",
    "training": "bold cyan",
    "degraded": "bold red",
    "offline": "red",
}


class LiveDisplay:
    """A table of the fleet that is redrawn as it changes; for terminals."""

    def __init__(self, live: Live) -> None:
        """Draw in a live display of Rich."""
        self._live = live

    def announce(self, text: str) -> None:
        """Print a line above the table."""
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, snapshot: SimulationProgress) -> None:
        """Redraw."""
        self._live.update(_picture(snapshot))


class LineDisplay:
    """Prints one line for every change; for logs and pipes."""

    def __init__(self, console: Console) -> None:
        """Print to a console."""
        self._console = console
        self._phase = ""
        self._ready: set[str] = set()
        self._run_number = 0
        self._rounds_done = 0
        self._rounds_planned = 0

    def announce(self, text: str) -> None:
        """Print a line."""
        self._print(text)

    def show(self, snapshot: SimulationProgress) -> None:
        """Print what has changed."""
        stamp = f"[{snapshot.elapsed_s:6.1f} s]"
        if snapshot.phase != self._phase:
            self._phase = snapshot.phase
            self._print(f"{stamp} {snapshot.phase}{_left(snapshot)}")
        if snapshot.run_number != self._run_number:
            self._run_number = snapshot.run_number
            self._rounds_done = self._rounds_planned = 0
        for device in snapshot.devices:
            if state_word(device.state) == "ready" and device.device_id not in self._ready:
                self._ready.add(device.device_id)
                # Idle watts are reported with the first front, which may not exist yet.
                idle = f", {device.idle_w:.1f} W idle" if device.idle_w else ""
                self._print(f"{stamp} {device.device_id}: ready, {device.mode_count:,} modes{idle}")
        for view in snapshot.rounds[self._rounds_planned :]:
            chosen = ", ".join(map(_measured, view.plan.assignments))
            planned = "; ".join(filter(None, (chosen, _watts(view))))
            self._print(f"{stamp} {_round(view, snapshot)}: {planned}")
            self._rounds_planned += 1
        for view in snapshot.rounds[self._rounds_done :]:
            if "accuracy" not in view.metrics:
                break
            self._print(
                f"{stamp} {_round(view, snapshot)} done: {_watts(view)}, accuracy {view.metrics['accuracy']:.1%}"
                f"{_left(snapshot)}"
            )
            self._rounds_done += 1

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _round(view: view_pb2.RoundView, snapshot: SimulationProgress) -> str:
    """A round with its number, and how many there are."""
    return f"round {view.round}" + (f" of {snapshot.rounds_in_run}" if snapshot.rounds_in_run else "")


def _left(snapshot: SimulationProgress) -> str:
    """The time that is left, to append to a line; empty if it is unknown."""
    return "" if snapshot.left_s is None else f"; {left_text(snapshot.left_s)}"


def _measured(assignment: planning_pb2.Assignment) -> str:
    """A device, with how many modes of the workload it had measured before the round."""
    return f"{assignment.device_id} ({assignment.profiled_modes} modes measured)"


def _watts(view: view_pb2.RoundView) -> str:
    if view.unplanned:
        return "unplanned: no budget was kept"
    if view.HasField("observed_site_w"):
        return f"{view.observed_site_w:.1f} of {view.plan.site_budget_w:g} W used, {view.observed_s:.0f} s"
    return f"{view.plan.planned_w:.1f} of {view.plan.site_budget_w:g} W planned, {view.plan.duration_s:.0f} s"


def _picture(snapshot: SimulationProgress) -> RenderableType:
    head = Text.assemble(
        ("Wattfleet ", "bold"),
        ("simulated fleet  ", "dim"),
        (snapshot.phase, "bold"),
        f"  {snapshot.elapsed_s:.0f} s{_left(snapshot)}",
    )
    fleet = FittingTable(columns("device", "state", "modes profiled", texts("doing")))
    for device in snapshot.devices:
        word = state_word(device.state)
        fleet.add(
            device.device_id,
            Text(word, style=_STATE_STYLE[word]),
            f"{device.profiled_modes} of {device.mode_count}",
            device.detail,
        )
    parts: list[RenderableType] = [head, Text(), fleet]
    if snapshot.rounds:
        parts += [Text(), *(_round_line(view, snapshot) for view in snapshot.rounds)]
    return Group(*parts)


def _round_line(view: view_pb2.RoundView, snapshot: SimulationProgress) -> Text:
    chosen = ", ".join(assignment.device_id for assignment in view.plan.assignments)
    accuracy = f"  accuracy {view.metrics['accuracy']:.1%}" if "accuracy" in view.metrics else ""
    return Text.assemble((f"{_round(view, snapshot)}  ", "bold"), chosen, f"  {_watts(view)}", (accuracy, "green"))


def closing_tables(run: Mapping[str, Any]) -> Sequence[RenderableType]:
    """Return the tables of one run, printed at the end."""
    provenance = " and ".join(dict.fromkeys(device["provenance"] for device in run["devices"].values()))
    sizes = " or ".join(map(str, run["batch_sizes"]))
    title = f"Run {run['run']}: {run['network']} network, minibatches of {sizes}. Devices ({provenance})"
    figures = ("modes profiled", "time MAPE %", "power MAPE %", "idle W", "rounds")
    devices = FittingTable(columns("device", *map(numbers, figures)), title=title, has_lines=True)
    for device_id, device in run["devices"].items():
        devices.add(
            device_id,
            f"{device['modes_profiled']} of {device['mode_space']}",
            f"{device['time_mape_pct']:.1f}",
            f"{device['power_mape_pct']:.1f}",
            f"{device['idle_w']:.1f}",
            str(sum(device_id in one["selected"] for one in run["rounds"])),
        )
    seen = ("epoch s\nplan", "epoch s\nseen", "watts\nplan", "watts\nseen")
    rounds = FittingTable(
        columns("round", "device", "mode", *map(numbers, seen)),
        title="Rounds: predicted (plan) and observed (seen); mode: cores, GHz of CPU/GPU/memory",
        has_lines=True,
    )
    for one in run["rounds"]:
        for k, part in enumerate(one["assignments"]):
            rounds.add(
                str(one["round"]) if k == 0 else "",
                part["device"],
                PowerMode(**part["mode"]).label(),
                _number(part["predicted_epoch_s"]),
                _number(part["observed_epoch_s"]),
                _number(part["predicted_power_w"]),
                _number(part["observed_power_w"]),
            )
        rounds.add(
            "",
            f"site, of {one['site_budget_w']:g} W",
            f"accuracy {one['accuracy']:.1%}",
            *("", ""),
            _number(one["planned_site_w"]),
            _number(one["observed_site_w"]),
            style="bold",
            ends_section=True,
        )
    return [devices, rounds, *([_comparison(run["comparison"])] if run["comparison"]["ways"] else [])]


def _comparison(comparison: Mapping[str, Any]) -> FittingTable:
    """Return the table that compares this run with the baselines, in the boards' own time."""
    target = comparison["target"]
    to_target = f"to {percent(target)}" if target is not None else "to target"
    names = (f"{to_target}\ns", f"{to_target}\nkJ", "all\ns", "all\nkJ", "accuracy\nat the end", "most W")
    title = "Compared in the boards' own time; kJ of all boards, idle ones included"
    table = FittingTable(columns(texts(""), *map(numbers, names)), title=title, has_lines=True)
    for way in comparison["ways"]:
        until = way["to_target"] or {"s": None, "j": None}
        table.add(
            way["name"],
            _number(until["s"]),
            _kilojoules(until["j"]),
            _number(way["duration_s"]),
            _kilojoules(way["energy_j"]),
            percent(way["final_accuracy"]),
            _number(way["most_w"]),
        )
    return table


def _kilojoules(joules: float | None) -> str:
    return "-" if joules is None else f"{joules / 1e3:.1f}"


def duty_table(duties: Mapping[str, Any]) -> RenderableType:
    """Return the table of how the boards kept their duties, printed at the end."""
    title = "Simulated requests; 95% ms: latency while training; training: planned / observed seconds"
    figures = ("requests", "in time\n%", "95% ms", "training")
    table = FittingTable(columns("device", "duty", *map(numbers, figures)), title=title, has_lines=True)
    for device_id, duty in duties.items():
        share, ratio = duty["in_time_share"], duty["training_of_plan"]
        table.add(
            device_id,
            duty["duty"],
            f"{duty['requests']:,}",
            "-" if share is None else f"{100 * share:.2f}",
            _number(duty["beside_training"]["p95_ms"]),
            "-" if ratio is None else f"{ratio:.2f}",
        )
    return table


def closing_line(run: Mapping[str, Any]) -> str:
    """Return the result of one run in one line."""
    errors = run["median_error"]
    epochs, watts = (
        f"{percent(errors[quantity]['share'])} over {count_of(errors[quantity]['trainings'], 'training')}"
        for quantity in ("epoch_s", "power_w")
    )
    held = [one["site_budget_held"] for one in run["rounds"] if one["site_budget_held"] is not None]
    unseen = len(run["rounds"]) - len(held)
    joules = [one["training_j"] for one in run["rounds"] if one["training_j"] is not None]
    observed, trainings = (sum(one[name] for one in run["rounds"]) for name in ("observed_trainings", "trainings"))
    return (
        f"run {run['run']}: final accuracy {run['final_accuracy']:.1%}, median error of an epoch's seconds {epochs} and"
        f" of watts {watts},"
        f" {sum(device['modes_profiled'] for device in run['devices'].values())} modes measured,"
        f" watts held in {sum(held)} of {count_of(len(held), 'observed round')}"
        f"{f' ({unseen} not observed)' if unseen else ''},"
        f" {energy_text(sum(joules) if joules else None)} for {trainings_words(observed, trainings)}"
        f"{_energy_words(run)}"
    )


def _energy_words(run: Mapping[str, Any]) -> str:
    """What a run has done with its energy budget, and whether it has ended because of it; empty without one."""
    energy = run["energy"]
    if energy is None:
        return ""
    done, asked_for = len(run["rounds"]), run["rounds_asked_for"]
    if run["error"]:
        why = f"it failed: {run['error']}"
    else:  # a run without an error ends early only for its energy
        why = "all its rounds were done" if done >= asked_for else "the rest does not suffice for another training"
    set_aside = f" and {energy_text(energy['set_aside_j'])} set aside" if energy["set_aside_j"] else ""
    return (
        f"; {energy_text(energy['spent_j'])} above idle spent{set_aside} of the energy budget of"
        f" {energy_text(energy['budget_j'])}: it ended after {done} of {count_of(asked_for, 'round')}, because {why}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
