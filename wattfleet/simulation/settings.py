"""Settings of a simulation: the fleet and what it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchOptions
from wattfleet.core.planning import EpochChoice
from wattfleet.core.planning.policies import policy_named
from wattfleet.simulation.devices import FleetDevice
from wattfleet.simulation.digits_app.task import NETWORKS

_MOST_AT_ONCE = 4  # each run has a ServerApp process, and a ClientApp process for each training
LOCAL_EPOCHS = 2
"""Local epochs of a chosen device in a round."""
PATIENCE_S = 120.0
"""How long Flower's server waits for the SuperNodes and for a feasible first plan, seconds."""


@dataclass(frozen=True)
class SimulatedApp:
    """The app of one run.

    Attributes:
        network: one of the digits app's networks.
        batch_size: samples in a minibatch.
        further_batches: other minibatch sizes that the plan may choose for a device.
        local_epochs: the numbers of local epochs that the plan may choose; a single number if it has no choice.
    """

    network: str
    batch_size: int
    further_batches: tuple[int, ...] = ()
    local_epochs: tuple[int, ...] = (LOCAL_EPOCHS,)

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise InvalidInputError(f"unknown network {self.network!r}: choose one of {', '.join(NETWORKS)}")
        sizes = tuple(sorted(self.batch_sizes))
        if sizes[0] < 1:
            raise InvalidInputError(f"a minibatch must have at least 1 sample, not {sizes[0]}")
        try:
            BatchOptions(sizes, (1.0,) * len(sizes))
            EpochChoice.of(self.local_epochs)
        except InvalidInputError as error:
            raise InvalidInputError(f"--app {self}: {error}") from None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """All minibatch sizes. The learning rate is set for the first one."""
        return self.batch_size, *self.further_batches

    def __str__(self) -> str:
        parts = [self.network, "/".join(map(str, self.batch_sizes))]
        if self.local_epochs != (LOCAL_EPOCHS,):
            parts.append("/".join(map(str, self.local_epochs)))
        return ":".join(parts)


Apps = tuple[SimulatedApp, ...]
"""Apps whose runs train at the same time."""


def apps_named(text: str) -> Apps:
    """Parse apps such as `perceptron:32`, or `convolutional:16+perceptron:32` to train at the same time.

    The plan chooses among several minibatch sizes, such as `perceptron:16/32/64`; the learning rate is set for the
    first. It chooses among several numbers of local epochs, such as `perceptron:32:2/4/8`.

    Raises:
        InvalidInputError: a network is unknown, a minibatch size or number of epochs is not a whole number above 0, or
            there are more apps than can train at the same time.
    """
    found = []
    for each in text.split("+"):
        network, *listed = each.split(":")
        numbers = [numbers.split("/") for numbers in listed]
        if not 1 <= len(numbers) <= 2 or not all(number.isdecimal() for each in numbers for number in each):
            raise InvalidInputError(
                f"--app {text!r}: write network:minibatch size, such as perceptron:32, or perceptron:16/32/64 to let"
                " the plan choose the size; add :2/4/8 to let it choose the local epochs; join apps that train at the"
                " same time by +"
            )
        (batch_size, *further), *epochs = [tuple(map(int, each)) for each in numbers]
        found.append(SimulatedApp(network, batch_size, tuple(further), *epochs))
    if len(found) > _MOST_AT_ONCE:
        raise InvalidInputError(f"--app {text!r}: at most {_MOST_AT_ONCE} apps may train at the same time")
    return tuple(found)


DEFAULT_APPS: Sequence[Apps] = ((SimulatedApp("convolutional", 16),), (SimulatedApp("perceptron", 32),))
"""Two runs, one after the other on the same boards."""


@dataclass(frozen=True)
class SimulationSettings:
    """Settings of a simulation.

    Attributes:
        devices: the fleet.
        apps: the apps of the runs. The apps of one entry train at the same time, the entries one after the other.
        rounds: federated rounds of each run.
        site_budget_w: watts for the whole fleet.
        profile_modes: largest number of modes that each agent measures.
        policy: name of the client-selection policy.
        clients: devices in a round, for the policies that take a number.
        deadline_s: seconds that a round's training may take, for the policy deadline.
        seed: random seed of data split, boards, profiles and training.
        reference: name or directory of the reference predictor.
        metrics_port: port of the coordinator's `/metrics`; 0 picks a free port.
        own_epochs: whether the plan may choose a different number of epochs for each device of a round.
        patience_s: how long Flower's server waits for the SuperNodes and for a feasible first plan.
        energy_budget_j: joules above idle that the trainings of each run may draw; None without an energy budget.
    """

    devices: Sequence[FleetDevice]
    apps: Sequence[Apps]
    rounds: int
    site_budget_w: float
    profile_modes: int
    policy: str
    clients: int | None
    seed: int
    reference: str
    metrics_port: int
    deadline_s: float | None = None
    own_epochs: bool = False
    patience_s: float = PATIENCE_S
    energy_budget_j: float | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InvalidInputError(f"--rounds must be at least 1, not {self.rounds}")
        if not 5 <= self.profile_modes:
            raise InvalidInputError(
                f"--modes must be at least 5, not {self.profile_modes}: a predictor needs at least 5 measured modes"
            )
        if self.own_epochs and not any(len(app.local_epochs) > 1 for together in self.apps for app in together):
            raise InvalidInputError(
                "--own-epochs needs an app whose plan chooses epochs, such as --app perceptron:32:2/4/8"
            )
        if self.policy == "deadline" and self.deadline_s is None:
            raise InvalidInputError(
                "the policy 'deadline' needs a time limit for a round: pass it as --deadline-s, such as --deadline-s 60"
            )
        policy_named(self.policy, count=self.clients, seed=self.seed, deadline_s=self.deadline_s)

    def why_not_compared(self, number: int) -> str | None:
        """Return why a run is not compared with baselines; None if it is.

        Args:
            number: the run's number, from 1.
        """
        if any(device.duty is not None for device in self.devices):
            return "the boards answered requests while they trained, and the baselines do not"
        if self.energy_budget_j is not None:
            return "the run had an energy budget, and the baselines train all rounds without one"
        first = 1
        for together in self.apps:
            if first <= number < first + len(together) and len(together) > 1:
                return (
                    f"runs {first} to {first + len(together) - 1} trained at the same time and shared boards and watts,"
                    " and the baselines train one app"
                )
            first += len(together)
        return None
