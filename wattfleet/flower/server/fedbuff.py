"""FedBuff: asynchronous training, for fleets whose slowest device needs over ten times as long as the fastest.

    FedBuff(buffer_size=4).start(grid, initial_arrays, num_rounds=100)
    PowerAware(FedBuff(buffer_size=4), coordinator="127.0.0.1:7070").start(...)

No round waits for its slowest device. The server aggregates as soon as enough updates have arrived, whichever version
of the model they started from. Free devices then train the new model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from logging import INFO, WARNING

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from wattfleet.common.clock import Clock, SystemClock
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.core.errors import InvalidInputError
from wattfleet.flower.server.errors import CoordinatorRefusedError, NoUpdatesError
from wattfleet.flower.server.grids import steady
from wattfleet.flower.server.replies import Arrays, SentRound, Update, describe_error, step
from wattfleet.flower.server.rounds import PlannedRounds

_POLL_S = 1.0
# While trainings are in flight, an attempt to reach the coordinator delays their updates.
_AWAY_POLL_S = 10.0
# Backoff of a node whose training failed; it doubles with each failure.
_FIRST_RETRY_S, _LONGEST_RETRY_S = 10.0, 320.0

Evaluation = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass
class _Dispatch:
    """Messages that were sent together, in one round of the coordinator if there is one."""

    sent: SentRound | None
    timeout_s: float
    unanswered: set[str] = field(default_factory=set)
    replies: list[Message] = field(default_factory=list)


@dataclass
class _InFlight:
    """A training in flight."""

    node_id: int
    version: int
    base: Arrays
    dispatch: _Dispatch
    give_up_s: float
    is_given_up: bool = False


class FedBuff(Strategy):  # type: ignore[misc]  # Flower is not typed for strict checking
    """Buffered asynchronous aggregation (FedBuff: Nguyen et al. 2022, arXiv 2106.06639).

    Nodes do not evaluate: a node handles one message at a time, so an evaluation would wait behind its training.
    """

    def __init__(
        self,
        buffer_size: int,
        server_learning_rate: float = 1.0,
        max_staleness: int | None = None,
        *,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        clock: Clock | None = None,
    ) -> None:
        """Set how updates are aggregated.

        Args:
            buffer_size: updates per server step; they differ in weight only by their staleness.
            server_learning_rate: scales each step.
            max_staleness: server steps after which an update is dropped; None keeps all.
            weighted_by_key: the metric that weights the average of the other metrics.
            arrayrecord_key: key of the arrays in a message.
            configrecord_key: key of the config in a message.
            clock: measures the waiting; None for the system's clock.

        Raises:
            InvalidInputError: a value is out of range.
        """
        if buffer_size < 1 or not 0 < server_learning_rate < float("inf"):
            raise InvalidInputError(
                f"buffer_size must be 1 or more and server_learning_rate above 0,"
                f" got {buffer_size} and {server_learning_rate:g}"
            )
        if max_staleness is not None and max_staleness < 0:
            raise InvalidInputError(f"max_staleness must be 0 or more, got {max_staleness}; None keeps every update")
        self.buffer_size = buffer_size
        self.server_learning_rate = server_learning_rate
        self.max_staleness = max_staleness
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self._clock = clock or SystemClock()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluation | None = None,
    ) -> Result:
        """Train on every node, without plans.

        Args:
            grid: Flower's grid.
            initial_arrays: the model to start from.
            num_rounds: server steps.
            timeout: seconds that a training may take, and that the run may go without an update.
            train_config: config sent to the nodes.
            evaluate_config: ignored, since nodes do not evaluate.
            evaluate_fn: evaluates on the server, before the first step and after each step.

        Raises:
            NoUpdatesError: no update arrived within `timeout`.
            SuperLinkError: Flower's SuperLink has answered with errors for too long.
        """
        self.summary()
        return self.start_planned(None, grid, initial_arrays, num_rounds, timeout, train_config, evaluate_fn)

    def start_planned(
        self,
        rounds: PlannedRounds | None,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int,
        timeout: float,
        train_config: ConfigRecord | None,
        evaluate_fn: Evaluation | None,
    ) -> Result:
        """Train on the free nodes that plans select; see `start`.

        Args:
            rounds: makes the plans; None to train on every free node.
            grid: see `start`.
            initial_arrays: see `start`.
            num_rounds: see `start`.
            timeout: see `start`.
            train_config: see `start`.
            evaluate_fn: see `start`.

        Raises:
            NoUpdatesError: see `start`.
            SuperLinkError: see `start`.
            PlanningError: no training is in flight, and none can be planned.
        """
        return _Loop(self, self._clock, rounds, grid, initial_arrays, timeout, train_config or ConfigRecord()).run(
            num_rounds, evaluate_fn
        )

    def summary(self) -> None:
        """Log the settings of the aggregation."""
        log(INFO, "\t├──> FedBuff: learning rate %g, %d updates per step", self.server_learning_rate, self.buffer_size)
        log(INFO, "\t└──> Maximum staleness: %s", "any" if self.max_staleness is None else self.max_staleness)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: FedBuff has no rounds.

        Raises:
            InvalidInputError: always.
        """
        raise InvalidInputError(
            "FedBuff has no rounds, so only PowerAware can wrap it: start FedBuff or PowerAware(FedBuff(...))"
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return nothing, since FedBuff has no rounds."""
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return nothing, since nodes do not evaluate."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing, since nodes do not evaluate."""
        return None


class _Loop:
    """The server loop of one run."""

    def __init__(
        self,
        strategy: FedBuff,
        clock: Clock,
        rounds: PlannedRounds | None,
        grid: Grid,
        initial_arrays: ArrayRecord,
        timeout_s: float,
        config: ConfigRecord,
    ) -> None:
        self._strategy = strategy
        self._clock = clock
        self._rounds = rounds
        self._grid = steady(grid, clock)
        self._timeout_s = timeout_s
        self._config = config
        self._arrays: Arrays = {key: array.numpy() for key, array in initial_arrays.items()}
        self._version = 0
        self._dispatches = 0
        self._in_flight: dict[str, _InFlight] = {}
        self._buffer: list[tuple[Update, RecordDict]] = []
        self._failures: dict[int, int] = {}
        self._not_before_s: dict[int, float] = {}
        self._updated_s = clock.now_s()
        self._no_plan_before_s = clock.now_s()

    def run(self, steps: int, evaluate_fn: Evaluation | None) -> Result:
        result = Result()
        self._evaluate(result, evaluate_fn)
        has_stepped = True
        while self._version < steps:
            # Send after each step, and whenever the trainings in flight are too few to fill the buffer.
            training = sum(not flight.is_given_up for flight in self._in_flight.values())
            if has_stepped or training + len(self._buffer) < self._strategy.buffer_size:
                self._send()
            self._receive()
            has_stepped = len(self._buffer) >= self._strategy.buffer_size
            if has_stepped:
                self._step(result)
                self._evaluate(result, evaluate_fn)
            elif self._clock.now_s() - self._updated_s > self._timeout_s:
                raise NoUpdatesError(f"no node has sent an update for {self._timeout_s:g} s: see the warnings above")
            else:
                self._clock.sleep_s(_POLL_S)
        for dispatch in {id(flight.dispatch): flight.dispatch for flight in self._in_flight.values()}.values():
            if dispatch.sent is not None:
                # A training that is still in flight has not failed. Its update is not needed any more.
                sent = dispatch.sent.sent
                dispatch.sent.sent = [part for part in sent if part[0].message_id not in dispatch.unanswered]
            self._report(dispatch)
        return result

    def _send(self) -> None:
        now_s = self._clock.now_s()
        busy = {flight.node_id for flight in self._in_flight.values()}
        free = [
            node_id
            for node_id in self._grid.get_node_ids()
            if node_id not in busy and self._not_before_s.get(node_id, now_s) <= now_s
        ]
        if not free or now_s < self._no_plan_before_s:
            return
        sent = None
        if self._rounds is not None:
            try:
                sent = self._rounds.plan(self._grid, self._dispatches + 1, free, waits=not self._in_flight)
            except CoordinatorUnreachableError:  # trainings in flight go on, and send their updates meanwhile
                self._updated_s, self._no_plan_before_s = now_s, self._clock.now_s() + _AWAY_POLL_S
                return
            except CoordinatorRefusedError as refused:
                if not (self._in_flight and refused.is_transient):
                    raise
                return  # trainings in flight hold the watts; a plan becomes possible when one of them ends
            finally:
                # The time spent waiting for the coordinator or for watts does not count as silence of the nodes.
                waited_s = self._clock.now_s() - now_s
                self._updated_s, now_s = self._updated_s + waited_s, now_s + waited_s
        self._dispatches += 1
        self._config["server-round"] = self._version + 1
        record = ArrayRecord({key: Array(array) for key, array in self._arrays.items()})
        content = RecordDict({self._strategy.arrayrecord_key: record, self._strategy.configrecord_key: self._config})
        to = free if sent is None else sent.node_ids
        messages = [Message(content, dst_node_id=node_id, message_type="train") for node_id in to]
        timeout_s: float | None = self._timeout_s
        if sent is not None and self._rounds is not None:
            messages = self._rounds.with_assignments(sent, messages)
            timeout_s = self._rounds.reply_timeout_s(sent, self._timeout_s)
        dispatch = _Dispatch(sent, timeout_s or self._timeout_s)
        accepted = set(self._grid.push_messages(messages))
        for message in messages:
            message_id, node_id = message.metadata.message_id, message.metadata.dst_node_id
            if message_id not in accepted:
                self._failed(node_id, "Flower did not accept its message")
                continue
            dispatch.unanswered.add(message_id)
            give_up_s = now_s + dispatch.timeout_s
            self._in_flight[message_id] = _InFlight(node_id, self._version, self._arrays, dispatch, give_up_s)
        if not dispatch.unanswered:
            self._report(dispatch)

    def _receive(self) -> None:
        for reply in self._grid.pull_messages(list(self._in_flight)) if self._in_flight else []:
            flight = self._in_flight.pop(reply.metadata.reply_to_message_id, None)
            if flight is None:
                continue
            flight.dispatch.replies.append(reply)
            self._accept(flight, reply)
            self._answered(reply.metadata.reply_to_message_id, flight.dispatch)
        now_s = self._clock.now_s()
        for message_id, flight in list(self._in_flight.items()):
            if now_s < flight.give_up_s:
                continue
            if flight.is_given_up:  # its message must have been lost
                del self._in_flight[message_id]
                continue
            if self._extend_timeout(flight.dispatch):
                continue
            # The node may still train and counts as busy. A late update is still used.
            flight.is_given_up = True
            flight.give_up_s = now_s + self._timeout_s
            self._failed(flight.node_id, f"no reply within {flight.dispatch.timeout_s:.0f} s")
            self._answered(message_id, flight.dispatch)

    def _extend_timeout(self, dispatch: _Dispatch) -> bool:
        """Give the trainings more time if their plan was trimmed meanwhile; return whether it was."""
        if dispatch.sent is None or self._rounds is None:
            return False
        extended_s = self._rounds.extended_timeout_s(dispatch.sent, self._timeout_s) or self._timeout_s
        more_s = extended_s - dispatch.timeout_s
        if more_s <= 0:
            return False
        dispatch.timeout_s = extended_s
        for flight in self._in_flight.values():
            if flight.dispatch is dispatch:
                flight.give_up_s += more_s
        return True

    def _accept(self, flight: _InFlight, reply: Message) -> None:
        """Add an update to the buffer."""
        if reply.has_error():
            self._failed(flight.node_id, describe_error(reply.error))
            return
        records = list(reply.content.array_records.values())
        trained = {key: array.numpy() for key, array in records[0].items()} if len(records) == 1 else {}
        if {key: array.shape for key, array in trained.items()} != {k: a.shape for k, a in flight.base.items()}:
            self._failed(flight.node_id, "its reply must hold the arrays that it was sent, exactly once")
            return
        self._failures.pop(flight.node_id, None)
        self._updated_s = self._clock.now_s()
        update = Update(flight.base, trained, self._version - flight.version)
        max_staleness = self._strategy.max_staleness
        if max_staleness is not None and update.staleness > max_staleness:
            log(INFO, "dropped the update of node %d: it started %d steps ago", flight.node_id, update.staleness)
            return
        self._buffer.append((update, reply.content))

    def _failed(self, node_id: int, reason: str) -> None:
        failures = self._failures[node_id] = self._failures.get(node_id, 0) + 1
        retry_s = min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2.0 ** (failures - 1))
        self._not_before_s[node_id] = self._clock.now_s() + retry_s
        log(WARNING, "node %d failed, retrying it in %.0f s: %s", node_id, retry_s, reason)

    def _answered(self, message_id: str, dispatch: _Dispatch) -> None:
        if message_id in dispatch.unanswered:
            dispatch.unanswered.discard(message_id)
            if not dispatch.unanswered:
                self._report(dispatch)

    def _report(self, dispatch: _Dispatch) -> None:
        """Report a dispatch's results to the coordinator, once."""
        sent, dispatch.sent = dispatch.sent, None
        if sent is not None and self._rounds is not None:
            self._rounds.finish(sent, dispatch.replies, self._strategy.weighted_by_key)

    def _step(self, result: Result) -> None:
        updates = [update for update, _ in self._buffer]
        contents = [content for _, content in self._buffer if self._has_weight(content)]
        self._buffer = []
        self._arrays = step(self._arrays, updates, self._strategy.server_learning_rate)
        self._version += 1
        stale = sum(update.staleness > 0 for update in updates)
        log(INFO, "[STEP %d] from %d updates, %d of them stale", self._version, len(updates), stale)
        result.arrays = ArrayRecord({key: Array(array) for key, array in self._arrays.items()})
        if contents:
            metrics = aggregate_metricrecords(contents, self._strategy.weighted_by_key)
            result.train_metrics_clientapp[self._version] = metrics

    def _has_weight(self, content: RecordDict) -> bool:
        records = list(content.metric_records.values())
        return len(records) == 1 and self._strategy.weighted_by_key in records[0]

    def _evaluate(self, result: Result, evaluate_fn: Evaluation | None) -> None:
        if evaluate_fn is None:
            return
        arrays = ArrayRecord({key: Array(array) for key, array in self._arrays.items()})
        metrics = evaluate_fn(self._version, arrays)
        if self._rounds is not None:
            self._rounds.report_metrics(self._dispatches, metrics)
        if metrics is not None:
            result.evaluate_metrics_serverapp[self._version] = metrics
