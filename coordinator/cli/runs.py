"""`wattfleet coordinator runs`, `rounds`, `forecast`, `round` and `energy`: what was planned, cost, and is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli.options import JsonOption, WatchOption, connected, show
from coordinator.display.words import ASSUMED_NOTE, expected_time, moment_of, number
from wattfleet.common.console import (
    MODE_LEGEND,
    count_of,
    duration_text,
    energy_text,
    plain_text,
    print_json,
    rounds_text,
    terminal,
)
from wattfleet.core.budgets import EnergyAccount
from wattfleet.core.errors import InvalidInputError, first_few
from wattfleet_proto.names import metric_order

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from coordinator.cli.client import CoordinatorClient
    from wattfleet.common.tables import FittingTable
    from wattfleet.core.planning import Tariff
    from wattfleet_proto.v1 import view_pb2


# --- Run names --------------------------------------------------------------------------------------------------------
# What the commands about runs share: how a run is named, by its name or Flower's id, and the styles of states.


_NEWEST = 5

NO_RUNS = (
    "no runs yet: start a Flower app whose strategy is wrapped in PowerAware, such as with `flwr run` (docs/flower.md)"
)
RUN_HELP = "the run's name, Flower's id of it, or the beginning of either"
RUN_STYLES = {"failed": "bold red", "stopped": "yellow", "running": "bold green"}


def names_of(runs: Iterable[view_pb2.RunView]) -> dict[str, str]:
    """The name of each run by its id, oldest first."""
    return {each.run_id: each.name for each in runs}


def run_id_of(known: Mapping[str, str], given: str) -> str:
    """Find the id of the run that a user named.

    Args:
        known: the names of all runs by id, oldest first.
        given: a run's name or id, or the unique beginning of one.

    Raises:
        InvalidInputError: no run matches, or several do.
    """
    if given in known:
        return given
    exactly = [run_id for run_id, name in known.items() if name == given]
    found = exactly or [each for each in known if given and (each.startswith(given) or known[each].startswith(given))]
    if len(found) == 1:
        return found[0]
    if found:
        names = first_few([each if known[each] == each else f"{known[each]} ({each})" for each in found])
        raise InvalidInputError(f"{given!r} is the beginning of several runs, {names}: give more of the name")
    newest = f"the newest runs are {', '.join(list(known.values())[-_NEWEST:])}" if known else NO_RUNS
    raise InvalidInputError(f"unknown run {given!r}: it never started, or was deleted; {newest}")


def run_ids_of(client: CoordinatorClient, given: Iterable[str]) -> dict[str, str]:
    """Find the runs that a user named, without duplicates: their names by id; errors as for `run_id_of`."""
    known = names_of(client.runs())
    return {run_id: known[run_id] for run_id in (run_id_of(known, each) for each in given)}


# --- Runs -------------------------------------------------------------------------------------------------------------
# `wattfleet coordinator runs`: all runs, and the cost of each.

_SHOWN = 20
_NO_SUCH_RUN = "no run has these labels: leave out --label to list all"


def runs(
    limit: Annotated[int, typer.Option("--limit", min=1, help="Show at most this many runs, the newest.")] = _SHOWN,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="KEY=VALUE",
            help="Show only runs with this label. Repeatable: runs with all. Default: all.",
        ),
    ] = None,
    watch: WatchOption = False,
    json_: JsonOption = False,
) -> None:
    """List runs, the newest last, with their workload, progress and cost."""
    from wattfleet_proto.names import label_of

    labels = dict(map(label_of, label or ()))
    with connected() as client:
        show(lambda: newest_runs(client, limit, labels), partial(_runs_table, is_filtered=bool(labels)), json_, watch)


def newest_runs(
    client: CoordinatorClient, limit: int, labels: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The newest runs with the totals of their rounds.

    Args:
        client: the coordinator.
        limit: the most runs.
        labels: only runs with all of these labels.

    Returns:
        `runs`: a dictionary for each run, the newest last; `older`: the number of runs that are left out.
    """
    from coordinator.display.values import run_totals, run_values
    from coordinator.display.words import has_labels

    views = [view for view in client.runs(with_times=True) if has_labels(run_values(view), labels)]
    found = [run_totals(view, client.rounds(view.run_id, with_devices=False)) for view in views[-limit:]]
    return {"runs": found, "older": max(0, len(views) - limit)}


def _runs_table(content: dict[str, Any], is_filtered: bool = False) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from coordinator.display.values import ENERGY_NOTE, energy_words, is_in_part
    from coordinator.display.words import labels_text
    from wattfleet.common.tables import Column, FittingTable, columns, numbers, texts

    found: Sequence[dict[str, Any]] = content["runs"]
    if not found:
        return Text(_NO_SUCH_RUN if is_filtered else NO_RUNS)
    has_labels = any(each["labels"] for each in found)
    table = FittingTable(
        columns(
            "run",
            "state",
            numbers("rounds"),
            numbers("time", rank=3),
            numbers("energy", rank=2),
            numbers("failed", rank=4),
            Column("started", rank=1),
            Column("id", rank=6),
            *([texts("labels", rank=5)] if has_labels else []),
            texts("workload"),
        )
    )
    for each in found:
        table.add(
            Text(each["name"]),
            Text(each["state"], style=RUN_STYLES.get(each["state"], "")),
            f"{each['rounds_done']:,} of {each['rounds_asked_for']:,}",
            duration_text(each["wall_s"] or None),
            energy_words(each),
            f"{each['failed_trainings']:,}",
            moment_of(each["started_unix_s"]),
            Text(each["run_id"]),
            *([Text(labels_text(each["labels"]))] if has_labels else []),
            Text(each["workload"] or "-"),
        )
    parts: list[RenderableType] = [table]
    if any(map(is_in_part, found)):
        parts.append(Text(ENERGY_NOTE, style="dim"))
    if content["older"]:
        older = count_of(content["older"], "older run")
        parts.append(Text(f"{older} not shown: --limit {len(found) + content['older']} shows all", style="dim"))
    parts += [Text(f"run {each['name']}: {words}", style="dim") for each in found if (words := _energy_left(each))]
    parts += [
        Text(f"run {each['name']}: {each['error']}", style=RUN_STYLES[each["state"]], overflow="fold")
        for each in found
        if each["error"]
    ]
    parts.append(
        Text("next: `rounds --run RUN`, then `round RUN N`; the beginning of a run's name is enough", style="dim")
    )
    return Group(*parts)


def _energy_left(run: dict[str, Any]) -> str:
    """What a run has done with its energy budget, and what is left; empty without one."""
    budget_j, spent_j, set_aside_j = (run[f"energy_{each}_j"] for each in ("budget", "spent", "set_aside"))
    if budget_j is None:
        return ""
    account = EnergyAccount(budget_j, spent_j, set_aside_j)
    return (
        f"{energy_text(account.left_j)} left of an energy budget of {energy_text(budget_j)}:"
        f" {energy_text(spent_j)} spent, {energy_text(set_aside_j)} set aside"
    )


# --- Rounds -----------------------------------------------------------------------------------------------------------
# `wattfleet coordinator rounds`: the rounds of a run as planned and as observed.

RunOption = Annotated[str | None, typer.Option("--run", help=f"Show this run: {RUN_HELP}. Default: the newest run.")]


def rounds(
    run: RunOption = None,
    watch: WatchOption = False,
    json_: JsonOption = False,
) -> None:
    """List the rounds of a run: devices, power and time as planned and observed, and metrics."""
    from coordinator.display.values import round_values, run_totals

    with connected() as client:

        def content() -> dict[str, Any]:
            runs = client.runs(with_times=json_)
            run_id = None if run is None else run_id_of(names_of(runs), run)
            chosen = [each for each in runs if run_id in (None, each.run_id)][-1:]
            if not chosen:
                return {"run_id": None, "rounds": []}
            views = list(client.rounds(chosen[0].run_id, with_devices=False, with_times=json_))
            return {**run_totals(chosen[0], views), "rounds": [round_values(view) for view in views]}

        show(content, _run_with_rounds, json_, watch)


def _run_with_rounds(content: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from coordinator.display.values import ENERGY_NOTE, is_in_part, trainings_words
    from coordinator.display.words import labels_text, run_title

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
    if words := _energy_left(content):
        lines.append(Text(words, style="dim"))
    if not content["rounds"]:
        next_step = "" if content["finished"] else "; `wattfleet coordinator plan --dry-run` previews the next one"
        return Group(*lines, Text(f"no rounds yet{next_step}"))
    lines.append(_table_of_rounds(content["rounds"]))
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


def _table_of_rounds(rounds: Sequence[dict[str, Any]]) -> FittingTable:
    """A table of the rounds with their energy and metrics."""
    from coordinator.display.values import energy_words
    from wattfleet.common.tables import FittingTable, columns, numbers

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


# --- Forecast ---------------------------------------------------------------------------------------------------------
# `wattfleet coordinator forecast`: what a run still needs, and what that costs.

_TARIFF_HELP = "a number, or a CSV file with the columns hour (0 to 23) and per_kwh"


def forecast(
    run: RunOption = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="METRIC=VALUE",
            help="Forecast until the mean of three rounds reaches this value, such as accuracy=0.9. Default: the rounds"
            " that the run was asked for.",
        ),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option("--price", help=f"What a kWh costs: {_TARIFF_HELP}. Default: no costs are shown."),
    ] = None,
    currency: Annotated[str, typer.Option("--currency", help="Unit of the price.")] = "EUR",
    co2: Annotated[
        str | None,
        typer.Option("--co2", help=f"Kilograms of CO2 per kWh: {_TARIFF_HELP}. Default: none are shown."),
    ] = None,
    watch: WatchOption = False,
    json_: JsonOption = False,
) -> None:
    """Show when a run will be done, and the energy and costs that it still needs."""
    import time

    from coordinator.display.values import forecast_values
    from wattfleet.core.planning import Target

    wanted = None
    if target is not None:
        metric, _, value = target.rpartition("=")
        try:
            wanted = Target(metric, float(value))
        except ValueError:
            raise InvalidInputError(f"--target {target}: write METRIC=VALUE, such as accuracy=0.9") from None
    tariffs = [_tariff(unit, given) for unit, given in ((currency, price), ("kg CO2", co2)) if given is not None]
    with connected() as client:

        def content() -> dict[str, Any]:
            runs = client.runs(with_times=True)
            run_id = None if run is None else run_id_of(names_of(runs), run)
            chosen = [each for each in runs if run_id in (None, each.run_id)][-1:]
            if not chosen:
                raise InvalidInputError(NO_RUNS)
            rounds = client.rounds(chosen[0].run_id, with_devices=False, with_times=True)
            return forecast_values(chosen[0], rounds, time.time(), wanted, tariffs)

        show(content, _forecast_table, json_, watch)


def _tariff(unit: str, given: str) -> Tariff:
    """Read a tariff from an option: a number, or the file that it names."""
    import csv
    from pathlib import Path

    from wattfleet.core.planning import Tariff

    try:
        return Tariff.constant(unit, float(given))
    except ValueError:
        pass
    by_hour: dict[int, float] = {}
    try:
        with open(Path(given), newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                by_hour[int(row["hour"])] = float(row["per_kwh"])
    except OSError as error:
        raise InvalidInputError(
            f"{given!r} is neither a number nor a file that can be read: {error.strerror}"
        ) from None
    except (KeyError, TypeError, ValueError, csv.Error):
        raise InvalidInputError(f"{given}: it needs the columns hour and per_kwh with a number in each row") from None
    if sorted(by_hour) != list(range(24)):
        raise InvalidInputError(f"{given}: it needs a row for each hour from 0 to 23")
    return Tariff(unit, tuple(by_hour[hour] for hour in range(24)))


def _forecast_table(content: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from wattfleet.common.tables import FittingTable, columns, numbers, texts

    target = content["target"]
    until = f"{content['rounds_asked_for']:,} rounds"
    if target is not None:
        until = f"{target['metric']} {'<=' if target['falls'] else '>='} {target['value']:g}"
    now = f"after {count_of(content['rounds_done'], 'round')}"
    if target is not None:
        now += f", with {target['metric']} {number(content['metric_now'], 3)}"
    lines: list[RenderableType] = [Text(f"run {content['name']} until {until}, {now}", style="bold")]
    table = FittingTable(columns(texts("still needed"), numbers("at least"), numbers("median"), numbers("at most")))

    def add(name: str, quantiles: Sequence[float | None] | None, words: Callable[[float], str]) -> None:
        never = "not reached"
        table.add(name, *(never if each is None else words(each) for each in quantiles or ()) or ("-",) * 3)

    add("rounds", content["further_rounds"], lambda rounds: f"{rounds:,.0f}")
    add("time", content["further_s"], duration_text)
    add("done at", content["done_unix_s"], moment_of)
    add("energy of the trainings", content["training_j"], energy_text)
    for cost in content["costs"]:
        add(cost["unit"], cost["cost"], lambda value: f"{value:,.2f}" if abs(value) >= 1 else f"{value:.2g}")
    lines.append(table)
    if target is None:
        basis = "from the time and energy of the run's own rounds"
    else:
        basis = "from the run's own curve, which knows nothing of the app"
        if content["reached_share"] < 1:
            basis += f"; {content['reached_share']:.0%} of its continuations reach the target at all"
    lines.append(Text(f'nine of ten outcomes lie between "at least" and "at most", {basis}', style="dim"))
    return Group(*lines)


# --- Round ------------------------------------------------------------------------------------------------------------
# `wattfleet coordinator round`: one round in full.

_STYLES = {"failed": "bold red", "late": "yellow", "in part": "yellow", "stopped": "yellow", "trained": "green"}


def round_(
    run: Annotated[str, typer.Argument(metavar="RUN", help=f"{RUN_HELP}.")],
    number_: Annotated[int, typer.Argument(metavar="N", min=1, help="Number of the round, from 1.")],
    json_: JsonOption = False,
) -> None:
    """Show one round: who trained, in which mode, why, and what failed."""
    from coordinator.display.values import round_details

    with connected() as client:
        [(run_id, name)] = run_ids_of(client, [run]).items()
        content = {"run_name": name, **round_details(client.round(run_id, number_))}
    if json_:
        print_json(content)
    else:
        _print(content)


def _print(content: dict[str, Any]) -> None:
    from rich.text import Text

    from wattfleet.common.tables import facts, grouped

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
    from coordinator.display.values import trainings_words

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

    from wattfleet.common.tables import FittingTable, columns, numbers
    from wattfleet.core.modes import PowerMode

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
    from wattfleet.core.modes import PowerMode

    return f"first {PowerMode(**each['first']['mode']).label()}" if each["became"] == "other mode" else each["became"]


# --- Energy -----------------------------------------------------------------------------------------------------------
# `wattfleet coordinator energy`: the joules of trainings by month, and by site, run and device.

_COUNTED = "energy: the watts of whole boards during observed trainings; months are in UTC"


def energy(
    by: Annotated[
        str, typer.Option(help="Add up by these, besides the month: site, run, device, or several with commas.")
    ] = "site",
    month: Annotated[
        str | None, typer.Option(help="Only this month, such as 2026-11. Default: all months.", show_default=False)
    ] = None,
    csv_: Annotated[bool, typer.Option("--csv", help="Print CSV instead of tables.")] = False,
    json_: JsonOption = False,
) -> None:
    """Show the energy of trainings by month, and by site, run or device.

    A site is the supply that a device is directly behind.
    """
    import csv
    import sys

    from coordinator.display.values import energy_rows, groups_of, is_in_month, month_of, run_energy

    if csv_ and json_:
        raise InvalidInputError("pass --csv or --json, not both")
    groups, only = groups_of(by), None if month is None else month_of(month)
    with connected() as client, terminal(to_stderr=True).status("asking the coordinator") as status:
        views = [view for view in client.runs(with_times=True) if is_in_month(view, only)]
        supplies = {each.device_id: each.supply for each in client.devices() if each.HasField("supply")}
        found = {}
        for view in views:
            status.update(f"run {view.name}")
            found[view.run_id] = run_energy(client.rounds(view.run_id, with_times=True))
    rows = energy_rows(found, names_of(views), supplies, groups, only)
    if json_:
        print_json(rows)
    elif csv_:
        columns = ("month", *groups, "training_j", "observed_trainings", "trainings")
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        terminal().print(_energy_table(rows, groups))


def _energy_table(rows: Sequence[Mapping[str, Any]], groups: Sequence[str]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from coordinator.display.values import trainings_words
    from wattfleet.common.tables import FittingTable, columns, numbers, texts

    if not rows:
        return Text("no training yet in this time")
    table = FittingTable(columns("month", *map(texts, groups), numbers("energy"), numbers("kWh", rank=1), "trainings"))
    for row in rows:
        joules = row["training_j"]
        table.add(
            row["month"],
            *(Text(row[each]) for each in groups),
            energy_text(joules),
            "-" if joules is None else f"{joules / 3.6e6:.3f}",
            trainings_words(row["observed_trainings"], row["trainings"]),
        )
    return Group(table, Text(_COUNTED, style="dim"))
