"""A population of measured workloads, and the prior of the parameters that it implies for the next one.

The log parameters of a workload are normally distributed around a mean that depends on the task and the board: a linear
mixed model. Mean and covariance are estimated from the workloads' own fits by expectation maximisation (Laird and Ware,
"Random-Effects Models for Longitudinal Data", Biometrics 1982). The covariance has an inverse Wishart prior, since
there are few workloads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.modes import Hardware, Task, WorkloadFacts
from wattfleet.core.prediction.roofline.estimation import Prior, Surface
from wattfleet.core.prediction.roofline.physics import PowerParameters, TimeParameters
from wattfleet.core.prediction.roofline.priors import (
    GENERAL_GROWTH,
    POWER_SPREADS,
    TIME_SPREADS,
    TYPICAL_WORKERS,
    Spreads,
    known_shift,
)

if TYPE_CHECKING:
    from typing_extensions import Self

Values = NDArray[np.float64]

MAX_MEMBERS = 64
"""Maximum number of workloads in a population."""

# Weight of the assumed covariance, in workloads.
_ASSUMED_WORKLOADS = 4.0
_ITERATIONS = 60
# Information on a parameter that is known to about 1 %.
_KNOWN = 1e4
_ANY_BOARD = Hardware(2048, 256, 15)
# A board whose GPU is smaller or larger than that of every member by more than this factor computes in another way,
# such as on its CPU. Its time is then as uncertain as on a board of which nothing is known.
_FARTHEST = 8.0


@dataclass(frozen=True)
class Estimate:
    """One workload's log parameters of one quantity, estimated from its own measurements without a prior.

    Attributes:
        mean: `[k]` log parameters.
        information: `[k, k]` inverse covariance of their errors; singular if the rows carry no information on a
            parameter.
        surface: the residual of the physics.
    """

    mean: Values
    information: Values
    surface: Surface


@dataclass(frozen=True)
class Member:
    """A measured workload.

    Attributes:
        facts: its task, and whether it has loader workers.
        hardware: the board that it was measured on.
        time: its time parameters.
        power: its power parameters.
    """

    facts: WorkloadFacts
    hardware: Hardware
    time: Estimate
    power: Estimate


@dataclass(frozen=True, eq=False)
class Population:
    """Measured workloads. The spread of their parameters gives the prior of another workload. Compared by identity.

    Attributes:
        members: the workloads; the first one's board is the base that others are compared with.
    """

    members: tuple[Member, ...]

    def without(self, indices: Collection[int]) -> Self:
        """The population without some members; at least one must be left."""
        return replace(self, members=tuple(each for k, each in enumerate(self.members) if k not in indices))

    def with_member(self, member: Member) -> Self:
        """The population with one more member, the last."""
        return replace(self, members=(*self.members, member))

    def time_prior(self, facts: WorkloadFacts, hardware: Hardware | None, elsewhere: Sequence[Member] = ()) -> Prior:
        """The prior of the log time parameters of a workload on a board.

        Args:
            facts: known facts of the workload.
            hardware: the board; None if it is unknown.
            elsewhere: the same workload on other boards.
        """
        shift, sd = known_shift(facts)
        known = [(each.hardware, each.time, known_shift(each.facts)[0]) for each in elsewhere]
        mean, covariance = self.time_effects.workload(facts.task, hardware, known)
        return Prior.correlated(mean + shift, covariance + np.diag(sd**2))

    def power_prior(self, facts: WorkloadFacts, hardware: Hardware | None, elsewhere: Sequence[Member] = ()) -> Prior:
        """The prior of the log power parameters of a workload on a board; arguments as in `time_prior`."""
        none = np.zeros(len(POWER_SPREADS.board))
        known = [(each.hardware, each.power, none) for each in elsewhere]
        return Prior.correlated(*self.power_effects.workload(facts.task, hardware, known))

    def surfaces(self, task: Task, hardware: Hardware | None) -> tuple[Surface, Surface]:
        """The mean residuals of time and power over the members with this task, on this board if there are any."""
        alike = [each for each in self.members if each.facts.task is task]
        here = [each for each in alike if each.hardware == (hardware or self.members[0].hardware)]
        first = (here or alike)[:1]
        same = [each for each in alike if first and each.hardware == first[0].hardware]
        return _mean_surface([each.time.surface for each in same]), _mean_surface([each.power.surface for each in same])

    @cached_property
    def time_effects(self) -> Effects:
        """The effects of task and board on the log time parameters."""
        shifts = [known_shift(each.facts)[0] for each in self.members]
        return _fit_effects(
            self.members, [each.time for each in self.members], shifts, TIME_SPREADS, time_shift, _FARTHEST
        )

    @cached_property
    def power_effects(self) -> Effects:
        """The effects of task and board on the log power parameters."""
        none = np.zeros(len(POWER_SPREADS.board))
        return _fit_effects(
            self.members, [each.power for each in self.members], [none] * len(self.members), POWER_SPREADS, power_shift
        )


HardwareShift = Callable[[Hardware, Hardware], Values]
"""Returns the differences of the log parameters, `[k]`, that follow from the data sheets of two boards."""


def time_shift(of: Hardware, to: Hardware) -> Values:
    """The differences of the log time parameters between two boards, by their data sheets, `[k]`.

    A GPU with half the cores needs twice the cycles for the same work, and so does a memory bus of half the width. A
    board without such a GPU computes on its CPU cores: that is work of the kind that the loader does.
    """
    gpu, bus = of.gpu_cores / to.gpu_cores, of.mem_bus_bits / to.mem_bus_bits
    if gpu > _FARTHEST:
        return np.log([gpu if each.name == "loading_mcycles" else 1.0 for each in fields(TimeParameters)])
    factors = {"compute_mcycles": gpu, "serial_compute_mcycles": gpu, "traffic_mcycles": bus}
    return np.log([factors.get(each.name, 1.0) for each in fields(TimeParameters)])


def power_shift(of: Hardware, to: Hardware) -> Values:
    """The differences of the log power parameters between two boards, by their data sheets, `[k]`.

    A memory bus of half the width draws half the power. The lowest power is proportional to the lowest preset.
    """
    bus = to.mem_bus_bits / of.mem_bus_bits
    factors = {"floor_mw": to.lowest_preset_w / of.lowest_preset_w}
    factors |= dict.fromkeys(("mem_clock_mw", "mem_traffic_mw", "mem_compute_mw"), bus)
    return np.log([factors.get(each.name, 1.0) for each in fields(PowerParameters)])


@dataclass(frozen=True)
class Effects:
    """The fitted effects of task and board on one quantity's `k` log parameters, and their spread between workloads.

    Attributes:
        boards: the `b` boards of the members; the first is the base.
        mean: `[(1 + b) k]` the mean of a training on the base board, the difference of an inference, and the difference
            of each further board beyond its data sheet.
        covariance: `[(1 + b) k, (1 + b) k]` covariance of the errors of `mean`.
        between: `[k, k]` covariance between workloads.
        spreads: the prior spreads.
        shift: the differences between two boards by their data sheets.
        farthest: factor in GPU cores beyond which a board is as uncertain as one of which nothing is known.
    """

    boards: tuple[Hardware, ...]
    mean: Values
    covariance: Values
    between: Values
    spreads: Spreads
    shift: HardwareShift
    farthest: float

    def workload(
        self, task: Task, hardware: Hardware | None, elsewhere: Sequence[tuple[Hardware, Estimate, Values]] = ()
    ) -> tuple[Values, Values]:
        """Mean `[k]` and covariance `[k, k]` of another workload's log parameters on a board.

        What makes a workload differ from others is mostly its own, and the same on all boards: the work of a step. So
        its parameters on other boards are jointly normal with those on this one, and condition them.

        Args:
            task: the workload's task.
            hardware: the board; None if it is unknown.
            elsewhere: boards on which the workload was measured, with its parameters there and the shift by its facts.
        """
        board, k = hardware or self.boards[0], len(self.between)
        design = _design(k, self.boards, task, board)
        mean = design @ self.mean + self.shift(self.boards[0], board)
        covariance = self.between + self._own_of_board(hardware) + design @ self.covariance @ design.T
        if not elsewhere:
            return mean, covariance
        designs = np.vstack([_design(k, self.boards, task, each) for each, _, _ in elsewhere])
        means = designs @ self.mean + np.concatenate([self.shift(self.boards[0], each) for each, _, _ in elsewhere])
        own = self.spreads.share_of_board * self.between
        common = self.between - own
        joint = designs @ self.covariance @ designs.T + np.tile(common, (len(elsewhere), len(elsewhere)))
        information, values = np.zeros_like(joint), np.zeros(len(joint))
        for k_from, (other, estimate, shift) in zip(range(0, len(joint), k), elsewhere, strict=True):
            block = slice(k_from, k_from + k)
            joint[block, block] += own + self._own_of_board(other)
            information[block, block] = estimate.information
            values[block] = estimate.mean - shift
        across = np.tile(common, (1, len(elsewhere))) + design @ self.covariance @ designs.T
        # The posterior of the parameters elsewhere, also where the information is singular; then what follows from it.
        gain = across @ np.linalg.inv(np.eye(len(joint)) + information @ joint)
        return mean + gain @ information @ (values - means), covariance - gain @ information @ across.T

    def _own_of_board(self, hardware: Hardware | None) -> Values:
        """`[k, k]` covariance of what a board that no member was measured on may have of its own."""
        if hardware is None or min(_distance(hardware, other) for other in self.boards) > self.farthest:
            return self.spreads.unknown_board
        return np.zeros_like(self.between) if hardware in self.boards else np.diag(self.spreads.board**2)


def _distance(of: Hardware, to: Hardware) -> float:
    """The factor between the GPU cores of two boards, at least 1."""
    factor = of.gpu_cores / to.gpu_cores
    return max(factor, 1 / factor)


def _design(k: int, boards: Sequence[Hardware], task: Task, hardware: Hardware) -> Values:
    """The design matrix, `[k, (1 + b) k]`: the effects that add up to the mean of a workload's parameters."""
    parts = [1.0, float(task is Task.INFERENCE), *(float(hardware == other) for other in boards[1:])]
    return np.hstack([part * np.eye(k) for part in parts])


def _fit_effects(
    members: Sequence[Member],
    estimates: Sequence[Estimate],
    shifts: Sequence[Values],
    spreads: Spreads,
    hardware_shift: HardwareShift,
    farthest: float = math.inf,
) -> Effects:
    """Estimate the effects and the covariance between workloads from the members' estimates."""
    boards = tuple(dict.fromkeys(each.hardware for each in members))
    k = len(spreads.task)
    anywhere = spreads.anywhere.root @ spreads.anywhere.root.T
    assumed_mean = np.concatenate([spreads.anywhere.mean, np.zeros(len(boards) * k)])
    further = [spreads.board**2] * (len(boards) - 1)
    assumed = np.diag(1 / np.concatenate([np.diag(anywhere), spreads.task**2, *further]))
    # The arrays have a first axis of `n` members.
    designs = np.stack([_design(k, boards, each.facts.task, each.hardware) for each in members])
    transposed = designs.swapaxes(1, 2)
    information = np.stack([each.information for each in estimates])
    centred = np.stack(
        [
            estimate.mean - shift - hardware_shift(boards[0], each.hardware)
            for each, estimate, shift in zip(members, estimates, shifts, strict=True)
        ]
    )[..., None]
    between = spreads.workload
    mean, covariance = assumed_mean, np.linalg.inv(assumed)
    for _ in range(_ITERATIONS):
        precision = np.linalg.inv(between)
        posterior = np.linalg.inv(precision + information)
        # The inverse of `between + inverse(information)`, also where the information is singular.
        weighted = transposed @ (precision - precision @ posterior @ precision)
        covariance = np.linalg.inv(assumed + (weighted @ designs).sum(0))
        mean = covariance @ (assumed @ assumed_mean + (weighted @ centred).sum(0)[:, 0])
        expected = (designs @ mean)[..., None]
        deviation = posterior @ (information @ centred + precision @ expected) - expected
        scatter = _ASSUMED_WORKLOADS * spreads.workload + (deviation @ deviation.swapaxes(1, 2) + posterior).sum(0)
        between = scatter / (_ASSUMED_WORKLOADS + len(members))
    return Effects(boards, mean, np.asarray(covariance), between, spreads, hardware_shift, farthest)


def _mean_surface(surfaces: Sequence[Surface]) -> Surface:
    """The mean of the surfaces that have the first one's inducing rows; zero if there are none."""
    if not surfaces:
        return Surface.zero()
    same = [each for each in surfaces if np.array_equal(each.settings, surfaces[0].settings)]
    return Surface(surfaces[0].settings, np.mean([each.weights for each in same], axis=0))


def population_of(
    time: Values, power: Values, surfaces: tuple[Surface, Surface], hardware: Hardware | None
) -> Population:
    """Create a population of a single workload from its parameters alone.

    Args:
        time: `[k]` log time parameters.
        power: `[k]` log power parameters.
        surfaces: its smooth residuals of time and of power.
        hardware: its board; None if it is unknown.
    """
    of_time = np.full(len(time), _KNOWN)
    # One batch size does not show which part of the work grows with the batch.
    of_time[-len(GENERAL_GROWTH) :] = 0
    return Population(
        (
            Member(
                WorkloadFacts(loader_workers=TYPICAL_WORKERS),
                hardware or _ANY_BOARD,
                Estimate(time, np.diag(of_time), surfaces[0]),
                Estimate(power, np.diag(np.full(len(power), _KNOWN)), surfaces[1]),
            ),
        )
    )
