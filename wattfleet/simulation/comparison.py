"""Compares runs with the baselines: accuracy over time and energy, and watts, in the boards' own time."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from edge_agent.devices.virtual.simulated import DatedWork
from edge_agent.devices.virtual.virtual_board import WorkSpan
from wattfleet.common.console import count_of, energy_text
from wattfleet.common.html_page import INK
from wattfleet.core.modes import PowerMode
from wattfleet.simulation.baselines import PLAIN_FLOWER, PRESETS, described
from wattfleet.simulation.virtual_time import MEASURING, TRAINING, SiteWatts, thinned
from wattfleet_proto.convert import mode_from_message
from wattfleet_proto.v1 import view_pb2

Report = Mapping[str, Any]
Figure = dict[str, Any]

THIS_RUN = "this run"

# Colours of Okabe and Ito; lines and symbols differ, too, for readers who cannot tell the colours apart.
_STYLES = {
    THIS_RUN: ("#0072b2", "solid", "circle"),
    PRESETS: ("#d55e00", "dash", "square"),
    PLAIN_FLOWER: ("#8a8f98", "dot", "diamond"),
}
_IDLE, _MEASURED, _BUDGET = "#8a8f98", "#e69f00", "#d1242f"
_TIE, _MANY = 0.005, 2.0
_TOLERANCE = 1.01
"""A budget counts as exceeded above this multiple of it: a board's power differs by up to a per cent each time."""


def compared(own: Report, baselines: Sequence[Report], site_budget_w: float) -> dict[str, Any]:
    """Return a run with its baselines for the report.

    Args:
        own: the run, as `described`.
        baselines: the baselines, as `trained`.
        site_budget_w: the site's budget, watts.

    Returns:
        `target`: the highest accuracy that all of them had after the last round, None if one is unknown; `ways`: the
        run and its baselines, each with its totals and with `to_target`, the seconds and joules from which on it kept
        the target; `missing`: the name and the reason of each baseline that cannot train.
    """
    ways = [own, *(each for each in baselines if "reason" not in each)]
    final = [way["rounds"][-1]["accuracy"] for way in ways]
    target = None if None in final else min(final)
    return {
        "target": target,
        "ways": [
            # Totals come first: a short peak is no longer there once the watts are thinned for their figure.
            {**way, **_totals(way, site_budget_w), "to_target": _until(way, target), "watts": _thinned(way["watts"])}
            for way in ways
        ],
        "missing": [dict(each) for each in baselines if "reason" in each],
        "reason": None,
    }


def not_compared(reason: str) -> dict[str, Any]:
    """Return the content of a run without baselines for the report."""
    return {"target": None, "ways": [], "missing": [], "reason": reason}


def _totals(way: Report, site_budget_w: float) -> dict[str, Any]:
    last, at_s, site_w = way["rounds"][-1], way["watts"]["at_s"], _site_w(way["watts"])
    over_s = sum(
        end_s - begin_s
        for (begin_s, end_s), watts in zip(pairwise(at_s), site_w[:-1], strict=True)
        if watts > _TOLERANCE * site_budget_w
    )
    return {
        "duration_s": last["end_s"],
        "energy_j": last["energy_j"],
        "final_accuracy": last["accuracy"],
        "most_w": max(site_w),
        "over_budget_s": over_s,
    }


def _until(way: Report, target: float | None) -> dict[str, float] | None:
    """Return the seconds and joules after which a way never fell below the target again."""
    if target is None:
        return None
    kept = way["rounds"][-1]
    for one in reversed(way["rounds"]):
        if one["accuracy"] is not None and one["accuracy"] < target:
            break
        kept = kept if one["accuracy"] is None else one
    return {"s": kept["end_s"], "j": kept["energy_j"]}


def _thinned(watts: Report) -> dict[str, Any]:
    extra_w = {kind: watts[kind] for kind in (TRAINING, MEASURING)}
    found = thinned(SiteWatts(watts["at_s"], watts["idle_w"], extra_w))
    return {"at_s": found.at_s, "idle_w": found.idle_w, **found.extra_w}


def _site_w(watts: Report) -> list[float]:
    return [watts["idle_w"] + sum(both) for both in zip(watts["training"], watts["measuring"], strict=True)]


def own_way(
    rounds: Sequence[view_pb2.RoundView],
    initial_accuracy: float | None,
    work: Mapping[str, Sequence[DatedWork]],
    idle_w: Mapping[str, float],
    site_budget_w: float,
    since_unix_s: float,
    until_unix_s: float,
) -> dict[str, Any]:
    """Return a run of the simulated fleet, as `described`.

    What boards did before the first plan, such as measuring modes, counts as a round 0.

    Args:
        rounds: the run's rounds, with their times.
        initial_accuracy: accuracy before the first round.
        work: what each board did during the whole simulation, by device id.
        idle_w: watts of every board while it idles.
        site_budget_w: the site's budget, watts.
        since_unix_s: when the run began.
        until_unix_s: when the next run began; infinite for the last one.
    """
    planned_at = [view.planned_unix_s for view in rounds]
    by_round: dict[int, dict[str, list[WorkSpan]]] = defaultdict(lambda: defaultdict(list))
    for device_id, spans in work.items():
        for span in spans:
            if since_unix_s <= span.ended_unix_s < until_unix_s:
                by_round[bisect.bisect_right(planned_at, span.ended_unix_s)][device_id].append(span)
    done = [(view.round, by_round[k], _planned_modes(view)) for k, view in enumerate(rounds, 1)]
    if by_round[0]:
        done.insert(0, (0, by_round[0], {}))
    accuracy = {view.round: view.metrics["accuracy"] for view in rounds if "accuracy" in view.metrics}
    return described(THIS_RUN, done, accuracy, initial_accuracy, idle_w, site_budget_w)


def _planned_modes(view: view_pb2.RoundView) -> dict[str, list[PowerMode]]:
    """Return the modes in which each device of a round was to train, first and after a trim."""
    found: dict[str, list[PowerMode]] = defaultdict(list)
    for plan in (view.plan.first_planned, view.plan):
        for each in plan.assignments:
            found[each.device_id].append(mode_from_message(each.mode))
    return found


# --- texts ----------------------------------------------------------------------------------------------------------


def verdict(run: Report) -> list[str]:
    """Return what a run gained or lost against its baselines, in sentences, the most important first."""
    comparison = run["comparison"]
    if comparison["reason"] is not None:
        return [f"Run {run['run']} ({run['network']}) is not compared with baselines: {comparison['reason']}."]
    missing = [
        f"{each['name'][0].upper()}{each['name'][1:]} cannot train: {each['reason']}." for each in comparison["missing"]
    ]
    own, *others = comparison["ways"]
    target = comparison["target"]
    if target is None or not others:
        return [f"Run {run['run']} ({run['network']}) has nothing to be compared with.", *missing]
    to_target = own["to_target"]
    found = [
        f"Run {run['run']} ({run['network']}) reached {target:.1%} accuracy for good in"
        f" {to_target['s']:,.0f} s and {energy_text(to_target['j'])}:"
        f" {', and '.join(_against(to_target, each) for each in others)}.",
        f"All of them had at least that after {count_of(sum(one['round'] > 0 for one in own['rounds']), 'round')}: "
        + ", ".join(f"{each['name']} {each['final_accuracy']:.1%}" for each in comparison["ways"])
        + ".",
    ]
    if own["measuring_s"]:
        found.append(
            f"This includes measuring modes: {own['measuring_s'] / own['worked_s']:.0%} of the boards' working time,"
            f" and {energy_text(own['measuring_j'])} above idle power. The others measure nothing, and their choices"
            " know the boards' true time and power."
        )
    return found + missing


def _against(own: Mapping[str, float], other: Report) -> str:
    its = other["to_target"]
    soon = _difference(own["s"] / its["s"], "sooner than", "later than", "times as late as", "as soon as")
    energy = _difference(own["j"] / its["j"], "less energy", "more energy", "times the energy", "the same energy")
    return f"{soon} {other['name']} ({its['s']:,.0f} s) and with {energy} ({energy_text(its['j'])})"


def _difference(ratio: float, less: str, more: str, times: str, same: str) -> str:
    if abs(ratio - 1) < _TIE:
        return same
    return f"{ratio:.1f} {times}" if ratio >= _MANY else f"{abs(ratio - 1):.0%} {less if ratio < 1 else more}"


# --- figures --------------------------------------------------------------------------------------------------------


def way_colours() -> dict[str, str]:
    """Return the colour of each way of training, by its name."""
    return {name: colour for name, (colour, _, _) in _STYLES.items()}


def comparison_figures(run: Report, site_budget_w: float) -> dict[str, Figure]:
    """Return the figures of a run's comparison by name; none if it is not compared."""
    comparison = run["comparison"]
    if not comparison["ways"]:
        return {}
    return {
        "compared-s": _accuracy(comparison, "end_s", 1.0, "seconds in the boards' own time"),
        "compared-j": _accuracy(comparison, "energy_j", 1e3, "kJ of the whole site"),
        "compared-w": _watts(comparison, site_budget_w),
    }


def _accuracy(comparison: Report, quantity: str, unit: float, title: str) -> Figure:
    """Plot the accuracy after each round over time or energy."""
    data = []
    for way in comparison["ways"]:
        colour, dash, symbol = _STYLES[way["name"]]
        points = [(0.0, way["initial_accuracy"], "before the first round")] + [
            (one[quantity] / unit, one["accuracy"], f"after round {one['round']}, {', '.join(one['devices'])}")
            for one in way["rounds"]
        ]
        known = [point for point in points if point[1] is not None]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [x for x, _, _ in known],
                "y": [y for _, y, _ in known],
                "line": {"color": colour, "width": 2, "dash": dash, "shape": "hv"},
                "marker": {"size": 8, "color": colour, "symbol": symbol},
                "customdata": [text for _, _, text in known],
                "hovertemplate": f"{way['name']}: %{{y:.1%}} at %{{x:,.1f}}<br>%{{customdata}}<extra></extra>",
            }
        )
    shapes = []
    if comparison["target"] is not None:
        line = {"color": INK, "width": 1, "dash": "dot"}
        ends = {"x0": 0, "x1": 1, "y0": comparison["target"], "y1": comparison["target"]}
        shapes.append({"type": "line", "xref": "paper", **ends, "line": line})
    layout = {
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "accuracy"}, "tickformat": ".0%", "range": [0, 1.04], "dtick": 0.2},
        "shapes": shapes,
        "height": 330,
    }
    return {"data": data, "layout": layout}


def _watts(comparison: Report, site_budget_w: float) -> Figure:
    """Plot the site's watts over time: this run as stacked areas, the baselines as lines."""
    own, *others = comparison["ways"]
    watts, data = own["watts"], []
    idle_w = [watts["idle_w"]] * len(watts["at_s"])
    for name, values, colour, opacity in (
        ("idle power of all boards", idle_w, _IDLE, "55"),
        ("training", watts["training"], _STYLES[THIS_RUN][0], "88"),
        ("measuring modes", watts["measuring"], _MEASURED, "cc"),
    ):
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "own",
                "x": watts["at_s"],
                "y": values,
                "line": {"width": 0, "shape": "hv", "color": colour},
                "fillcolor": f"{colour}{opacity}",
                "hovertemplate": f"{THIS_RUN}, {name}: %{{y:.1f}} W<extra></extra>",
            }
        )
    for way in others:
        colour, dash, _ = _STYLES[way["name"]]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": way["watts"]["at_s"],
                "y": _site_w(way["watts"]),
                "line": {"width": 1.5, "shape": "hv", "color": colour, "dash": dash},
                "hovertemplate": f"{way['name']}: %{{y:.1f}} W<extra></extra>",
            }
        )
    end_s = max(way["duration_s"] for way in comparison["ways"])
    rounds = [one for one in own["rounds"] if one["round"] > 0][:-1]
    line = {"color": INK, "width": 1, "dash": "dot"}
    budget = {"color": _BUDGET, "width": 2}
    most_w = max(site_budget_w, *(way["most_w"] for way in comparison["ways"]))
    layout = {
        "xaxis": {"title": {"text": "seconds in the boards' own time"}, "range": [0, end_s]},
        "yaxis": {"title": {"text": "watts of the site"}, "range": [0, 1.12 * most_w]},
        "shapes": [
            {"type": "line", "x0": 0, "x1": end_s, "y0": site_budget_w, "y1": site_budget_w, "line": budget},
            *(
                {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}
                for x in (one["end_s"] for one in rounds)
            ),
        ],
        "height": 340,
    }
    return {"data": data, "layout": layout}
