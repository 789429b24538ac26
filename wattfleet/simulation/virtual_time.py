"""A fleet's rounds in the boards' own time: how long they took, and what the whole site drew meanwhile.

A simulated board's clock advances only while it works. All boards that train in a round begin at the same time, and the
round ends with the slowest of them; meanwhile, all others idle, or measure until then. A board measures as soon as its
granted watts fit beside those of the others, as the coordinator grants them. Rounds follow each other without gaps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from edge_agent.devices.virtual.simulated import DatedWork
from edge_agent.devices.virtual.virtual_board import WorkSpan
from wattfleet.core.modes import PowerMode

Work = Mapping[str, Sequence[WorkSpan]]
"""What boards did, by device id."""

MEASURING, TRAINING = "measuring", "training"


@dataclass(frozen=True)
class Draw:
    """What one board drew for a while.

    Attributes:
        begin_s: since the beginning of the run.
        end_s: since the beginning of the run.
        extra_w: mean watts above the board's idle power.
        kind: `TRAINING` in the mode that was planned for the device, else `MEASURING`.
    """

    begin_s: float
    end_s: float
    extra_w: float
    kind: str


@dataclass(frozen=True)
class Stretch:
    """A round, or the time before the first one.

    Attributes:
        number: number of the round; 0 for the time before the first one.
        begin_s: since the beginning of the run.
        end_s: since the beginning of the run.
        energy_j: joules of all boards, idle ones included.
        draws: what boards drew above idle power.
    """

    number: int
    begin_s: float
    end_s: float
    energy_j: float
    draws: Sequence[Draw]


def stretches(
    rounds: Sequence[tuple[int, Work, Mapping[str, Collection[PowerMode]]]],
    idle_w: Mapping[str, float],
    site_budget_w: float = math.inf,
) -> list[Stretch]:
    """Put rounds one after another.

    Args:
        rounds: the number of each round, what the boards did in it, and the modes planned for each device.
        idle_w: watts of every board while it idles.
        site_budget_w: watts within which boards measure, if their work states what they were granted.
    """
    free_w = site_budget_w - sum(idle_w.values())
    found: list[Stretch] = []
    for number, work, planned in rounds:
        begin_s = found[-1].end_s if found else 0.0
        draws_of = _draws(begin_s, work, planned, idle_w, free_w)
        ends_s = {device_id: drawn[-1].end_s for device_id, drawn in draws_of.items() if drawn}
        # The clock of a board that measures beside a round can be far ahead: on a real one, the round's end stops it.
        of_round_s = [ends_s[device_id] for device_id in ends_s.keys() & planned.keys()]
        end_s = max(of_round_s or ends_s.values(), default=begin_s)
        draws = [
            replace(draw, end_s=min(draw.end_s, end_s))
            for drawn in draws_of.values()
            for draw in drawn
            if draw.begin_s < end_s
        ]
        extra_j = sum(draw.extra_w * (draw.end_s - draw.begin_s) for draw in draws)
        found.append(Stretch(number, begin_s, end_s, sum(idle_w.values()) * (end_s - begin_s) + extra_j, draws))
    return found


def _draws(
    begin_s: float,
    work: Work,
    planned: Mapping[str, Collection[PowerMode]],
    idle_w: Mapping[str, float],
    free_w: float,
) -> dict[str, list[Draw]]:
    """Return what each board drew in a round, from the round's begin on.

    In this machine's time, a training ends within a moment, and its watts are granted again. In the boards' time, a
    board that measures has to wait for them: from its grants, and not from what it drew, follows when it begins.
    """
    found: dict[str, list[Draw]] = {device_id: [] for device_id in work}
    # Of each board, the periods for which it is granted the same watts without a gap.
    granted: dict[str, list[_Granted]] = {device_id: [] for device_id in work}
    for device_id, span in _in_order(work, planned):
        if (lasted_s := span.end_s - span.begin_s) <= 0:
            continue
        own_s = found[device_id][-1].end_s if found[device_id] else begin_s
        granted_w = span.granted_w - idle_w[device_id] if isinstance(span, DatedWork) else 0.0
        if granted_w > 0:
            if device_id not in planned:
                others = [one for other, its in granted.items() if other != device_id for one in its]
                own_s = _fits_from_s(own_s, lasted_s, others, free_w - granted_w)
            its = granted[device_id]
            goes_on = bool(its) and (its[-1].end_s, its[-1].watts) == (own_s, granted_w)
            begun_s = its.pop().begin_s if goes_on else own_s
            its.append(_Granted(begun_s, own_s + lasted_s, granted_w))
        kind = TRAINING if span.mode in planned.get(device_id, ()) else MEASURING
        extra_w = span.energy_j / lasted_s - idle_w[device_id]
        found[device_id].append(Draw(own_s, own_s + lasted_s, extra_w, kind))
    return found


class _Granted(NamedTuple):
    """A period in which a board may draw watts above its idle power."""

    begin_s: float
    end_s: float
    watts: float


def _in_order(work: Work, planned: Collection[str]) -> list[tuple[str, WorkSpan]]:
    """Return the work of all boards: of those that train in the round first, then of others as it was granted."""

    def place(one: tuple[str, WorkSpan]) -> tuple[bool, float]:
        device_id, span = one
        return device_id not in planned, span.ended_unix_s if isinstance(span, DatedWork) else 0.0

    return sorted(((device_id, span) for device_id, spans in work.items() for span in spans), key=place)


def _fits_from_s(earliest_s: float, lasts_s: float, others: Sequence[_Granted], others_w: float) -> float:
    """Return from when on the grants of others take at most `others_w` for a while; if never, the earliest time."""
    others = [one for one in others if one.end_s > earliest_s]
    for begin_s in sorted({earliest_s, *(one.end_s for one in others)}):
        beside = [one for one in others if one.begin_s < begin_s + lasts_s and one.end_s > begin_s]
        # Grants only grow where one of them begins.
        moments_s = [begin_s, *(one.begin_s for one in beside if one.begin_s > begin_s)]
        most_w = max(sum(one.watts for one in beside if one.begin_s <= at_s < one.end_s) for at_s in moments_s)
        if most_w <= others_w + _ROUNDING_W:
            return begin_s
    return earliest_s


_ROUNDING_W = 1e-6


@dataclass(frozen=True)
class SiteWatts:
    """The watts of a site over time, from each moment to the next.

    Attributes:
        at_s: `[n]` moments; the last one is the end.
        idle_w: watts of all boards while they idle.
        extra_w: `[n]` watts above that, by kind of work; the last value is 0.
    """

    at_s: list[float]
    idle_w: float
    extra_w: Mapping[str, list[float]]


def site_watts(run: Sequence[Stretch], idle_w: Mapping[str, float]) -> SiteWatts:
    """Return the watts of a site over a run."""
    draws = [draw for stretch in run for draw in stretch.draws]
    ends = (moment for draw in draws for moment in (draw.begin_s, draw.end_s))
    at_s = sorted({0.0, *itertools.chain(ends, (stretch.end_s for stretch in run))})
    place = {moment: k for k, moment in enumerate(at_s)}
    change_w = {kind: np.zeros(len(at_s)) for kind in (TRAINING, MEASURING)}
    for draw in draws:
        change_w[draw.kind][place[draw.begin_s]] += draw.extra_w
        change_w[draw.kind][place[draw.end_s]] -= draw.extra_w
    # What rounding leaves of a difference is no watt.
    extra_w = {kind: np.cumsum(change).round(6).tolist() for kind, change in change_w.items()}
    return SiteWatts(at_s, sum(idle_w.values()), extra_w)


_MOST_MOMENTS = 4000


def thinned(watts: SiteWatts) -> SiteWatts:
    """Return the watts of a site at fewer moments, if they are too many for a figure: means with the same energy."""
    at_s = np.array(watts.at_s)
    if len(at_s) <= _MOST_MOMENTS:
        return watts
    kept_s = np.linspace(at_s[0], at_s[-1], _MOST_MOMENTS)
    extra_w = {}
    for kind, values in watts.extra_w.items():
        energy_j = np.concatenate([[0.0], np.cumsum(np.array(values)[:-1] * np.diff(at_s))])
        means_w = np.diff(np.interp(kept_s, at_s, energy_j)) / np.diff(kept_s)
        extra_w[kind] = [*means_w.round(3).tolist(), 0.0]
    return SiteWatts(kept_s.round(2).tolist(), watts.idle_w, extra_w)
