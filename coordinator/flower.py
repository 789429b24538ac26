"""The server's side of Flower: any strategy, steered by the fleet's round plans.

from coordinator.flower import PowerAware

strategy = PowerAware(FedAvg(), coordinator="127.0.0.1:7070")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from logging import INFO, WARNING
from typing import Any, TypeVar

import grpc
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from wattfleet.errors import WattfleetError
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, RECORD_KEY, RoundAssignment
from wattfleet_proto.convert import mode_from_message
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

_RPC_TIMEOUT_S = 30.0
_IDENTIFY_TIMEOUT_S = 120.0
_PLAN_PATIENCE_S = 120.0
_POLL_S = 1.0

# How many nodes a strategy wants; the plan has decided that, and waiting for more would stall the round.
_SAMPLING = {"fraction_train": 1.0, "min_train_nodes": 1, "min_available_nodes": 1}

Answer = TypeVar("Answer")


class PlanningError(WattfleetError):
    """The coordinator made no plan; the text gives its reason."""


class ChosenNodesGrid(Grid):  # type: ignore[misc]  # Flower is not typed for strict checking
    """Flower's grid, showing only some of its nodes: every strategy samples through what its grid shows."""

    def __init__(self, grid: Grid, node_ids: list[int]) -> None:
        """Show these nodes of a grid."""
        self._grid = grid
        self._node_ids = node_ids

    def get_node_ids(self) -> Iterable[int]:
        """The chosen nodes."""
        return list(self._node_ids)

    @property
    def run(self) -> Any:
        """The run, as the wrapped grid has it."""
        return self._grid.run

    def set_run(self, run: Any) -> None:
        """Set the wrapped grid's run."""
        self._grid.set_run(run)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Create a message with the wrapped grid."""
        return self._grid.create_message(*args, **kwargs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push through the wrapped grid."""
        return self._grid.push_messages(messages)  # type: ignore[no-any-return]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull through the wrapped grid."""
        return self._grid.pull_messages(message_ids)  # type: ignore[no-any-return]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send through the wrapped grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)  # type: ignore[no-any-return]


class PowerAware(Strategy):  # type: ignore[misc]  # Flower is not typed for strict checking
    """A strategy whose training rounds go to the devices, and in the power modes, that the coordinator plans.

    The wrapped strategy writes the messages and aggregates the replies as ever; evaluation is left to it.
    """

    def __init__(self, strategy: Strategy, coordinator: str = "127.0.0.1:7070", local_epochs: float = 1.0) -> None:
        """Wrap a strategy.

        Args:
            strategy: any of Flower's strategies, or one of your own.
            coordinator: host:port of the coordinator.
            local_epochs: passes over its data that the app's training makes at each node in a round.
        """
        self.strategy = strategy
        self._coordinator = coordinator
        self._local_epochs = local_epochs
        self._planner = planning_pb2_grpc.PlanningServiceStub(grpc.insecure_channel(coordinator))
        self._run_id: str | None = None
        self._plan: planning_pb2.PlanRoundResponse | None = None
        self._round_started_s = 0.0

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds as the wrapped strategy would, and tell the coordinator how they went."""
        run_id = self._start_run(grid, num_rounds)

        def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(server_round, arrays) if evaluate_fn else None
            self._report_metrics(run_id, server_round, metrics)
            return metrics

        try:
            result = super().start(
                grid,
                initial_arrays,
                num_rounds,
                timeout,
                train_config,
                evaluate_config,
                evaluated if evaluate_fn else None,
            )
        except BaseException as error:
            request = planning_pb2.FinishRunRequest(run_id=run_id, error=f"{type(error).__name__}: {error}")
            try:
                self._call(self._planner.FinishRun, request)
            except PlanningError as unreported:
                log(WARNING, "the end of the run was not reported: %s", unreported)
            raise
        self._call(self._planner.FinishRun, planning_pb2.FinishRunRequest(run_id=run_id))
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Plan the round, let the wrapped strategy write its messages, and add each node's assignment."""
        run_id = self._run_id or self._start_run(grid, 0)
        node_ids = self._connected(grid)
        self._bind_nodes(grid, node_ids)
        plan = self._plan = self._planned(run_id, server_round, node_ids)
        for decision in plan.decisions:
            log(INFO, "%s %s: %s", "+" if decision.selected else "-", decision.device_id, decision.reason)
        assignments = {assignment.node_id: assignment for assignment in plan.assignments}
        with _samples_all(self.strategy):
            messages = list(
                self.strategy.configure_train(server_round, arrays, config, ChosenNodesGrid(grid, list(assignments)))
            )
        self._round_started_s = time.monotonic()
        return [self._assigned(message, plan, assignments[message.metadata.dst_node_id]) for message in messages]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Tell the coordinator who failed, and let the wrapped strategy aggregate."""
        replies = list(replies)
        if self._plan:
            # An error's source need not be the node that failed: who did not answer well is who is missing.
            answered = {reply.metadata.src_node_id for reply in replies if not reply.has_error()}
            self._call(
                self._planner.FinishRound,
                planning_pb2.FinishRoundRequest(
                    plan_id=self._plan.plan_id,
                    results=[
                        planning_pb2.DeviceResult(device_id=a.device_id, share=1.0)
                        if a.node_id in answered
                        else planning_pb2.DeviceResult(device_id=a.device_id, failure="no usable reply")
                        for a in self._plan.assignments
                    ],
                    wall_s=time.monotonic() - self._round_started_s,
                ),
            )
            self._plan = None
        return self.strategy.aggregate_train(server_round, replies)  # type: ignore[no-any-return]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Evaluation is left to the wrapped strategy."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)  # type: ignore[no-any-return]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Evaluation is left to the wrapped strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the wrapped strategy's summary."""
        log(INFO, "\t├──> Power-aware, planned by %s, around %s:", self._coordinator, type(self.strategy).__name__)
        self.strategy.summary()

    def _start_run(self, grid: Grid, rounds: int) -> str:
        self._run_id = str(grid.run.run_id)
        request = planning_pb2.StartRunRequest(
            run_id=self._run_id, strategy=type(self.strategy).__name__, rounds=rounds
        )
        self._call(self._planner.StartRun, request)
        return self._run_id

    def _connected(self, grid: Grid) -> list[int]:
        """The nodes to plan over, once the strategy's own least number of them is there."""
        least = max(1, getattr(self.strategy, "min_available_nodes", 1))
        while len(node_ids := list(grid.get_node_ids())) < least:
            log(INFO, "Waiting for nodes to connect: %d of %d", len(node_ids), least)
            time.sleep(_POLL_S)
        return node_ids

    def _bind_nodes(self, grid: Grid, node_ids: list[int]) -> None:
        """Ask nodes that no device is known for who they are; once known, they are not asked again."""
        known = self._call(self._planner.ResolveNodes, planning_pb2.ResolveNodesRequest(node_ids=node_ids))
        if not known.unknown_node_ids:
            return
        record = ConfigRecord({IDENTIFY_KEY: True})
        replies = grid.send_and_receive(
            [
                Message(RecordDict({RECORD_KEY: record}), dst_node_id=node_id, message_type="train")
                for node_id in known.unknown_node_ids
            ],
            timeout=_IDENTIFY_TIMEOUT_S,
        )
        bindings = []
        for reply in replies:
            if reply.has_error() or RECORD_KEY not in reply.content:
                reason = reply.error.reason if reply.has_error() else "the app has no power_mode_mod"
                log(WARNING, "node %d is left out, it did not identify: %s", reply.metadata.src_node_id, reason)
                continue
            device_id = str(reply.content[RECORD_KEY][DEVICE_ID_KEY])
            bindings.append(planning_pb2.NodeBinding(node_id=reply.metadata.src_node_id, device_id=device_id))
        self._call(self._planner.BindNodes, planning_pb2.BindNodesRequest(bindings=bindings))

    def _planned(self, run_id: str, server_round: int, node_ids: list[int]) -> planning_pb2.PlanRoundResponse:
        """The round's plan; waits a while for devices that are not ready yet."""
        request = planning_pb2.PlanRoundRequest(
            run_id=run_id, round=server_round, node_ids=node_ids, epochs=self._local_epochs
        )
        give_up_s = time.monotonic() + _PLAN_PATIENCE_S
        while True:
            try:
                plan: planning_pb2.PlanRoundResponse = self._planner.PlanRound(request, timeout=_RPC_TIMEOUT_S)
                return plan
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > give_up_s:
                    raise self._refusal(error) from None
                log(INFO, "Waiting for a plan: %s", error.details())
                time.sleep(_POLL_S)

    def _assigned(
        self, message: Message, plan: planning_pb2.PlanRoundResponse, assignment: planning_pb2.Assignment
    ) -> Message:
        """The strategy's message with the node's own assignment beside what the strategy wrote."""
        content = RecordDict(dict(message.content))  # strategies put one record into all messages
        content[RECORD_KEY] = ConfigRecord(
            RoundAssignment(
                plan_id=plan.plan_id,
                device_id=assignment.device_id,
                mode=mode_from_message(assignment.mode),
                epochs=self._local_epochs,
                power_limit_w=assignment.power_limit_w,
            ).to_record()
        )
        message.content = content
        return message

    def _report_metrics(self, run_id: str, server_round: int, metrics: MetricRecord | None) -> None:
        numbers = {k: float(v) for k, v in (metrics or {}).items() if isinstance(v, (int, float))}
        self._call(
            self._planner.ReportMetrics,
            planning_pb2.ReportMetricsRequest(run_id=run_id, round=server_round, metrics=numbers),
        )

    def _call(self, method: Callable[..., Answer], request: Any) -> Answer:
        try:
            return method(request, timeout=_RPC_TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: grpc.RpcError) -> PlanningError:
        return PlanningError(f"the coordinator at {self._coordinator}: {error.code().name}: {error.details()}")


@contextmanager
def _samples_all(strategy: Strategy) -> Iterator[None]:
    """While this lasts, the strategy samples all nodes that it is shown."""
    own = {name: getattr(strategy, name) for name in _SAMPLING if hasattr(strategy, name)}
    for name in own:
        setattr(strategy, name, _SAMPLING[name])
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(strategy, name, value)
