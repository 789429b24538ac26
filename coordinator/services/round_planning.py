"""Plans and previews rounds while the fleet changes, one at a time, each in its own thread; ends and deletes runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from coordinator.errors import FleetReturningError, NoDevicesError, UnknownRecordError
from coordinator.repository.repository import FleetRepository
from coordinator.service_figures import ServiceFigures, timed
from coordinator.services.event_log import EventLog
from coordinator.services.orders import Orders
from coordinator.settings import RoundSettings
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Leases
from coordinator.state.measuring import MeasuringPlan
from coordinator.state.node_predictions import NodePrediction, predict_nodes
from coordinator.state.preview import Preview, RoundPreview, WhatIf
from coordinator.state.records import RoundRecord, RunRecord, plan_id_of
from coordinator.state.rounds.request import RoundRequest
from wattfleet.errors import InfeasibleBudgetError, NoCandidatesError
from wattfleet.modes import Workload
from wattfleet.planning import EpochChoice, require_epochs
from wattfleet_proto.measuring_limits import ENDS_WITHIN_S
from wattfleet_proto.run_end import STOPPED

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
_CONFIRM_POLLS, _CONFIRM_POLL_S = 100, 0.02
_FRONTS_POLL_S = 0.02

_RELEASE_POLL_S = 0.1
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
                except (NoDevicesError, NoCandidatesError, InfeasibleBudgetError) as error:
                    self._fleet.flower.refused(run_id, node_ids)
                    self._log_refusal(run_id, number, str(error))
                    raise
        record = self._fleet.rounds.get(plan_id_of(run_id, number))
        await self._repository.save(record)
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
            await self._repository.save()
        except BaseException:
            # Nobody learns of these grants, so that no message would ever use their watts.
            self._fleet.rounds.grants.stop_measuring_of(plan_id)
            raise
        finally:
            self._fleet.rounds.grants.pending.let_go(plan_id)
            self._orders.send_due()
        return plan_id, plan, request.nodes

    def _require_kept(self, run_id: str) -> None:
        """Check that a run has neither ended nor is being deleted.

        Raises:
            UnknownRecordError: the run does not exist, or is being deleted.
            RunEndedError: the run has ended.
        """
        self._fleet.flower.require_live(run_id)
        if run_id in self._deleting:
            raise UnknownRecordError(f"unknown run {run_id!r}: it is being deleted")

    def run_started(self, run_id: str) -> None:
        """Make the plans of a run that has just started wait for the devices' fronts for its workload."""
        self._fronts_until_s[run_id] = self._now_s() + _STARTING_S

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

    async def predict(self, run_id: str, node_ids: Sequence[int], epochs: float) -> list[NodePrediction]:
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
                request, record = await asyncio.to_thread(
                    self._planned, self._fleet.copy(), run_id, number, node_ids, epochs
                )
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
        self._events.planned(record)

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
            if not any(map(self._orders.knows_workloads, unknown)):
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
        """Prepare the fleet, or a copy of it, for a plan.

        Raises:
            FleetReturningError: some of the nodes' devices are still expected to reconnect.
        """
        self._require_connected(fleet, node_ids)
        self._abandon_overdue(fleet)

    def _require_connected(self, fleet: Fleet, node_ids: Sequence[int]) -> None:
        """Check that a plan is not limited to the few devices that reconnected first.

        Raises:
            FleetReturningError: some devices are still expected to reconnect.
        """
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
                planned_s = max(planned_s, fleet.rounds.grants.longest_unknown_s / self._settings.overdue_factor)
            longest_s = self._settings.overdue_factor * planned_s + self._settings.overdue_s
            if now_s - since_s[plan_id] > longest_s:
                what = "still has late trainings" if plan_id in finished else "was never finished"
                _log.warning("round %s is overdue and %s: its devices are released", plan_id, what)
                fleet.rounds.abandon(plan_id)
