"""`wattfleet coordinator rounds`: the rounds of a run as planned and as observed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import (
    JsonOption,
    WatchOption,
    connected,
    show,
)
from coordinator.cli.run_names import NO_RUNS, RUN_HELP, RUN_STYLES, names_of, run_id_of
from coordinator.display.wording import number
from wattfleet_io.console import count_of, duration_text, energy_text, rounds_text
from wattfleet_proto.metric_names import metric_order

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from wattfleet_io.tables import FittingTable

RunOption = Annotated[str | None, typer.Option("--run", help=f"Show this run: {RUN_HELP}. Default: the newest run.")]


def rounds(
    run: RunOption = None,
    watch: WatchOption = False,
    json_: JsonOption = False,
) -> None:
    """List the rounds of a run: devices, power and time as planned and observed, and metrics."""
    from coordinator.display.run_totals import run_totals
    from coordinator.display.view_values import round_values

    with connected() as client:

        def content() -> dict[str, Any]:
            runs = client.runs(with_times=json_)
            run_id = None if run is None else run_id_of(names_of(runs), run)
            chosen = [each for each in runs if run_id in (None, each.run_id)][-1:]
            if not chosen:
                return {"run_id": None, "rounds": []}
            views = list(client.rounds(chosen[0].run_id, with_devices=False, with_times=json_))
            return {**run_totals(chosen[0], views), "rounds": [round_values(view) for view in views]}

        show(content, _table, json_, watch)


def _table(content: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from coordinator.display.run_totals import ENERGY_NOTE, is_in_part, trainings_words
    from coordinator.display.run_words import labels_text, run_title

    if content["run_id"] is None:
        return Text(NO_RUNS)
    asked_for = count_of(content["rounds_asked_for"], "round")
    lines: list[RenderableType] = [
        Text(
            f"run {run_title(content)}: {content['strategy']}, workload {content['workload']}, {asked_for} requested,"
            f" {content['state']}",
            style="bold",
        ),
    ]
    if content["labels"]:
        lines.append(Text(labels_text(content["labels"]), style="dim"))
    if content["error"]:
        lines.append(Text(content["error"], style=RUN_STYLES[content["state"]]))
    if not content["rounds"]:
        next_step = "" if content["finished"] else "; `wattfleet coordinator plan --dry-run` previews the next one"
        return Group(*lines, Text(f"no rounds yet{next_step}"))
    lines.append(_rounds_table(content["rounds"]))
    lines += [_trim(each) for each in content["rounds"] if each["trimmed_planned_w"] is not None]
    if unplanned := [each["round"] for each in content["rounds"] if each["unplanned"]]:
        lines.append(Text(f"{rounds_text(unplanned)} unplanned: no budget was kept", style="bold red"))
    unobserved = [each for each in content["rounds"] if each["wall_s"] is not None and each["observed_s"] is None]
    if unobserved := [each["round"] for each in unobserved if not each["unplanned"]]:
        why = "devices measured other modes, trained too briefly, or failed"
        lines.append(Text(f"{rounds_text(unobserved)} not observed: {why}", style="dim"))
    if content["training_j"] is not None:
        covered = trainings_words(content["observed_trainings"], content["trainings"])
        note = f"; {ENERGY_NOTE}" if any(map(is_in_part, content["rounds"])) else ""
        lines.append(Text(f"energy: {energy_text(content['training_j'])} for {covered}{note}", style="dim"))
    return Group(*lines)


def _rounds_table(rounds: Sequence[dict[str, Any]]) -> FittingTable:
    """A table of the rounds with their energy and metrics."""
    from coordinator.display.run_totals import energy_words
    from wattfleet_io.tables import FittingTable, columns, numbers

    names = sorted({name for each in rounds for name in each["metrics"]}, key=metric_order)
    table = FittingTable(
        columns(
            numbers("round"),
            numbers("devices"),
            numbers("W\nallowed", rank=2),
            numbers("W\nplanned"),
            numbers("W\nused"),
            numbers("time\nplanned", rank=1),
            numbers("time\ntaken"),
            numbers("energy", rank=3),
            *(numbers(name, rank=4 + k) for k, name in enumerate(names)),
        )
    )
    for each in rounds:
        is_running = each["wall_s"] is None and each["observed_s"] is None
        table.add(
            str(each["round"]),
            _devices(each),
            number(each["site_budget_w"]),
            number(each["planned_w"]),
            number(each["observed_site_w"]),
            duration_text(each["planned_s"]),
            "running" if is_running else duration_text(each["wall_s" if each["unplanned"] else "observed_s"]),
            energy_words(each),
            *(number(each["metrics"].get(name), 3) for name in names),
        )
    return table


def _devices(each: dict[str, Any]) -> Text:
    """Describe how many devices took part, and how many of them were late."""
    from rich.text import Text

    failed, late, devices = len(each["failed"]), len(each["late"]), each["devices"]
    text = Text(f"{devices - failed:,} of {devices:,}", style="bold red") if failed else Text(f"{devices:,}")
    return text.append(f", {late:,} late", style="yellow") if late else text


def _trim(each: dict[str, Any]) -> Text:
    """Describe how a round was trimmed in flight, because its budget fell or its devices' duties left less time."""
    from rich.text import Text

    changes = [
        f"{count_of(count, 'device')} {words}"
        for count, words in ((each["in_other_mode"], "continued in another mode"), (each["stopped"], "stopped"))
        if count
    ]
    if not changes:
        longer = f"{duration_text(each['trimmed_s'])} instead of {duration_text(each['planned_s'])}"
        return Text(f"round {each['round']} takes up to {longer}: epochs take longer beside a duty", style="yellow")
    return Text(
        f"round {each['round']} trimmed to {number(each['trimmed_planned_w'])} of"
        f" {number(each['trimmed_site_budget_w'])} W: {', '.join(changes)}",
        style="yellow",
    )
