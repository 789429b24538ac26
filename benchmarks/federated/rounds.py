"""One method's rounds: planned, trained on the boards, and learned from."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from benchmarks.federated.learning import Federation
from benchmarks.federated.methods import Method
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.training.training import TrainingWatch
from wattfleet.modes import PowerMode, Workload, modes_to_array
from wattfleet.planning import Assignment, History, Participation

LOCAL_EPOCHS = 2
"""As in `wattfleet simulate`."""


@dataclass(frozen=True)
class Member:
    """One device of a fleet.

    Attributes:
        device_id: its name.
        board: it is left as it is.
        parked: its mode between trainings.
        idle_w: watts while parked.
        minibatches: of an epoch over its own data.
    """

    device_id: str
    board: SimulatedDevice
    parked: PowerMode
    idle_w: float
    minibatches: int


@dataclass(frozen=True)
class Round:
    """What came of a round.

    Attributes:
        chosen: devices that trained, by number.
        training_s: seconds until the slowest was done.
        steady_s: the same, had every minibatch taken as long as those after the first.
        training_kj: energy of the selected devices above idle power; a first minibatch adds little to it.
        planned_w: watts of the site that the method set aside.
        true_w: watts of the site while all chosen devices train, without noise.
        observed_w: the same as their agents report them.
        accuracy: of the model after the round, on the test images.
    """

    chosen: tuple[int, ...]
    training_s: float
    steady_s: float
    training_kj: float
    planned_w: float
    true_w: float
    observed_w: float
    accuracy: float


class Station:
    """A device at work: its board, and the agent's own watch over its trainings.

    Args:
        member: whose.
        noise: another word, another noise of the board.
    """

    def __init__(self, member: Member, noise: str) -> None:
        self._board = member.board.restarted(zlib.crc32(f"{noise}/{member.device_id}".encode()))
        self._minibatches = member.minibatches
        self._watch = TrainingWatch(self._board, member.parked)
        self._trained = _Trained(member.minibatches)
        self._true_w: dict[PowerMode, float] = {}

    def train(self, assignment: Assignment) -> tuple[float, float, float]:
        """Seconds of the start, seconds of minibatches at their steady pace, and mean watts during these."""
        begin_s = self._board.clock.now_s()
        self._watch.start(self._trained, assignment.mode, LOCAL_EPOCHS, assignment.power_limit_w)
        first_s = self._board.clock.now_s() - begin_s
        observed = self._watch.finish()
        assert observed is not None, "nothing else was measured"
        warmup_s = max(0.0, first_s - observed.epoch_s / self._minibatches)
        return warmup_s, observed.epoch_s * LOCAL_EPOCHS, observed.power_w

    def true_w(self, mode: PowerMode) -> float:
        """Watts of training in a mode, without noise."""
        if mode not in self._true_w:
            self._true_w[mode] = float(self._board.truth(modes_to_array([mode]))[1][0]) / 1e3
        return self._true_w[mode]


def run_rounds(method: Method, fleet: Sequence[Member], federation: Federation, rounds: int, noise: str) -> list[Round]:
    """A run from the first parameters on.

    Args:
        method: fills the rounds.
        fleet: the devices; all idle but those that train.
        federation: what they learn.
        rounds: how many.
        noise: another word, another noise of the boards.

    Raises:
        InfeasibleBudgetError: the method can fill no round.
    """
    number = {member.device_id: k for k, member in enumerate(fleet)}
    stations = [Station(member, noise) for member in fleet]
    model, history, found = federation.start, History(), list[Round]()
    for server_round in range(1, rounds + 1):
        assignments = method.plan(server_round, LOCAL_EPOCHS, history)
        chosen = tuple(number[assignment.device_id] for assignment in assignments)
        model = federation.after(model, chosen)
        participations = {
            fleet[k].device_id: Participation(num_examples=federation.samples[k], loss=model.losses[k]) for k in chosen
        }
        history = history.after(server_round, participations)
        found.append(_round(assignments, chosen, fleet, stations, model.accuracy))
    return found


def _round(
    assignments: Sequence[Assignment],
    chosen: tuple[int, ...],
    fleet: Sequence[Member],
    stations: Sequence[Station],
    accuracy: float,
) -> Round:
    trained = np.array([stations[k].train(each) for k, each in zip(chosen, assignments, strict=True)])
    warmup_s, steady_s, observed_w = trained.T
    own_idle_w = np.array([fleet[k].idle_w for k in chosen])
    others_w = sum(member.idle_w for member in fleet) - float(own_idle_w.sum())
    return Round(
        chosen,
        training_s=float((warmup_s + steady_s).max()),
        steady_s=float(steady_s.max()),
        training_kj=float(((observed_w - own_idle_w) * steady_s).sum()) / 1e3,
        planned_w=others_w + sum(each.power_limit_w for each in assignments),
        true_w=others_w + sum(stations[k].true_w(each.mode) for k, each in zip(chosen, assignments, strict=True)),
        observed_w=others_w + float(observed_w.sum()),
        accuracy=accuracy,
    )


@dataclass(frozen=True)
class _Trained:
    """The workload that the board stands for; no app reports minibatches here."""

    minibatches_per_epoch: int
    first_gcycles: float = 0.0
    paced: Workload | None = None
    is_length_known: bool = True

    def productive(self, power_limit_w: float, minibatches: float) -> NoReturn:
        raise AssertionError("no app reports minibatches here")

    def training_was_too_short(self, minibatches: float) -> NoReturn:
        raise AssertionError("no mode is measured here")
