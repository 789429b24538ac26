"""`wattfleet coordinator round`: one round in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import JsonOption, connected
from coordinator.cli.run_names import RUN_HELP, run_ids_of
from coordinator.display.wording import ASSUMED_NOTE, expected_time, moment_of, number
from wattfleet_io.console import MODE_LEGEND, count_of, duration_text, energy_text, plain_text, print_json, terminal

if TYPE_CHECKING:
    from rich.text import Text

    from wattfleet_io.tables import FittingTable

_STYLES = {"failed": "bold red", "late": "yellow", "in part": "yellow", "stopped": "yellow", "trained": "green"}


def round_(
    run: Annotated[str, typer.Argument(metavar="RUN", help=f"{RUN_HELP}.")],
    number_: Annotated[int, typer.Argument(metavar="N", min=1, help="Number of the round, from 1.")],
    json_: JsonOption = False,
) -> None:
    """Show one round: who trained, in which mode, why, and what failed."""
    from coordinator.display.round_details import round_details

    with connected() as client:
        [(run_id, name)] = run_ids_of(client, [run]).items()
        content = {"run_name": name, **round_details(client.round(run_id, number_))}
    if json_:
        print_json(content)
    else:
        _print(content)


def _print(content: dict[str, Any]) -> None:
    from rich.text import Text

    from wattfleet_io.tables import facts, grouped

    console = terminal()
    console.print(_title(content))
    console.print(facts(_totals(content)))
    if content["selected"]:
        console.print()
        console.print(_selected(content))
    if failed := [(each["device_id"], plain_text(each["failure"])) for each in content["selected"] if each["failure"]]:
        console.print(Text("\nfailed", style="bold red"))
        console.print(grouped(failed, style="red"))
    if why := [(each["device_id"], each["reason"]) for each in content["selected"] if each["reason"]]:
        console.print(Text("\nwhy they were selected"))
        console.print(grouped(why))
    if content["not_selected"]:
        console.print(Text(f"\n{count_of(len(content['not_selected']), 'device')} not selected"))
        console.print(grouped(((each["device_id"], each["reason"]) for each in content["not_selected"]), style="dim"))
    if not content["unplanned"]:
        assumed = f"\n{ASSUMED_NOTE}" if any(each["length_assumed"] for each in content["selected"]) else ""
        console.print(Text(f"\n{MODE_LEGEND}{assumed}", style="dim"))


def _title(content: dict[str, Any]) -> Text:
    from rich.text import Text

    state = "running" if content["wall_s"] is None else f"finished in {duration_text(content['wall_s'])}"
    began = "" if content["planned_unix_s"] is None else f", began {moment_of(content['planned_unix_s'])}"
    workload = f", workload {content['workload']}" if content["workload"] else ""
    return Text(f"round {content['round']} of run {content['run_name']}: {state}{began}{workload}", style="bold")


def _totals(content: dict[str, Any]) -> dict[str, str]:
    from coordinator.display.run_totals import trainings_words

    if content["unplanned"]:
        return {"plan": "none, because the coordinator was away: no budget was kept"}
    watts, seconds, joules = (content[key] for key in ("observed_site_w", "observed_s", "training_j"))
    covered = trainings_words(content["observed_trainings"], content["devices"])
    lines = {
        "power": f"{number(content['planned_w'])} of {number(content['site_budget_w'])} W planned,"
        f" {'not observed' if watts is None else f'{number(watts)} W observed'}",
        "time": f"{duration_text(content['planned_s'])} planned,"
        f" {'not observed' if seconds is None else f'{duration_text(seconds)} observed'}",
        "energy": f"{'not observed' if joules is None else f'{energy_text(joules)} for {covered}'}",
    }
    if content["trimmed_planned_w"] is not None:
        lines["trim"] = (
            f"to {number(content['trimmed_planned_w'])} of {number(content['trimmed_site_budget_w'])} W:"
            f" {content['in_other_mode']:,} in another mode, {content['stopped']:,} stopped"
        )
    if metrics := ", ".join(f"{name} {number(value, 3)}" for name, value in content["metrics"].items()):
        lines["metrics"] = metrics
    return lines


def _selected(content: dict[str, Any]) -> FittingTable:
    from rich.text import Text

    from wattfleet.modes import PowerMode
    from wattfleet_io.tables import FittingTable, columns, numbers

    planned = (
        "mode",
        numbers("batch", rank=2),
        numbers("epochs", rank=1),
        numbers("W\nplanned"),
        numbers("W\nused"),
        numbers("time\nplanned"),
        numbers("time\ntaken"),
    )
    table = FittingTable(columns("device", "outcome", *(() if content["unplanned"] else planned)))
    for each in content["selected"]:
        word = each["outcome"] if each["outcome"] != "in part" else f"{each['share']:.0%}"
        names = (Text(each["device_id"]), Text(word, style=_STYLES.get(each["outcome"], "")))
        if content["unplanned"]:
            table.add(*names)
            continue
        mode = PowerMode(**each["mode"]).label()
        table.add(
            *names,
            f"{mode} ({_change(each)})" if each["became"] else mode,
            number(each["batch"], 0),
            "-" if each["epochs"] is None else f"{each['epochs']:g}",
            number(each["planned_w"]),
            number(each["observed_w"]),
            expected_time(each["predicted_s"], each["length_assumed"]),
            duration_text(each["observed_s"]),
        )
    return table


def _change(each: dict[str, Any]) -> str:
    """Describe how a trim changed a device's assignment."""
    from wattfleet.modes import PowerMode

    return f"first {PowerMode(**each['first']['mode']).label()}" if each["became"] == "other mode" else each["became"]
