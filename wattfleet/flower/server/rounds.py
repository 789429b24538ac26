"""Plans and reports the rounds of a run, for both PowerAware and FedBuff."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import INFO, WARNING

import grpc
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid

from wattfleet.common.clock import Clock
from wattfleet.common.console import count_of, plain_text
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.core.errors import first_few
from wattfleet.core.modes import Workload
from wattfleet.core.planning import EpochChoice
from wattfleet.flower.server.away import AwayPolicy, Outage
from wattfleet.flower.server.coordinator_run import ACTIVE_RUNS, CoordinatorRun
from wattfleet.flower.server.errors import CoordinatorRefusedError, PlanningError
from wattfleet.flower.server.names import RunNaming, RunTitle, WorkloadNaming
from wattfleet.flower.server.nodes import POLL_S, Nodes
from wattfleet.flower.server.planning_client import PlanningClient
from wattfleet.flower.server.predictions import NodePrediction, predicted_metrics
from wattfleet.flower.server.replies import (
    PlannedRound,
    RoundReplies,
    RoundWithoutPlan,
    SentRound,
    assigned_messages,
    bases_of,
    normalise_updates,
)
from wattfleet.flower.server.selection import BatchChoice, Select, selected_nodes
from wattfleet.flower.server.stopping import end_of, reported_stop
from wattfleet_proto.assignment import AssignedWork
from wattfleet_proto.v1 import planning_pb2

# A round without a deadline may take this multiple of its predicted duration, since the prediction is a median and
# devices may measure power modes during training. A deadline needs no such slack, since devices keep it themselves.
_DURATION_SLACK = 2.0
_LOW_BUDGET_POLL_S = 10.0
_AWAY_POLL_S = 5.0
_LOG_INTERVAL_S = 600.0
_FINAL_REPORTS_WITHIN_S = 30.0


@dataclass(frozen=True)
class WaitLimits:
    """How long to wait for replies, nodes and watts, seconds; see `PowerAware`.

    Attributes:
        allowance_s: for replies, in addition to the training; None for only the app's own timeout.
        nodes_s: for nodes to connect and to be ready.
        low_budget_s: for a budget that is high enough for one device, in a run that has trained before.
    """

    allowance_s: float | None
    nodes_s: float
    low_budget_s: float


class PlannedRounds:
    """Plans and reports the rounds of a run, and decides what happens while the coordinator does not answer."""

    def __init__(
        self,
        planner: PlanningClient,
        strategy: str,
        needs_all: bool,
        local_epochs: EpochChoice,
        naming: WorkloadNaming,
        run_naming: RunNaming,
        batches: BatchChoice | None,
        select: Select | None,
        limits: WaitLimits,
        away: AwayPolicy,
        clock: Clock,
        energy_budget_j: float | None = None,
    ) -> None:
        """Use a coordinator's plans for one strategy.

        Args:
            planner: the coordinator.
            strategy: the strategy's name, for logs and reports.
            needs_all: whether it needs the update of every device, so that plans select all that the budgets allow.
            local_epochs: passes over its data that a node's training makes in a round, or those that plans may choose.
            naming: names the workload of a run.
            run_naming: names a run.
            batches: the batch sizes that a plan may choose; None if the app trains with its own batch size.
            select: chooses the nodes that a plan may use; None to let the plan choose among all.
            limits: how long to wait.
            away: what to do while the coordinator does not answer.
            clock: measures the waiting.
            energy_budget_j: joules above idle that a run's trainings may draw; None without an energy budget.
        """
        self._planner = planner
        self._strategy = strategy
        self._run = CoordinatorRun(planner, strategy, needs_all, local_epochs, clock, energy_budget_j)
        self._naming = naming
        self._run_naming = run_naming
        self._batches = batches
        self._select = select
        self._limits = limits
        self._clock = clock
        self._nodes = Nodes(planner, limits.nodes_s, clock)
        self._outage = Outage(away, strategy, clock)
        self._has_planned = self._may_follow = self._is_ended = False
        self._unplanned: dict[int, RoundWithoutPlan] = {}
        self._said_unprofiled: set[str] = set()

    @contextmanager
    def run(self, grid: Grid, rounds: int, arrays: ArrayRecord) -> Iterator[None]:
        """Report the start of a run, and its end when this context ends.

        Args:
            grid: Flower's grid.
            rounds: how many rounds the run has.
            arrays: the network that it starts from.

        Raises:
            TwoStrategiesError: another power-aware strategy runs.
            PlanningError: the coordinator refused the run.
            InvalidInputError: no valid workload name can be derived from the run, or its config has an invalid name or
                label.
        """
        with ACTIVE_RUNS.enter(str(grid.run.run_id)) as run_id, reported_stop(self._stop, grid.get_node_ids):
            self._start(run_id, rounds, self._workload(grid, arrays), self._run_naming.of(grid.run))
            try:
                yield
            except BaseException as error:
                self._finish(end_of(error, grid.get_node_ids))
                raise
            self._finish("")

    def require_start(self, grid: Grid, arrays: ArrayRecord) -> None:
        """Start the run if `start` was not called, because the app or another strategy configures rounds directly.

        A run that has finished is started again, because the app configures further rounds.
        """
        if not self._run.is_started:
            self._start(str(grid.run.run_id), 0, self._workload(grid, arrays), self._run_naming.of(grid.run))
        elif self._run.is_finished:
            self._run.start_again()

    def _workload(self, grid: Grid, arrays: ArrayRecord) -> Workload:
        """The workload of the run, with the batch sizes that its plans may choose."""
        workload = self._naming.workload(grid.run, arrays)
        return workload if self._batches is None else self._batches.of_workload(workload)

    def connected(self, grid: Grid, least: int) -> list[int]:
        """Return the connected nodes; see `Nodes.connected`."""
        return self._nodes.connected(grid, least)

    def without_excluded(self, node_ids: Iterable[int]) -> list[int]:
        """Return the nodes without those of drained and excluded devices; see `Nodes.without_excluded`."""
        return self._nodes.without_excluded(node_ids)

    def plan(
        self,
        grid: Grid,
        number: int,
        node_ids: list[int],
        waits: bool = True,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> SentRound:
        """Plan a round; while the coordinator is away, wait for it, or return a round without a plan.

        Args:
            grid: Flower's grid.
            number: the round's number, from 1.
            node_ids: nodes that are connected and free.
            waits: whether to wait for the coordinator, and for a plan that is refused for now. Later attempts use all
                connected nodes.
            is_busy: returns whether nodes still train for earlier rounds. As long as they do, a plan that is refused
                for now is waited for, since they may be the only nodes that can be planned.

        Raises:
            CoordinatorRefusedError: no device became ready, the watts are too few for any device, or the coordinator
                refused.
            CoordinatorUnreachableError: the coordinator does not answer, and `waits` is false.
            EnergyUsedUpError: what is left of the run's energy budget does not suffice for another training.
            PlanningError: the run has to end, since the coordinator does not answer.
        """
        began_s = self._clock.now_s()
        while True:
            try:
                if self._planner.is_unreachable:
                    self._planner.connect(self._outage.left_s)
                plan = self._request_plan(grid, number, node_ids, waits, is_busy)
            except CoordinatorUnreachableError as unreachable:
                self._outage.continues(unreachable, self._nodes.are_exclusions_known)
                if self._outage.policy.action == "unplanned" and (
                    allowed := self._nodes.allowed_without_plan(grid, node_ids)
                ):
                    self._unplanned[number] = RoundWithoutPlan(allowed, number, self._clock.now_s())
                    return self._unplanned[number]
                if not waits:
                    raise
                self._require_patience(self._clock.now_s() - began_s)
                self._clock.sleep_s(min(_AWAY_POLL_S, self._outage.left_s))
                node_ids = list(grid.get_node_ids())
                continue
            self._outage.end(self._planner.name)
            self._has_planned = True
            for decision in plan.decisions:
                log(
                    INFO,
                    "%s %s: %s",
                    "+" if decision.selected else "-",
                    decision.device_id,
                    plain_text(decision.reason),
                )
            return PlannedRound(plan, number, self._clock.now_s())

    def plan_measuring(
        self, grid: Grid, node_ids: list[int], survey_s: float | None
    ) -> planning_pb2.PlanMeasuringResponse:
        """Request which nodes measure now; see `CoordinatorRun.plan_measuring`.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            CoordinatorRefusedError: the coordinator refused.
        """
        self._planner.send_pending()
        return self._run.plan_measuring(self._nodes.identified(grid, node_ids), survey_s)

    def predictions(self, grid: Grid) -> list[NodePrediction]:
        """Predict the next round of each connected node, as if it were selected; nothing is reserved.

        Raises:
            PlanningError: the run has not started.
            CoordinatorRefusedError: the coordinator refused.
            CoordinatorUnreachableError: the coordinator does not answer.
        """
        if not self._run.is_started:
            raise PlanningError(
                "there are no predictions before the run has started, since its workload is unknown: call predictions"
                " in the strategy's configure_train, or pass PowerAware(select=...)"
            )
        self._planner.send_pending()
        return self._run.predictions(self._nodes.identified(grid, list(grid.get_node_ids())))

    def able(self, grid: Grid, node_ids: list[int]) -> list[int]:
        """Return the nodes that could train now; all if none could, or if the coordinator does not answer."""
        try:
            found = {each.node_id for each in self.predictions(grid) if not each.reason}
        except (CoordinatorUnreachableError, CoordinatorRefusedError):
            return node_ids
        return [node_id for node_id in node_ids if node_id in found] or node_ids

    def reply_timeout_s(self, sent: SentRound, timeout_s: float | None) -> float | None:
        """Return how long to wait for a round's replies, seconds; never longer than the app's own timeout.

        It is the app's own timeout if the length of a device's epoch is only assumed. Such a device may train far
        longer than predicted, and has no deadline.
        """
        allowance_s = self._limits.allowance_s
        if (
            isinstance(sent, PlannedRound)
            and allowance_s is not None
            and not any(each.length_assumed for each in sent.plan.assignments)
        ):
            training_s = sent.plan.deadline_s or _DURATION_SLACK * sent.plan.duration_s
            timeout_s = min(timeout_s or float("inf"), training_s + allowance_s)
        sent.timeout_s = timeout_s
        return timeout_s

    def extended_timeout_s(self, sent: SentRound, timeout_s: float | None) -> float | None:
        """Return the timeout of a round whose timeout has passed: a longer one if the plan was trimmed meanwhile."""
        if isinstance(sent, RoundWithoutPlan):
            return sent.timeout_s
        try:
            sent.plan = self._run.current_plan(sent.plan.plan_id)
        except (CoordinatorUnreachableError, CoordinatorRefusedError) as error:
            log(
                WARNING,
                "not waiting any longer for replies, because it is unknown whether the plan was trimmed: %s",
                error,
            )
            return sent.timeout_s
        previous_s = sent.timeout_s
        extended_s = self.reply_timeout_s(sent, timeout_s)
        if extended_s != previous_s:
            log(INFO, "the plan was trimmed: waiting for replies for up to %.0f s", extended_s)
        return extended_s

    def with_assignments(self, sent: SentRound, messages: Iterable[Message]) -> list[Message]:
        """Add each node's assignment to its message; drops messages to nodes that the plan did not select.

        Without a plan, messages stay as they are.
        """
        if isinstance(sent, RoundWithoutPlan):
            unchanged = list(messages)
            sent.sent += [(message.metadata, str(message.metadata.dst_node_id)) for message in unchanged]
            sent.bases = bases_of(unchanged)
            return unchanged
        work = {each.node_id: self._work_of(each) for each in sent.plan.assignments}
        return assigned_messages(sent, messages, work)

    def finish(
        self, sent: SentRound, replies: Iterable[Message], weighted_by_key: str, adds_metrics: bool = False
    ) -> list[Message]:
        """Report a round's results to the coordinator, and return the replies that the strategy aggregates.

        Args:
            sent: the round.
            replies: the replies that arrived.
            weighted_by_key: the metric that the strategy uses as weight.
            adds_metrics: whether to add predictions and observations to the replies' metrics, and to scale updates to
                the same number of local epochs.
        """
        answered = RoundReplies(sent.sent, replies, sent.timeout_s, sent.late)
        results = answered.results(weighted_by_key)
        self._nodes.recheck_later(answered.refused_by_agents())
        self.check_epochs(sent, answered)
        self._explain_unprofiled(sent, answered)
        for result in results:
            if result.failure:
                log(WARNING, "%s failed: %s", self.device_name(sent, result.device_id), result.failure)
            elif result.late:
                log(
                    INFO,
                    "%s still trains, and the round does not wait for it",
                    self.device_name(sent, result.device_id),
                )
            elif result.share < 1:
                log(INFO, "%s did %.0f %% of its work before the deadline", result.device_id, 100 * result.share)
        wall_s = self._clock.now_s() - sent.began_s
        if isinstance(sent, RoundWithoutPlan):
            self._report_unplanned(sent, results, wall_s)
            return answered.replies
        if adds_metrics:
            self.add_metrics(sent, answered)
            normalise_updates(sent, answered.replies, answered.ignoring)
        self._run.report_round(sent.plan.plan_id, results, wall_s)
        return answered.replies

    def give_up(self, sent: SentRound) -> None:
        """Report a round whose replies are not aggregated, since the strategy has begun another one.

        Devices whose messages were sent may still train, so they count as late; the others are free at once.
        """
        sent.sent = [(metadata, label) for metadata, label in sent.sent if metadata.message_id]
        sent.late.update(label for _, label in sent.sent)
        log(WARNING, "round %d ends without an aggregation, since another round has begun", sent.number)
        self.finish(sent, [], "")

    def check_epochs(self, sent: SentRound, answered: RoundReplies) -> None:
        """Check which nodes have trained the plan's number of local epochs, and log the others.

        If no node of the run has done so, later plans no longer choose the epochs. After a round that ended without
        some of its nodes this is unknown, so later plans still choose them.

        Args:
            sent: the round.
            answered: replies to it, in time or late, after `results`.
        """
        usable = {reply.metadata.src_node_id for reply in answered.replies if not reply.has_error()}
        self._may_follow |= bool(sent.epochs and (sent.late or usable - answered.ignoring))
        if not (sent.epochs and usable & answered.ignoring and self._run.chooses_epochs):
            return
        remedy = "train for planned_work(batch_size, epochs=...).epochs epochs"
        if not self._may_follow:
            self._run.fix_epochs()
            log(
                WARNING,
                "the app does not follow the plan's local epochs, so later rounds are planned with %g: %s, or pass"
                " one number as local_epochs",
                self._run.usual_epochs,
                remedy,
            )
            return
        names = [name for metadata, name in sent.sent if metadata.dst_node_id in usable & answered.ignoring]
        log(WARNING, "the plan's local epochs were not followed by %s: %s", first_few(names), remedy)

    def _explain_unprofiled(self, sent: SentRound, answered: RoundReplies) -> None:
        """Log once in a run why devices that have not measured any mode did not measure one in this round either."""
        if not isinstance(sent, PlannedRound):
            return
        named: dict[str, list[str]] = {}
        for each in sent.plan.assignments:
            why = None if each.profiled_modes else answered.unprofiled.get(each.device_id)
            if why is not None and why not in self._said_unprofiled:
                named.setdefault(why, []).append(each.device_id)
        for why, names in named.items():
            log(WARNING, "no power mode of %s is measured while the app trains: %s", first_few(names), why)
        self._said_unprofiled |= set(named)

    def report_metrics(self, number: int, metrics: MetricRecord | None, prefix: str = "") -> None:
        """Report the strategy's metrics after a round; round 0 is the evaluation before the first round.

        Args:
            number: the round's number.
            metrics: the metrics. Numbers are reported, lists are not.
            prefix: prefix of the reported names.
        """
        if not self._run.is_started:
            return
        numbers = {prefix + k: float(v) for k, v in (metrics or {}).items() if isinstance(v, (int, float))}
        if number in self._unplanned:  # FedBuff evaluates while nodes still train
            self._unplanned[number].metrics.update(numbers)
            return
        self._run.report_metrics(number, numbers)

    def _work_of(self, assignment: planning_pb2.Assignment) -> AssignedWork:
        """The batch size and epochs that the plan has chosen for a device."""
        work = AssignedWork() if self._batches is None else self._batches.work_of(assignment)
        return replace(work, epochs=int(assignment.epochs)) if self._run.chooses_epochs and assignment.epochs else work

    def add_metrics(self, sent: SentRound, answered: RoundReplies) -> None:
        """Add the predictions and observations to the metrics of a planned round's replies."""
        if isinstance(sent, PlannedRound):
            answered.add_metrics(predicted_metrics(sent.plan))

    def device_name(self, sent: SentRound, label: str) -> str:
        """The name of the device that a message was sent to, for logs."""
        if isinstance(sent, PlannedRound):
            return label
        return self._nodes.device_of(int(label)) or f"node {label}"

    def _report_unplanned(
        self, unplanned: RoundWithoutPlan, results: list[planning_pb2.DeviceResult], wall_s: float
    ) -> None:
        self._unplanned.pop(unplanned.number, None)
        by_node = {int(result.device_id): result for result in results}
        for node_id, result in by_node.items():
            result.device_id = self._nodes.device_of(node_id)
        self._run.report_unplanned(unplanned, by_node, wall_s)

    def _start(self, run_id: str, rounds: int, workload: Workload, names: RunTitle) -> None:
        self._has_planned = self._may_follow = self._is_ended = False
        self._unplanned = {}
        self._said_unprofiled = set()
        self._run.start(run_id, rounds, workload, names)
        if self._planner.is_unreachable and self._outage.policy.action == "stop":
            unreachable = CoordinatorUnreachableError(f"the coordinator at {self._planner.name} cannot be reached")
            self._outage.continues(unreachable, are_exclusions_known=False)

    def _stop(self, why: str) -> None:
        """Report that somebody has stopped the run; the process ends within seconds."""
        self._run.finish(why)
        self._is_ended = True

    def _finish(self, error: str) -> None:
        if self._is_ended:
            return
        self._run.finish(error)
        began_s = self._clock.now_s()
        while self._planner.pending_reports and not error:
            try:
                self._planner.send_pending()
            except (CoordinatorUnreachableError, CoordinatorRefusedError):
                if self._clock.now_s() - began_s >= _FINAL_REPORTS_WITHIN_S:
                    break
                self._clock.sleep_s(POLL_S)
        if self._planner.pending_reports:
            log(
                WARNING,
                "the coordinator has no complete record of this run: %d reports could not be sent",
                self._planner.pending_reports,
            )

    def _require_patience(self, waited_s: float) -> None:
        """Make sure that a run in which no node may train without a plan waits no longer than for nodes."""
        if self._outage.policy.action == "unplanned" and waited_s >= self._limits.nodes_s:
            raise PlanningError(
                f"no connected node may train without a plan (see the warnings above), and the coordinator at"
                f" {self._planner.name} did not answer for {self._limits.nodes_s:g} s: start the coordinator, or wait"
                " longer with PowerAware(patience_s=...)"
            ) from None

    def _request_plan(
        self, grid: Grid, number: int, node_ids: list[int], waits: bool, is_busy: Callable[[], bool]
    ) -> planning_pb2.PlanRoundResponse:
        """Request a plan until there is one: devices may not be ready yet, or the budget may still be too low."""
        refusal = None
        began_s = logged_s = -float("inf")
        while True:
            try:
                self._planner.send_pending()
                known = self._nodes.identified(grid, node_ids)
                if self._select is not None:
                    known = selected_nodes(self._select, number, self._run.predictions(known))
                return self._run.plan(number, known)
            except CoordinatorRefusedError as refused:
                timeout_s, poll_s = self._wait_for(refused) if waits else (0.0, 0.0)
                now_s = self._clock.now_s()
                if refused.code is not refusal:
                    # When the budget has risen again, for example in the morning, devices may still have to get ready.
                    refusal, began_s, logged_s = refused.code, now_s, -float("inf")
                if waits and refused.is_transient and is_busy():
                    began_s = now_s  # the patience starts when the last of these nodes is free
                if now_s - began_s >= timeout_s:
                    connected = set(node_ids)
                    if why := {each: text for each, text in self._nodes.why_unknown.items() if each in connected}:
                        unknown = f"the device of {count_of(len(why), 'node')} is unknown: "
                        reasons = first_few(list(dict.fromkeys(why.values())), "; ")
                        raise CoordinatorRefusedError(f"{refused}; {unknown}{reasons}", refused.code) from None
                    raise
                if now_s - logged_s >= _LOG_INTERVAL_S:
                    log(INFO, "Waiting for a plan: %s", refused)
                    logged_s = now_s
                self._clock.sleep_s(poll_s)
            node_ids = list(grid.get_node_ids())

    def _wait_for(self, refused: CoordinatorRefusedError) -> tuple[float, float]:
        """Return for how many seconds to retry after a refusal, and the interval in seconds."""
        if not refused.is_transient:
            return 0.0, 0.0
        # A budget that was high enough before may be low for a while, at night for example. A budget that never was is
        # a mistake.
        if refused.code is grpc.StatusCode.FAILED_PRECONDITION and self._has_planned:
            return self._limits.low_budget_s, _LOW_BUDGET_POLL_S
        return self._limits.nodes_s, POLL_S
