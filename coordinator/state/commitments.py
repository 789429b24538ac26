"""What devices were promised in rounds, from the plan until they are known to be done: a pure state machine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from coordinator.state.records import RoundRecord, RunRecord, run_of
from wattfleet.planning import Assignment
from wattfleet_proto.device_state import DeviceState


@dataclass(frozen=True)
class Commitment:
    """A device's part in the newest plan that chose it.

    Attributes:
        plan_id: the plan.
        assignment: what it trains in, or will; None where it was told to stop.
        has_begun: it was seen training since.
        is_over: it is not waited for any more. It may train still, since nobody can end a training that was given up.
    """

    plan_id: str
    assignment: Assignment | None
    has_begun: bool = False
    is_over: bool = False

    @property
    def set_aside_w(self) -> float:
        """Watts set aside for it."""
        return 0.0 if self.assignment is None else self.assignment.power_limit_w


class Commitments:
    """The newest promise of every device."""

    def __init__(self, rounds: Collection[RoundRecord], runs: Mapping[str, RunRecord]) -> None:
        """Begin with what a store holds.

        Args:
            rounds: oldest first.
            runs: those that the rounds are of, by id.
        """
        self._commitments: dict[str, Commitment] = {}
        for record in rounds:
            self.made(record)
            for device_id in record.observations:
                self.observed(device_id, record.plan_id)
            if record.wall_s is not None or runs[record.run_id].finished:
                self.round_over(record)

    def of(self, device_id: str) -> Commitment | None:
        """A device's newest promise; None where there never was one."""
        return self._commitments.get(device_id)

    def awaited(self) -> Iterator[tuple[str, Commitment]]:
        """The devices that are waited for."""
        return ((device_id, promise) for device_id, promise in self._commitments.items() if not promise.is_over)

    def awaited_plans(self) -> set[str]:
        """The plans in which some device is waited for."""
        return {promise.plan_id for _, promise in self.awaited()}

    def copy(self) -> Commitments:
        """Commitments that go their own way from here."""
        copied = Commitments((), {})
        copied._commitments.update(self._commitments)  # noqa: SLF001 - of its own kind
        return copied

    # --- what happens -------------------------------------------------------------------------------------------

    def made(self, record: RoundRecord) -> None:
        """A round was planned; a device keeps to the newest plan."""
        assignments = {assignment.device_id: assignment for assignment in record.plan.assignments}
        for device_id in record.nodes:
            self._commitments[device_id] = Commitment(record.plan_id, assignments.get(device_id))

    def changed(self, device_id: str, assignment: Assignment | None) -> None:
        """A device that is waited for is to go on with something else."""
        self._commitments[device_id] = replace(self._commitments[device_id], assignment=assignment)

    def seen(self, device_id: str, state: DeviceState) -> None:
        """A device says what it does: one that is ready after it trained is done."""
        promise = self._commitments.get(device_id)
        if promise is None:
            return
        if state is DeviceState.TRAINING:
            self._commitments[device_id] = replace(promise, has_begun=True)
        elif state is DeviceState.READY and promise.has_begun:
            self._commitments[device_id] = replace(promise, is_over=True)

    def observed(self, device_id: str, plan_id: str) -> None:
        """A device reports what its training needed."""
        self._end(device_id, plan_id)

    def free(self, device_ids: Collection[str], run_id: str) -> None:
        """The Flower server of a run takes these for free: it waits for none of them."""
        for device_id in device_ids:
            promise = self._commitments.get(device_id)
            if promise is not None and run_of(promise.plan_id) == run_id:
                self._end(device_id, promise.plan_id)

    def round_over(self, record: RoundRecord) -> None:
        """A round is over, or given up."""
        for device_id in record.nodes:
            self._end(device_id, record.plan_id)

    def run_over(self, run_id: str) -> None:
        """A run is over."""
        self.free(list(self._commitments), run_id)

    def forget(self, run_ids: Collection[str]) -> None:
        """Let go of what runs that are over had promised."""
        self._commitments = {
            device_id: promise
            for device_id, promise in self._commitments.items()
            if run_of(promise.plan_id) not in run_ids
        }

    def _end(self, device_id: str, plan_id: str) -> None:
        promise = self._commitments.get(device_id)
        if promise is not None and promise.plan_id == plan_id:
            self._commitments[device_id] = replace(promise, is_over=True)
