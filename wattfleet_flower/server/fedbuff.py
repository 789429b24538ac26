"""FedBuff: asynchronous training, for fleets whose devices differ by more than ten times.

    FedBuff(buffer_size=4).start(grid, initial_arrays, num_rounds=100)
    PowerAware(FedBuff(buffer_size=4), coordinator="127.0.0.1:7070").start(...)

No round waits for its slowest device: the server makes a step as soon as enough updates have arrived, whatever they
began from, and devices that are free then begin from its result.
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

from wattfleet.errors import InvalidInputError
from wattfleet_flower.server.buffer import Arrays, Update, step
from wattfleet_flower.server.clock import Clock, SystemClock
from wattfleet_flower.server.errors import NoUpdatesError, RefusedError
from wattfleet_flower.server.outcome import failure_of
from wattfleet_flower.server.rounds import PlannedRound, PlannedRounds

_POLL_S = 1.0
# A node whose training failed is tried again after a while, each time after twice as long.
_TRIED_AGAIN_AFTER_S, _TRIED_AGAIN_AT_LAST_AFTER_S = 10.0, 320.0

Evaluation = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass
class _Dispatch:
    """Messages that were sent together, by one plan where there is one."""

    planned: PlannedRound | None
    waited_s: float
    unanswered: set[str] = field(default_factory=set)
    replies: list[Message] = field(default_factory=list)


@dataclass
class _Flight:
    """A training that is under way."""

    node_id: int
    version: int
    base: Arrays
    dispatch: _Dispatch
    give_up_s: float
    is_given_up: bool = False


class FedBuff(Strategy):  # type: ignore[misc]  # Flower is not typed for strict checking
    """Buffered asynchronous aggregation; see the module.

    Evaluation on the nodes is left out: a node works on one message at a time, and it would wait behind trainings.
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
        """Choose how it aggregates.

        Args:
            buffer_size: updates of one server step; each counts the same, but for its staleness.
            server_learning_rate: how far a step goes.
            max_staleness: updates that began more steps ago are dropped; None keeps all.
            weighted_by_key: the metric by which the others are averaged.
            arrayrecord_key: where the arrays lie in a message.
            configrecord_key: where the config lies in a message.
            clock: to wait by; None for the system's.

        Raises:
            InvalidInputError: with these no step is possible.
        """
        if buffer_size < 1 or not 0 < server_learning_rate < float("inf"):
            raise InvalidInputError(
                f"a step needs one update or more and a rate above 0, not {buffer_size} and {server_learning_rate:g}"
            )
        if max_staleness is not None and max_staleness < 0:
            raise InvalidInputError(f"a staleness of at most {max_staleness} drops every update: allow 0 or more")
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
            grid: Flower's.
            initial_arrays: to begin with.
            num_rounds: server steps.
            timeout: seconds that a training may take, and that the run may go without any update.
            train_config: for the nodes.
            evaluate_config: of no use here.
            evaluate_fn: evaluates on the server, before the first step and after each.

        Raises:
            NoUpdatesError: no update arrived for as long as `timeout`.
        """
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
        """Train on the nodes that plans choose among those that are free; see `start`.

        Args:
            rounds: plans; None for every node that is free.
            grid: see `start`.
            initial_arrays: see `start`.
            num_rounds: see `start`.
            timeout: see `start`.
            train_config: see `start`.
            evaluate_fn: see `start`.

        Raises:
            NoUpdatesError: see `start`.
            PlanningError: nothing trains, and no training can be planned.
        """
        self.summary()
        return _Loop(self, self._clock, rounds, grid, initial_arrays, timeout, train_config or ConfigRecord()).run(
            num_rounds, evaluate_fn
        )

    def summary(self) -> None:
        """Log how it aggregates."""
        log(INFO, "\t├──> FedBuff: a step of %g for every %d updates", self.server_learning_rate, self.buffer_size)
        log(INFO, "\t└──> Most stale update: %s", "any" if self.max_staleness is None else self.max_staleness)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """There are no rounds to configure.

        Raises:
            InvalidInputError: always.
        """
        raise InvalidInputError(
            "FedBuff has no rounds that another strategy could drive: start it itself, or PowerAware(FedBuff(...))"
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """No round is configured, so none is aggregated."""
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nodes evaluate nothing."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nodes evaluate nothing."""
        return None


class _Loop:
    """One run."""

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
        self._grid = grid
        self._timeout_s = timeout_s
        self._config = config
        self._arrays: Arrays = {key: array.numpy() for key, array in initial_arrays.items()}
        self._version = 0
        self._dispatches = 0
        self._flights: dict[str, _Flight] = {}
        self._buffer: list[tuple[Update, RecordDict]] = []
        self._failures: dict[int, int] = {}
        self._not_before_s: dict[int, float] = {}
        self._updated_s = clock.now_s()

    def run(self, steps: int, evaluate_fn: Evaluation | None) -> Result:
        result = Result()
        self._evaluate(result, evaluate_fn)
        has_stepped = True
        while self._version < steps:
            # After a step for the nodes that are free to begin from it; and where the buffer could not fill else.
            under_way = sum(not flight.is_given_up for flight in self._flights.values())
            if has_stepped or under_way + len(self._buffer) < self._strategy.buffer_size:
                self._send()
            self._receive()
            has_stepped = len(self._buffer) >= self._strategy.buffer_size
            if has_stepped:
                self._step(result)
                self._evaluate(result, evaluate_fn)
            elif self._clock.now_s() - self._updated_s > self._timeout_s:
                raise NoUpdatesError(
                    f"no node has sent an update for {self._timeout_s:g} s: look at the warnings above"
                )
            else:
                self._clock.sleep_s(_POLL_S)
        for dispatch in {id(flight.dispatch): flight.dispatch for flight in self._flights.values()}.values():
            if dispatch.planned is not None:
                # What is under way still did not fail: it is just of no use any more.
                sent = dispatch.planned.sent
                dispatch.planned.sent = [one for one in sent if one[0].message_id not in dispatch.unanswered]
            self._told(dispatch)
        return result

    def _send(self) -> None:
        now_s = self._clock.now_s()
        busy = {flight.node_id for flight in self._flights.values()}
        free = [
            node_id
            for node_id in self._grid.get_node_ids()
            if node_id not in busy and self._not_before_s.get(node_id, now_s) <= now_s
        ]
        if not free:
            return
        planned = None
        if self._rounds is not None:
            try:
                planned = self._rounds.plan(self._grid, self._dispatches + 1, free, waits=not self._flights)
            except RefusedError as refused:
                if not (self._flights and refused.may_pass):
                    raise
                return  # those that train hold the watts: there will be a plan when one of them is done
        self._dispatches += 1
        self._config["server-round"] = self._version + 1
        record = ArrayRecord({key: Array(array) for key, array in self._arrays.items()})
        content = RecordDict({self._strategy.arrayrecord_key: record, self._strategy.configrecord_key: self._config})
        to = free if planned is None else planned.node_ids
        messages = [Message(content, dst_node_id=node_id, message_type="train") for node_id in to]
        waited_s: float | None = self._timeout_s
        if planned is not None and self._rounds is not None:
            messages = self._rounds.assigned(planned, messages)
            waited_s = self._rounds.limit_s(planned, self._timeout_s)
        dispatch = _Dispatch(planned, waited_s or self._timeout_s)
        taken = set(self._grid.push_messages(messages))
        for message in messages:
            message_id, node_id = message.metadata.message_id, message.metadata.dst_node_id
            if message_id not in taken:
                self._failed(node_id, "Flower did not take its message")
                continue
            dispatch.unanswered.add(message_id)
            give_up_s = now_s + dispatch.waited_s
            self._flights[message_id] = _Flight(node_id, self._version, self._arrays, dispatch, give_up_s)
        if not dispatch.unanswered:
            self._told(dispatch)

    def _receive(self) -> None:
        for reply in self._grid.pull_messages(list(self._flights)) if self._flights else []:
            flight = self._flights.pop(reply.metadata.reply_to_message_id, None)
            if flight is None:
                continue
            flight.dispatch.replies.append(reply)
            self._taken(flight, reply)
            self._answered(reply.metadata.reply_to_message_id, flight.dispatch)
        now_s = self._clock.now_s()
        for message_id, flight in list(self._flights.items()):
            if now_s < flight.give_up_s:
                continue
            if flight.is_given_up:  # for so long that its message must be lost
                del self._flights[message_id]
                continue
            if self._waits_on(flight.dispatch):
                continue
            # It may train still, and counts as busy; should its update come after all, it is welcome.
            flight.is_given_up = True
            flight.give_up_s = now_s + self._timeout_s
            self._failed(flight.node_id, f"no reply within {flight.dispatch.waited_s:.0f} s")
            self._answered(message_id, flight.dispatch)

    def _waits_on(self, dispatch: _Dispatch) -> bool:
        """Whether its trainings may take longer than they were waited for, as their plan was trimmed since."""
        if dispatch.planned is None or self._rounds is None:
            return False
        waited_s = self._rounds.renewed_limit_s(dispatch.planned, self._timeout_s) or self._timeout_s
        more_s = waited_s - dispatch.waited_s
        if more_s <= 0:
            return False
        dispatch.waited_s = waited_s
        for flight in self._flights.values():
            if flight.dispatch is dispatch:
                flight.give_up_s += more_s
        return True

    def _taken(self, flight: _Flight, reply: Message) -> None:
        """Take an update into the buffer."""
        if reply.has_error():
            self._failed(flight.node_id, failure_of(reply.error))
            return
        records = list(reply.content.array_records.values())
        trained = {key: array.numpy() for key, array in records[0].items()} if len(records) == 1 else {}
        if {key: array.shape for key, array in trained.items()} != {k: a.shape for k, a in flight.base.items()}:
            self._failed(flight.node_id, "its reply does not hold the arrays that it was sent, once")
            return
        self._failures.pop(flight.node_id, None)
        self._updated_s = self._clock.now_s()
        update = Update(flight.base, trained, self._version - flight.version)
        most = self._strategy.max_staleness
        if most is not None and update.staleness > most:
            log(INFO, "node %d's update is dropped: it began %d steps ago", flight.node_id, update.staleness)
            return
        self._buffer.append((update, reply.content))

    def _failed(self, node_id: int, reason: str) -> None:
        failures = self._failures[node_id] = self._failures.get(node_id, 0) + 1
        again_s = min(_TRIED_AGAIN_AT_LAST_AFTER_S, _TRIED_AGAIN_AFTER_S * 2.0 ** (failures - 1))
        self._not_before_s[node_id] = self._clock.now_s() + again_s
        log(WARNING, "node %d failed, and is tried again after %.0f s: %s", node_id, again_s, reason)

    def _answered(self, message_id: str, dispatch: _Dispatch) -> None:
        if message_id in dispatch.unanswered:
            dispatch.unanswered.discard(message_id)
            if not dispatch.unanswered:
                self._told(dispatch)

    def _told(self, dispatch: _Dispatch) -> None:
        """Tell the coordinator what came of a plan, once."""
        planned, dispatch.planned = dispatch.planned, None
        if planned is not None and self._rounds is not None:
            self._rounds.finish(planned, dispatch.replies, self._strategy.weighted_by_key)

    def _step(self, result: Result) -> None:
        updates = [update for update, _ in self._buffer]
        contents = [content for _, content in self._buffer if self._is_weighed(content)]
        self._buffer = []
        self._arrays = step(self._arrays, updates, self._strategy.server_learning_rate)
        self._version += 1
        stale = sum(update.staleness > 0 for update in updates)
        log(INFO, "[STEP %d] of %d updates, %d of them stale", self._version, len(updates), stale)
        result.arrays = ArrayRecord({key: Array(array) for key, array in self._arrays.items()})
        if contents:
            metrics = aggregate_metricrecords(contents, self._strategy.weighted_by_key)
            result.train_metrics_clientapp[self._version] = metrics

    def _is_weighed(self, content: RecordDict) -> bool:
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
