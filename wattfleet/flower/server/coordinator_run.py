"""One run at the coordinator: requests for its plans, and reports of its rounds.

A run belongs to the process that started it. The process proves this with a token in every request.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

import grpc
from flwr.common.logger import log

from wattfleet.common.clock import Clock
from wattfleet.core.modes import Workload
from wattfleet.core.planning import EpochChoice
from wattfleet.flower.server.errors import (
    CoordinatorRefusedError,
    EnergyUsedUpError,
    LostRunError,
    TwoStrategiesError,
)
from wattfleet.flower.server.names import RunTitle
from wattfleet.flower.server.planning_client import PlanningClient
from wattfleet.flower.server.predictions import NodePrediction, node_predictions
from wattfleet.flower.server.replies import RoundWithoutPlan, truncate_failures
from wattfleet_proto.convert import epoch_choice_to_message, workload_to_message
from wattfleet_proto.limits import MAX_MESSAGE_BYTES
from wattfleet_proto.v1 import planning_pb2

# --- Active runs ------------------------------------------------------------------------------------------------------
# Makes sure that only one power-aware strategy at a time runs in each Flower run of this process.


class ActiveRuns:
    """The runs in which a power-aware strategy is running."""

    def __init__(self) -> None:
        """Start with no run."""
        self._lock = threading.Lock()
        self._active: set[str] = set()
        self._strategies: Counter[str] = Counter()

    @contextmanager
    def enter(self, run_id: str) -> Iterator[str]:
        """Mark a run as active within this context, and yield the run id to report to the coordinator.

        Raises:
            TwoStrategiesError: another strategy is running in this run.
        """
        with self._lock:
            if run_id in self._active:
                raise TwoStrategiesError(
                    f"two power-aware strategies are running in run {run_id}: each would plan with all of the site's"
                    " watts. Start the second one after the first has ended"
                )
            self._active.add(run_id)
            self._strategies[run_id] += 1
            # The second strategy starts at round 1 again, which the coordinator has planned already.
            name = run_id if self._strategies[run_id] == 1 else f"{run_id}-{self._strategies[run_id]}"
        try:
            yield name
        finally:
            with self._lock:
                self._active.discard(run_id)


ACTIVE_RUNS = ActiveRuns()


# --- Coordinator run --------------------------------------------------------------------------------------------------

_MOST_IDS = 20
# Leaves room for the other fields of the message.
_RESULTS_BYTES = MAX_MESSAGE_BYTES - 4096
# Bytes that a result in a round without a plan needs beyond a device's result: the node id and message overhead.
_NODE_BYTES = 20
# Results of rounds without a plan that are kept for their reports, about 100 bytes each; later rounds are reported
# without results.
_MAX_KEPT_RESULTS = 200_000


@dataclass
class _StartedRun:
    """A run that was started, or that will be started once the coordinator can be reached.

    Attributes:
        flower_id: Flower's id of the run.
        rounds: how many rounds it has; 0 if this is unknown.
        workload: what it trains.
        names: its name and its labels.
        ids_tried: how many ids were tried. Another process may have started a run with Flower's id.
    """

    flower_id: str
    rounds: int
    workload: Workload
    names: RunTitle
    ids_tried: int = 1

    @property
    def run_id(self) -> str:
        """The run's id at the coordinator."""
        return self.flower_id if self.ids_tried == 1 else f"{self.flower_id}-{self.ids_tried}"


class CoordinatorRun:
    """Starts a run at the coordinator, requests its plans, and reports its rounds.

    Flower cannot resume a run. A restarted process begins the Flower run with round 1 again, which the coordinator has
    already planned for the process before it. It continues as run ID-2, ID-3 and so on.
    """

    def __init__(
        self,
        planner: PlanningClient,
        strategy: str,
        needs_all: bool,
        local_epochs: EpochChoice,
        clock: Clock,
        energy_budget_j: float | None = None,
    ) -> None:
        """Use a coordinator.

        Args:
            planner: the coordinator.
            strategy: the strategy's name.
            needs_all: whether the strategy needs the update of every device.
            local_epochs: passes over its data that a node's training makes in a round, or those that plans may choose.
            clock: measures when rounds began.
            energy_budget_j: joules above idle that the run's trainings may draw; None without an energy budget.
        """
        self._energy_budget_j = energy_budget_j
        self._planner = planner
        self._strategy = strategy
        self._needs_all = needs_all
        self._local_epochs = local_epochs
        self._clock = clock
        self._token = secrets.token_urlsafe(32)
        self._run: _StartedRun | None = None
        self._is_finished = False

    @property
    def is_started(self) -> bool:
        """Whether `start` was called."""
        return self._run is not None

    @property
    def is_finished(self) -> bool:
        """Whether `finish` was called since the last start."""
        return self._is_finished

    @property
    def usual_epochs(self) -> float:
        """The local epochs where no plan has chosen them."""
        return self._local_epochs.fewest

    @property
    def chooses_epochs(self) -> bool:
        """Whether plans may choose the local epochs."""
        return len(self._local_epochs.options) > 1

    def fix_epochs(self) -> None:
        """Stop plans from choosing the local epochs, because the app does not follow them."""
        self._local_epochs = EpochChoice.fixed(self.usual_epochs)

    def start(self, flower_id: str, rounds: int, workload: Workload, names: RunTitle) -> None:
        """Start a run at the coordinator, or later if the coordinator cannot be reached now.

        Args:
            flower_id: Flower's id of the run.
            rounds: how many rounds it has; 0 if this is unknown.
            workload: what it trains.
            names: its name and its labels.

        Raises:
            CoordinatorRefusedError: the coordinator refused the run.
        """
        self._run = run = _StartedRun(flower_id, rounds, workload, names)
        self._start(run)

    def start_again(self) -> None:
        """Start the run again after `finish`, because the app requests further rounds of it.

        Raises:
            CoordinatorRefusedError: the coordinator refused the run.
        """
        self._start(self._started)

    def _start(self, run: _StartedRun) -> None:
        self._is_finished = False
        self._planner.report(
            "StartRun",
            lambda: self._start_request(run),
            lambda refused: _takes_next_id(run, refused),
            lambda answer: _log_name(run, answer.name),
        )

    def plan(self, number: int, node_ids: Sequence[int]) -> planning_pb2.PlanRoundResponse:
        """Request a round's plan, once; without nodes the coordinator returns the existing plan and makes no new one.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            CoordinatorRefusedError: the coordinator refused.
            EnergyUsedUpError: what is left of the run's energy budget does not suffice for another training.
            LostRunError: the coordinator does not know the run any more.
        """
        request = planning_pb2.PlanRoundRequest(
            run_id=self._started.run_id,
            round=number,
            node_ids=node_ids,
            epochs=self._local_epochs.fewest,
            run_token=self._token,
            epoch_choice=epoch_choice_to_message(self._local_epochs) if self.chooses_epochs else None,
        )
        plan: planning_pb2.PlanRoundResponse = self._call("PlanRound", request)
        return plan

    def plan_measuring(self, node_ids: Sequence[int], survey_s: float | None) -> planning_pb2.PlanMeasuringResponse:
        """Request which nodes measure now, outside of rounds.

        Args:
            node_ids: nodes that are connected and free.
            survey_s: seconds in which devices that do not know the workload begin measurements; None for all devices,
                until the round ends.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            CoordinatorRefusedError: the coordinator refused.
        """
        request = planning_pb2.PlanMeasuringRequest(
            run_id=self._started.run_id,
            node_ids=node_ids,
            epochs=self._local_epochs.fewest,
            run_token=self._token,
            survey_s=survey_s,
        )
        plan: planning_pb2.PlanMeasuringResponse = self._planner.call("PlanMeasuring", request)
        return plan

    def predictions(self, node_ids: Sequence[int]) -> list[NodePrediction]:
        """Request what is predicted of nodes for the next round.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            CoordinatorRefusedError: the coordinator refused.
            LostRunError: the coordinator does not know the run any more.
        """
        request = planning_pb2.PredictNodesRequest(
            run_id=self._started.run_id, node_ids=node_ids, epochs=self.usual_epochs, run_token=self._token
        )
        answer: planning_pb2.PredictNodesResponse = self._call("PredictNodes", request)
        return node_predictions(answer.predictions)

    def current_plan(self, plan_id: str) -> planning_pb2.PlanRoundResponse:
        """Request a plan's current state, since it may have been trimmed.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            CoordinatorRefusedError: the coordinator refused.
        """
        request = planning_pb2.GetPlanRequest(plan_id=plan_id)
        # A round waits for this answer.
        answer: planning_pb2.GetPlanResponse = self._planner.call_briefly("GetPlan", request)
        return answer.plan

    def report_round(self, plan_id: str, results: Sequence[planning_pb2.DeviceResult], wall_s: float) -> None:
        """Report the results of a planned round."""
        truncate_failures(results, _RESULTS_BYTES)
        request = planning_pb2.FinishRoundRequest(
            plan_id=plan_id, results=results, wall_s=wall_s, run_token=self._token
        )
        self._report("FinishRound", lambda: request)

    def report_unplanned(
        self, unplanned: RoundWithoutPlan, results: Mapping[int, planning_pb2.DeviceResult], wall_s: float
    ) -> None:
        """Report a round without a plan. The report is sent when the coordinator answers again.

        Args:
            unplanned: the round.
            results: each device's result, by node id.
            wall_s: its duration in seconds.
        """
        run = self._started
        if len(results) * (self._planner.pending_reports + 1) > _MAX_KEPT_RESULTS:
            log(
                WARNING,
                "the results of round %d are dropped: the coordinator has not answered for too long",
                unplanned.number,
            )
            results = {}
        truncate_failures(list(results.values()), _RESULTS_BYTES - _NODE_BYTES * len(results))
        of_nodes = [planning_pb2.NodeResult(node_id=node_id, result=result) for node_id, result in results.items()]

        def build() -> planning_pb2.ReportUnplannedRoundRequest:
            return planning_pb2.ReportUnplannedRoundRequest(
                run_id=run.run_id,
                round=unplanned.number,
                began_ago_s=self._clock.now_s() - unplanned.began_s,
                wall_s=wall_s,
                results=of_nodes,
                metrics=unplanned.metrics,
                run_token=self._token,
            )

        self._report("ReportUnplannedRound", build)

    def report_metrics(self, number: int, metrics: Mapping[str, float]) -> None:
        """Report the strategy's metrics after a round; round 0 is the evaluation before the first round."""
        run = self._started
        self._report(
            "ReportMetrics",
            lambda: planning_pb2.ReportMetricsRequest(
                run_id=run.run_id, round=number, metrics=metrics, run_token=self._token
            ),
        )

    def finish(self, error: str) -> None:
        """Report that the run is over.

        Args:
            error: why it failed; empty if it completed.
        """
        run = self._started
        self._is_finished = True
        self._report(
            "FinishRun",
            lambda: planning_pb2.FinishRunRequest(run_id=run.run_id, error=error, run_token=self._token),
        )

    @property
    def _started(self) -> _StartedRun:
        assert self._run is not None, "it was started"
        return self._run

    def _start_request(self, run: _StartedRun) -> planning_pb2.StartRunRequest:
        return planning_pb2.StartRunRequest(
            run_id=run.run_id,
            strategy=self._strategy,
            rounds=run.rounds,
            run_token=self._token,
            workload=workload_to_message(run.workload),
            name=run.names.name,
            app=run.names.app,
            labels=run.names.labels,
            needs_all=self._needs_all,
            energy_budget_j=self._energy_budget_j or 0.0,
        )

    def _call(self, method: str, request: Any) -> Any:
        try:
            return self._planner.call(method, request)
        except CoordinatorRefusedError as refused:
            if refused.code is grpc.StatusCode.NOT_FOUND:
                raise LostRunError(self._started.run_id, self._planner.name) from None
            if refused.code is grpc.StatusCode.OUT_OF_RANGE:
                raise EnergyUsedUpError(str(refused)) from None
            raise

    def _report(self, method: str, build: Callable[[], Any]) -> None:
        try:
            self._planner.report(method, build)
        except CoordinatorRefusedError as refused:
            log(WARNING, "the coordinator rejected %s: %s", method, refused)


def _log_name(run: _StartedRun, name: str) -> None:
    """Log what the coordinator calls a run."""
    log(INFO, "run %s is called %s at the coordinator", run.run_id, name)


def _takes_next_id(run: _StartedRun, refused: CoordinatorRefusedError) -> bool:
    """Give a run the next id if another process has started a run with its current id.

    Returns:
        Whether to start it again.
    """
    if refused.code is not grpc.StatusCode.PERMISSION_DENIED or run.ids_tried > _MOST_IDS:
        return False
    taken = run.run_id
    run.ids_tried += 1
    log(
        WARNING,
        "run %s was started by another process: this one continues as run %s. Devices that still train for the"
        " former are free after `wattfleet coordinator delete %s --end`",
        taken,
        run.run_id,
        taken,
    )
    return True
