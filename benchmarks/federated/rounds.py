"""Runs the rounds of one method: plan, training on the boards, and learning."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from benchmarks.federated.boards import BASE_BATCH, Board, passes, with_batch
from benchmarks.federated.jobs import LOCAL_EPOCHS, Job, Method
from benchmarks.federated.learning import Federation, LocalWork
from edge_agent.training.training import TrainingRunner
from wattfleet.core.choosing import BatchEfficiency
from wattfleet.core.modes import PowerMode, Workload, modes_to_array
from wattfleet.core.planning import History, Participation


@dataclass(frozen=True)
class Member:
    """One device of a fleet.

    Attributes:
        device_id: its name.
        board: its board, which is not changed.
        parked: the mode between trainings.
        idle_w: watts while parked.
        minibatches: minibatches in an epoch over its own data, with batches of `BASE_BATCH`.
    """

    device_id: str
    board: Board
    parked: PowerMode
    idle_w: float
    minibatches: int


@dataclass(frozen=True)
class Round:
    """The result of a round, or of a server step if the trainings of several rounds overlap.

    Attributes:
        chosen: numbers of the devices that trained; for a step, those whose updates it uses.
        training_s: seconds until the slowest device was done; for a step, seconds since the last one.
        steady_s: the same without the extra time of first minibatches; for a step, `training_s`.
        training_kj: energy of the selected devices above idle power, without first minibatches, which add little.
        planned_w: watts of the site that the method set aside; for a step, the maximum since the last one. The same
            holds for `true_w`.
        true_w: watts of the site while all chosen devices train, without noise.
        observed_w: the same as reported by the agents.
        accuracy: accuracy of the model after the round, on the test data.
        epochs: mean local epochs of the selected devices.
        batch: mean batch size of the selected devices.
    """

    chosen: tuple[int, ...]
    training_s: float
    steady_s: float
    training_kj: float
    planned_w: float
    true_w: float
    observed_w: float
    accuracy: float
    epochs: float = LOCAL_EPOCHS
    batch: float = BASE_BATCH


class Station:
    """A device that can train: its board, and the agent's observation of trainings.

    Args:
        member: the device.
        noise: text that seeds the board's noise.
    """

    def __init__(self, member: Member, noise: str, efficiency: BatchEfficiency) -> None:
        self._board = member.board.restarted(zlib.crc32(f"{noise}/{member.device_id}".encode()))
        self._minibatches, self._efficiency = member.minibatches, efficiency
        self._watch = TrainingRunner(self._board, member.parked)
        self._true_w: dict[tuple[PowerMode, int], float] = {}

    def train(self, job: Job) -> tuple[float, float, float]:
        """Train; return the seconds of the start and of the other minibatches, and the mean watts of the latter."""
        minibatches = self._minibatches * BASE_BATCH / job.batch * passes(job.batch, self._efficiency)
        trained = _Trained(max(1, round(minibatches)), with_batch(job.batch))
        begin_s = self._board.clock.now_s()
        self._watch.start(trained, job.assignment.mode, job.epochs, job.assignment.power_limit_w)
        first_s = self._board.clock.now_s() - begin_s
        observed = self._watch.finish()
        assert observed is not None, "nothing else was measured"
        warmup_s = max(0.0, first_s - observed.epoch_s / trained.minibatches_per_epoch)
        return warmup_s, observed.epoch_s * job.epochs, observed.power_w

    def true_w(self, job: Job) -> float:
        """Return the watts of training in a job's mode and with its batch size, without noise."""
        key = job.assignment.mode, job.batch
        if key not in self._true_w:
            power_mw = self._board.truth(modes_to_array([key[0]]), with_batch(job.batch))[1]
            self._true_w[key] = float(power_mw[0]) / 1e3
        return self._true_w[key]


def run_rounds(
    method: Method,
    fleet: Sequence[Member],
    stations: Sequence[Station],
    federation: Federation,
    rounds: int,
    efficiency: BatchEfficiency,
    enough: Callable[[Sequence[Round]], bool] = lambda found: False,
) -> list[Round]:
    """Run from the initial parameters, and return the rounds.

    Args:
        method: selects devices and modes.
        fleet: the devices. Those that do not train are idle.
        stations: the same devices, able to train.
        federation: the devices' data, and the training of models.
        rounds: maximum number of rounds.
        efficiency: samples needed with each batch size.
        enough: returns whether the run may end, given the rounds so far.

    Raises:
        InfeasibleBudgetError: the budget is too small for any device of the method.
    """
    number = {member.device_id: k for k, member in enumerate(fleet)}
    model, history, found = federation.start, History(), list[Round]()
    for server_round in range(1, rounds + 1):
        jobs = method.plan(server_round, history)
        work = {number[job.device_id]: LocalWork(job.epochs * passes(job.batch, efficiency), job.batch) for job in jobs}
        model = federation.after(model, work, method.is_normalised)
        participations = {
            fleet[k].device_id: Participation(num_examples=federation.samples[k], loss=model.losses[k]) for k in work
        }
        history = history.after(server_round, participations)
        found.append(_round(jobs, tuple(work), fleet, stations, model.accuracy))
        if enough(found):
            break
    return found


def _round(
    jobs: Sequence[Job], chosen: tuple[int, ...], fleet: Sequence[Member], stations: Sequence[Station], accuracy: float
) -> Round:
    trained = np.array([stations[k].train(each) for k, each in zip(chosen, jobs, strict=True)])
    warmup_s, steady_s, observed_w = trained.T
    own_idle_w = np.array([fleet[k].idle_w for k in chosen])
    others_w = sum(member.idle_w for member in fleet) - float(own_idle_w.sum())
    return Round(
        chosen,
        training_s=float((warmup_s + steady_s).max()),
        steady_s=float(steady_s.max()),
        training_kj=float(((observed_w - own_idle_w) * steady_s).sum()) / 1e3,
        planned_w=others_w + sum(each.assignment.power_limit_w for each in jobs),
        true_w=others_w + sum(stations[k].true_w(each) for k, each in zip(chosen, jobs, strict=True)),
        observed_w=others_w + float(observed_w.sum()),
        accuracy=accuracy,
        epochs=float(np.mean([job.epochs for job in jobs])),
        batch=float(np.mean([job.batch for job in jobs])),
    )


@dataclass(frozen=True)
class _Trained:
    """The workload of a simulated training, without an app that reports minibatches."""

    minibatches_per_epoch: int
    paced: Workload
    first_gcycles: float = 0.0
    is_length_known: bool = True
    is_length_estimated: bool = False
    profiled_modes: int = 0

    def predicted_minibatch_s(self, mode: PowerMode) -> NoReturn:
        raise AssertionError("no app reports minibatches here")

    def productive(self, power_limit_w: float, minibatches: float, spare_s: object, own_minibatch_s: float) -> NoReturn:
        raise AssertionError("no app reports minibatches here")

    def training_was_too_short(self, minibatches: float) -> NoReturn:
        raise AssertionError("no mode is measured here")

    def knob_was_not_reached(self, mode: object, error: object) -> NoReturn:
        raise AssertionError("simulated boards reach every mode")
