"""What rounds cost without Wattfleet: other ways of training on the same boards, in virtual time.

The boards are those of the simulation. They train the same data, from the same parameters, for as many rounds, and
their choices know the boards' true time and power. Only the clock differs: nothing waits for the seconds of a board.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import tomllib
import torch
from torch import Tensor, nn

from edge_agent.devices.sysfs import presets_of
from edge_agent.devices.virtual.virtual_board import VirtualBoard, WorkSpan
from edge_agent.runtime.readiness import parked_mode
from wattfleet.core.choosing import Front, predicted_front
from wattfleet.core.errors import InfeasibleBudgetError
from wattfleet.core.modes import ModeArray, PowerMode, Workload, WorkloadFacts
from wattfleet.core.planning import Allowance, Offer, RoundPlan, plan_round
from wattfleet.core.planning.policies import FastestK, RandomK
from wattfleet.core.prediction import Prediction
from wattfleet.simulation.digits_app.task import (
    NETWORKS,
    Minibatches,
    device_data,
    evaluate,
    minibatches_per_epoch,
    sample_counts,
    scaled_learning_rate,
    train,
)
from wattfleet.simulation.flower import APP_DIRECTORY
from wattfleet.simulation.settings import SimulatedApp, SimulationSettings
from wattfleet.simulation.virtual_time import MEASURING, Stretch, Work, site_watts, stretches

_log = logging.getLogger(__name__)


# --- Federation -------------------------------------------------------------------------------------------------------
# Federated averaging of the digits app in this process, without Flower, for runs in virtual time.
#
# A round's model depends only on the devices chosen so far, so runs that make the same choices share the training.


Parameters = Mapping[str, Tensor]


class TrainingStoppedError(Exception):
    """The training was stopped from outside."""


@dataclass(frozen=True)
class Model:
    """A state of the global model.

    Attributes:
        parameters: the network's parameters.
        accuracy: accuracy on held-out digits.
        server_round: the rounds that led to it.
        followers: the models after one more round, by the devices that train in it.
    """

    parameters: Parameters
    accuracy: float
    server_round: int = 0
    followers: dict[tuple[int, ...], Model] = field(default_factory=dict, repr=False, compare=False)


class Federation:
    """Devices that train the digits app, each on its own part of the data.

    Args:
        app: the app.
        devices: number of devices.
        seed: seed of the data split, the initial parameters and the order of minibatches, as in the app.
        data_file: the data set; see `digits`.
        stopped: ends a training once it is set.
    """

    def __init__(
        self, app: SimulatedApp, devices: int, seed: int, data_file: str = "", stopped: threading.Event | None = None
    ) -> None:
        self._app, self._devices, self._seed, self._data_file = app, devices, seed, data_file
        self._stopped = stopped or threading.Event()
        content = tomllib.loads((APP_DIRECTORY / "pyproject.toml").read_text(encoding="utf-8"))
        learning_rate = float(content["tool"]["flwr"]["app"]["config"]["learning-rate"])
        self._learning_rate = scaled_learning_rate(learning_rate, app.batch_size)

    def start(self) -> Model:
        """Return the model before the first round."""
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            network = NETWORKS[self._app.network]()
        return self._model(network, 0)

    def after(self, model: Model, partitions: Sequence[int]) -> Model:
        """Return the model after one more round: the devices' models, weighted by their samples.

        Args:
            model: the model before.
            partitions: the devices that train, by the index of their part of the data.

        Raises:
            TrainingStoppedError: it was stopped meanwhile.
        """
        chosen = tuple(sorted(partitions))
        if chosen not in model.followers:
            model.followers[chosen] = self._trained(model, chosen)
        return model.followers[chosen]

    def _trained(self, model: Model, partitions: Sequence[int]) -> Model:
        merged = {name: torch.zeros_like(value) for name, value in model.parameters.items()}
        data = [device_data(each, self._devices, self._seed, self._data_file) for each in partitions]
        samples = [len(labels) for _, labels in data]
        network = NETWORKS[self._app.network]()
        for own, count in zip(data, samples, strict=True):
            network.load_state_dict(model.parameters)
            loader = Minibatches(own, self._app.batch_size, self._seed + model.server_round + 1)
            epochs = [self._until_stopped(loader) for _ in range(self._app.local_epochs[0])]
            train(network, epochs, self._learning_rate)
            for name, value in network.state_dict().items():
                merged[name] += count / sum(samples) * value
        network.load_state_dict(merged)
        return self._model(network, model.server_round + 1)

    def _until_stopped(self, loader: Minibatches) -> Iterator[tuple[Tensor, Tensor]]:
        for minibatch in loader:
            if self._stopped.is_set():
                raise TrainingStoppedError
            yield minibatch

    def _model(self, network: nn.Module, server_round: int) -> Model:
        parameters = {name: value.clone() for name, value in network.state_dict().items()}
        return Model(parameters, evaluate(network, self._data_file)[1], server_round)


# --- Baselines --------------------------------------------------------------------------------------------------------

PRESETS = "NVIDIA's presets"
PLAIN_FLOWER = "plain Flower"


_DRAWS = 200
_NICENESS = 5


def idle_w(board: VirtualBoard) -> float:
    """Return the true watts of a parked board."""
    parked = board.restarted(0)
    parked.apply(parked_mode(parked))
    return parked.load_in_force.idle_mw / 1e3


@dataclass(frozen=True)
class TrueBoard:
    """The true time and power of a board with a workload, as opposed to the predicted ones.

    Attributes:
        board: the board.
        workload: the workload that it trains.
        minibatches_per_epoch: minibatches in one local epoch.
        idle_w: watts while it idles.
    """

    board: VirtualBoard
    workload: Workload
    minibatches_per_epoch: int
    idle_w: float

    @cached_property
    def best(self) -> Front:
        """Return the Pareto front of the board's whole mode space."""
        return self._front(self.board.modes)

    @cached_property
    def highest(self) -> Front:
        """Return a front of one point, with every clock at its highest as in the preset MAXN."""
        modes = self.board.modes
        return self._front(modes[np.lexsort(modes.T)[-1:]])

    @cached_property
    def presets(self) -> Front | None:
        """Return the Pareto front of the board's presets; None if it has no presets."""
        modes = [mode for mode in presets_of(self.board).values() if self.board.offers(mode)]
        return self._front(np.array(modes)) if modes else None

    def _front(self, modes: ModeArray) -> Front:
        certain = np.zeros(len(modes))
        true = Prediction(*self.board.mean_truth(modes, self.workload), certain, certain)
        return predicted_front(modes, true, self.minibatches_per_epoch, self.board.mean_first_gcycles)


def true_boards(
    app: SimulatedApp, workload: Workload, seed: int, boards: Mapping[str, VirtualBoard]
) -> dict[str, TrueBoard]:
    """Return the truth about every device of a simulation with an app, by id; also of devices that never trained.

    Args:
        app: the app. If a plan may choose its minibatch size, this is the truth for its first size.
        workload: the workload as the run states it.
        seed: seed of the data split.
        boards: the boards, in the order of their data.
    """
    # The rest of the facts that affect the boards' speed; an app's loader reports it when a device trains.
    paced = workload.completed(WorkloadFacts(batch=app.batch_size))
    samples = sample_counts(len(boards), seed)
    return {
        device_id: TrueBoard(board, paced, minibatches_per_epoch(count, app.batch_size), idle_w(board))
        for (device_id, board), count in zip(boards.items(), samples, strict=True)
    }


class Way(Protocol):
    """A way to choose the devices and modes of a round."""

    def modes(self, server_round: int) -> dict[str, PowerMode]:
        """Return the modes of the devices that train in a round, by device id.

        Raises:
            InfeasibleBudgetError: the budget is too small for any device.
        """
        ...


@dataclass(frozen=True)
class PlainFlower:
    """Flower without a planner: devices are drawn at random, as many as fit into the budget, and train in MAXN.

    Attributes:
        boards: all boards of the site.
        site_budget_w: the site's budget, watts.
        seed: seed of the draws.
    """

    boards: Mapping[str, TrueBoard]
    site_budget_w: float
    seed: int

    def modes(self, server_round: int) -> dict[str, PowerMode]:
        """Draw devices one after the other, and leave out those that no longer fit.

        Raises:
            InfeasibleBudgetError: no device fits.
        """
        drawn = random.Random(f"{self.seed}/{server_round}").sample(sorted(self.boards), len(self.boards))
        left_w = self.site_budget_w - sum(board.idle_w for board in self.boards.values())
        found = {}
        for device_id in drawn:
            board = self.boards[device_id]
            extra_w = float(board.highest.power_w[0]) - board.idle_w
            if extra_w <= left_w:
                found[device_id] = board.highest.mode(0)
                left_w -= extra_w
        if not found:
            raise InfeasibleBudgetError(f"no board fits into {self.site_budget_w:g} W in MAXN")
        return found


@dataclass(frozen=True)
class BestPresets:
    """Devices are drawn at random; an exact planner that knows the truth chooses their presets for the shortest round.

    Boards without presets have only their highest mode.

    Attributes:
        boards: all boards of the site.
        site_budget_w: the site's budget, watts.
        seed: seed of the draws.
        epochs: local epochs of each device.
        count: devices to draw; None for half of them, as for Wattfleet's policies. Those that do not fit are left out.
    """

    boards: Mapping[str, TrueBoard]
    site_budget_w: float
    seed: int
    epochs: float
    count: int | None = None

    def modes(self, server_round: int) -> dict[str, PowerMode]:
        """Return the drawn devices' modes in the shortest round within the budget.

        Raises:
            InfeasibleBudgetError: no drawn device fits.
        """
        offers = [
            Offer(device_id, board.presets or board.highest, board.idle_w) for device_id, board in self.boards.items()
        ]
        allowance = Allowance.of_site(self.site_budget_w)
        plan = plan_round(offers, RandomK(self.count, self.seed), allowance, self.epochs, server_round)
        return {each.device_id: each.mode for each in plan.assignments}


class TrainedBoards:
    """Boards that train in virtual time.

    Args:
        boards: the boards, with what they train; they are left as they are.
        noise: seed of the boards' noise.
    """

    def __init__(self, boards: Mapping[str, TrueBoard], noise: int) -> None:
        self._boards = boards
        self._opened = {
            device_id: true.board.restarted(noise + k) for k, (device_id, true) in enumerate(boards.items())
        }
        self._parked = {device_id: parked_mode(board) for device_id, board in self._opened.items()}
        self._work: dict[str, list[WorkSpan]] = {}
        for device_id, board in self._opened.items():
            board.on_work = partial(self._worked, device_id)

    def train(self, modes: Mapping[str, PowerMode], epochs: float) -> Work:
        """Train a round, as the agents do on these boards, and return what the boards did."""
        self._work = {device_id: [] for device_id in modes}
        for device_id, mode in modes.items():
            board, true = self._opened[device_id], self._boards[device_id]
            board.apply(mode)
            training = board.begin_training(true.workload)
            training.finish(max(1, round(epochs * true.minibatches_per_epoch)))
            board.apply(self._parked[device_id])
        return self._work

    def _worked(self, device_id: str, span: WorkSpan) -> None:
        self._work[device_id].append(span)


def trained(
    name: str,
    way: Way,
    boards: Mapping[str, TrueBoard],
    federation: Federation,
    rounds: int,
    epochs: float,
    noise: int,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train one way, and return it for the report, as `described`; with a `reason` alone if it is not possible.

    Args:
        name: the way's name.
        way: chooses devices and modes.
        boards: all boards of the site.
        federation: trains the models.
        rounds: number of rounds.
        epochs: local epochs of each device.
        noise: seed of the boards' noise.
        progress: called with the current step as text.

    Raises:
        TrainingStoppedError: it was stopped meanwhile.
    """
    partitions = {device_id: partition for partition, device_id in enumerate(boards)}
    fleet, model = TrainedBoards(boards, noise), federation.start()
    initial, done, accuracy = model.accuracy, [], {}
    for number in range(1, rounds + 1):
        progress(f"{name}, round {number} of {rounds}")
        try:
            modes = way.modes(number)
        except InfeasibleBudgetError as error:
            return {"name": name, "reason": str(error)}
        done.append((number, fleet.train(modes, epochs), {device_id: (mode,) for device_id, mode in modes.items()}))
        model = federation.after(model, [partitions[device_id] for device_id in modes])
        accuracy[number] = model.accuracy
    return described(name, done, accuracy, initial, {device_id: board.idle_w for device_id, board in boards.items()})


def described(
    name: str,
    rounds: Sequence[tuple[int, Work, Mapping[str, Sequence[PowerMode]]]],
    accuracy: Mapping[int, float],
    initial_accuracy: float | None,
    idle_w: Mapping[str, float],
    site_budget_w: float = math.inf,
) -> dict[str, Any]:
    """Return a run in virtual time for the report.

    Args:
        name: its name.
        rounds: see `stretches`.
        accuracy: accuracy after each round, by its number.
        initial_accuracy: accuracy before the first round.
        idle_w: watts of every board while it idles.
        site_budget_w: see `stretches`.
    """
    devices = [sorted(device_id for device_id, spans in work.items() if spans) for _, work, _ in rounds]
    return described_stretches(
        name, stretches(rounds, idle_w, site_budget_w), devices, accuracy, initial_accuracy, idle_w
    )


def described_stretches(
    name: str,
    run: Sequence[Stretch],
    devices: Sequence[Sequence[str]],
    accuracy: Mapping[int, float],
    initial_accuracy: float | None,
    idle_w: Mapping[str, float],
) -> dict[str, Any]:
    """Return a run in virtual time for the report; see `described`.

    Args:
        name: its name.
        run: its rounds, and the times before them.
        devices: the devices that worked in each of these.
        accuracy: accuracy after each round, by its number.
        initial_accuracy: accuracy before the first round.
        idle_w: watts of every board while it idles.
    """
    watts = site_watts(run, idle_w)
    energy_j = list(itertools.accumulate(stretch.energy_j for stretch in run))
    draws = [draw for stretch in run for draw in stretch.draws]
    measuring = [draw for draw in draws if draw.kind == MEASURING]
    return {
        "name": name,
        "initial_accuracy": initial_accuracy,
        "rounds": [
            {
                "round": stretch.number,
                "devices": list(worked),
                "end_s": stretch.end_s,
                "energy_j": joules,
                "accuracy": accuracy.get(stretch.number),
            }
            for stretch, joules, worked in zip(run, energy_j, devices, strict=True)
        ],
        "worked_s": sum(draw.end_s - draw.begin_s for draw in draws),
        "measuring_s": sum(draw.end_s - draw.begin_s for draw in measuring),
        "measuring_j": sum(draw.extra_w * (draw.end_s - draw.begin_s) for draw in measuring),
        "watts": {"at_s": watts.at_s, "idle_w": watts.idle_w, **watts.extra_w},
    }


class BaselineTraining:
    """Trains the baselines of runs in a thread of low priority, while the simulated fleet trains.

    Args:
        settings: what is simulated.
        boards: the boards, in the order of their data; they are left as they are.
    """

    def __init__(self, settings: SimulationSettings, boards: Mapping[str, VirtualBoard]) -> None:
        self._settings, self._boards = settings, boards
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, "baselines", initializer=_in_background)
        self._futures: dict[int, Future[list[dict[str, Any]]]] = {}
        self.step = ""

    def __enter__(self) -> BaselineTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def begin(self, number: int, app: SimulatedApp, workload: Workload) -> None:
        """Begin with the baselines of a run, unless they have begun or the run cannot be compared."""
        if number not in self._futures and self._settings.why_not_compared(number) is None:
            self._futures[number] = self._pool.submit(self._train, number, app, workload)

    @property
    def are_done(self) -> bool:
        """Whether all baselines that have begun are trained."""
        return all(future.done() for future in self._futures.values())

    def results(self, number: int) -> list[dict[str, Any]]:
        """Wait for the baselines of a run, and return each of them as `trained` does."""
        try:
            return self._futures[number].result()
        except Exception as error:
            # The run itself has succeeded, and its report must not be lost.
            _log.exception("the baselines of run %d failed", number)
            return [{"name": name, "reason": f"it failed with {error!r}"} for name in (PRESETS, PLAIN_FLOWER)]

    def _train(self, number: int, app: SimulatedApp, workload: Workload) -> list[dict[str, Any]]:
        settings, epochs = self._settings, app.local_epochs[0]
        boards = true_boards(app, workload, settings.seed, self._boards)
        federation = Federation(app, len(boards), settings.seed, stopped=self._stopped)
        ways: dict[str, Way] = {
            PRESETS: BestPresets(boards, settings.site_budget_w, settings.seed, epochs, settings.clients),
            PLAIN_FLOWER: PlainFlower(boards, settings.site_budget_w, settings.seed),
        }

        def progress(text: str) -> None:
            self.step = f"{text} of run {number}"

        return [
            trained(name, way, boards, federation, settings.rounds, epochs, settings.seed, progress)
            for name, way in ways.items()
        ]


def _in_background() -> None:
    """Let the fleet's processes go first."""
    torch.set_num_threads(1)
    with suppress(OSError, AttributeError):
        # Linux has a priority for each thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _fastest(
    boards: Mapping[str, TrueBoard], fronts: Mapping[str, Front], epochs: float, site_budget_w: float
) -> RoundPlan | None:
    """The shortest round in which all devices with a front train; None if the budget does not suffice for that."""
    offers = [Offer(each, front, boards[each].idle_w) for each, front in fronts.items()]
    allowance = Allowance.of_site(
        site_budget_w, sum(board.idle_w for each, board in boards.items() if each not in fronts)
    )
    try:
        plan = plan_round(offers, FastestK(len(offers)), allowance, epochs, 1)
    except InfeasibleBudgetError:
        return None
    return plan if len(plan.assignments) == len(offers) else None


def random_draw(
    boards: Mapping[str, TrueBoard], chosen: Sequence[str], epochs: float, site_budget_w: float, seed: int
) -> dict[str, Any]:
    """Return how long a round takes with the chosen devices, and with as many devices drawn uniformly.

    It covers all possible draws, or many. Each set gets its own best modes within the same watts, by the boards' true
    values, so only the selection makes a difference.

    Args:
        boards: all boards of the site.
        chosen: ids of the devices that trained in the round.
        epochs: local epochs of each device.
        site_budget_w: the site's budget, watts.
        seed: seed of the draws, if not all are covered.

    Returns:
        `draws`: the number of drawn sets; `over_budget`: those that no modes keep within the budget;
        `selected_duration_s`: seconds with the chosen devices; `mean_duration_s` and `worst_duration_s`: seconds over
        the other sets. A value is None if the budget is too small for all of its sets.
    """

    def duration_s(devices: Sequence[str]) -> float | None:
        plan = _fastest(boards, {each: boards[each].best for each in devices}, epochs, site_budget_w)
        return None if plan is None else plan.duration_s

    sets = _draws(boards, len(chosen), seed) if chosen else []
    durations_s = [each for each in map(duration_s, sets) if each is not None]
    return {
        "draws": len(sets),
        "over_budget": len(sets) - len(durations_s),
        "selected_duration_s": duration_s(chosen) if chosen else None,
        "mean_duration_s": float(np.mean(durations_s)) if durations_s else None,
        "worst_duration_s": max(durations_s, default=None),
    }


def _draws(boards: Mapping[str, TrueBoard], count: int, seed: int) -> list[tuple[str, ...]]:
    """Return all sets of a number of devices, or many that are drawn uniformly."""
    devices = sorted(boards)
    if math.comb(len(devices), count) <= _DRAWS:
        return list(itertools.combinations(devices, count))
    generator, found = random.Random(seed), set[tuple[str, ...]]()
    while len(found) < _DRAWS:
        found.add(tuple(sorted(generator.sample(devices, count))))
    return sorted(found)
