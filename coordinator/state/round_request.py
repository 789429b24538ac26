"""A round that is to be planned: all that its plan depends on, taken from the fleet at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.state.records import RoundRecord, plan_id_of
from wattfleet.planning import Allowance, History, Offer, Selection, plan_round
from wattfleet.planning.policies import Policy


@dataclass(frozen=True)
class RoundRequest:
    """Nothing in it changes any more, so that any thread may plan it while the fleet goes on.

    Attributes:
        run_id: Flower's run.
        number: from 1.
        epochs: local epochs of each chosen device.
        offers: what the devices that are ready can be planned with.
        nodes: Flower's node id of every device that has one.
        policy: who is chosen.
        allowance: watts of every supply, and what all other devices draw there.
        history: the run's rounds that are over.
        selection: the operator's own say.
        trims: how often rounds in flight had been trimmed before.
    """

    run_id: str
    number: int
    epochs: float
    offers: Sequence[Offer]
    nodes: Mapping[str, int]
    policy: Policy
    allowance: Allowance
    history: History
    selection: Selection
    trims: int

    @property
    def plan_id(self) -> str:
        """The id of the plan that is asked for."""
        return plan_id_of(self.run_id, self.number)

    def planned(self) -> RoundRecord:
        """Plan the round; of ten thousand devices that takes half a second.

        Raises:
            NoCandidatesError: none of those that are ready may be chosen.
            InfeasibleBudgetError: the site's watts carry none.
            InvalidInputError: the number of epochs is not above zero.
        """
        plan = plan_round(
            self.offers, self.policy, self.allowance, self.epochs, self.number, self.history, self.selection
        )
        chosen = {assignment.device_id for assignment in plan.assignments}
        idle_w = sum(self.allowance.elsewhere_w.values())
        idle_w += sum(offer.idle_w for offer in self.offers if offer.device_id not in chosen)
        nodes = {device_id: self.nodes[device_id] for device_id in chosen}
        return RoundRecord(self.plan_id, self.run_id, self.number, self.epochs, plan, nodes, idle_w)
