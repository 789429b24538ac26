"""Methods that choose how much each device of a round does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from benchmarks.federated.jobs import LOCAL_EPOCHS, Job, Values
from benchmarks.federated.learning import LocalWork, movement
from wattfleet.errors import InfeasibleBudgetError
from wattfleet.planning import Allowance, History, Offer, assignment_at, curves_of, plan_round
from wattfleet.planning.policies import Progress, device_worth


@dataclass(frozen=True)
class Effort:
    """What a round with some number of local epochs brings.

    Attributes:
        progress: of a round with all devices, in multiples of the progress with `LOCAL_EPOCHS`.
        half_devices: number of devices with which a round makes half of it. The more local epochs, the further the
            devices' models drift apart, and the more devices are needed.
    """

    progress: float = 1.0
    half_devices: float = 3.0


Efforts = Mapping[float, Effort]
"""By the number of local epochs."""

FIXED_EFFORT: Efforts = {float(LOCAL_EPOCHS): Effort()}
"""No choice of epochs."""

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of its epochs that a device may do."""

_LIMITS = 16


@dataclass(frozen=True)
class ChosenEpochs:
    """Chooses the local epochs of each round, the same for all its devices, by the most progress per second.

    A round of `k` devices with `e` epochs makes `f(e) * k / (k + h(e))` of progress, where `f` and `h` are measured on
    a proxy. The plan's duration and the overhead are the seconds of the round.

    Attributes:
        offers: fronts that are planned with.
        site_budget_w: watts of the site.
        efforts: `f` and `h` by `e`.
        overhead_s: seconds of a round besides its training.
    """

    offers: Sequence[Offer]
    site_budget_w: float
    efforts: Efforts
    overhead_s: float
    is_normalised: ClassVar[bool] = False

    def plan(self, server_round: int, history: History) -> Sequence[Job]:
        """The best of the plans with each number of epochs."""
        allowance = Allowance.of_site(self.site_budget_w)
        most, best = 0.0, list[Job]()
        for epochs, effort in self.efforts.items():
            policy = Progress(half_devices=effort.half_devices, overhead_s=self.overhead_s)
            plan = plan_round(self.offers, policy, allowance, epochs, server_round, history)
            devices = len(plan.assignments)
            progress = effort.progress * devices / (devices + effort.half_devices)
            if (rate := progress / (plan.duration_s + self.overhead_s)) > most:
                most, best = rate, [Job(each, epochs) for each in plan.assignments]
        return best


@dataclass(frozen=True)
class PartialWork:
    """Gives slow devices of a round less work, so that the others need not wait for them.

    For each of several durations, every device may do the shares of its epochs that its watts allow in time. A round
    makes `sum(w s) / (sum(w) + h)` of progress, where `s` is how far a device with its steps goes relative to one with
    all of them. This is the mean of `s`, as FedNova averages it, times the progress `sum(w) / (sum(w) + h)` of a round
    of so many devices. The set and its shares are chosen by progress per watt, one step at a time.

    Attributes:
        offers: fronts that are planned with.
        samples: of each device.
        policy: its `half_devices` and its overhead are used.
        site_budget_w: watts of the site.
    """

    offers: Sequence[Offer]
    samples: Sequence[int]
    policy: Progress
    site_budget_w: float
    is_normalised: ClassVar[bool] = True

    def plan(self, server_round: int, history: History) -> Sequence[Job]:
        """The set, the shares and the duration with the most progress per second."""
        curves = [curves_of(self.offers, share * LOCAL_EPOCHS) for share in SHARES]
        spare_w = self.site_budget_w - sum(offer.idle_w for offer in self.offers)
        worth = device_worth(self.offers, server_round, history)
        value = np.array([[_movement(share, samples) for samples in self.samples] for share in SHARES])
        limits_s = np.geomspace(
            min(float(each.time_s.min()) for each in curves) * (1 + 1e-9), float(curves[-1].time_s.max()), _LIMITS
        )
        most, best = 0.0, list[Job]()
        for limit_s in map(float, limits_s):
            steps = [each.steps_within(limit_s) for each in curves]
            extra_w = np.array([each.extra_at(step) for each, step in zip(curves, steps, strict=True)])
            level, progress = most_progress(extra_w, value / value[-1], worth, spare_w, self.policy.half_devices)
            if progress / (limit_s + self.policy.overhead_s) > most:
                most = progress / (limit_s + self.policy.overhead_s)
                best = [
                    Job(
                        assignment_at(self.offers[k], curves[level[k]], int(steps[level[k]][k])),
                        SHARES[level[k]] * LOCAL_EPOCHS,
                    )
                    for k in map(int, np.flatnonzero(level >= 0))
                ]
        if not best:
            raise InfeasibleBudgetError(f"{self.site_budget_w:g} W is not enough to train one device")
        return best


def _movement(share: float, samples: int) -> float:
    return movement(LocalWork(share * LOCAL_EPOCHS).steps(samples))


def most_progress(
    extra_w: Values, value: Values, worth: Values, spare_w: float, half_devices: float
) -> tuple[np.ndarray, float]:
    """Shares of work within some watts, close to those with the most progress.

    Args:
        extra_w: `[s, n]` watts that each device needs for each of `SHARES`; infinite where it cannot be in time.
        value: `[s, n]` how much each share of a device's work counts, 1 for all of it.
        worth: `[n]` weight of each device, 1 on average.
        spare_w: watts to share out.
        half_devices: see `Progress`.

    Returns:
        `[n]` index into `SHARES`, -1 for devices that are not selected, and the progress.
    """
    level = np.full(len(worth), -1)
    done, used_w = np.zeros(len(worth)), np.zeros(len(worth))
    most, best = 0.0, level.copy()
    if len(extra_w) > 1:  # devices that do all of their work may be better than many that do a part
        level_of_all, most = most_progress(extra_w[-1:], value[-1:], worth, spare_w, half_devices)
        best = np.where(level_of_all >= 0, len(extra_w) - 1, -1)
    while True:
        gain = (value - done) * worth
        cost_w = np.maximum(extra_w - used_w, 1e-9)
        can = (gain > 0) & (extra_w - used_w <= spare_w - used_w.sum())
        if not can.any():
            return best, most
        share, device = np.unravel_index(int(np.where(can, gain / cost_w, -1.0).argmax()), gain.shape)
        level[device], done[device], used_w[device] = share, value[share, device], extra_w[share, device]
        chosen = level >= 0
        scale = min(1.0, float(chosen.sum() / worth[chosen].sum()))  # a set counts for no more devices than it has
        progress = scale * float((worth * done).sum()) / (scale * float(worth[chosen].sum()) + half_devices)
        if progress > most:
            most, best = progress, level.copy()
