"""Draw a round plan: `python -m benchmarks.plan_picture docs/images/plan.png`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from wattfleet.core.choosing import Front
from wattfleet.core.planning import Allowance, Offer, curves_of, plan_round
from wattfleet.core.planning.policies import FastestK

_SPARE_W = 22.0
_IDLE_W = 5.0
_SHAPES = {"AGX Orin": (12.0, 48.0), "Orin NX": (24.0, 26.0), "Xavier NX": (34.0, 30.0), "Nano": (42.0, 13.0)}


def _offer(name: str, fastest_s: float, most_w: float) -> Offer:
    """Return a device whose time falls with the watts above idle power, more slowly at higher watts."""
    share = np.linspace(1.0, 0.25, 9)
    return Offer(
        name,
        Front(
            modes=np.column_stack([np.full(9, 4.0), 1e6 * share, np.full(9, 6e8), np.full(9, 2e9)]),
            epoch_s=fastest_s / share**0.9,
            power_w=_IDLE_W + (most_w - _IDLE_W) * share**1.4,
            epoch_log_sd=np.full(9, 0.02),
            power_log_sd=np.full(9, 0.02),
            warmup_s=np.zeros(9),
        ),
        _IDLE_W,
    )


def draw(path: Path) -> None:
    """Draw the picture and write it to a file."""
    offers = [_offer(name, *shape) for name, shape in _SHAPES.items()]
    plan = plan_round(offers, FastestK(3), Allowance.of_site(_SPARE_W + _IDLE_W * len(offers)), 1.0, 1)
    curves = curves_of(offers, 1.0)
    chosen = {assignment.device_id: assignment.power_limit_w - _IDLE_W for assignment in plan.assignments}
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for k, offer in enumerate(offers):
        steps = slice(int(curves.start[k]), int(curves.start[k + 1]))
        times_s, extra_w = curves.time_s[steps], curves.extra_w[steps]
        [line] = axes.step(np.append(times_s, 120.0), np.append(extra_w, extra_w[-1]), where="post", lw=1.6)
        axes.annotate(
            offer.device_id, (times_s[0], extra_w[0]), (4, 3), textcoords="offset points", color=line.get_color()
        )
        step = int(curves.steps_within(plan.duration_s)[k])
        watts = float(curves.extra_w[step])
        taken = offer.device_id in chosen
        axes.plot(plan.duration_s, watts, "o", color=line.get_color(), ms=7, mfc=line.get_color() if taken else "white")
        said = f"{offer.device_id}: {watts:.1f} W" + ("" if taken else ", not taken")
        axes.text(0.62, 0.9 - 0.07 * k, said, transform=axes.transAxes, color=line.get_color())
    axes.axvline(plan.duration_s, color="0.35", ls="--", lw=1)
    total_w = sum(chosen.values())
    axes.set_title(
        f"Least time for three devices on {_SPARE_W:g} W above idling: {plan.duration_s:.0f} s, {total_w:.1f} W",
        fontsize=11,
    )
    axes.set(
        xlabel="seconds per epoch (90 % quantile)",
        ylabel="watts above idling (95 % quantile)",
        xlim=(0, 110),
        ylim=(0, None),
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
