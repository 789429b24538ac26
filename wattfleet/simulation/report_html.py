"""The report of a simulated run as one HTML page that works offline."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from wattfleet.common.console import rounds_text
from wattfleet.common.html_page import write_page
from wattfleet.simulation.comparison import verdict, way_colours
from wattfleet.simulation.report_figures import (
    PLOTTED,
    SD_OF_90_PCT,
    device_styles,
    duty_figures,
    figures,
    is_predicted,
    log_sd,
    mode_label,
    percent,
)

Report = Mapping[str, Any]
Figure = dict[str, Any]


def write_html(report: Report, path: Path) -> None:
    """Write a report as an HTML page.

    Args:
        report: the result of `wattfleet.simulation.report.build_report`.
        path: the file to write.
    """
    write_page(
        path,
        "wattfleet.simulation",
        "report.html.j2",
        figures(report) | duty_figures(report, device_styles(report["settings"]["devices"])),
        {"percent": percent, "mean": _mean, "mode": mode_label, "span": rounds_text},
        report=report,
        parts=[
            {
                "run": run,
                "styles": device_styles(run["devices"]),
                "selections": _selections(run),
                "verdict": verdict(run),
                "within": {quantity: _within_interval(run, quantity) for quantity in ("epoch_s", "power_w")},
            }
            for run in report["runs"]
        ],
        simultaneous=_simultaneous(report["settings"]["apps"]),
        plotted=PLOTTED,
        way_colours=way_colours(),
        has_choice=any(len(run["batch_sizes"]) > 1 or len(run["local_epochs"]) > 1 for run in report["runs"]),
        command=repeat_command(report["settings"]),
    )


def repeat_command(settings: Report) -> str:
    """Return the command that repeats a simulation."""
    specs = [spec.split(":", 1) for spec in settings["devices"].values()]
    boards = Counter(which for kind, which in specs if kind == "simulated")
    command = ["wattfleet", "simulate", "--devices", ",".join(f"{kind}:{count}" for kind, count in boards.items())]
    for kind, which in specs:
        if kind == "replay":
            command += ["--device-csv", which]
    for app in settings["apps"]:
        command += ["--app", app]
    for duty in settings["duties"]:
        command += ["--duty", duty]
    if settings["own_epochs"]:
        command.append("--own-epochs")
    for option in ("rounds", "site_budget_w", "modes", "policy", "clients", "deadline_s", "seed", "reference"):
        if (value := settings[option]) is not None:
            command += [f"--{option.replace('_', '-')}", f"{value:.12g}" if isinstance(value, float) else str(value)]
    return shlex.join(command)


def _simultaneous(apps: Iterable[str]) -> list[list[int]]:
    """Return the numbers of runs that trained at the same time, in groups."""
    found, first = [], 1
    for together in apps:
        count = 1 + together.count("+")
        if count > 1:
            found.append(list(range(first, first + count)))
        first += count
    return found


def _within_interval(run: Report, quantity: str) -> tuple[int, int]:
    """Return how many observations lie within their 90 % interval, and how many there are."""
    within = []
    for part in (part for one in run["rounds"] for part in one["assignments"]):
        if (observed := part[f"observed_{quantity}"]) is not None and is_predicted(part, quantity):
            distance = abs(math.log(observed / part[f"predicted_{quantity}"]))
            within.append(distance <= SD_OF_90_PCT * log_sd(part, quantity))
    return sum(within), len(within)


def _selections(run: Report) -> list[dict[str, Any]]:
    """Return the selections and their reasons; rounds with the same decisions are combined."""
    groups: list[dict[str, Any]] = []
    for one in run["rounds"]:
        alike = next((group for group in groups if group["round"]["decisions"] == one["decisions"]), None)
        if alike is None:
            sets = math.comb(len(run["devices"]), len(one["selected"]))
            groups.append({"rounds": [one["round"]], "round": one, "sets": sets})
        else:
            alike["rounds"].append(one["round"])
    return groups


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values."""
    known = [value for value in values if value is not None]
    return mean(known) if known else None
