"""A request for a round's plan: everything that the plan depends on, copied from the fleet at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.errors import NoDevicesError
from coordinator.state.records import RoundRecord, plan_id_of
from wattfleet.errors import InfeasibleBudgetError
from wattfleet.planning import Allowance, Decision, EpochChoice, History, Offer, Selection, plan_round
from wattfleet.planning.policies import Policy


@dataclass(frozen=True)
class RoundRequest:
    """An immutable request, so that another thread can plan the round while the fleet changes.

    Attributes:
        run_id: Flower's run.
        number: from 1.
        epochs: local epochs of each chosen device, or those that the policy may choose.
        offers: the offers of the ready devices.
        nodes: Flower's node id of every device that has one.
        policy: the client-selection policy.
        allowance: watts of every supply, and the watts that all other devices draw there.
        history: the run's finished rounds.
        selection: the operator's rules for client selection.
        not_offered: device id -> why a ready device is not among the offers.
    """

    run_id: str
    number: int
    epochs: float | EpochChoice
    offers: Sequence[Offer]
    nodes: Mapping[str, int]
    policy: Policy
    allowance: Allowance
    history: History
    selection: Selection
    not_offered: Mapping[str, str] = field(default_factory=dict)

    @property
    def plan_id(self) -> str:
        """The id of the requested plan."""
        return plan_id_of(self.run_id, self.number)

    def planned(self) -> RoundRecord:
        """Plan the round; with ten thousand devices this takes half a second.

        Raises:
            NoCandidatesError: none of the ready devices may be chosen.
            NoDevicesError: no device can train with the watts that are left after other runs' shares.
            InfeasibleBudgetError: the site's budget is too small for any device.
            InvalidInputError: the number of epochs is not above zero.
        """
        try:
            plan = plan_round(
                self.offers, self.policy, self.allowance, self.epochs, self.number, self.history, self.selection
            )
        except InfeasibleBudgetError:
            if not any(self.allowance.left_w.values()):
                raise
            raise NoDevicesError("the watts are left to runs that have waited longer; try again later") from None
        if self.not_offered:
            others = (Decision(device_id, False, reason) for device_id, reason in self.not_offered.items())
            decisions = sorted((*plan.decisions, *others), key=lambda decision: decision.device_id)
            plan = replace(plan, decisions=tuple(decisions))
        chosen = {assignment.device_id for assignment in plan.assignments}
        idle_w = sum(self.allowance.elsewhere_w.values())
        idle_w += sum(offer.idle_w for offer in self.offers if offer.device_id not in chosen)
        nodes = {assignment.device_id: self.nodes[assignment.device_id] for assignment in plan.assignments}
        epochs = max(assignment.epochs for assignment in plan.assignments)
        return RoundRecord(self.plan_id, self.run_id, self.number, epochs, plan, nodes, idle_w)
