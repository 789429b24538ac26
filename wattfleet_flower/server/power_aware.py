"""A wrapper that steers any strategy by the fleet's round plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from wattfleet_flower.server.clock import Clock, SystemClock
from wattfleet_flower.server.errors import TwoStrategiesError
from wattfleet_flower.server.fedbuff import FedBuff
from wattfleet_flower.server.grids import ShownNodesGrid, TimedGrid
from wattfleet_flower.server.planner import Planner
from wattfleet_flower.server.rounds import Patience, PlannedRound, PlannedRounds
from wattfleet_flower.server.sampling import attribute, layers, takes_all, takes_at_most

ALLOWANCE_S = 90.0
"""Of every message Flower starts a Python process, which takes some ten seconds on a Jetson; the model travels twice;
and that a node is gone or its process was killed is known after a minute only."""

PATIENCE_S = 120.0
LOW_BUDGET_PATIENCE_S = 12 * 3600.0
"""A night."""


class PowerAware(Strategy):  # type: ignore[misc]  # Flower is not typed for strict checking
    """A strategy whose training rounds go to the devices, and in the power modes, that the coordinator plans.

    The wrapped strategy writes the messages and aggregates the replies as ever; evaluation is left to it. While the
    coordinator is away, training is left to it as well, which is said. Failures, and what is done about each, are in
    `docs/flower.md`.
    """

    def __init__(
        self,
        strategy: Strategy,
        coordinator: str | Any = "127.0.0.1:7070",
        local_epochs: float = 1.0,
        *,
        allowance_s: float | None = ALLOWANCE_S,
        patience_s: float = PATIENCE_S,
        low_budget_patience_s: float = LOW_BUDGET_PATIENCE_S,
        clock: Clock | None = None,
    ) -> None:
        """Wrap a strategy.

        Args:
            strategy: any of Flower's strategies, or one of your own.
            coordinator: host:port of the coordinator, or a stub of its PlanningService.
            local_epochs: passes over its data that the app's training makes at each node in a round.
            allowance_s: seconds that a round's replies are waited for beyond the plan's deadline, or beyond twice its
                predicted duration where it has none; never beyond `start`'s own timeout, which alone counts where this
                is None.
            patience_s: seconds to wait for as many nodes as the strategy wants, for unknown nodes to identify, and for
                a device to be ready. Then the round goes on with those there are; where there is none, the run ends.
            low_budget_patience_s: seconds to wait for more watts where the budget, in a run that has trained, carries
                no device any more.
            clock: to wait by; None for the system's.

        Raises:
            TwoStrategiesError: the strategy is, or wraps, a power-aware one.
        """
        if any(isinstance(layer, PowerAware) for layer in layers(strategy)):
            raise TwoStrategiesError("a power-aware strategy around another: wrap a strategy once, on the outside")
        self.strategy = strategy
        self._coordinator = coordinator if isinstance(coordinator, str) else "its stub"
        self._clock = clock or SystemClock()
        self._rounds = PlannedRounds(
            Planner(coordinator),
            type(strategy).__name__,
            local_epochs,
            Patience(allowance_s, patience_s, low_budget_patience_s),
            self._clock,
        )
        self._planned: PlannedRound | None = None

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
        """Run the rounds as the wrapped strategy would, and tell the coordinator how they went.

        Raises:
            PlanningError: a round cannot be planned, and waiting was of no use; the text says why.
            TwoStrategiesError: another power-aware strategy runs.
        """

        def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None, "else this is not called"
            metrics = evaluate_fn(server_round, arrays)
            self._rounds.report_metrics(server_round, metrics)
            return metrics

        with self._rounds.run(grid, num_rounds):
            if isinstance(self.strategy, FedBuff):
                return self.strategy.start_planned(
                    self._rounds, grid, initial_arrays, num_rounds, timeout, train_config, evaluate_fn
                )
            return super().start(
                TimedGrid(grid, self._limit_s, self._renewed_limit_s, self._clock),
                initial_arrays,
                num_rounds,
                timeout,
                train_config,
                evaluate_config,
                evaluated if evaluate_fn else None,
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Plan the round, let the wrapped strategy write its messages, and add each node's assignment."""
        self._planned = None
        if attribute(self.strategy, "fraction_train", 1.0) == 0:  # the app trains nothing
            return self.strategy.configure_train(server_round, arrays, config, grid)  # type: ignore[no-any-return]
        node_ids = self._rounds.connected(grid, max(1, attribute(self.strategy, "min_available_nodes", 1)))
        planned = self._rounds.plan(grid, server_round, node_ids)
        if planned is None:
            with takes_at_most(self.strategy, len(node_ids)):
                return list(self.strategy.configure_train(server_round, arrays, config, ShownNodesGrid(grid, node_ids)))
        self._planned = planned
        with takes_all(self.strategy):
            shown = ShownNodesGrid(grid, planned.node_ids)
            return self._rounds.assigned(planned, self.strategy.configure_train(server_round, arrays, config, shown))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Tell the coordinator what came of the round, and let the wrapped strategy aggregate."""
        planned, self._planned = self._planned, None
        if planned is not None:
            replies = self._rounds.finish(planned, replies, attribute(self.strategy, "weighted_by_key", "num-examples"))
        return self.strategy.aggregate_train(server_round, replies)  # type: ignore[no-any-return]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Evaluation is left to the wrapped strategy, but it waits for no more nodes than there are."""
        node_ids = list(grid.get_node_ids())
        if not node_ids:
            log(WARNING, "nothing is evaluated after round %d: no node is connected", server_round)
            return []
        with takes_at_most(self.strategy, len(node_ids)):
            shown = ShownNodesGrid(grid, node_ids)
            return list(self.strategy.configure_evaluate(server_round, arrays, config, shown))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Evaluation is left to the wrapped strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the wrapped strategy's summary."""
        log(INFO, "\t├──> Power-aware, planned by %s, around %s:", self._coordinator, type(self.strategy).__name__)
        self.strategy.summary()

    def _limit_s(self, timeout_s: float | None) -> float | None:
        """How long to wait for a training's replies."""
        return timeout_s if self._planned is None else self._rounds.limit_s(self._planned, timeout_s)

    def _renewed_limit_s(self, timeout_s: float | None) -> float | None:
        """How long to wait for those that lack, once that is over."""
        return timeout_s if self._planned is None else self._rounds.renewed_limit_s(self._planned, timeout_s)
