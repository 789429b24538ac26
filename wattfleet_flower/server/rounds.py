"""The rounds of one run, as the coordinator plans them: the part that every power-aware strategy shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

import grpc
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from wattfleet_flower.server.clock import Clock
from wattfleet_flower.server.errors import CoordinatorAwayError, RefusedError
from wattfleet_flower.server.nodes import POLL_S, Nodes
from wattfleet_flower.server.outcome import Outcome, shorten
from wattfleet_flower.server.planner import Planner
from wattfleet_flower.server.turns import RUNS
from wattfleet_proto.assignment import RECORD_KEY
from wattfleet_proto.convert import assignments_from_plan
from wattfleet_proto.message_sizes import MAX_MESSAGE_BYTES
from wattfleet_proto.v1 import planning_pb2

# A predicted duration is a median, and modes may be measured during a training: one that takes up to this many times
# as long is still waited for. A deadline needs no such room, the devices keep it themselves.
_DURATION_SLACK = 2.0
_LOW_BUDGET_POLL_S = 10.0
_SAID_AGAIN_AFTER_S = 600.0
_TOLD_AT_THE_END_WITHIN_S = 30.0
# Of a message, what is left beside its plan's name.
_RESULTS_BYTES = MAX_MESSAGE_BYTES - 4096


@dataclass(frozen=True)
class Patience:
    """How long is waited for what; see `PowerAware`.

    Attributes:
        allowance_s: for what a training needs beside the training; None bounds no round.
        nodes_s: for nodes to connect and to be ready.
        low_budget_s: in a run that has trained, for a budget that carries a device.
    """

    allowance_s: float | None
    nodes_s: float
    low_budget_s: float


@dataclass
class PlannedRound:
    """A plan, and what was sent by it.

    Attributes:
        plan: the coordinator's plan.
        number: of the round, from 1.
        began_s: when its messages were written.
        waited_s: how long its replies are waited for; None while nobody knows.
        sent: metadata of every message, and the device that it was for.
    """

    plan: planning_pb2.PlanRoundResponse
    number: int
    began_s: float
    waited_s: float | None = None
    sent: list[tuple[Any, str]] = field(default_factory=list)

    @property
    def node_ids(self) -> list[int]:
        """The chosen nodes."""
        return [assignment.node_id for assignment in self.plan.assignments]


class PlannedRounds:
    """Plans the rounds of a run and reports them; says when the coordinator is away, and when it is back."""

    def __init__(self, planner: Planner, strategy: str, local_epochs: float, patience: Patience, clock: Clock) -> None:
        """Plan for one strategy.

        Args:
            planner: the coordinator.
            strategy: name of the strategy, for people.
            local_epochs: passes over its data that the app's training makes at each node in a round.
            patience: how long is waited for what.
            clock: to wait by.
        """
        self._planner = planner
        self._strategy = strategy
        self._local_epochs = local_epochs
        self._patience = patience
        self._clock = clock
        self._nodes = Nodes(planner, patience.nodes_s, clock)
        self._run: planning_pb2.StartRunRequest | None = None
        self._has_planned = False
        self._is_plain = False

    @contextmanager
    def run(self, grid: Grid, rounds: int) -> Iterator[None]:
        """A run, from its start to its end, both reported.

        Raises:
            TwoStrategiesError: another power-aware strategy runs.
            PlanningError: the coordinator refused the run.
        """
        with RUNS.begun(str(grid.run.run_id)) as run_id:
            self._start(run_id, rounds)
            try:
                yield
            except BaseException as error:
                self._finish(f"{type(error).__name__}: {error}")
                raise
            self._finish("")

    def connected(self, grid: Grid, least: int) -> list[int]:
        """The nodes that are there; see `Nodes.connected`."""
        return self._nodes.connected(grid, least)

    def plan(self, grid: Grid, number: int, node_ids: list[int], waits: bool = True) -> PlannedRound | None:
        """The plan of a round; None while the coordinator is away, which is said.

        Args:
            grid: Flower's.
            number: of the round, from 1.
            node_ids: nodes that are connected, and free.
            waits: whether to wait, within patience, where there is no plan yet; then over all nodes that are connected.

        Raises:
            RefusedError: none of the devices got ready, the watts carry none, or the coordinator refused; the text
                says why.
        """
        if self._run is None:  # driven by hand, or by a strategy around this one
            self._start(str(grid.run.run_id), 0)
        try:
            if self._planner.away:
                self._planner.reach()
            plan = self._planned(grid, number, node_ids, waits)
        except CoordinatorAwayError as away:
            if not self._is_plain:
                log(
                    WARNING,
                    "%s. Training goes on with plain %s, and NO BUDGET IS KEPT: every node may train, in the power"
                    " mode that it is in. Start the coordinator ('wattfleet coordinator serve'), or correct its"
                    " address in the app; rounds are planned again once it answers.",
                    away,
                    self._strategy,
                )
            self._is_plain = True
            return None
        if self._is_plain:
            log(INFO, "the coordinator at %s is back: rounds are planned again", self._planner.name)
        self._is_plain, self._has_planned = False, True
        for decision in plan.decisions:
            log(INFO, "%s %s: %s", "+" if decision.selected else "-", decision.device_id, decision.reason)
        return PlannedRound(plan, number, self._clock.now_s())

    def limit_s(self, planned: PlannedRound, timeout_s: float | None) -> float | None:
        """How long to wait for a round's replies, seconds; never longer than the app's own timeout."""
        plan, allowance_s = planned.plan, self._patience.allowance_s
        if allowance_s is not None:
            training_s = plan.deadline_s or _DURATION_SLACK * plan.duration_s
            timeout_s = min(timeout_s or float("inf"), training_s + allowance_s)
        planned.waited_s = timeout_s
        return timeout_s

    def renewed_limit_s(self, planned: PlannedRound, timeout_s: float | None) -> float | None:
        """The same once that long has been waited: where watts fell, the plan was trimmed, and takes longer now."""
        assert self._run is not None, "it has planned"
        # Of a round that has its plan no nodes are needed; should it be known no more, none is made of none.
        request = planning_pb2.PlanRoundRequest(
            run_id=self._run.run_id, round=planned.number, epochs=self._local_epochs
        )
        try:
            planned.plan = self._planner.ask("PlanRound", request)
        except (CoordinatorAwayError, RefusedError) as unknown:
            log(WARNING, "replies are waited for no longer, as nobody knows whether the plan was trimmed: %s", unknown)
            return planned.waited_s
        before_s = planned.waited_s
        limit_s = self.limit_s(planned, timeout_s)
        if limit_s != before_s:
            log(INFO, "the plan was trimmed since: replies are waited for up to %.0f s", limit_s)
        return limit_s

    def assigned(self, planned: PlannedRound, messages: Iterable[Message]) -> list[Message]:
        """A strategy's messages, each with its node's assignment beside what the strategy wrote."""
        assignments = assignments_from_plan(planned.plan, self._local_epochs)
        kept = []
        for message in messages:
            assignment = assignments.get(message.metadata.dst_node_id)
            if assignment is None:
                log(WARNING, "node %d gets no message: the plan has no watts for it", message.metadata.dst_node_id)
                continue
            content = RecordDict(dict(message.content))  # strategies put one record into all messages
            content[RECORD_KEY] = ConfigRecord(assignment.to_record())
            message.content = content
            # Flower writes the message's id into its metadata when it is sent.
            planned.sent.append((message.metadata, assignment.device_id))
            kept.append(message)
        return kept

    def finish(self, planned: PlannedRound, replies: Iterable[Message], weighted_by_key: str) -> list[Message]:
        """Tell the coordinator what came of a round; the replies, as the strategy may aggregate them."""
        outcome = Outcome(planned.sent, replies, planned.waited_s)
        results = outcome.weigh(weighted_by_key)
        for result in results:
            if result.failure:
                log(WARNING, "%s failed: %s", result.device_id, result.failure)
            elif result.share < 1:
                log(INFO, "%s did %.0f %% of its work in time", result.device_id, 100 * result.share)
        shorten(results, _RESULTS_BYTES)
        request = planning_pb2.FinishRoundRequest(
            plan_id=planned.plan.plan_id, results=results, wall_s=self._clock.now_s() - planned.began_s
        )
        self._tell("FinishRound", request)
        return outcome.replies

    def report_metrics(self, number: int, metrics: MetricRecord | None) -> None:
        """Tell the coordinator what the strategy evaluated after a round; round 0 is before the first."""
        if self._run is None or (number and self._is_plain):
            return  # it knows of no such round
        numbers = {k: float(v) for k, v in (metrics or {}).items() if isinstance(v, (int, float))}
        self._tell(
            "ReportMetrics",
            planning_pb2.ReportMetricsRequest(run_id=self._run.run_id, round=number, metrics=numbers),
        )

    def _start(self, run_id: str, rounds: int) -> None:
        self._run = planning_pb2.StartRunRequest(run_id=run_id, strategy=self._strategy, rounds=rounds)
        self._has_planned = self._is_plain = False
        self._planner.tell("StartRun", self._run)

    def _finish(self, error: str) -> None:
        assert self._run is not None, "it was started"
        self._tell("FinishRun", planning_pb2.FinishRunRequest(run_id=self._run.run_id, error=error))
        began_s = self._clock.now_s()
        while self._planner.untold and not error:
            try:
                self._planner.catch_up()
            except CoordinatorAwayError:
                break
            except RefusedError:
                if self._clock.now_s() - began_s >= _TOLD_AT_THE_END_WITHIN_S:
                    break
                self._clock.sleep_s(POLL_S)
        if self._planner.untold:
            log(
                WARNING,
                "the coordinator does not know all of this run: %d reports were not taken",
                self._planner.untold,
            )

    def _tell(self, method: str, request: Any) -> None:
        try:
            self._planner.tell(method, request)
        except RefusedError as refused:
            log(WARNING, "%s was not taken: %s", method, refused)

    def _planned(self, grid: Grid, number: int, node_ids: list[int], waits: bool) -> planning_pb2.PlanRoundResponse:
        """The plan, once there is one: devices may have to get ready, or the budget to rise."""
        assert self._run is not None, "it was started"
        refusal = None
        began_s = said_s = -float("inf")
        is_known = True
        while True:
            try:
                self._planner.catch_up()
                request = planning_pb2.PlanRoundRequest(
                    run_id=self._run.run_id,
                    round=number,
                    node_ids=self._nodes.identified(grid, node_ids),
                    epochs=self._local_epochs,
                )
                plan: planning_pb2.PlanRoundResponse = self._planner.ask("PlanRound", request)
                return plan
            except RefusedError as refused:
                if refused.code is grpc.StatusCode.NOT_FOUND and is_known:
                    # Its store was replaced since the run began.
                    is_known = False
                    self._planner.ask("StartRun", self._run)
                    continue
                patience_s, poll_s = self._waiting_for(refused) if waits else (0.0, 0.0)
                now_s = self._clock.now_s()
                if refused.code is not refusal:
                    # Watts that are back after a night find devices that still have to get ready.
                    refusal, began_s, said_s = refused.code, now_s, -float("inf")
                if now_s - began_s >= patience_s:
                    raise
                if now_s - said_s >= _SAID_AGAIN_AFTER_S:
                    log(INFO, "Waiting for a plan: %s", refused)
                    said_s = now_s
                self._clock.sleep_s(poll_s)
            node_ids = list(grid.get_node_ids())

    def _waiting_for(self, refused: RefusedError) -> tuple[float, float]:
        """How long to go on asking after a refusal, and how often; seconds."""
        if not refused.may_pass:
            return 0.0, 0.0
        # A budget that has carried this run is low now, at night say. One that never has is a mistake.
        if refused.code is grpc.StatusCode.FAILED_PRECONDITION and self._has_planned:
            return self._patience.low_budget_s, _LOW_BUDGET_POLL_S
        return self._patience.nodes_s, POLL_S
