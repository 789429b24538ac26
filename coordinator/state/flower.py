"""The Flower part of the fleet's state: nodes, runs, and requests for a round's plan."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from coordinator.errors import NoDevicesError, NotRunOwnerError, QuotaExceededError, RunEndedError, UnknownRecordError
from coordinator.state.agents import Agents
from coordinator.state.contention import Contention
from coordinator.state.energy import EnergyAccounts
from coordinator.state.measuring import MeasuringPlan, MeasuringRequest, survey_of, unmeasured_of
from coordinator.state.names import LONGEST_NAME, distinct_run_name, require_metrics, require_name
from coordinator.state.operator import OperatorSettings
from coordinator.state.power_draw import PowerDraw
from coordinator.state.records import (
    LONGEST_TEXT,
    DeviceRecord,
    NodeRecord,
    RoundRecord,
    RunRecord,
    plan_id_of,
    run_of,
)
from coordinator.state.rounds.ledger import RoundLedger, RoundRequest
from coordinator.state.stores import SharedEnergy
from coordinator.state.workload_fronts import UNNAMED
from wattfleet.core.budgets import require_joules
from wattfleet.core.errors import MAX_LISTED, InvalidInputError, first_few
from wattfleet.core.modes import Workload
from wattfleet.core.planning import EnergyStores, EpochChoice, Offer
from wattfleet.core.planning.policies import AllDevices, Policy
from wattfleet_proto.device_state import DeviceState, GrantPhase
from wattfleet_proto.names import plan_in_words

# --- Pairing ----------------------------------------------------------------------------------------------------------
# How Flower's nodes are paired with their devices: a SuperNode may not reach the agent of the device that it names.


@dataclass(frozen=True)
class PairedDevices:
    """The devices of the given nodes.

    Attributes:
        nodes: device id -> the node through which it can train.
        unpaired: device id -> why it cannot train through any of these nodes, with the remedy.
    """

    nodes: Mapping[str, int]
    unpaired: Mapping[str, str]


@dataclass
class NodePairings:
    """The known pairing of each node.

    Attributes:
        problems: node id -> why it cannot train on its device, with the remedy; empty if the node reached the device's
            agent. Nodes that were not checked are absent.
        connected_at: node id -> when a Flower app last reported it as connected.
    """

    problems: dict[int, str] = field(default_factory=dict)
    connected_at: dict[int, datetime] = field(default_factory=dict)

    def note(self, node_id: int, problem: str | None) -> None:
        """Record a node's check result; None if it was not checked."""
        if problem is None:
            self.problems.pop(node_id, None)
        else:
            self.problems[node_id] = problem

    def connected(self, node_ids: Iterable[int], at: datetime) -> None:
        """Record that a Flower app reported the given nodes as connected."""
        self.connected_at.update(dict.fromkeys(node_ids, at))

    def keep(self, node_ids: Mapping[int, str]) -> None:
        """Forget all nodes except the given ones."""
        self.problems = {node: problem for node, problem in self.problems.items() if node in node_ids}
        self.connected_at = {node: at for node, at in self.connected_at.items() if node in node_ids}

    def paired(self, devices: Mapping[int, str]) -> PairedDevices:
        """Return the devices that can train through one of the connected nodes.

        Args:
            devices: node id -> device id.
        """
        nodes: dict[str, int] = {}
        unpaired = {device: problem for node, device in devices.items() if (problem := self.problems.get(node))}
        counts: dict[str, int] = {}
        for node, device in devices.items():
            if not self.problems.get(node):
                nodes[device] = node
                counts[device] = counts.get(device, 0) + 1
        for device, count in counts.items():
            unpaired.pop(device, None)
            if count > 1:
                del nodes[device]
                unpaired[device] = shared_device(count)
        return PairedDevices(nodes, unpaired)

    def all_problems(self, devices: Mapping[int, str]) -> dict[int, str]:
        """Return `problems`, plus the nodes whose device another connected SuperNode names as well.

        Args:
            devices: device id of every known node.
        """
        together: dict[tuple[str, datetime], list[int]] = {}
        for node, device in devices.items():
            if node in self.connected_at and not self.problems.get(node):
                together.setdefault((device, self.connected_at[node]), []).append(node)
        shared = {node: shared_device(len(nodes)) for nodes in together.values() if len(nodes) > 1 for node in nodes}
        return self.problems | shared


def shared_device(count: int) -> str:
    """The reason why a device cannot train if several connected SuperNodes name it."""
    return (
        f"{count} connected SuperNodes name it: give each SuperNode its own device-id. A SuperNode that was restarted"
        " is listed twice for about a minute"
    )


# --- Run owners -------------------------------------------------------------------------------------------------------
# A run's owner: the app that started it.
#
# The app proves its identity with a token and, over TLS, with its certificate. Only a hash of both is kept.


def owner_of(token: str, peer: str = "") -> str:
    """The owner to store with a run: a hexadecimal SHA-256; empty without a token and a certificate.

    Args:
        token: the app's token.
        peer: the id in the app's certificate; empty without one.

    Raises:
        InvalidInputError: the token is too long.
    """
    if len(token) > LONGEST_NAME:
        raise InvalidInputError(f"a run's token must have at most {LONGEST_NAME} characters, not {len(token):,}")
    proof = f"{peer}\n{token}" if peer else token
    return hashlib.sha256(proof.encode(errors="replace")).hexdigest() if proof else ""


def require_owner(run_id: str, owner: str, token: str, peer: str = "") -> None:
    """Check that a request about a run comes from its owner; a run without an owner accepts any request.

    A run that was started in plaintext belongs to whoever has its token, so that it can continue over TLS.

    Raises:
        NotRunOwnerError: the request has another token or certificate, or none.
        InvalidInputError: the token is too long.
    """
    proofs = {owner_of(token), owner_of(token, peer)} - {""}
    if owner and not any(hmac.compare_digest(owner, proof) for proof in proofs):
        raise NotRunOwnerError(
            f"run {run_id!r} was started by another app: only that app can plan, report and finish its rounds; start a "
            "run of your own"
        )


# --- Flower -----------------------------------------------------------------------------------------------------------


class FlowerRuns:
    """Flower's nodes and runs, and the plans of their rounds. Each change returns the record to store.

    Attributes:
        policy: the client-selection policy.
        nodes: Flower node id -> device id, in the order in which the nodes were bound.
        runs: known runs by id, oldest first.
        contention: how runs share devices and watts.
        pairings: whether nodes can train on their devices.
        energy: the accounts of runs with an energy budget.
        stores: the batteries, and the energy budgets of supplies.
    """

    def __init__(
        self,
        policy: Policy,
        nodes: Mapping[int, str],
        runs: Sequence[RunRecord],
        agents: Agents,
        operator: OperatorSettings,
        rounds: RoundLedger,
        draw: PowerDraw,
        contention: Contention,
        stores: SharedEnergy,
        pairings: NodePairings | None = None,
        energy: EnergyAccounts | None = None,
    ) -> None:
        """Start from what a store holds.

        Args:
            policy: the client-selection policy.
            nodes: Flower node id -> device id.
            runs: known runs, oldest first.
            agents: the devices to choose from.
            operator: budgets and rules for client selection.
            rounds: all rounds.
            draw: what each device can be planned with.
            contention: how runs share devices and watts.
            stores: the batteries, and the energy budgets of supplies.
            pairings: whether nodes can train on their devices; None if this is unknown.
            energy: the accounts of runs with an energy budget; None if there are none.
        """
        self.energy = energy or EnergyAccounts()
        self.stores = stores
        self.policy = policy
        self.contention = contention
        self.nodes = dict(nodes)
        self.pairings = pairings or NodePairings()
        self.runs = {record.run_id: record for record in runs}
        self._agents = agents
        self._operator = operator
        self._rounds = rounds
        self._draw = draw

    def run(self, run_id: str) -> RunRecord:
        """Get one run.

        Raises:
            UnknownRecordError: the run never started.
        """
        if run_id not in self.runs:
            raise UnknownRecordError(f"unknown run {run_id!r}: it never started")
        return self.runs[run_id]

    def name_of(self, run_id: str) -> str:
        """What people call a run; its id if the run is unknown."""
        return self.runs[run_id].name if run_id in self.runs else run_id

    def round_text(self, plan_id: str) -> str:
        """A round in words, such as "round 3 of run digits-0714-1532", or a run's measurements."""
        return plan_in_words(plan_id, self.name_of(run_of(plan_id)))

    def workload_of(self, run_id: str) -> str:
        """The name of a run's workload; empty if the run is unknown."""
        return self.runs[run_id].workload.name if run_id in self.runs else ""

    def live_workloads(self) -> list[Workload]:
        """The workloads of all runs that have not ended, those of the newest runs first, without duplicates."""
        live = [run.workload for run in reversed(self.runs.values()) if not run.finished]
        named: dict[str, Workload] = {}
        for workload in live:
            named.setdefault(workload.name, workload)
        return list(named.values())

    def is_planned(self, run_id: str, number: int) -> bool:
        """Whether a round has its plan already."""
        return plan_id_of(run_id, number) in self._rounds.records

    def occupation(self, device: DeviceRecord, run_id: str) -> str:
        """Describe what a device is doing that may keep it out of a run's round."""
        other_plan = self._plan_of_other_run(device.device_id, run_id)
        text = device.state.value
        if other_plan is not None:
            text += f", and part of {self.round_text(other_plan)}"
        if other_plan is None and device.state is DeviceState.READY and self._rounds.grants.may_train(device.device_id):
            text += ", but has not confirmed yet that its last training is over"
        left_out = self._agents.claims.exclusion_reason(device, self.workload_of(run_id))
        has_front = device.front_for(self.workload_of(run_id)) is not None
        if device.state is DeviceState.READY and left_out is None and not has_front:
            text += f", but {_no_prediction(self.workload_of(run_id))}"
        if self._operator.overrides_of(device.device_id).drained:
            text += ", and drained"
        return text if left_out is None else f"{text}, and left out: {left_out}"

    # --- nodes and runs -----------------------------------------------------------------------------------------

    def bind_node(self, node_id: int, device_id: str, pairing_problem: str | None = None) -> NodeRecord:
        """Bind one of Flower's nodes to a device, whose agent may connect later.

        Args:
            node_id: the node.
            device_id: the device that its SuperNode names.
            pairing_problem: why it cannot train there, with the remedy; empty if the node reached the device's agent,
                None if this was not checked.

        Raises:
            InvalidInputError: the device id is not printable.
        """
        require_name("a device's id", device_id)
        problem = None if pairing_problem is None else pairing_problem[:LONGEST_TEXT]
        self.nodes.pop(node_id, None)
        self.nodes[node_id] = device_id
        self.pairings.note(node_id, problem)
        return NodeRecord(node_id, device_id, problem)

    def paired(self, node_ids: Iterable[int]) -> PairedDevices:
        """Return the devices that can train through one of the connected nodes, and why others cannot."""
        return self.pairings.paired({node: self.nodes[node] for node in node_ids if node in self.nodes})

    def forget(self, device_ids: Collection[str]) -> None:
        """Remove the bindings of some devices' nodes."""
        self.nodes = {node: device for node, device in self.nodes.items() if device not in device_ids}
        self.pairings.keep(self.nodes)

    def start_run(
        self,
        run_id: str,
        strategy: str,
        rounds: int,
        token: str = "",
        workload: Workload | None = None,
        peer: str = "",
        name: str = "",
        labels: Mapping[str, str] | None = None,
        needs_all: bool = False,
        energy_budget_j: float | None = None,
    ) -> RunRecord:
        """Start a Flower run, or continue one that was started with the same token.

        Args:
            run_id: Flower's id.
            strategy: name of the wrapped strategy.
            rounds: number of requested rounds.
            token: proves that later requests come from the same app.
            workload: its workload in new rounds; None if the app does not state it.
            peer: the id in the app's certificate; empty without one.
            name: what people call a new run, with a number if another run has this name; empty for its id.
            labels: words by which people find it; None for those that it has.
            needs_all: whether its strategy needs the update of every device.
            energy_budget_j: joules above idle that its trainings may draw; None without an energy budget. A run that
                continues keeps what it has spent.

        Raises:
            NotRunOwnerError: another app has started a run of this id.
            InvalidInputError: the token is too long, the joules are not finite and above 0, or the run exists with an
                energy budget and none is given, or the other way round.
        """
        if energy_budget_j is not None:
            require_joules("an energy budget", energy_budget_j)
        if run_id not in self.runs:
            owner = owner_of(token, peer)
            distinct = distinct_run_name(name or run_id, {each.name for each in self.runs.values()})
            return self._put(
                RunRecord(
                    run_id,
                    strategy,
                    rounds,
                    owner=owner,
                    workload=workload or UNNAMED,
                    name=distinct,
                    labels=dict(labels or {}),
                    needs_all=needs_all,
                    energy_budget_j=energy_budget_j,
                )
            )
        self.require_owner(run_id, token, peer)
        before = self.runs[run_id]
        if (before.energy_budget_j is None) != (energy_budget_j is None):
            raise InvalidInputError(
                f"run {before.name} was started {'without' if before.energy_budget_j is None else 'with'} an energy"
                " budget, which it must keep when it continues: keep energy_budget as it was, or start a new run"
            )
        return self._put(
            replace(
                before,
                strategy=strategy,
                rounds=rounds,
                error="",
                finished=False,
                workload=workload or before.workload,
                labels=before.labels if labels is None else dict(labels),
                needs_all=needs_all,
                energy_budget_j=energy_budget_j,
            )
        )

    def require_room(self, run_id: str, max_live: int) -> None:
        """Check that another run may start.

        Raises:
            QuotaExceededError: the most runs allowed have not ended yet.
        """
        if run_id in self.runs and not self.runs[run_id].finished:
            return
        if sum(not record.finished for record in self.runs.values()) >= max_live:
            raise QuotaExceededError(
                f"{max_live:,} runs have not ended, which is the limit: end some with `wattfleet coordinator delete RUN"
                " --end`, or raise the coordinator's setting rounds.max_live_runs"
            )

    def require_owner(self, run_id: str, token: str, peer: str = "") -> None:
        """Check that a request about a run comes from the app that started it.

        Raises:
            UnknownRecordError: the run never started.
            NotRunOwnerError: another app has started it.
            InvalidInputError: the token is too long.
        """
        require_owner(run_id, self.run(run_id).owner, token, peer)

    def require_live(self, run_id: str) -> None:
        """Check that a run has not ended, before one of its rounds is planned.

        Raises:
            UnknownRecordError: the run never started.
            RunEndedError: it has ended, for example because an operator ended it.
        """
        record = self.run(run_id)
        if record.finished:
            reason = f": {record.error}" if record.error else ""
            raise RunEndedError(f"run {self.name_of(run_id)!r} has ended, start another run{reason}")

    def finish_run(self, run_id: str, error: str) -> RunRecord:
        """Finish a Flower run and release its devices; a run that has ended before keeps its reason.

        Raises:
            UnknownRecordError: the run never started.
        """
        return self.finish_runs([run_id], error)[0]

    def finish_runs(self, run_ids: Collection[str], error: str) -> list[RunRecord]:
        """Finish Flower runs and release their devices, in one pass over all devices.

        Raises:
            UnknownRecordError: one of them never started; none is finished.
        """
        known = [self.run(run_id) for run_id in run_ids]
        records = [
            each if each.finished else replace(each, error=error[:LONGEST_TEXT], finished=True) for each in known
        ]
        self._rounds.runs_finished(set(run_ids))
        self.contention.waiting.served(run_ids)
        return [self._put(record) for record in records]

    def report_metrics(self, run_id: str, number: int, metrics: dict[str, float]) -> RunRecord | RoundRecord:
        """Add the metrics that the strategy evaluated after a round; round 0 is before the first.

        Raises:
            UnknownRecordError: the run or the round does not exist.
            InvalidInputError: the round has too many metrics, or the name of one is not printable.
        """
        known = self._rounds.get(plan_id_of(run_id, number)).metrics if number else {}
        require_metrics(run_id, number, metrics, known)
        if number == 0:
            return self._put(replace(self.run(run_id), initial_metrics=metrics))
        return self._rounds.report_metrics(plan_id_of(run_id, number), metrics)

    def remove_runs(self, run_ids: Collection[str]) -> None:
        """Remove runs that were deleted from the store, with their rounds."""
        self.contention.waiting.served(run_ids)
        self.energy.remove_runs(run_ids)
        for run_id in run_ids:
            self.runs.pop(run_id, None)
        self._rounds.remove_runs(run_ids)

    # --- plans --------------------------------------------------------------------------------------------------

    def plan(self, run_id: str, number: int, node_ids: Sequence[int], epochs: float | EpochChoice) -> RoundRecord:
        """Plan a round over the ready devices behind the given nodes; a repeated request returns the same plan.

        A device is ready once its previous grant is over. The Flower server of this run names only nodes that it does
        not wait for, and `release` ends their grants.

        Raises:
            UnknownRecordError: the run does not exist.
            NoDevicesError: no device is ready; the message lists what every device is doing.
            NoCandidatesError: none of the ready devices may be chosen.
            InfeasibleBudgetError: the site's budget is too small for any device.
            EnergySpentError: what is left of the run's energy budget does not suffice for any device.
        """
        if self.is_planned(run_id, number):
            return self._rounds.get(plan_id_of(run_id, number))
        request = self.request_round(run_id, number, node_ids, epochs)
        return self.accept_plan(request, request.planned())

    def request_round(
        self, run_id: str, number: int, node_ids: Sequence[int], epochs: float | EpochChoice
    ) -> RoundRequest:
        """Collect all that a round's plan depends on now; `plan` requests, plans and accepts in one step.

        Plan requests one at a time, because each plan depends on what the previous one reserved.

        Raises:
            UnknownRecordError: the run does not exist.
            NoDevicesError: no device is ready; the message lists what every device is doing.
        """
        workload = self.run(run_id).workload.name
        paired = self.paired(node_ids)
        nodes = paired.nodes
        ready = self._ready(nodes)
        found = self._offers(ready, workload)
        if all(self._operator.overrides_of(offer.device_id).drained for offer in found):
            raise NoDevicesError(f"no device is ready to train: {self._occupations(run_id, paired)}")
        share = self.contention.waiting.share_of(run_id, self._live())
        not_offered = share.leaves(_fastest_first(found), self.name_of) if share.ahead else {}
        offers = [offer for offer in found if offer.device_id not in not_offered]
        if not offers:
            raise NoDevicesError(f"no device is left for the run: {next(iter(not_offered.values()))}; try again later")
        if len(found) < len(ready):
            offered = {offer.device_id for offer in found}
            unknown = [device.device_id for device in ready if device.device_id not in offered]
            left_out = self._agents.left_out(workload)
            not_offered.update({each: left_out.get(each, _no_prediction(workload)) for each in unknown})
        not_offered.update({each: why for each, why in paired.unpaired.items() if each in self._agents.devices})
        elsewhere_w = self._draw.elsewhere_w({offer.device_id for offer in offers})
        allowance = replace(self._operator.allowance, elsewhere_w=elsewhere_w)
        return RoundRequest(
            run_id,
            number,
            epochs,
            offers,
            nodes,
            AllDevices() if self.run(run_id).needs_all else self.policy,
            self.contention.leave(run_id, share, allowance, offers) if share.ahead else allowance,
            self._rounds.cache.history(run_id),
            replace(self._operator.selection, left_out=self._agents.left_out(workload)),
            not_offered,
            self.energy.left(self.run(run_id), number),
            self._stores(nodes),
        )

    def _stores(self, device_ids: Collection[str]) -> EnergyStores | None:
        """What limits the energy of a round besides its run's budget; None if nothing does."""
        if self.stores.is_empty:
            return None
        idle_w, in_flight = self._draw.idle_of_devices_w(), self._rounds.grants.plans_of_trainings()
        return self.stores.stores(device_ids, idle_w, in_flight)

    def request_measuring(
        self, run_id: str, node_ids: Sequence[int], epochs: float, modes: int, survey_s: float | None
    ) -> MeasuringRequest:
        """Collect what decides which devices measure now, outside of the run's rounds.

        Args:
            run_id: the run.
            node_ids: nodes that are connected and free.
            epochs: local epochs of a training that goes on to its end.
            modes: number of modes that each device should measure.
            survey_s: only devices that do not know the run's workload measure, each a few modes, and begin no further
                measurement after these seconds; None for all devices, until they are stopped.

        Raises:
            UnknownRecordError: the run does not exist.
            RunEndedError: the run has ended.
        """
        self.require_live(run_id)
        workload = self.workload_of(run_id)
        nodes = self.paired(node_ids).nodes
        offers = self._offers(self._ready(nodes), workload)
        not_ready = nodes.keys() - {offer.device_id for offer in offers}
        not_ready -= self._operator.exclusion_reasons(not_ready & self._agents.devices.keys(), workload).keys()
        predicting = set(filter(self._agents.is_connected, self._unpredicted(not_ready, workload)))
        excluded = self._operator.exclusion_reasons([offer.device_id for offer in offers], workload)
        offers = [offer for offer in offers if offer.device_id not in excluded]
        if not self.stores.is_empty:
            # Nothing is set aside for measurements, so devices with limited energy measure in rounds only.
            limited = {offer.device_id for offer in offers if self.stores.is_limited(offer.device_id)}
            offers = [offer for offer in offers if offer.device_id not in limited]
            not_ready, predicting = (
                {each for each in found if not self.stores.is_limited(each)} for found in (not_ready, predicting)
            )
        if survey_s is None and self.energy.of(run_id) is not None:
            offers, not_ready, predicting = [], set(), set()  # its joules are for rounds, in which devices measure, too
        if survey_s is None:
            rounds_s = [each.plan.duration_s for each in self._rounds.awaited() if each.run_id == run_id]
            measuring = unmeasured_of(offers, modes, rounds_s)
        else:
            measuring = survey_of(offers, self._agents.devices, survey_s, self._measured(workload))
        offers = [offer for offer in offers if offer.device_id in measuring]
        elsewhere_w = self._draw.elsewhere_w(measuring.keys())
        allowance = replace(self._operator.allowance, elsewhere_w=elsewhere_w)
        request = MeasuringRequest(epochs, offers, measuring, nodes, allowance, len(not_ready), len(predicting))
        if survey_s is None or self.energy.of(run_id) is None:
            return request
        idle_w = {offer.device_id: offer.idle_w for offer in offers}
        return replace(request, affordable=partial(self.energy.affordable, self.run(run_id), survey_s, idle_w=idle_w))

    def _measured(self, workload: str) -> set[str]:
        """The connected devices that have measured modes of a workload, or measure some now."""
        found = {
            device.device_id
            for device in self._agents.devices.values()
            if (front := device.front_for(workload)) is not None and front.profiled_modes
        }
        for device_id, plan_id in self._rounds.grants.of_measuring():
            known = self._rounds.grants.of(device_id)
            measures = known is not None and not known.is_over and known.grant.measuring and known.grant.measuring.modes
            if measures and self.workload_of(run_of(plan_id)) == workload:
                found.add(device_id)
        return set(filter(self._agents.is_connected, found))

    def _ready(self, nodes: Mapping[str, int]) -> list[DeviceRecord]:
        """The devices with a node that are ready for another training."""
        return [
            device
            for device in self._agents.devices.values()
            if device.state is DeviceState.READY
            and device.device_id in nodes
            and self._agents.is_connected(device.device_id)
            and not self._rounds.grants.may_train(device.device_id)
        ]

    def unready(self, node_ids: Sequence[int]) -> list[str]:
        """The devices of some nodes that may train, but are not ready: they train, restart or are not connected."""
        nodes = self.paired(node_ids).nodes
        ready = {device.device_id for device in self._ready(nodes)}
        return sorted(each for each in nodes if each not in ready and not self._operator.overrides_of(each).drained)

    def _offers(self, devices: Sequence[DeviceRecord], workload: str) -> list[Offer]:
        """What some devices offer for a workload; devices without a front for it are left out."""
        lengths = self._agents.usual_lengths()
        return [offer for device in devices if (offer := self._draw.offer_of(device, workload, lengths)) is not None]

    def refused(self, run_id: str, node_ids: Sequence[int]) -> None:
        """Record that a run got no plan; it now waits if other runs hold devices or watts that it could use.

        Args:
            run_id: the run.
            node_ids: the nodes that it requested.
        """
        asked = dict.fromkeys(self.paired(node_ids).nodes)
        self.contention.refused(run_id, self.workload_of(run_id), asked, self._live())

    def _live(self) -> dict[str, str]:
        """The workload name of each run that has not ended, by run id."""
        return {each.run_id: each.workload.name for each in self.runs.values() if not each.finished}

    def unpredicted(self, run_id: str, node_ids: Sequence[int]) -> list[str]:
        """The ready devices of the given nodes that have no front for a run's workload and gave no reason."""
        return self._unpredicted(self.paired(node_ids).nodes, self.workload_of(run_id))

    def _unpredicted(self, device_ids: Iterable[str], workload: str) -> list[str]:
        found = [self._agents.devices.get(device_id) for device_id in device_ids]
        return [
            device.device_id
            for device in found
            if device is not None
            and device.state is DeviceState.READY
            and device.front_for(workload) is None
            and self._agents.claims.exclusion_reason(device, workload) is None
        ]

    def accept_plan(self, request: RoundRequest, record: RoundRecord) -> RoundRecord:
        """Put a plan in force, which commits its devices and watts.

        Args:
            request: the request that was planned.
            record: the planned round.

        Raises:
            UnknownRecordError: the run was deleted meanwhile.
            RunEndedError: the run has ended meanwhile.
            EnergySpentError: another round of the run has taken the energy meanwhile.
        """
        self.require_live(request.run_id)
        self.energy.planned(record)
        self.stores.planned(record)
        self.contention.waiting.served([request.run_id])
        return self._rounds.add(record)

    def accept_measuring(self, run_id: str, plan: MeasuringPlan) -> str:
        """Let devices measure, which commits their watts.

        Args:
            run_id: the run.
            plan: the devices that measure, one or more.

        Returns:
            The id that the grants name in place of a round's plan.

        Raises:
            UnknownRecordError: the run was deleted meanwhile.
            RunEndedError: the run has ended meanwhile.
        """
        self.require_live(run_id)
        plan_id = self._rounds.grants.measure(run_id, plan.assignments, plan.measuring)
        self.runs[run_id] = self.energy.surveyed(self.run(run_id), plan_id, plan.assignments)
        return plan_id

    def end_measuring(self, run_id: str) -> None:
        """Stop the trainings that a run lets devices run in order to measure, because its round has ended."""
        grants = self._rounds.grants
        grants.stop_measuring([each for each, plan_id in grants.of_measuring() if run_of(plan_id) == run_id])

    def end_unused_measuring(self, run_id: str, node_ids: Sequence[int]) -> set[str]:
        """End the grants of nodes that measure nothing: an app requests only nodes that it waits for no more.

        This is so if the answer to its last request was lost, or if a node's app failed before it trained.

        Returns:
            The connected devices whose grants are not over yet.
        """
        requested, grants = self.paired(node_ids).nodes, self._rounds.grants
        unused = {
            device_id
            for device_id, plan_id in grants.of_measuring()
            if device_id in requested
            and run_of(plan_id) == run_id
            and (known := grants.of(device_id)) is not None
            and not known.is_over
            and known.phase is GrantPhase.WAITING
        }
        grants.stop_measuring(unused)
        return {each for each in unused if self._agents.is_connected(each) and grants.may_train(each)}

    def stop_measuring(self, run_id: str, node_ids: Sequence[int]) -> set[str]:
        """Stop trainings that are run in order to measure, since a round may need their devices or watts.

        Those of the run itself go on if it does not request their nodes: it waits for their updates.

        Args:
            run_id: the run that plans a round.
            node_ids: the nodes that it requests.

        Returns:
            The connected devices that still measure, or whose app has not ended yet.
        """
        requested = self.paired(node_ids).nodes
        stopped = {
            device_id
            for device_id, plan_id in self._rounds.grants.of_measuring()
            if device_id in requested or run_of(plan_id) != run_id
        }
        self._rounds.grants.stop_measuring(stopped)
        return {
            device_id
            for device_id in stopped
            if self._agents.is_connected(device_id)
            and (
                self._rounds.grants.may_train(device_id)
                or self._agents.devices[device_id].state is DeviceState.TRAINING
            )
        }

    def release(self, run_id: str, node_ids: Sequence[int]) -> set[str]:
        """End the grants of the devices that a run's Flower server no longer waits for.

        Returns:
            The connected devices whose grants are not over yet, although they do not train.
        """
        # A SuperNode that names a wrong device is no evidence about that device's training.
        device_ids = list(self.paired(node_ids).nodes)
        self._rounds.grants.give_up_devices(device_ids, run_id)
        return {
            device_id
            for device_id in filter(self._rounds.grants.may_train, device_ids)
            if self._agents.is_connected(device_id)
            and self._agents.devices[device_id].state is DeviceState.READY
            and self._plan_of_other_run(device_id, run_id) is None
        }

    def _plan_of_other_run(self, device_id: str, run_id: str) -> str | None:
        """The plan id of another run's round that a device is in flight for; empty if there is none."""
        grant = self._rounds.grants.of(device_id)
        if grant is None or grant.is_over or grant.is_given_up or run_of(grant.plan_id) == run_id:
            return None
        return grant.plan_id

    def _occupations(self, run_id: str, paired: PairedDevices) -> str:
        """Describe what all devices are doing; for many devices, also the number in each state."""
        if not self._agents.devices:
            return "none ever connected; enrol a board with `wattfleet coordinator invite`, and start its agent"
        texts = []
        for each in self._agents.devices.values():
            text = f"{each.device_id} is {self.occupation(each, run_id)}"
            if each.device_id in paired.unpaired:
                text += f", but its SuperNode cannot train there: {paired.unpaired[each.device_id]}"
            elif each.state is DeviceState.READY and each.device_id not in paired.nodes:
                text += _NO_NODE
            texts.append(text)
        if len(texts) <= MAX_LISTED:
            return first_few(texts)
        counts = Counter(device.state.value for device in self._agents.devices.values()).most_common()
        return f"{', '.join(f'{count:,} are {state}' for state, count in counts)}: {first_few(texts)}"

    def _put(self, record: RunRecord) -> RunRecord:
        self.runs[record.run_id] = record
        self.energy.started(record)
        return record


_NO_NODE = ", but no Flower node of this round names it"


def _no_prediction(workload: str) -> str:
    return f"has no prediction for the workload {workload!r} yet"


def _fastest_first(offers: Sequence[Offer]) -> list[str]:
    """Return the ids of devices in order of their time for one epoch in the fastest mode."""
    return [each.device_id for each in sorted(offers, key=lambda offer: (offer.front.one_epoch_s[0], offer.device_id))]
