"""The planning service: the requests and reports of Flower servers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from coordinator.errors import FleetReturningError, NoDevicesError, UnknownRecordError
from coordinator.identity.access import peer_of
from coordinator.repository.repository import FleetRepository
from coordinator.service_figures import ServiceFigures, timed
from coordinator.services.event_log import EventLog
from coordinator.services.orders import Orders
from coordinator.settings import RoundSettings
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Leases
from coordinator.state.measuring import MeasuringPlan
from coordinator.state.names import default_run_name, require_metrics, require_name
from coordinator.state.preview import NodePreview, Preview, RoundPreview, WhatIf, predict_nodes
from coordinator.state.records import DeviceResult, RoundRecord, RunRecord, plan_id_of, run_of
from coordinator.state.rounds.ledger import RoundRequest, reported
from wattfleet.common.clock import utc_now
from wattfleet.core.errors import (
    EnergySpentError,
    InfeasibleBudgetError,
    InvalidInputError,
    NoCandidatesError,
    first_few,
)
from wattfleet.core.modes import Workload
from wattfleet.core.planning import EpochChoice, plausible_examples, plausible_loss, require_epochs
from wattfleet_proto.convert import (
    assignment_to_message,
    epochs_of_request,
    plan_to_message,
    workload_from_message,
)
from wattfleet_proto.limits import ENDS_WITHIN_S, MAX_ROUNDS
from wattfleet_proto.names import STOPPED, require_labels, require_run_name
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

_log = logging.getLogger(__name__)


# --- Round planning ---------------------------------------------------------------------------------------------------
# Plans and previews rounds while the fleet changes, one at a time, each in its own thread; ends and deletes runs.


_ATTEMPTS = 3
_CONFIRM_POLLS, _CONFIRM_POLL_S = 100, 0.02
_FRONTS_POLL_S = 0.02

_RELEASE_POLL_S = 0.1
_OVERDUE_FACTOR = 2.0
"""A round is abandoned after its planned duration or deadline times this factor, plus `rounds.overdue_s`."""

_ENERGY_WAIT_S = 60.0
"""Seconds in which a run without enough energy waits for reports and devices, before it ends with its result. An app's
patience must be longer: by default it is 120 s."""

_ENDED = f"{STOPPED}by an operator, who ended it"

_STARTING_S = 30.0
"""Seconds after the start of a run in which its plans wait for fronts; later, devices without one are left out."""


class RoundPlanning:
    """Plans of one fleet's rounds."""

    def __init__(
        self,
        repository: FleetRepository,
        leases: Leases,
        orders: Orders,
        now_s: Callable[[], float] = time.monotonic,
        settings: RoundSettings = RoundSettings(),
        figures: ServiceFigures | None = None,
        profile_modes: int = 50,
        events: EventLog | None = None,
    ) -> None:
        """Plan for one fleet.

        Args:
            repository: the fleet and its store.
            leases: the sessions.
            orders: sends devices their grants.
            now_s: the clock of the leases.
            settings: when a round is overdue. Flower servers wait the same multiple of its duration, and by default 90
                s more.
            figures: records how long the computation of plans takes.
            profile_modes: number of modes of a workload that each device should measure.
            events: the log of what happens to the fleet; None for one that stores nothing.
        """
        self._profile_modes = profile_modes
        self._events = events or EventLog(repository.fleet)
        self._repository = repository
        self._fleet = repository.fleet
        self._leases = leases
        self._orders = orders
        self._now_s = now_s
        self._settings = settings
        self._figures = figures or ServiceFigures()
        self._fronts_until_s: dict[str, float] = {}
        self._refusals: dict[str, str] = {}
        self._without_energy_since_s: dict[str, float] = {}
        self._deleting: set[str] = set()
        self._lock = asyncio.Lock()
        self._abandon_overdue(self._fleet)

    async def plan(self, run_id: str, number: int, node_ids: Sequence[int], epochs: float | EpochChoice) -> RoundRecord:
        """Plan a round; a retried request returns the plan that was made.

        Agents are answered meanwhile, because planning a large round takes a while.

        Raises:
            FleetReturningError: some of the nodes' devices are still expected to reconnect.
            NoDevicesError: no device is ready.
            NoCandidatesError: none of the ready devices may be chosen.
            InfeasibleBudgetError: the site's budget is too small for any device.
            EnergySpentError: what is left of the run's energy budget does not suffice for any device.
            InvalidInputError: the request is malformed.
            UnknownRecordError: the run does not exist.
        """
        await self._repository.load_round(plan_id_of(run_id, number))
        if not self._fleet.flower.is_planned(run_id, number):
            self._fleet.flower.require_live(run_id)
            await self._repository.load_history(run_id)
            await self._await_fronts(run_id, node_ids)
            async with self._lock:  # each plan depends on the previous one
                try:
                    await self._plan(run_id, number, node_ids, epochs)
                except (NoDevicesError, NoCandidatesError, InfeasibleBudgetError, EnergySpentError) as error:
                    self._fleet.flower.refused(run_id, node_ids)
                    self._log_refusal(run_id, number, str(error))
                    raise
        record = self._fleet.rounds.get(plan_id_of(run_id, number))
        stores = self._fleet.stores
        await self._repository.save(record, *stores.of_plan(record.plan_id), *stores.take_contained())
        self._fleet.rounds.grants.pending.let_go(record.plan_id)
        self._orders.send_due()
        return record

    async def measure(
        self, run_id: str, node_ids: Sequence[int], epochs: float, survey_s: float | None
    ) -> tuple[str, MeasuringPlan, Mapping[str, int]]:
        """Let devices measure with the watts that are left.

        Args:
            run_id: the run.
            node_ids: nodes that are connected and free.
            epochs: local epochs of a training that goes on to its end.
            survey_s: only devices that do not know the run's workload measure, each a few modes, and begin no further
                measurement after these seconds; None for all devices, until they are stopped.

        Returns:
            The id that the grants name in place of a plan's, empty if no device measures now; the plan; and the node
            of each device.

        Raises:
            FleetReturningError: some of the nodes' devices are still expected to reconnect.
            InvalidInputError: the epochs are not above zero.
            UnknownRecordError: the run does not exist, or is being deleted.
            RunEndedError: the run has ended.
            StoreUnavailableError: the grants could not be stored; no device measures.
        """
        require_epochs(epochs)
        self._require_kept(run_id)
        await self._await_fronts(run_id, node_ids)
        async with self._lock:
            self._require_kept(run_id)
            self._require_connected(self._fleet, node_ids)
            await self._confirmed(lambda: self._fleet.flower.end_unused_measuring(run_id, node_ids))
            for _ in range(_ATTEMPTS):
                request = self._fleet.flower.request_measuring(run_id, node_ids, epochs, self._profile_modes, survey_s)
                plan = await asyncio.to_thread(request.planned)
                if not plan.assignments:
                    return "", plan, request.nodes
                if not self._fleet.is_outdated(run_id, plan.assignments):
                    break
            else:
                raise NoDevicesError("the fleet changes faster than measurements can be planned: try again")
            self._require_kept(run_id)  # neither ended nor deleted meanwhile
            plan_id = self._fleet.flower.accept_measuring(run_id, plan)
            self._fleet.rounds.grants.pending.hold_back(plan_id)  # until it is stored
        try:
            await self._repository.save(self._fleet.flower.run(run_id))
        except BaseException:
            # Nobody learns of these grants, so that no message would ever use their watts.
            self._fleet.rounds.grants.stop_measuring_of(plan_id)
            raise
        finally:
            self._fleet.rounds.grants.pending.let_go(plan_id)
            self._orders.send_due()
        return plan_id, plan, request.nodes

    def _require_kept(self, run_id: str) -> None:
        """Check that a run has neither ended nor is being deleted."""
        self._fleet.flower.require_live(run_id)
        if run_id in self._deleting:
            raise UnknownRecordError(f"unknown run {run_id!r}: it is being deleted")

    def run_started(self, run_id: str) -> None:
        """Make the plans of a run that has just started wait for the devices' fronts for its workload."""
        self._fronts_until_s[run_id] = self._now_s() + _STARTING_S
        self._without_energy_since_s.pop(run_id, None)

    async def finish_runs(self, run_ids: Collection[str], error: str, caller: str = "") -> None:
        """End runs, release their devices, and store it.

        Args:
            run_ids: the runs.
            error: why they ended; empty if they finished as planned.
            caller: the operator who ended them; empty for their app.

        Raises:
            UnknownRecordError: one of them never started; none is ended.
            StoreUnavailableError: the runs have ended, and are stored later.
        """
        finished = self._finish(run_ids, error, caller)
        self._orders.send_due()  # trainings that have not begun are cancelled
        await self._repository.save(*finished)

    def _finish(self, run_ids: Collection[str], error: str, caller: str) -> list[RunRecord]:
        """End runs and release their devices, as `finish_runs` does; returns what has to be stored."""
        live = {run_id for run_id in run_ids if not self._fleet.flower.run(run_id).finished}
        finished = self._fleet.flower.finish_runs(run_ids, error)
        for run in finished:
            self._fronts_until_s.pop(run.run_id, None)
            self._refusals.pop(run.run_id, None)
            self._without_energy_since_s.pop(run.run_id, None)
            self._events.run_finished(run, run.run_id in live, caller)
        return finished

    async def require_deletable(self, run_ids: Collection[str], end: bool) -> None:
        """Check that `delete_runs` can do all that is asked; nothing changes.

        Raises:
            UnknownRecordError: a run never started.
            StillInUseError: a run has not ended; or its rounds hold watts for devices that train, or that cannot be
                reached.
            StoreUnavailableError: nothing can be stored or deleted now.
        """
        await self._repository.save(*map(self._fleet.flower.run, run_ids))
        if end:
            self._fleet.require_stoppable(run_ids)
            return
        for run_id in run_ids:
            self._fleet.require_ended(run_id)
        self._fleet.require_unused(run_ids)

    async def delete_runs(
        self, run_ids: Collection[str], end: bool, deleted: Callable[[str], None], caller: str = ""
    ) -> None:
        """Delete runs that `require_deletable` has accepted.

        Args:
            run_ids: the runs.
            end: end those that are running, and stop their trainings. Each run is deleted once its devices have
                confirmed this, or once their grants have lapsed.
            deleted: called with the id of each deleted run.
            caller: the operator who deletes them.

        Raises:
            StillInUseError: without `end`, another round of a run was planned meanwhile.
            StoreUnavailableError: the next run could not be deleted completely.
        """
        if end:
            live = [run_id for run_id in run_ids if not self._fleet.flower.run(run_id).finished]
            finished = self._finish(live, _ENDED, caller)
            # Before this is stored: nothing waits for these trainings any more, even if the store fails.
            self._fleet.rounds.grants.stop_runs(run_ids)
            self._orders.send_due()
            await self._repository.save(*finished)
        for run_id in run_ids:
            while not await self._is_released(run_id, end):
                await asyncio.sleep(_RELEASE_POLL_S)
            try:
                await self._repository.delete_run(run_id)
            finally:
                self._deleting.discard(run_id)
            deleted(run_id)

    async def _is_released(self, run_id: str, end: bool) -> bool:
        """Whether no round of a run holds watts; if so, no more rounds of it are planned."""
        async with self._lock:  # not while a round of it is planned
            if end:
                self._fleet.rounds.grants.stop_runs([run_id])  # its app may have had another round planned
                self._orders.send_due()
                if run_id in self._fleet.held_by_runs():
                    return False
            else:
                self._fleet.require_unused([run_id])
            self._deleting.add(run_id)
            return True

    async def predict(self, run_id: str, node_ids: Sequence[int], epochs: float) -> list[NodePreview]:
        """Predict the next round of a run on each node.

        Raises:
            UnknownRecordError: the run does not exist.
            InvalidInputError: the epochs are not above zero.
        """
        self._fleet.flower.run(run_id)
        await self._await_fronts(run_id, node_ids)
        return await asyncio.to_thread(predict_nodes, self._fleet.copy(), run_id, node_ids, epochs)

    async def get(self, plan_id: str) -> RoundRecord:
        """Get a round that was planned before, which may have been trimmed since.

        Raises:
            UnknownRecordError: the plan does not exist.
        """
        await self._repository.load_round(plan_id)
        return self._fleet.rounds.get(plan_id)

    async def preview(
        self,
        run_id: str,
        all_devices: bool,
        epochs: float,
        workload: Workload | None = None,
        what_if: WhatIf = WhatIf(),
    ) -> Preview:
        """Preview the next round of a run as it would be planned now.

        Args:
            run_id: the run; empty for a new one.
            all_devices: include devices without a Flower node.
            epochs: local epochs; 0 for those of the run's last round.
            workload: the workload of a new run; None for that of the newest run.
            what_if: the assumptions that differ from the fleet.

        Raises:
            WattfleetError: as from `plan`.
        """
        if run_id:
            await self._repository.load_history(run_id)
            await self._repository.load_newest_round(run_id)
        preview = RoundPreview(self._fleet, run_id, all_devices, workload, what_if)
        self._prepare(preview.fleet, preview.node_ids)
        return await asyncio.to_thread(preview.plan, epochs)

    async def _plan(self, run_id: str, number: int, node_ids: Sequence[int], epochs: float | EpochChoice) -> None:
        if self._fleet.flower.is_planned(run_id, number):
            return  # by a concurrent request for the same round
        self._require_kept(run_id)
        # The round is loaded already, unless plans of many runs were requested meanwhile.
        await self._repository.load_history(run_id)
        self._prepare(self._fleet, node_ids)
        await self._stop_measuring(run_id, node_ids)
        await self._release(run_id, node_ids)
        for _ in range(_ATTEMPTS):
            with timed(self._figures.plan_s):
                try:
                    request, record = await asyncio.to_thread(
                        self._planned, self._fleet.copy(), run_id, number, node_ids, epochs
                    )
                except EnergySpentError as error:
                    if not (why := self._why_energy_may_come(run_id, node_ids)):
                        raise
                    raise NoDevicesError(f"{error}; waiting for {_ENERGY_WAIT_S:g} s at most: {why}") from None
            # Another reference may have been pinned meanwhile, so that devices reconnect.
            self._require_connected(self._fleet, node_ids)
            # Meanwhile, budgets may fall, and devices may begin to profile or be forgotten.
            if not self._fleet.is_outdated(run_id, record.plan.assignments):
                break
        else:
            raise NoDevicesError("the fleet changes faster than a round can be planned: try again")
        self._require_kept(run_id)  # neither ended nor deleted meanwhile
        self._fleet.flower.accept_plan(request, record)
        self._fleet.rounds.grants.pending.hold_back(record.plan_id)  # until it is stored
        self._fleet.rounds.since_s[record.plan_id] = self._now_s()
        self._refusals.pop(run_id, None)
        self._without_energy_since_s.pop(run_id, None)
        self._events.planned(record)

    def _why_energy_may_come(self, run_id: str, node_ids: Sequence[int]) -> str:
        """Why what is left of a run's energy may soon suffice for a training; empty if it will not, or not in time."""
        since_s = self._without_energy_since_s.setdefault(run_id, self._now_s())
        if self._now_s() - since_s >= _ENERGY_WAIT_S:
            return ""
        if training := self._fleet.rounds.grants.counting_energy(run_id):
            return f"{first_few(training)} may still train, and return what they do not draw"
        if unready := self._fleet.flower.unready(node_ids):
            return f"{first_few(unready)} may get ready, and need less"
        return ""

    @staticmethod
    def _planned(
        fleet: Fleet, run_id: str, number: int, node_ids: Sequence[int], epochs: float | EpochChoice
    ) -> tuple[RoundRequest, RoundRecord]:
        request = fleet.flower.request_round(run_id, number, node_ids, epochs)
        return request, request.planned()

    def _log_refusal(self, run_id: str, number: int, reason: str) -> None:
        """Log once why a round cannot be planned; the Flower server repeats its request until it can be."""
        if self._refusals.get(run_id) != reason:
            self._refusals[run_id] = reason
            self._events.cannot_plan(run_id, number, reason)

    async def _await_fronts(self, run_id: str, node_ids: Sequence[int]) -> None:
        """Wait briefly for the devices' fronts for a workload that was just announced to them.

        Devices that do not report a front in time are left out of the round.
        """
        for _ in range(round(self._settings.fronts_wait_s / _FRONTS_POLL_S)):
            if run_id not in self._fronts_until_s:
                return
            if self._now_s() > self._fronts_until_s[run_id]:
                del self._fronts_until_s[run_id]
                return
            unknown = self._fleet.flower.unpredicted(run_id, node_ids)
            if not any(map(self._orders.has_session, unknown)):
                return
            await asyncio.sleep(_FRONTS_POLL_S)

    async def _stop_measuring(self, run_id: str, node_ids: Sequence[int]) -> None:
        """Stop devices that measure, and wait until they can train in a round.

        Devices whose app does not end its training in time are left out of the round.
        """
        measuring = self._fleet.flower.stop_measuring(run_id, node_ids)
        self._orders.send_due()
        for _ in range(round(ENDS_WITHIN_S / _CONFIRM_POLL_S)):
            if not measuring:
                return
            await asyncio.sleep(_CONFIRM_POLL_S)
            measuring = self._fleet.flower.stop_measuring(run_id, node_ids)

    async def _release(self, run_id: str, node_ids: Sequence[int]) -> None:
        """End older grants of the nodes' devices to this run, and wait until the devices have confirmed it.

        Devices that do not confirm in time are left out of the round.
        """
        await self._confirmed(lambda: self._fleet.flower.release(run_id, node_ids))

    async def _confirmed(self, end: Callable[[], Collection[str]]) -> None:
        """End grants, and wait briefly until the devices have confirmed it.

        Args:
            end: ends them, and returns the devices that have not confirmed it yet; called repeatedly.
        """
        unconfirmed = end()
        self._orders.send_due()
        for _ in range(_CONFIRM_POLLS):
            if not unconfirmed:
                return
            await asyncio.sleep(_CONFIRM_POLL_S)
            unconfirmed = end()

    def _prepare(self, fleet: Fleet, node_ids: Sequence[int]) -> None:
        """Prepare the fleet, or a copy of it, for a plan."""
        self._require_connected(fleet, node_ids)
        self._abandon_overdue(fleet)

    def _require_connected(self, fleet: Fleet, node_ids: Sequence[int]) -> None:
        """Check that a plan is not limited to the few devices that reconnected first."""
        device_ids = set(fleet.flower.paired(node_ids).nodes)
        missing, left_s = self._leases.expected_back(device_ids, self._now_s())
        if missing:
            raise FleetReturningError(
                f"waiting for devices to reconnect: {missing} still missing; rounds are planned without them after"
                f" {left_s:.0f} s"
            )

    def _abandon_overdue(self, fleet: Fleet) -> None:
        """Release the devices of rounds that their Flower server must have abandoned without reporting it.

        These are rounds that it never finished, and late trainings of finished rounds.
        """
        now_s = self._now_s()
        records = fleet.rounds.awaited()
        plans = {record.plan_id: record.plan for record in records}
        finished = {record.plan_id for record in records if record.wall_s is not None}
        since_s = {plan_id: fleet.rounds.since_s.get(plan_id, now_s) for plan_id in plans}
        fleet.rounds.since_s = since_s.copy()
        for plan_id, plan in plans.items():
            planned_s = max(plan.duration_s, plan.deadline_s or 0.0)
            if any(each.is_length_assumed for each in plan.assignments):
                planned_s = max(planned_s, fleet.rounds.grants.longest_unknown_s / _OVERDUE_FACTOR)
            longest_s = _OVERDUE_FACTOR * planned_s + self._settings.overdue_s
            if now_s - since_s[plan_id] > longest_s:
                what = "still has late trainings" if plan_id in finished else "was never finished"
                _log.warning("round %s is overdue and %s: its devices are released", plan_id, what)
                fleet.rounds.abandon(plan_id)


# --- Planning ---------------------------------------------------------------------------------------------------------

_LONGEST_FAILURE = 500


class PlanningServicer(planning_pb2_grpc.PlanningServiceServicer):
    """Translates between a Flower server's messages and the fleet."""

    def __init__(
        self,
        repository: FleetRepository,
        planning: RoundPlanning,
        orders: Orders,
        now: Callable[[], datetime] = utc_now,
        settings: RoundSettings = RoundSettings(),
        events: EventLog | None = None,
    ) -> None:
        """Serve one fleet.

        Args:
            repository: the fleet and its store.
            planning: plans its rounds.
            orders: sends devices their grants.
            now: returns the date and time, with a UTC offset.
            settings: how many runs may exist.
            events: the log of what happens to the fleet; None for one that stores nothing.
        """
        self._events = events or EventLog(repository.fleet)
        self._repository = repository
        self._fleet = repository.fleet
        self._flower = repository.fleet.flower
        self._operator = repository.fleet.operator
        self._rounds = repository.fleet.rounds
        self._unplanned = repository.fleet.unplanned
        self._planning = planning
        self._orders = orders
        self._now = now
        self._max_live_runs = settings.max_live_runs

    async def StartRun(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.StartRunRequest, context: Any
    ) -> planning_pb2.StartRunResponse:
        """Start a Flower run."""
        require_name("a run's id", request.run_id)
        require_name("a strategy's name", request.strategy)
        _require_round(request.rounds)
        if request.name:
            require_run_name(request.name)
        require_labels(request.labels)
        workload = workload_from_message(request.workload) if request.HasField("workload") else None
        self._flower.require_room(request.run_id, self._max_live_runs)
        known = self._flower.runs.get(request.run_id)
        started = self._flower.start_run(
            request.run_id,
            request.strategy,
            request.rounds,
            request.run_token,
            workload,
            peer_of(context),
            request.name or default_run_name(request.app, self._now()),
            request.labels,
            request.needs_all,
            request.energy_budget_j or None,
        )
        await self._repository.save(started)
        self._planning.run_started(request.run_id)
        self._events.run_started(started, is_new=known is None or known.finished)
        self._orders.announce_workloads()
        return planning_pb2.StartRunResponse(name=started.name)

    async def ResolveNodes(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ResolveNodesRequest, context: Any
    ) -> planning_pb2.ResolveNodesResponse:
        """Look up which nodes are bound to a device, and which of these must not train."""
        nodes = self._flower.nodes
        known = {node: nodes[node] for node in request.node_ids if node in nodes}
        problems = self._flower.pairings.problems
        self._flower.pairings.connected(known, self._now())
        return planning_pb2.ResolveNodesResponse(
            bindings=[
                planning_pb2.NodeBinding(node_id=n, device_id=d, pairing_problem=problems.get(n))
                for n, d in known.items()
            ],
            unknown_node_ids=[node for node in request.node_ids if node not in known],
            exclusions=self._exclusions(known),
        )

    async def BindNodes(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.BindNodesRequest, context: Any
    ) -> planning_pb2.BindNodesResponse:
        """Bind nodes to devices; an invalid binding is skipped, so that it does not block the others."""
        bound = []
        skipped, first = 0, ""
        for binding in request.bindings:
            try:
                problem = binding.pairing_problem if binding.HasField("pairing_problem") else None
                bound.append(self._flower.bind_node(binding.node_id, binding.device_id, problem))
            except InvalidInputError as error:
                first = first or f"the first one is node {binding.node_id}: {error}"
                skipped += 1
        if skipped:
            _log.warning("%s of %s nodes are not bound; %s", f"{skipped:,}", f"{len(request.bindings):,}", first)
        await self._repository.save(*bound)
        devices = {record.node_id: record.device_id for record in bound}
        self._flower.pairings.connected(devices, self._now())
        return planning_pb2.BindNodesResponse(exclusions=self._exclusions(devices))

    async def PlanRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.PlanRoundRequest, context: Any
    ) -> planning_pb2.PlanRoundResponse:
        """Plan a round; a retried request returns the plan that was made."""
        self._flower.require_owner(request.run_id, request.run_token, peer_of(context))
        _require_round(request.round)
        return await _message(
            await self._planning.plan(request.run_id, request.round, request.node_ids, epochs_of_request(request))
        )

    async def PlanMeasuring(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.PlanMeasuringRequest, context: Any
    ) -> planning_pb2.PlanMeasuringResponse:
        """Let devices measure with the watts that are left, before a round or beside one."""
        self._flower.require_owner(request.run_id, request.run_token, peer_of(context))
        plan_id, plan, nodes = await self._planning.measure(
            request.run_id,
            request.node_ids,
            request.epochs,
            request.survey_s if request.HasField("survey_s") else None,
        )
        return planning_pb2.PlanMeasuringResponse(
            plan_id=plan_id,
            assignments=[assignment_to_message(each, nodes[each.device_id]) for each in plan.assignments],
            waiting=plan.waiting,
            not_ready=plan.not_ready,
            predicting=plan.predicting,
        )

    async def PredictNodes(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.PredictNodesRequest, context: Any
    ) -> planning_pb2.PredictNodesResponse:
        """Predict the next round on each node."""
        self._flower.require_owner(request.run_id, request.run_token, peer_of(context))
        self._flower.require_live(request.run_id)
        predictions = await self._planning.predict(request.run_id, request.node_ids, request.epochs)
        return planning_pb2.PredictNodesResponse(
            predictions=[
                planning_pb2.NodePrediction(
                    node_id=each.node_id,
                    device_id=each.device_id,
                    assignment=(
                        None if each.assignment is None else assignment_to_message(each.assignment, each.node_id)
                    ),
                    reason=each.reason,
                )
                for each in predictions
            ]
        )

    async def GetPlan(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.GetPlanRequest, context: Any
    ) -> planning_pb2.GetPlanResponse:
        """Look up a plan, which may have been trimmed since it was made."""
        return planning_pb2.GetPlanResponse(plan=await _message(await self._planning.get(request.plan_id)))

    async def FinishRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.FinishRoundRequest, context: Any
    ) -> planning_pb2.FinishRoundResponse:
        """Finish a round: the Flower server waits for no more replies to it."""
        results = [_result(message, message.device_id) for message in request.results]
        self._flower.require_owner(run_of(request.plan_id), request.run_token, peer_of(context))
        await self._repository.load_round(request.plan_id)
        _log_implausible(request.plan_id, results, request.results)
        is_first = self._rounds.get(request.plan_id).wall_s is None
        finished = self._rounds.finish(request.plan_id, results, request.wall_s)
        self._flower.end_measuring(run_of(request.plan_id))
        if is_first:
            self._events.finished(finished)
        self._orders.send_due()  # trainings that have not begun are cancelled
        await self._repository.save(finished, *self._fleet.settle_unbegun(request.plan_id))
        return planning_pb2.FinishRoundResponse()

    async def ReportUnplannedRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ReportUnplannedRoundRequest, context: Any
    ) -> planning_pb2.ReportUnplannedRoundResponse:
        """Store a round that trained without a plan; a round that is already stored does not change."""
        run_id, number = request.run_id, request.round
        self._flower.require_owner(run_id, request.run_token, peer_of(context))
        _require_round(number)
        if not self._unplanned.is_known(run_id, number):
            results = [_result(message.result, self._name(message)) for message in request.results]
            metrics = dict(request.metrics)
            record = reported(run_id, number, self._now(), request.began_ago_s, request.wall_s, results, metrics)
            _log_implausible(plan_id_of(run_id, number), results, [message.result for message in request.results])
            await self._repository.save(record)
            self._unplanned.stored(record)
            self._events.unplanned(run_id, number)
        return planning_pb2.ReportUnplannedRoundResponse()

    async def ReportMetrics(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ReportMetricsRequest, context: Any
    ) -> planning_pb2.ReportMetricsResponse:
        """Add the metrics that the strategy evaluated after a round."""
        self._flower.require_owner(request.run_id, request.run_token, peer_of(context))
        _require_round(request.round)
        if self._unplanned.is_known(request.run_id, request.round):
            await self._add_metrics(request.run_id, request.round, dict(request.metrics))
            return planning_pb2.ReportMetricsResponse()
        await self._repository.load_round(plan_id_of(request.run_id, request.round))
        changed = self._flower.report_metrics(request.run_id, request.round, dict(request.metrics))
        await self._repository.save(changed)
        return planning_pb2.ReportMetricsResponse()

    async def FinishRun(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.FinishRunRequest, context: Any
    ) -> planning_pb2.FinishRunResponse:
        """Finish a Flower run."""
        self._flower.require_owner(request.run_id, request.run_token, peer_of(context))
        await self._planning.finish_runs([request.run_id], request.error)
        return planning_pb2.FinishRunResponse()

    def _exclusions(self, devices: Mapping[int, str]) -> list[planning_pb2.NodeExclusion]:
        """The nodes whose devices must not train because of the operator's rules.

        Args:
            devices: Flower node id -> device id.
        """
        reasons = self._operator.exclusion_reasons(set(devices.values()))
        return [
            planning_pb2.NodeExclusion(node_id=node_id, reason=reasons[device_id])
            for node_id, device_id in devices.items()
            if device_id in reasons
        ]

    def _name(self, message: planning_pb2.NodeResult) -> str:
        """A node's display name: its device, or else its number."""
        return self._flower.nodes.get(message.node_id) or message.result.device_id or f"node {message.node_id}"

    async def _add_metrics(self, run_id: str, number: int, metrics: dict[str, float]) -> None:
        """Add metrics to a round without a plan."""
        record = await self._repository.read(lambda store: store.unplanned_of(run_id, number))
        if record is None:
            raise UnknownRecordError(f"unknown round {number} of run {run_id!r}")
        require_metrics(run_id, number, metrics, record.metrics)
        await self._repository.save(replace(record, metrics={**record.metrics, **metrics}))


def _require_round(number: int) -> None:
    """Check the number of a run's rounds."""
    if number > MAX_ROUNDS:
        raise InvalidInputError(f"a run has at most {MAX_ROUNDS:,} rounds, not {number:,}: start another run")


async def _message(record: RoundRecord) -> planning_pb2.PlanRoundResponse:
    """Convert a round's plan to a message, in a thread because it may be large."""
    return await asyncio.to_thread(plan_to_message, record.plan_id, record.plan, record.nodes)


def _result(message: planning_pb2.DeviceResult, device_id: str) -> DeviceResult:
    require_name("a device's id", device_id)
    return DeviceResult(
        device_id=device_id,
        failure=message.failure[:_LONGEST_FAILURE],
        num_examples=plausible_examples(message.num_examples) if message.HasField("num_examples") else None,
        loss=plausible_loss(message.loss) if message.HasField("loss") else None,
        share=message.share,
        late=message.late and not message.failure,
    )


def _log_implausible(
    round_name: str, results: Sequence[DeviceResult], messages: Sequence[planning_pb2.DeviceResult]
) -> None:
    """Log which devices' results contain an implausible value, which is left out."""
    devices = [
        result.device_id for result, sent in zip(results, messages, strict=True) if _has_implausible_value(result, sent)
    ]
    if devices:
        _log.warning(
            "round %s: an implausible loss or number of examples counts as not reported: %s",
            round_name,
            first_few(devices),
        )


def _has_implausible_value(result: DeviceResult, message: planning_pb2.DeviceResult) -> bool:
    """Whether a value of the message was implausible."""
    return (result.num_examples is None and message.HasField("num_examples")) or (
        result.loss is None and message.HasField("loss")
    )
