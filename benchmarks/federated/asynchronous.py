"""Asynchronous training in virtual time: the free devices are planned with the watts that are left.

As in `wattfleet.flower.server.fedbuff`, the server aggregates while other trainings go on, and then plans the devices
that have become free. Devices that still train keep the watts that their plans have set aside.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from benchmarks.federated.jobs import LOCAL_EPOCHS, Job
from benchmarks.federated.learning import Federation, LocalWork, Model, Trained
from benchmarks.federated.methods import FleetOffers
from benchmarks.federated.rounds import Member, Round
from benchmarks.federated.server_steps import STEPPINGS, Arrival, Stepping
from benchmarks.federated.site_watts import Draw, SiteWatts
from wattfleet.core.errors import InfeasibleBudgetError
from wattfleet.core.planning import Allowance, History, Offer, Participation, plan_round
from wattfleet.core.planning.policies import Policy, Progress


@dataclass(frozen=True)
class Asynchronous:
    """An asynchronous method.

    Attributes:
        offers: the fronts of all devices that plans are made from.
        policy: the client-selection policy, applied to the free devices.
        site_budget_w: watts of the site.
        overhead_s: seconds between a plan, which an arriving update causes, and the start of its trainings.
        stepping: decides when the server aggregates the updates that have arrived.
    """

    offers: Sequence[Offer]
    policy: Policy
    site_budget_w: float
    overhead_s: float
    stepping: Stepping

    def plan(self, free: Sequence[Offer], elsewhere_w: float, number: int, history: History) -> list[Job]:
        """Select among the free devices, and return their jobs.

        Args:
            free: fronts of the devices that do not train.
            elsewhere_w: watts that are set aside for the other devices.
            number: number of the plan, from 1.
            history: earlier plans.

        Raises:
            InfeasibleBudgetError: the watts that are left are too few for any free device.
        """
        allowance = Allowance.of_site(self.site_budget_w, elsewhere_w)
        plan = plan_round(free, self.policy, allowance, LOCAL_EPOCHS, number, history)
        return [Job(each) for each in plan.assignments]


def asynchronous(name: str, offers: FleetOffers, site_budget_w: float, progress: Progress) -> Asynchronous:
    """Return one of the asynchronous `METHODS`.

    Args:
        name: name of the method.
        offers: the fleet.
        site_budget_w: watts of the site.
        progress: the policy. Its overhead is the time between a plan and the start of its trainings.
    """
    own = name.removeprefix("oracle-")
    known = offers.predicted if name == own else offers.true
    return Asynchronous(known, progress, site_budget_w, progress.overhead_s, STEPPINGS[own])


class Worker(Protocol):
    """A device that trains; see `rounds.Station`."""

    def train(self, job: Job) -> tuple[float, float, float]:
        """Train; return the seconds of the start and of the other minibatches, and the mean watts of the latter."""
        ...

    def true_w(self, job: Job) -> float:
        """Return the watts of training in a job's mode and with its batch size, without noise."""
        ...


def run_asynchronously(
    method: Asynchronous,
    fleet: Sequence[Member],
    workers: Sequence[Worker],
    federation: Federation,
    steps: int,
    enough: Callable[[Sequence[Round]], bool] = lambda found: False,
) -> list[Round]:
    """Run from the initial parameters. Each server step is a round of the result.

    Args:
        method: the method to run.
        fleet: the devices.
        workers: the same devices, able to train.
        federation: the devices' data, and the training of models.
        steps: maximum number of server steps.
        enough: returns whether the run may end, given the steps so far.

    Raises:
        InfeasibleBudgetError: the budget is too small to train any device.
    """
    return _Run(method, fleet, workers, federation).until(steps, enough)


@dataclass
class _Dispatch:
    """Trainings that were planned together."""

    number: int
    size: int
    replied: dict[str, Participation] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class _InFlight:
    """A training in flight, ordered by its end."""

    until_s: float
    device: int
    job: Job = field(compare=False)
    base: Model = field(compare=False)
    trained: Trained = field(compare=False)
    dispatch: _Dispatch = field(compare=False)


class _Run:
    """The server's state. The events are the ends of trainings."""

    def __init__(
        self, method: Asynchronous, fleet: Sequence[Member], workers: Sequence[Worker], federation: Federation
    ) -> None:
        self._method, self._fleet, self._workers, self._federation = method, fleet, workers, federation
        self._number = {member.device_id: k for k, member in enumerate(fleet)}
        self._watts = SiteWatts(sum(member.idle_w for member in fleet))
        self._now_s = self._stepped_s = 0.0
        self._model, self._history = federation.start, History()
        self._dispatches = 0
        self._latest: _Dispatch | None = None
        self._in_flight: list[_InFlight] = []
        self._waiting: list[tuple[Arrival, Job]] = []

    def until(self, steps: int, enough: Callable[[Sequence[Round]], bool]) -> list[Round]:
        stepping, found = self._method.stepping, list[Round]()
        self._send()
        while len(found) < steps:
            ended = heapq.heappop(self._in_flight)
            self._now_s = ended.until_s
            self._accept(ended)
            expected = 0 if self._latest is None else self._latest.size
            replied = 0 if self._latest is None else len(self._latest.replied)
            if stepping.is_due(len(self._waiting), expected, replied):
                found.append(self._step())
                if enough(found):
                    break
                self._send()
            elif stepping.sends_early(len(self._waiting), len(self._in_flight), expected):
                self._send()
        return found

    def _send(self) -> None:
        """Plan the free devices and start their trainings, unless trainings in flight hold the watts."""
        busy = {flight.device: flight.job.assignment.power_limit_w for flight in self._in_flight}
        free = [offer for offer in self._method.offers if self._number[offer.device_id] not in busy]
        if not free:
            return
        try:
            jobs = self._method.plan(free, sum(busy.values()), self._dispatches + 1, self._history)
        except InfeasibleBudgetError:
            if not busy:
                raise
            return
        self._dispatches += 1
        self._latest = _Dispatch(self._dispatches, len(jobs))
        work = {self._number[job.device_id]: LocalWork(job.epochs, job.batch) for job in jobs}
        trained = self._federation.updates(self._model, work, self._dispatches - 1)
        for device, job in zip(work, jobs, strict=True):
            until_s = self._train(device, job)
            flight = _InFlight(until_s, device, job, self._model, trained[device], self._latest)
            heapq.heappush(self._in_flight, flight)

    def _train(self, device: int, job: Job) -> float:
        """Train a device, record its watts, and return the training with its end."""
        warmup_s, steady_s, observed_w = self._workers[device].train(job)
        begin_s = self._now_s + self._method.overhead_s + warmup_s
        idle_w = self._fleet[device].idle_w
        planned_w, true_w = job.assignment.power_limit_w - idle_w, self._workers[device].true_w(job) - idle_w
        until_s = begin_s + steady_s
        self._watts.add(Draw(self._now_s, begin_s, until_s, planned_w, true_w, observed_w - idle_w))
        return until_s

    def _accept(self, ended: _InFlight) -> None:
        samples, dispatch = self._federation.samples[ended.device], ended.dispatch
        self._waiting.append((Arrival(ended.device, samples, ended.base, ended.trained), ended.job))
        dispatch.replied[ended.job.device_id] = Participation(num_examples=samples, loss=ended.trained.loss)
        if not self._method.stepping.ends_rounds and len(dispatch.replied) == dispatch.size:
            self._history = self._history.after(dispatch.number, dispatch.replied)

    def _step(self) -> Round:
        arrivals = [arrival for arrival, _ in self._waiting]
        jobs = [job for _, job in self._waiting]
        merged = self._method.stepping.merged(self._model, arrivals)
        if self._method.stepping.ends_rounds and self._latest is not None:
            # A late device counts in the round that uses its update.
            participations = {
                self._fleet[each.device].device_id: Participation(num_examples=each.samples, loss=each.trained.loss)
                for each in arrivals
            }
            self._history = self._history.after(self._latest.number, participations)
            self._latest = None
        self._waiting = []
        self._model = self._federation.model(merged, server_round=self._model.server_round + 1)
        stretch, since_s = self._watts.until(self._now_s), self._now_s - self._stepped_s
        self._stepped_s = self._now_s
        return Round(
            tuple(each.device for each in arrivals),
            training_s=since_s,
            steady_s=since_s,
            training_kj=stretch.training_kj,
            planned_w=stretch.planned_w,
            true_w=stretch.true_w,
            observed_w=stretch.observed_w,
            accuracy=self._model.accuracy,
            epochs=float(np.mean([job.epochs for job in jobs])),
            batch=float(np.mean([job.batch for job in jobs])),
        )
