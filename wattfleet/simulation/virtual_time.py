"""A fleet's rounds in the boards' own time: how long they took, and what the whole site drew meanwhile.

A simulated board's clock advances only while it works. All boards of a round begin at the same time, and a round ends
with the slowest of them; meanwhile, all others idle, or measure until then. Rounds follow each other without gaps.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

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
    rounds: Sequence[tuple[int, Work, Mapping[str, Collection[PowerMode]]]], idle_w: Mapping[str, float]
) -> list[Stretch]:
    """Put rounds one after another.

    Args:
        rounds: the number of each round, what the boards did in it, and the modes planned for each device.
        idle_w: watts of every board while it idles.
    """
    found: list[Stretch] = []
    for number, work, planned in rounds:
        begin_s = found[-1].end_s if found else 0.0
        draws_of = {
            device_id: list(_draws(begin_s, spans, planned.get(device_id, ()), idle_w[device_id]))
            for device_id, spans in work.items()
        }
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


def _draws(begin_s: float, spans: Sequence[WorkSpan], planned: Collection[PowerMode], idle_w: float) -> Iterator[Draw]:
    for span in spans:
        lasted_s = span.end_s - span.begin_s
        if lasted_s > 0:
            kind = TRAINING if span.mode in planned else MEASURING
            yield Draw(begin_s, begin_s + lasted_s, span.energy_j / lasted_s - idle_w, kind)
            begin_s += lasted_s


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
