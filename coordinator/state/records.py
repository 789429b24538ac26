"""What the coordinator knows of devices, Flower's nodes, runs and rounds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from wattfleet.budgets import Override
from wattfleet.choosing import Front
from wattfleet.errors import InvalidInputError
from wattfleet.planning import Assignment, Participation, RoundPlan
from wattfleet_proto.device_state import DeviceState


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """One device.

    Attributes:
        device_id: its name.
        board: kind of board.
        provenance: simulated, replayed or hardware.
        mode_count: size of its mode space.
        state: what it is doing.
        profiled_modes: modes measured.
        detail: for people, what it is doing or what is wrong.
        front: its predicted front; None until it was reported.
        idle_w: watts while parked; None until it was reported.
        reference_digest: of the reference predictor that the front came from.
    """

    device_id: str
    board: str
    provenance: str
    mode_count: int
    state: DeviceState = DeviceState.ENROLLED
    profiled_modes: int = 0
    detail: str = ""
    front: Front | None = None
    idle_w: float | None = None
    reference_digest: str = ""

    def __post_init__(self) -> None:
        # Ten thousand devices are of few kinds: each word is kept once.
        for name in ("board", "provenance", "reference_digest"):
            object.__setattr__(self, name, sys.intern(getattr(self, name)))


@dataclass(frozen=True)
class NodeRecord:
    """One of Flower's nodes.

    Attributes:
        node_id: Flower's id, of 64 bits.
        device_id: the device that it is; its agent may connect later.
    """

    node_id: int
    device_id: str


@dataclass(frozen=True)
class DeviceOverrides:
    """What the operator says of one device by command, beside what the site file states.

    Attributes:
        device_id: the device.
        tags: words by which it can be chosen.
        drained: it is chosen for no new round.
    """

    device_id: str
    tags: frozenset[str] = frozenset()
    drained: bool = False


@dataclass(frozen=True)
class SupplyOverride:
    """The watts that the operator has set for one supply.

    Attributes:
        supply: its name.
        override: the watts; None where they were cleared.
    """

    supply: str
    override: Override | None


@dataclass(frozen=True)
class PublishedReference:
    """A reference predictor that is handed out beside the one that the coordinator was started with.

    Attributes:
        digest: sha256 of the manifest, hexadecimal.
        manifest: its manifest.
        weights: its weights.
    """

    digest: str
    manifest: bytes = field(repr=False)
    weights: bytes = field(repr=False)


@dataclass(frozen=True)
class PinnedReference:
    """Which reference predictor agents are to transfer from.

    Attributes:
        digest: of a published one; None for the one that the coordinator was started with.
    """

    digest: str | None


@dataclass(frozen=True)
class ObservedTraining:
    """What one device's training in a round was observed to need.

    Attributes:
        device_id: the device.
        epoch_s: seconds per epoch.
        power_w: mean watts while training.
    """

    device_id: str
    epoch_s: float
    power_w: float

    def __post_init__(self) -> None:
        if not (0 < self.epoch_s < float("inf") and 0 < self.power_w < float("inf")):
            raise InvalidInputError(
                f"{self.device_id}: observed seconds and watts must be finite and above zero,"
                f" not {self.epoch_s} and {self.power_w}"
            )


@dataclass(frozen=True)
class RoundObservation:
    """One device's observation as part of its round: what changes of the round when it comes in.

    Attributes:
        plan_id: the round's plan.
        observed: what was observed.
    """

    plan_id: str
    observed: ObservedTraining


@dataclass(frozen=True)
class DeviceResult:
    """What came of one device's part in a round, as the Flower server saw it.

    Attributes:
        device_id: the device.
        failure: why no usable reply came; empty where one came.
        num_examples: its weight in the aggregation, for the work that was done; None where it was not told.
        loss: mean training loss; None where the app reports none.
        share: of the assigned work that was done, 0 to 1.
    """

    device_id: str
    failure: str = ""
    num_examples: float | None = None
    loss: float | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.num_examples is not None and not 0 <= self.num_examples < float("inf"):
            raise InvalidInputError(f"{self.device_id}: {self.num_examples} are no number of examples")
        if self.loss is not None and not abs(self.loss) < float("inf"):
            raise InvalidInputError(f"{self.device_id}: a loss has to be finite, or left out, not {self.loss}")
        if not 0 <= self.share <= 1:
            raise InvalidInputError(f"{self.device_id}: a share of its work is 0 to 1, not {self.share}")


@dataclass(frozen=True)
class RoundRecord:
    """One planned round.

    Attributes:
        plan_id: its id.
        run_id: Flower's run.
        number: from 1.
        epochs: local epochs of each chosen device.
        plan: the plan.
        nodes: Flower's node id of every chosen device.
        idle_w: watts that the devices which were not chosen idle at.
        observations: by device id.
        results: of the chosen devices that were sent a training; empty until the round is over.
        metrics: what the strategy reported for the round, such as accuracy.
        wall_s: seconds the round took the Flower server; None while it runs.
    """

    plan_id: str
    run_id: str
    number: int
    epochs: float
    plan: RoundPlan
    nodes: dict[str, int]
    idle_w: float
    observations: dict[str, ObservedTraining] = field(default_factory=dict)
    results: tuple[DeviceResult, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    wall_s: float | None = None

    @property
    def failed(self) -> tuple[str, ...]:
        """Chosen devices that sent no usable reply."""
        return tuple(result.device_id for result in self.results if result.failure)

    @property
    def _is_observed(self) -> bool:
        """Whether every chosen device was observed; never where all of them were ended."""
        chosen = self.plan.assignments
        return bool(chosen) and all(each.device_id in self.observations for each in chosen)

    @property
    def observed_site_w(self) -> float | None:
        """Observed watts of the chosen devices and the idling ones; None until every chosen one was observed."""
        if not self._is_observed:
            return None
        return self.idle_w + sum(observed.power_w for observed in self.observations.values())

    @property
    def observed_duration_s(self) -> float | None:
        """Observed seconds of the slowest chosen device; None until every chosen one was observed.

        The start of a training is not observed: it counts as it was predicted.
        """
        if not self._is_observed:
            return None
        warmup_s = {assignment.device_id: assignment.warmup_s for assignment in self.plan.assignments}
        return max(
            warmup_s.get(observed.device_id, 0.0) + self.epochs * observed.epoch_s
            for observed in self.observations.values()
        )


@dataclass(frozen=True)
class Reassignment:
    """What a device in a round in flight is to be told, because its supply's watts fell.

    Attributes:
        device_id: the device.
        plan_id: the round's plan.
        assignment: what it is to go on with; None where it is to stop.
    """

    device_id: str
    plan_id: str
    assignment: Assignment | None


@dataclass(frozen=True)
class RunRecord:
    """One Flower run.

    Attributes:
        run_id: Flower's id.
        strategy: name of the wrapped strategy.
        rounds: rounds asked for.
        initial_metrics: before the first round.
        error: what ended it early; empty while it runs and when it completed.
        finished: it is over.
    """

    run_id: str
    strategy: str
    rounds: int
    initial_metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    finished: bool = False


OperatorRecord = DeviceOverrides | SupplyOverride | PublishedReference | PinnedReference
"""What the operator has said."""

StoredRecord = DeviceRecord | NodeRecord | RunRecord | RoundRecord | RoundObservation | OperatorRecord
"""What the fleet hands out to be stored: each says all that is to be known of one thing."""


def parts_of(results: Iterable[DeviceResult]) -> dict[str, Participation]:
    """The devices' parts in a round, as policies need them."""
    return {each.device_id: Participation(bool(each.failure), each.num_examples, each.loss) for each in results}


def plan_id_of(run_id: str, number: int) -> str:
    """The id of a round's plan."""
    return f"{run_id}/{number}"


def run_of(plan_id: str) -> str:
    """The run that a plan is of."""
    return plan_id.rpartition("/")[0]
