"""The planned rounds of one run: what PowerAware and FedBuff share."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

import grpc
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from wattfleet_flower.server.active_runs import ACTIVE_RUNS
from wattfleet_flower.server.errors import CoordinatorUnreachableError, RefusedError
from wattfleet_flower.server.nodes import POLL_S, Nodes
from wattfleet_flower.server.planning_client import PlanningClient
from wattfleet_flower.server.replies import RoundReplies, truncate_failures
from wattfleet_flower.server.run_start import start_run
from wattfleet_io.clock import Clock
from wattfleet_io.console import plain_text
from wattfleet_proto.assignment import RECORD_KEY
from wattfleet_proto.convert import assignments_from_plan
from wattfleet_proto.message_sizes import MAX_MESSAGE_BYTES
from wattfleet_proto.v1 import planning_pb2

# Without a deadline a round is given this many times its predicted duration: the prediction is a median, and devices
# may measure power modes during training. Devices keep a deadline themselves, so it needs no slack.
_DURATION_SLACK = 2.0
_LOW_BUDGET_POLL_S = 10.0
_LOG_INTERVAL_S = 600.0
_FINAL_REPORTS_WITHIN_S = 30.0
# Leaves room for the other fields of the message.
_RESULTS_BYTES = MAX_MESSAGE_BYTES - 4096


@dataclass(frozen=True)
class WaitLimits:
    """How long to wait for replies, nodes and watts, seconds; see `PowerAware`.

    Attributes:
        allowance_s: for replies, beyond the training itself; None for no limit beyond the app's own timeout.
        nodes_s: for nodes to connect and to be ready.
        low_budget_s: for a budget that suffices for a device, in a run that has trained before.
    """

    allowance_s: float | None
    nodes_s: float
    low_budget_s: float


@dataclass
class PlannedRound:
    """A plan and the messages sent for it.

    Attributes:
        plan: the coordinator's plan.
        number: the round's number, from 1.
        began_s: when the round began, seconds of the clock.
        timeout_s: how long to wait for its replies; None for no limit.
        sent: each message's metadata, and the device it is sent to.
    """

    plan: planning_pb2.PlanRoundResponse
    number: int
    began_s: float
    timeout_s: float | None = None
    sent: list[tuple[Any, str]] = field(default_factory=list)

    @property
    def node_ids(self) -> list[int]:
        """The selected nodes."""
        return [assignment.node_id for assignment in self.plan.assignments]


class PlannedRounds:
    """Plans and reports the rounds of a run; logs when the coordinator becomes unreachable and when it is back."""

    def __init__(
        self, planner: PlanningClient, strategy: str, local_epochs: float, limits: WaitLimits, clock: Clock
    ) -> None:
        """Plan for one strategy.

        Args:
            planner: the coordinator.
            strategy: the strategy's name, for logs and reports.
            local_epochs: passes over its data that the app's training makes at each node in a round.
            limits: how long to wait.
            clock: measures the waiting.
        """
        self._planner = planner
        self._strategy = strategy
        self._local_epochs = local_epochs
        self._limits = limits
        self._clock = clock
        self._nodes = Nodes(planner, limits.nodes_s, clock)
        self._run_token = secrets.token_urlsafe(32)
        self._run: planning_pb2.StartRunRequest | None = None
        self._has_planned = False
        self._is_unplanned = False

    @contextmanager
    def run(self, grid: Grid, rounds: int) -> Iterator[None]:
        """Report the start and the end of a run around this context.

        Raises:
            TwoStrategiesError: another power-aware strategy runs.
            PlanningError: the coordinator refused the run.
        """
        with ACTIVE_RUNS.enter(str(grid.run.run_id)) as run_id:
            self._start(run_id, rounds)
            try:
                yield
            except BaseException as error:
                self._finish(f"{type(error).__name__}: {error}")
                raise
            self._finish("")

    def connected(self, grid: Grid, least: int) -> list[int]:
        """Return the connected nodes; see `Nodes.connected`."""
        return self._nodes.connected(grid, least)

    def plan(self, grid: Grid, number: int, node_ids: list[int], waits: bool = True) -> PlannedRound | None:
        """Plan a round; returns None, with a warning, while the coordinator is unreachable.

        Args:
            grid: Flower's grid.
            number: the round's number, from 1.
            node_ids: nodes that are connected and free.
            waits: whether to wait for a plan that is refused for now. Later attempts use all connected nodes.

        Raises:
            RefusedError: no device became ready, the watts suffice for none, or the coordinator refused otherwise.
        """
        if self._run is None:  # called without `start`, directly or by another strategy
            self._start(str(grid.run.run_id), 0)
        try:
            if self._planner.is_unreachable:
                self._planner.connect()
            plan = self._request_plan(grid, number, node_ids, waits)
        except CoordinatorUnreachableError as unreachable:
            if not self._is_unplanned:
                log(
                    WARNING,
                    "%s. Training continues with plain %s, and NO BUDGET IS KEPT: every node may train, in its current"
                    " power mode. Start the coordinator ('wattfleet coordinator serve'), or correct its address in"
                    " the app; rounds are planned again once it answers.",
                    unreachable,
                    self._strategy,
                )
            self._is_unplanned = True
            return None
        if self._is_unplanned:
            log(INFO, "the coordinator at %s is back: rounds are planned again", self._planner.name)
        self._is_unplanned, self._has_planned = False, True
        for decision in plan.decisions:
            log(INFO, "%s %s: %s", "+" if decision.selected else "-", decision.device_id, plain_text(decision.reason))
        return PlannedRound(plan, number, self._clock.now_s())

    def reply_timeout_s(self, planned: PlannedRound, timeout_s: float | None) -> float | None:
        """Return how long to wait for a round's replies, seconds; never longer than the app's own timeout."""
        plan, allowance_s = planned.plan, self._limits.allowance_s
        if allowance_s is not None:
            training_s = plan.deadline_s or _DURATION_SLACK * plan.duration_s
            timeout_s = min(timeout_s or float("inf"), training_s + allowance_s)
        planned.timeout_s = timeout_s
        return timeout_s

    def extended_timeout_s(self, planned: PlannedRound, timeout_s: float | None) -> float | None:
        """Return the timeout again once it has passed: longer if the plan was trimmed to fewer watts since."""
        assert self._run is not None, "it has planned"
        try:
            planned.plan = self._current_plan(planned.plan.plan_id, planned.number)
        except (CoordinatorUnreachableError, RefusedError) as error:
            log(WARNING, "not waiting longer for replies, since it is unknown whether the plan was trimmed: %s", error)
            return planned.timeout_s
        previous_s = planned.timeout_s
        extended_s = self.reply_timeout_s(planned, timeout_s)
        if extended_s != previous_s:
            log(INFO, "the plan was trimmed: waiting for replies for up to %.0f s", extended_s)
        return extended_s

    def _current_plan(self, plan_id: str, number: int) -> planning_pb2.PlanRoundResponse:
        """Look up a plan as it is now: it may have been trimmed since it was made.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            RefusedError: the coordinator refused.
        """
        assert self._run is not None, "it has planned"
        try:
            answer: planning_pb2.GetPlanResponse = self._planner.call(
                "GetPlan", planning_pb2.GetPlanRequest(plan_id=plan_id)
            )
            return answer.plan
        except RefusedError as refused:
            if refused.code is not grpc.StatusCode.UNIMPLEMENTED:
                raise
        # Before protocol 1.2: without nodes the coordinator returns the existing plan and never makes a new one.
        request = planning_pb2.PlanRoundRequest(
            run_id=self._run.run_id, round=number, epochs=self._local_epochs, run_token=self._run_token
        )
        plan: planning_pb2.PlanRoundResponse = self._planner.call("PlanRound", request)
        return plan

    def with_assignments(self, planned: PlannedRound, messages: Iterable[Message]) -> list[Message]:
        """Add each node's assignment to its message; drops messages to nodes that the plan did not select."""
        assignments = assignments_from_plan(planned.plan, self._local_epochs)
        kept = []
        for message in messages:
            assignment = assignments.get(message.metadata.dst_node_id)
            if assignment is None:
                log(
                    WARNING,
                    "the message to node %d is dropped: the plan did not select it",
                    message.metadata.dst_node_id,
                )
                continue
            content = RecordDict(dict(message.content))  # strategies share one record among all messages
            content[RECORD_KEY] = ConfigRecord(assignment.to_record())
            message.content = content
            # Flower sets the message id in the metadata when it sends the message.
            planned.sent.append((message.metadata, assignment.device_id))
            kept.append(message)
        return kept

    def finish(self, planned: PlannedRound, replies: Iterable[Message], weighted_by_key: str) -> list[Message]:
        """Report a round's results to the coordinator; returns the replies that the strategy aggregates."""
        answered = RoundReplies(planned.sent, replies, planned.timeout_s)
        results = answered.results(weighted_by_key)
        for result in results:
            if result.failure:
                log(WARNING, "%s failed: %s", result.device_id, result.failure)
            elif result.share < 1:
                log(INFO, "%s did %.0f %% of its work before the deadline", result.device_id, 100 * result.share)
        truncate_failures(results, _RESULTS_BYTES)
        request = planning_pb2.FinishRoundRequest(
            plan_id=planned.plan.plan_id,
            results=results,
            wall_s=self._clock.now_s() - planned.began_s,
            run_token=self._run_token,
        )
        self._report("FinishRound", request)
        return answered.replies

    def report_metrics(self, number: int, metrics: MetricRecord | None) -> None:
        """Report the strategy's metrics after a round; round 0 is the evaluation before the first round."""
        if self._run is None or (number and self._is_unplanned):
            return  # the coordinator has no such round
        numbers = {k: float(v) for k, v in (metrics or {}).items() if isinstance(v, (int, float))}
        self._report(
            "ReportMetrics",
            planning_pb2.ReportMetricsRequest(
                run_id=self._run.run_id, round=number, metrics=numbers, run_token=self._run_token
            ),
        )

    def _start(self, run_id: str, rounds: int) -> None:
        run = planning_pb2.StartRunRequest(
            run_id=run_id, strategy=self._strategy, rounds=rounds, run_token=self._run_token
        )
        self._has_planned = self._is_unplanned = False
        self._run = start_run(self._planner, run)

    def _finish(self, error: str) -> None:
        assert self._run is not None, "it was started"
        request = planning_pb2.FinishRunRequest(run_id=self._run.run_id, error=error, run_token=self._run_token)
        self._report("FinishRun", request)
        began_s = self._clock.now_s()
        while self._planner.pending_reports and not error:
            try:
                self._planner.send_pending()
            except CoordinatorUnreachableError:
                break
            except RefusedError:
                if self._clock.now_s() - began_s >= _FINAL_REPORTS_WITHIN_S:
                    break
                self._clock.sleep_s(POLL_S)
        if self._planner.pending_reports:
            log(
                WARNING,
                "the coordinator's record of this run is incomplete: %d reports could not be sent",
                self._planner.pending_reports,
            )

    def _report(self, method: str, request: Any) -> None:
        try:
            self._planner.report(method, request)
        except RefusedError as refused:
            log(WARNING, "the coordinator rejected %s: %s", method, refused)

    def _request_plan(
        self, grid: Grid, number: int, node_ids: list[int], waits: bool
    ) -> planning_pb2.PlanRoundResponse:
        """Request the plan until there is one: devices may have to get ready, or the budget to rise."""
        assert self._run is not None, "it was started"
        refusal = None
        began_s = logged_s = -float("inf")
        is_run_known = is_run_ours = True
        while True:
            try:
                self._planner.send_pending()
                request = planning_pb2.PlanRoundRequest(
                    run_id=self._run.run_id,
                    round=number,
                    node_ids=self._nodes.identified(grid, node_ids),
                    epochs=self._local_epochs,
                    run_token=self._run_token,
                )
                plan: planning_pb2.PlanRoundResponse = self._planner.call("PlanRound", request)
                return plan
            except RefusedError as refused:
                if refused.code is grpc.StatusCode.NOT_FOUND and is_run_known:
                    # The coordinator's store was replaced since the run began.
                    is_run_known = False
                    self._planner.call("StartRun", self._run)
                    continue
                if refused.code is grpc.StatusCode.PERMISSION_DENIED and is_run_ours:
                    # The run was started while the coordinator could not be reached, and refused since.
                    is_run_ours = False
                    self._run = start_run(self._planner, self._run)
                    continue
                timeout_s, poll_s = self._wait_for(refused) if waits else (0.0, 0.0)
                now_s = self._clock.now_s()
                if refused.code is not refusal:
                    # When the budget is back after a night, devices may still have to get ready.
                    refusal, began_s, logged_s = refused.code, now_s, -float("inf")
                if now_s - began_s >= timeout_s:
                    raise
                if now_s - logged_s >= _LOG_INTERVAL_S:
                    log(INFO, "Waiting for a plan: %s", refused)
                    logged_s = now_s
                self._clock.sleep_s(poll_s)
            node_ids = list(grid.get_node_ids())

    def _wait_for(self, refused: RefusedError) -> tuple[float, float]:
        """Return how long to retry after a refusal, and at which interval; seconds."""
        if not refused.is_transient:
            return 0.0, 0.0
        # A budget that sufficed before may be low for a while, at night for example. One that never did is a mistake.
        if refused.code is grpc.StatusCode.FAILED_PRECONDITION and self._has_planned:
            return self._limits.low_budget_s, _LOW_BUDGET_POLL_S
        return self._limits.nodes_s, POLL_S
