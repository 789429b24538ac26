"""The fleet as the coordinator knows it: a pure state machine, driven by the service and by tests alike.

Every change goes through a method here; each returns the record that changed, for the shell to store. Nothing here
reads a clock, opens a socket or touches a file.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace

from coordinator.errors import NoDevicesError, UnknownRecordError
from coordinator.state.commitments import Commitments
from coordinator.state.latest_results import LatestResults
from coordinator.state.names import require_name, require_tag, shown
from coordinator.state.placement import DeviceRules, OnlySite, Placement
from coordinator.state.records import (
    DeviceOverrides,
    DeviceRecord,
    DeviceResult,
    NodeRecord,
    ObservedTraining,
    Reassignment,
    RoundObservation,
    RoundRecord,
    RunRecord,
    plan_id_of,
    run_of,
)
from coordinator.state.round_cache import RoundCache
from coordinator.state.round_request import RoundRequest
from wattfleet.budgets import InForce
from wattfleet.choosing import Front
from wattfleet.errors import MAX_LISTED, InvalidInputError, first_few
from wattfleet.planning import Allowance, InFlight, Offer, Selection, trim_rounds
from wattfleet.planning.policies import Policy
from wattfleet_proto.device_state import DeviceState

# What devices say of themselves is kept for all of them, so that its size has to be bounded.
_LONGEST_DETAIL = 2_000
_DIGEST = re.compile("([0-9a-f]{64})?")

_IMPLAUSIBLE_W = 1_000.0
"""No board draws as much, Jetsons a tenth at most; one that is believed to leaves no watts to its site."""


class Fleet:
    """All devices, Flower nodes, runs and rounds, and the rules by which they change.

    Attributes:
        memory: of the rounds; one that it lacks has to be recalled before a method here names it.
        may_exceed: more may be drawn than when watts were last looked at: `trim` has to be called.
        newest: what each device was last assigned, and observed to need.
    """

    def __init__(
        self,
        allowance: Allowance,
        policy: Policy,
        devices: Sequence[DeviceRecord] = (),
        nodes: dict[int, str] | None = None,
        runs: Sequence[RunRecord] = (),
        rounds: Sequence[RoundRecord] = (),
        archived: Collection[str] = (),
        placement: Placement | None = None,
        selection: Selection | None = None,
        says: Sequence[DeviceOverrides] = (),
    ) -> None:
        """Start from what a store holds; no device is connected yet.

        Args:
            allowance: watts of every supply to begin with.
            policy: who is chosen.
            devices: known devices.
            nodes: Flower node id -> device id.
            runs: known runs, oldest first.
            rounds: known rounds, oldest first.
            archived: known runs of which rounds are left out.
            placement: where devices hang, and what is stated of them; None where all hang behind the only site.
            selection: the operator's own say in who trains.
            says: what the operator said of single devices since.
        """
        self.allowance = allowance
        self.policy = policy
        self._placement = placement or OnlySite(allowance.supplies)
        self._selection = selection or Selection()
        self.says = {say.device_id: say for say in says}
        self.in_force: dict[str, InForce] = {}
        self.devices = {record.device_id: replace(record, state=DeviceState.OFFLINE) for record in devices}
        self.nodes = dict(nodes or {})
        self.runs = {record.run_id: record for record in runs}
        self.memory = RoundCache(rounds, archived)
        self._connected: set[str] = set()
        self.may_exceed = False
        self._trims = 0
        self._commitments = Commitments(rounds, self.runs)
        self.newest = LatestResults()
        for record in rounds:
            self.newest.assigned(record.plan.assignments)
            self.newest.observed(record, record.observations.values())
            self.newest.evaluated(record)

    @property
    def rounds(self) -> Mapping[str, RoundRecord]:
        """The rounds at hand, by plan id; the newest is the last one."""
        return self.memory.rounds

    @property
    def site_budget_w(self) -> float:
        """Watts of all sites together, as they stand now."""
        return self.allowance.site_budget_w

    def set_budget(self, supply: str, in_force: InForce) -> tuple[list[RoundRecord], list[Reassignment]]:
        """A supply's budget changes: rounds planned from now on keep it, and those in flight are trimmed to it.

        Returns:
            The rounds that had to be trimmed, and what their devices are to be told.

        Raises:
            InvalidInputError: no such supply, or no watts.
        """
        self.allowance = replace(self.allowance, budget_w={**self.allowance.budget_w, supply: in_force.watts})
        self.in_force[supply] = in_force
        return self.trim()

    def trim(self) -> tuple[list[RoundRecord], list[Reassignment]]:
        """Trim the rounds in flight to the watts, where more is drawn than their plans knew of.

        A device that is gone cannot be told anything: it counts with what was set aside for it, and what the others
        are to do is planned around it.

        Returns:
            The rounds that had to be trimmed, and what their devices are to be told.
        """
        self._trims += 1
        flying: dict[str, list[Offer]] = {}
        for device_id, promise in self._commitments.awaited():
            device = self.devices.get(device_id)
            # One that measures itself does as it has to.
            if promise.assignment is None or device is None or device.state is DeviceState.PROFILING:
                continue
            if (offer := self._offer(device)) is not None:
                flying.setdefault(promise.plan_id, []).append(offer)
        if not flying:
            self.may_exceed = False
            return [], []
        rounds = [
            InFlight(self.rounds[plan_id].plan, self.rounds[plan_id].epochs, offers)
            for plan_id, offers in flying.items()
        ]
        elsewhere_w = self._elsewhere_w({offer.device_id for each in rounds for offer in each.offers})
        changed, told = [], []
        trims = trim_rounds(rounds, replace(self.allowance, elsewhere_w=elsewhere_w))
        for plan_id, trim in zip(flying, trims, strict=True):
            if trim is None:
                continue
            record = self.rounds[plan_id]
            assignments = {assignment.device_id: assignment for assignment in trim.plan.assignments}
            for device_id in trim.changed + trim.ended:
                self._commitments.changed(device_id, assignments.get(device_id))
                told.append(Reassignment(device_id, plan_id, assignments.get(device_id)))
            ended_w = sum(self.devices[device_id].idle_w or 0.0 for device_id in trim.ended)
            self.newest.assigned(trim.plan.assignments)
            changed.append(self._put_round(replace(record, plan=trim.plan, idle_w=record.idle_w + ended_w)))
        self.may_exceed = False
        return changed, told

    def standing_order(self, device_id: str) -> Reassignment | None:
        """What a device that is waited for is to do, for one whose session begins: it may have missed an order."""
        promise = self._commitments.of(device_id)
        if promise is None or promise.is_over:
            return None
        return Reassignment(device_id, promise.plan_id, promise.assignment)

    def awaited_rounds(self) -> list[RoundRecord]:
        """The rounds of which some device is waited for."""
        return [self.rounds[plan_id] for plan_id in self._commitments.awaited_plans()]

    def give_up(self, plan_id: str) -> None:
        """Wait no more for the devices of a round whose Flower server has not been heard of for too long.

        Those that train still count as long as they do.

        Raises:
            UnknownRecordError: no such plan.
        """
        self._commitments.round_over(self._round(plan_id))

    # --- agents -------------------------------------------------------------------------------------------------

    def connect(self, device_id: str, board: str, provenance: str, mode_count: int) -> DeviceRecord:
        """A device's session begins, or another takes its place.

        Raises:
            InvalidInputError: no id, or none that can be shown, or the id was enrolled as another kind of board.
        """
        if not device_id or not board or mode_count < 1:
            raise InvalidInputError("a device needs an id, a kind of board and at least one power mode")
        require_name("a device's id", device_id)
        require_name("a device's kind of board", board)
        known = self.devices.get(device_id)
        if known and (known.board, known.provenance) != (board, provenance):
            raise InvalidInputError(
                f"{device_id} was enrolled as {known.provenance} {known.board}, not {provenance} {board}:"
                " give it another id"
            )
        self._placement.supply_of(device_id)  # what is wrong with it concerns this device, not a round's plan
        self._connected.add(device_id)
        self.may_exceed = True
        record = known or DeviceRecord(device_id, board, provenance, mode_count)
        return self._put(replace(record, state=DeviceState.ENROLLED, mode_count=mode_count, detail=""))

    def disconnect(self, device_id: str) -> DeviceRecord:
        """A device's session is gone."""
        self._connected.discard(device_id)
        return self._put(replace(self.device(device_id), state=DeviceState.OFFLINE, detail=""))

    def report_state(self, device_id: str, state: DeviceState, profiled_modes: int, detail: str) -> DeviceRecord:
        """A device says what it is doing."""
        detail = detail[:_LONGEST_DETAIL]
        before = self.device(device_id)
        self.may_exceed |= state is DeviceState.PROFILING and before.state is not state
        self._commitments.seen(device_id, state)
        return self._put(replace(before, state=state, profiled_modes=profiled_modes, detail=detail))

    def report_front(
        self, device_id: str, front: Front, idle_w: float, profiled_modes: int, reference_digest: str
    ) -> DeviceRecord:
        """A device reports its front.

        Raises:
            InvalidInputError: no board draws such watts, or the digest is none.
        """
        Offer(device_id, front, idle_w)  # the planner's own conditions, checked where the report comes in
        for does, watts in (("idles at", idle_w), ("may take", float(front.planned_w[0]))):
            if watts >= _IMPLAUSIBLE_W:
                raise InvalidInputError(
                    f"{device_id} says that it {does} {watts:,.0f} W, which no board does: are its milliwatts told as"
                    " watts? See what it reads with `wattfleet agent doctor`, and let it profile anew"
                )
        if not _DIGEST.fullmatch(reference_digest):
            raise InvalidInputError(
                f"{device_id}: a reference's digest has 64 hexadecimal digits, unlike {shown(reference_digest)}"
            )
        before = self.device(device_id)
        if before.front is not None and before.front.equals(front):
            front = before.front
        after = replace(
            before, front=front, idle_w=idle_w, profiled_modes=profiled_modes, reference_digest=reference_digest
        )
        if front is before.front and after == before:
            return before
        self.may_exceed = True
        return self._put(after)

    def observe(self, plan_id: str, observed: ObservedTraining) -> RoundObservation:
        """A device reports what a round needed; the same report again changes nothing.

        Raises:
            UnknownRecordError: no such plan, or the device is not part of it.
        """
        record = self._round(plan_id)
        if observed.device_id not in record.nodes:
            raise UnknownRecordError(f"{observed.device_id} is not part of plan {plan_id}")
        kept = record.observations.get(observed.device_id)
        if kept is None:
            kept = observed
            self._commitments.observed(observed.device_id, plan_id)
            observations = {**record.observations, observed.device_id: observed}
            self.newest.observed(self._put_round(replace(record, observations=observations)), [observed])
        return RoundObservation(plan_id, kept)

    # --- Flower -------------------------------------------------------------------------------------------------

    def bind_node(self, node_id: int, device_id: str) -> NodeRecord:
        """Tie one of Flower's nodes to a device, whose agent may connect later.

        Raises:
            InvalidInputError: no device can have such an id.
        """
        require_name("a device's id", device_id)
        self.nodes[node_id] = device_id
        return NodeRecord(node_id, device_id)

    def start_run(self, run_id: str, strategy: str, rounds: int) -> RunRecord:
        """A Flower run begins."""
        return self._put_run(RunRecord(run_id, strategy, rounds))

    def finish_run(self, run_id: str, error: str) -> RunRecord:
        """A Flower run is over."""
        record = replace(self.run(run_id), error=error[:_LONGEST_DETAIL], finished=True)
        self._commitments.run_over(run_id)
        self.memory.run_over(run_id)
        return self._put_run(record)

    def plan(self, run_id: str, number: int, node_ids: Sequence[int], epochs: float) -> RoundRecord:
        """Plan a round over the devices behind the given nodes that are ready; asked again, the same plan.

        A device that another run waits for is not ready. The Flower server of this run names only nodes that it does
        not wait for.

        The idle watts of every connected device that has reported them count against the budgets; of one that is
        waited for, or still trains, what was set aside for it; of one that measures itself anew, what its hungriest
        mode takes. What a device draws that has not reported any, because it still profiles, is not known and not
        counted; nor is one that is gone, unless it is waited for.

        Raises:
            NoDevicesError: none is ready; the text says what every device does.
            NoCandidatesError: none of those that are ready may be chosen.
            InfeasibleBudgetError: the site's watts carry none.
        """
        if self.is_planned(run_id, number):
            return self._round(plan_id_of(run_id, number))
        request = self.request_round(run_id, number, node_ids, epochs)
        return self.take_plan(request, request.planned())

    def request_round(self, run_id: str, number: int, node_ids: Sequence[int], epochs: float) -> RoundRequest:
        """All that a plan depends on, as it is now: see `plan`, which asks, plans and takes the plan at once.

        Requests are to be planned one after another, since a plan counts on what the one before it set aside.

        Raises:
            UnknownRecordError: no such run.
            NoDevicesError: none is ready; the text says what every device does.
            InvalidInputError: several nodes say that they are the same device.
        """
        self.run(run_id)
        known = [node_id for node_id in node_ids if node_id in self.nodes]
        nodes = {self.nodes[node_id]: node_id for node_id in known}
        if len(nodes) < len(known):
            twice = sorted({self.nodes[n] for n in known if n not in nodes.values()})
            raise InvalidInputError(
                f"several connected nodes say that they are {first_few(twice)}: give each SuperNode its own device-id"
            )
        offers = [
            offer
            for device in self.devices.values()
            if device.state is DeviceState.READY
            and device.device_id in nodes
            and self._round_elsewhere(device.device_id, run_id) is None
            and (offer := self._offer(device)) is not None
        ]
        elsewhere_w = self._elsewhere_w({offer.device_id for offer in offers})
        if all(self.say_of(offer.device_id).drained for offer in offers):
            raise NoDevicesError(f"no device is ready to train: {self._occupations(run_id)}")
        return RoundRequest(
            run_id,
            number,
            epochs,
            offers,
            nodes,
            self.policy,
            replace(self.allowance, elsewhere_w=elsewhere_w),
            self.memory.history(run_id),
            self._selection_now(),
            self._trims,
        )

    def take_plan(self, request: RoundRequest, record: RoundRecord) -> RoundRecord:
        """A round that was requested is planned: from now on its devices and watts are promised.

        Args:
            request: what was asked for.
            record: what came of it.
        """
        # The watts were looked at meanwhile, without this round.
        self.may_exceed |= self._trims != request.trims
        self._commitments.free([offer.device_id for offer in request.offers], request.run_id)
        self._commitments.made(record)
        self.newest.assigned(record.plan.assignments)
        return self._put_round(record)

    def finish_round(self, plan_id: str, results: Sequence[DeviceResult], wall_s: float) -> RoundRecord:
        """The Flower server has all replies of a round that it will get.

        Raises:
            UnknownRecordError: no such plan, or a device is not part of it.
            InvalidInputError: a round cannot have taken so long.
        """
        record = self._round(plan_id)
        if not 0 <= wall_s < math.inf:
            raise InvalidInputError(f"a round takes 0 s or more, not {wall_s}")
        for result in results:
            if result.device_id not in record.nodes:
                raise UnknownRecordError(f"{result.device_id} is not part of plan {plan_id}")
        self._commitments.round_over(record)
        record = self._put_round(replace(record, results=tuple(results), wall_s=wall_s))
        self.memory.round_over(record)
        return record

    def report_metrics(self, run_id: str, number: int, metrics: dict[str, float]) -> RunRecord | RoundRecord:
        """The strategy reports what it evaluated after a round; round 0 is before the first.

        Raises:
            UnknownRecordError: no such run or round.
            InvalidInputError: a metric's name is none.
        """
        for name in metrics:
            require_name("a metric's name", name)
        if number == 0:
            return self._put_run(replace(self.run(run_id), initial_metrics=metrics))
        record = self._round(plan_id_of(run_id, number))
        record = self._put_round(replace(record, metrics={**record.metrics, **metrics}))
        self.newest.evaluated(record)
        return record

    def is_planned(self, run_id: str, number: int) -> bool:
        """Whether a round has its plan already."""
        return plan_id_of(run_id, number) in self.rounds

    def dispensable_rounds(self) -> list[str]:
        """The rounds that can be let go of once they are stored: nobody is waited for, and others were used since."""
        return self.memory.dispensable(self._commitments.awaited_plans())

    def forget(self, run_ids: Collection[str]) -> None:
        """Let go of runs that are over, and of their rounds, as the store has."""
        for run_id in run_ids:
            self.runs.pop(run_id, None)
        self.memory.forget(run_ids)
        self._commitments.forget(run_ids)

    def _round_elsewhere(self, device_id: str, run_id: str) -> str | None:
        """The plan of another run that waits for a device."""
        promise = self._commitments.of(device_id)
        if promise is None or promise.is_over or run_of(promise.plan_id) == run_id:
            return None
        return promise.plan_id

    def _occupations(self, run_id: str) -> str:
        """What keeps devices from a run's round, in words; of more than a few, how many are in which state."""
        if not self.devices:
            return "none ever connected"
        told = [f"{each.device_id} is {self.occupation(each, run_id)}" for each in self.devices.values()]
        if len(told) <= MAX_LISTED:
            return first_few(told)
        counts = Counter(device.state.value for device in self.devices.values()).most_common()
        return f"{', '.join(f'{count:,} are {state}' for state, count in counts)}: {first_few(told)}"

    def occupation(self, device: DeviceRecord, run_id: str) -> str:
        """What keeps a device from a run's round, in words."""
        elsewhere = self._round_elsewhere(device.device_id, run_id)
        occupation = device.state.value if elsewhere is None else f"{device.state.value}, and part of round {elsewhere}"
        return f"{occupation}, and drained" if self.say_of(device.device_id).drained else occupation

    def _offer(self, device: DeviceRecord) -> Offer | None:
        """What a device can be planned with; None while it is gone or has reported no front."""
        if device.front is None or device.idle_w is None or device.device_id not in self._connected:
            return None
        rules = self._placement.rules_of(device.device_id)
        supply = self._placement.supply_of(device.device_id)
        tags = rules.tags | self.say_of(device.device_id).tags
        return Offer(device.device_id, device.front, device.idle_w, supply, rules.limit_w, tags)

    def _elsewhere_w(self, offered: Set[str]) -> dict[str, float]:
        """What devices that are not offered to a round draw at each supply."""
        elsewhere_w = dict.fromkeys(self.allowance.supplies.names, 0.0)
        for device in self.devices.values():
            if device.device_id in offered or not (drawn_w := self._drawn_w(device)):
                continue
            try:
                elsewhere_w[self._placement.supply_of(device.device_id)] += drawn_w
            except InvalidInputError:
                # Gone since before a restart, and nobody says any more where it hangs: it was refused if it came back.
                continue
        return elsewhere_w

    def _drawn_w(self, device: DeviceRecord) -> float:
        """What a device that is not offered to a round draws meanwhile, as far as it is known."""
        promise = self._commitments.of(device.device_id)
        # Flower takes some seconds to start what was planned, and does not end what was given up.
        is_on = promise is not None and (not promise.is_over or device.state is DeviceState.TRAINING)
        set_aside_w = promise.set_aside_w if promise is not None and is_on else 0.0
        if device.device_id not in self._connected or device.front is None or device.idle_w is None:
            return set_aside_w
        measuring_w = float(device.front.planned_w[0]) if device.state is DeviceState.PROFILING else 0.0
        return max(set_aside_w, measuring_w, device.idle_w)

    # --- the operator -------------------------------------------------------------------------------------------

    def tag(self, device_ids: Collection[str], add: Set[str], remove: Set[str]) -> list[DeviceOverrides]:
        """Give devices tags beside those of the site file, and take such tags from them: from all, or from none.

        Raises:
            UnknownRecordError: a device never connected.
            InvalidInputError: a tag is no word, is both given and taken, or is one of the site file's.
        """
        for word in add:  # what older versions took for a tag can be removed
            require_tag(word)
        if both := add & remove:
            raise InvalidInputError(f"{', '.join(sorted(both))}: either add a tag or remove it")
        says = []
        for device_id in dict.fromkeys(device_ids):
            say = self.say_of(self.device(device_id).device_id)
            if stated := remove & self._placement.rules_of(device_id).tags:
                raise InvalidInputError(
                    f"{device_id} is tagged {', '.join(sorted(stated))} in the site file: remove it there"
                )
            says.append(replace(say, tags=(say.tags | add) - remove))
        return self._put_says(says)

    def drain(self, device_ids: Collection[str], is_drained: bool = True) -> list[DeviceOverrides]:
        """Choose devices for no new round, or do so again; what they train they finish.

        Raises:
            UnknownRecordError: a device never connected; none is changed.
        """
        ids = [self.device(device_id).device_id for device_id in dict.fromkeys(device_ids)]
        return self._put_says([replace(self.say_of(device_id), drained=is_drained) for device_id in ids])

    def say_of(self, device_id: str) -> DeviceOverrides:
        """What the operator said of a device."""
        return self.says.get(device_id) or DeviceOverrides(device_id)

    def _put_says(self, says: list[DeviceOverrides]) -> list[DeviceOverrides]:
        self.says.update({say.device_id: say for say in says})
        return says

    def _selection_now(self) -> Selection:
        drained = frozenset(device_id for device_id, say in self.says.items() if say.drained)
        return replace(self._selection, drained=drained)

    # --- looking ------------------------------------------------------------------------------------------------

    def copy(self) -> Fleet:
        """A fleet that goes its own way from here: what is changed in one is not changed in the other."""
        copied = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (dict, set, Commitments, LatestResults, RoundCache)):
                setattr(copied, name, value.copy())
        return copied

    def placement_of(self, device_id: str) -> tuple[str, DeviceRules]:
        """The supply that a device hangs behind, empty where that cannot be told, and what is stated of it."""
        try:
            supply = self._placement.supply_of(device_id)
        except InvalidInputError:
            supply = ""
        return supply, self._placement.rules_of(device_id)

    def set_aside_w(self) -> dict[str, float]:
        """Watts that are set aside at every supply now, for trainings and for idling devices behind it."""
        allowance = replace(self.allowance, elsewhere_w=self._elsewhere_w(frozenset()))
        return {use.supply: use.planned_w for use in allowance.use([], {})}

    def device(self, device_id: str) -> DeviceRecord:
        """One device.

        Raises:
            UnknownRecordError: it never connected.
        """
        if device_id not in self.devices:
            raise UnknownRecordError(f"no device {device_id!r} ever connected; is its agent running?")
        return self.devices[device_id]

    def run(self, run_id: str) -> RunRecord:
        """One run.

        Raises:
            UnknownRecordError: it never started.
        """
        if run_id not in self.runs:
            raise UnknownRecordError(f"run {run_id!r} never started")
        return self.runs[run_id]

    def rounds_of(self, run_id: str) -> list[RoundRecord]:
        """The rounds of a run that are at hand, in the order they were planned."""
        return self.memory.of_run(run_id)

    def _round(self, plan_id: str) -> RoundRecord:
        if plan_id not in self.rounds:
            raise UnknownRecordError(f"no round was planned as {plan_id!r}")
        self.memory.use(plan_id)
        return self.rounds[plan_id]

    def _put(self, record: DeviceRecord) -> DeviceRecord:
        self.devices[record.device_id] = record
        return record

    def _put_run(self, record: RunRecord) -> RunRecord:
        self.runs[record.run_id] = record
        return record

    def _put_round(self, record: RoundRecord) -> RoundRecord:
        return self.memory.put(record)
