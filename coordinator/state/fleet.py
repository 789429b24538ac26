"""The fleet as the coordinator knows it: agents, the operator's settings, Flower's runs, and their rounds."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from coordinator.state.agents import Agents
from coordinator.state.flower import FlowerRuns
from coordinator.state.operator import OperatorSettings
from coordinator.state.placement import OnlySite, Placement
from coordinator.state.power_draw import PowerDraw
from coordinator.state.records import (
    DeviceOverrides,
    DeviceRecord,
    Reassignment,
    RoundRecord,
    RunRecord,
)
from coordinator.state.rounds.ledger import RoundLedger
from coordinator.state.rounds.unplanned import UnplannedRounds
from wattfleet.budgets import InForce
from wattfleet.planning import Allowance, InFlight, Offer, Selection, trim_rounds
from wattfleet.planning.policies import Policy
from wattfleet_proto.device_state import DeviceState


class Fleet:
    """All parts of the fleet's state, and the changes that concern several of them.

    Attributes:
        agents: devices, their sessions, states and fronts.
        operator: budgets, tags, drained devices and rules for client selection.
        flower: Flower's nodes and runs, and requests for plans.
        rounds: all planned rounds, with their commitments and results.
        unplanned: the rounds without a plan.
        draw: the watts of every device.
    """

    def __init__(
        self,
        allowance: Allowance,
        policy: Policy,
        devices: Sequence[DeviceRecord] = (),
        nodes: Mapping[int, str] | None = None,
        runs: Sequence[RunRecord] = (),
        rounds: Sequence[RoundRecord] = (),
        archived: Collection[str] = (),
        placement: Placement | None = None,
        selection: Selection | None = None,
        overrides: Sequence[DeviceOverrides] = (),
        unplanned: Iterable[tuple[str, int]] = (),
    ) -> None:
        """Start from what a store holds; no device is connected yet.

        Args:
            allowance: initial watts of every supply.
            policy: the client-selection policy.
            devices: known devices.
            nodes: Flower node id -> device id.
            runs: known runs, oldest first.
            rounds: known rounds, oldest first.
            archived: ids of the runs with rounds that are in the store only.
            placement: which supply each device is behind, and its rules; None where all are behind the only site.
            selection: the operator's rules for client selection.
            overrides: what the operator set for single devices by command.
            unplanned: run and number of each round without a plan.
        """
        placement = placement or OnlySite(allowance.supplies)
        self.rounds = RoundLedger(rounds, {record.run_id: record for record in runs}, archived)
        self.unplanned = UnplannedRounds(unplanned)
        self.agents = Agents(devices, placement, self.rounds)
        self.operator = OperatorSettings(allowance, placement, selection or Selection(), self.agents, overrides)
        self.draw = PowerDraw(self.agents, self.operator, self.rounds.commitments)
        self.flower = FlowerRuns(policy, nodes or {}, runs, self.agents, self.operator, self.rounds, self.draw)

    def copy(self) -> Fleet:
        """An independent copy."""
        copied = copy.copy(self)
        copied.rounds = self.rounds.copy()
        copied.agents = self.agents.copy(copied.rounds)
        copied.operator = self.operator.copy(copied.agents)
        copied.draw = PowerDraw(copied.agents, copied.operator, copied.rounds.commitments)
        copied.flower = self.flower.copy(copied.agents, copied.operator, copied.rounds, copied.draw)
        return copied

    def set_budget(self, supply: str, in_force: InForce) -> tuple[list[RoundRecord], list[Reassignment]]:
        """Change a supply's budget, for rounds planned from now on, and trim the rounds in flight to it.

        Returns:
            The rounds that were trimmed, and the orders to send to their devices.

        Raises:
            InvalidInputError: no such supply, or invalid watts.
        """
        self.operator.set_budget(supply, in_force)
        return self.trim()

    def trim(self) -> tuple[list[RoundRecord], list[Reassignment]]:
        """Trim the rounds in flight to the budgets, where devices draw more than their plans took into account.

        A disconnected device cannot take an order: it counts with what is reserved for it, and the others are planned
        around it.

        Returns:
            The rounds that were trimmed, and the orders to send to their devices.
        """
        self.rounds.trim_count += 1
        trimmed: list[RoundRecord] = []
        reassignments: list[Reassignment] = []
        in_flight = self._offers_in_flight()
        if not in_flight:
            self.rounds.is_trim_due = False
            return trimmed, reassignments
        offered = {offer.device_id for offers in in_flight.values() for offer in offers}
        rounds = [
            InFlight(self.rounds.records[plan_id].plan, self.rounds.records[plan_id].epochs, offers)
            for plan_id, offers in in_flight.items()
        ]
        allowance = replace(self.operator.allowance, elsewhere_w=self.draw.elsewhere_w(offered))
        for plan_id, trim in zip(in_flight, trim_rounds(rounds, allowance), strict=True):
            if trim is None:
                continue
            before = self.rounds.records[plan_id]
            stopped_w = sum(self.agents.devices[device_id].idle_w or 0.0 for device_id in trim.ended)
            record = replace(before, plan=trim.plan, idle_w=before.idle_w + stopped_w)
            reassignments += self.rounds.replace_plan(record, trim.changed + trim.ended)
            trimmed.append(record)
        self.rounds.is_trim_due = False
        return trimmed, reassignments

    def _offers_in_flight(self) -> dict[str, list[Offer]]:
        """What the devices in flight can be planned with, by plan."""
        offers: dict[str, list[Offer]] = {}
        for device_id, commitment in self.rounds.commitments.in_flight():
            device = self.agents.devices.get(device_id)
            # A device that profiles sets its own power modes.
            if commitment.assignment is None or device is None or device.state is DeviceState.PROFILING:
                continue
            if (offer := self.draw.offer_of(device)) is not None:
                offers.setdefault(commitment.plan_id, []).append(offer)
        return offers
