"""What rounds have committed devices to, from the plan until the training is known to be done."""

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
        assignment: what the device trains in, or will train in; None where it was ordered to stop.
        has_begun: the device was seen training since.
        is_over: nobody waits for the device any more. It may still train: a training cannot be ended from outside.
    """

    plan_id: str
    assignment: Assignment | None
    has_begun: bool = False
    is_over: bool = False

    @property
    def reserved_w(self) -> float:
        """Watts reserved for the device."""
        return 0.0 if self.assignment is None else self.assignment.power_limit_w


class Commitments:
    """The newest commitment of every device."""

    def __init__(self, rounds: Collection[RoundRecord], runs: Mapping[str, RunRecord]) -> None:
        """Start from what a store holds.

        Args:
            rounds: oldest first.
            runs: the runs of these rounds, by id.
        """
        self._commitments: dict[str, Commitment] = {}
        for record in rounds:
            self.commit(record)
            for device_id in record.observations:
                self.release(device_id, record.plan_id)
            if record.wall_s is not None or runs[record.run_id].finished:
                self.release_round(record)

    def of(self, device_id: str) -> Commitment | None:
        """A device's newest commitment; None if no plan ever chose it."""
        return self._commitments.get(device_id)

    def in_flight(self) -> Iterator[tuple[str, Commitment]]:
        """The commitments that are not over, each with its device's id."""
        return ((device_id, each) for device_id, each in self._commitments.items() if not each.is_over)

    def plans_in_flight(self) -> set[str]:
        """The plans with a commitment that is not over."""
        return {commitment.plan_id for _, commitment in self.in_flight()}

    def copy(self) -> Commitments:
        """An independent copy."""
        copied = Commitments((), {})
        copied._commitments.update(self._commitments)  # noqa: SLF001 - an instance of this class
        return copied

    # --- changes ------------------------------------------------------------------------------------------------

    def commit(self, record: RoundRecord) -> None:
        """Commit the devices of a new plan; it replaces their commitments to older plans."""
        assignments = {assignment.device_id: assignment for assignment in record.plan.assignments}
        for device_id in record.nodes:
            self._commitments[device_id] = Commitment(record.plan_id, assignments.get(device_id))

    def reassign(self, device_id: str, assignment: Assignment | None) -> None:
        """Change the assignment of a device in flight; None stops it."""
        self._commitments[device_id] = replace(self._commitments[device_id], assignment=assignment)

    def state_reported(self, device_id: str, state: DeviceState) -> None:
        """Take note of a device's state: one that is ready after training is done."""
        commitment = self._commitments.get(device_id)
        if commitment is None:
            return
        if state is DeviceState.TRAINING:
            self._commitments[device_id] = replace(commitment, has_begun=True)
        elif state is DeviceState.READY and commitment.has_begun:
            self._commitments[device_id] = replace(commitment, is_over=True)

    def release(self, device_id: str, plan_id: str) -> None:
        """End a device's commitment to a plan, unless a newer plan has replaced it."""
        commitment = self._commitments.get(device_id)
        if commitment is not None and commitment.plan_id == plan_id:
            self._commitments[device_id] = replace(commitment, is_over=True)

    def release_from_run(self, device_ids: Collection[str], run_id: str) -> None:
        """End the commitments of some devices to a run, whose Flower server does not wait for them."""
        for device_id in device_ids:
            commitment = self._commitments.get(device_id)
            if commitment is not None and run_of(commitment.plan_id) == run_id:
                self.release(device_id, commitment.plan_id)

    def release_round(self, record: RoundRecord) -> None:
        """End all commitments to a round that is finished or abandoned."""
        for device_id in record.nodes:
            self.release(device_id, record.plan_id)

    def release_run(self, run_id: str) -> None:
        """End all commitments to a run that is finished."""
        self.release_from_run(list(self._commitments), run_id)

    def forget(self, device_ids: Collection[str]) -> None:
        """Remove the commitments of some devices."""
        for device_id in device_ids:
            self._commitments.pop(device_id, None)

    def remove_runs(self, run_ids: Collection[str]) -> None:
        """Remove the commitments to runs that were deleted."""
        self._commitments = {
            device_id: commitment
            for device_id, commitment in self._commitments.items()
            if run_of(commitment.plan_id) not in run_ids
        }
