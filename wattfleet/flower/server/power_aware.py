"""A wrapper that makes any strategy follow the coordinator's round plans."""

from __future__ import annotations

import copyreg
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    Result,
    Strategy,
)

from wattfleet.common.addresses import COORDINATOR_VARIABLE
from wattfleet.common.clock import Clock, SystemClock
from wattfleet.common.identity.channels import Endpoint, named_folder
from wattfleet.common.settings.user_file import user_folder
from wattfleet.core.budgets import joules_of
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Workload
from wattfleet.core.planning import EpochChoice
from wattfleet.flower.server.away import AwayPolicy, OnCoordinatorAway
from wattfleet.flower.server.errors import EnergyUsedUpError, PlanningError, TwoStrategiesError
from wattfleet.flower.server.fedbuff import FedBuff
from wattfleet.flower.server.grids import FreeNodesGrid, LateReplies, SelectedNodesGrid, WaitingGrid, steady
from wattfleet.flower.server.measuring import SURVEY_S, Measurements
from wattfleet.flower.server.names import WORKLOAD_KEYS, RunNaming, WorkloadNaming
from wattfleet.flower.server.planning_client import PlanningClient
from wattfleet.flower.server.predictions import NodePrediction
from wattfleet.flower.server.replies import PlannedRound, Quorum, SentRound, keep_common_metrics
from wattfleet.flower.server.rounds import PlannedRounds, WaitLimits
from wattfleet.flower.server.selection import (
    BatchChoice,
    Select,
    attribute,
    layers,
    needs_all,
    sampling_all,
    sampling_at_most,
    takes_turns,
    trains_nothing,
)
from wattfleet_proto.assignment import RECORD_KEY
from wattfleet_proto.names import CLIENT_METRICS_PREFIX

# --- Summary ----------------------------------------------------------------------------------------------------------
# The summary of a strategy in Flower's log at the start: which options have an effect when rounds are planned.


_USED = {
    "min_available_nodes": "nodes to wait for before a plan",
    "fraction_evaluate": "share of the nodes that evaluate",
    "min_evaluate_nodes": "nodes that evaluate at least",
}
_IGNORED = ("fraction_train", "min_train_nodes")

# FedAvg's log lines about sampling, without the tree characters before them.
_SAMPLING_LINES = ("Sampling:", "Fraction: train", "Minimum nodes: train", "Minimum available nodes:")


def log_summary(
    strategy: Strategy, coordinator: str, on_coordinator_away: OnCoordinatorAway, summary: Callable[[], None]
) -> None:
    """Log who chooses the nodes, which options of a strategy have an effect, and the rest of its own summary.

    Args:
        strategy: the wrapped strategy.
        coordinator: its address, as logs name it.
        on_coordinator_away: what a run does while the coordinator does not answer.
        summary: logs the strategy's own summary.
    """
    name = type(strategy).__name__
    _log("\t├──> PowerAware around %s: the coordinator at %s plans each training", name, coordinator)
    if takes_turns(strategy):
        chooses = f"{name} lets the nodes train in turn; each plan is for the one whose turn it is"
    elif needs_all(strategy):
        chooses = f"{name} needs the trees of every node, so all train that the budgets allow, whatever the policy"
    else:
        chooses = "The coordinator's policy chooses the nodes that train, and their power modes"
    _log("\t│\t├── %s", chooses)
    if isinstance(strategy, FedBuff):
        _log("\t│\t└── The options of FedBuff below are used")
        summary()
        return
    if trains_nothing(strategy):
        _log("\t│\t└── %s has fraction_train=0: nothing is trained, so nothing is planned", name)
        summary()
        return
    used = [f"{option}={value} ({meaning})" for option, meaning in _USED.items() if (value := _of(strategy, option))]
    _log("\t│\t├── Used of %s's options on nodes: %s", name, ", ".join(used) or "none")
    ignored = [f"{option}={value}" for option in _IGNORED if (value := _of(strategy, option))]
    meanwhile = "; used while the coordinator is away" if ignored and on_coordinator_away == "unplanned" else ""
    _log("\t│\t└── Ignored: %s%s", ", ".join(ignored) or "none", meanwhile)
    with _without_sampling():
        summary()


def _log(text: str, *values: object) -> None:
    log(logging.INFO, text, *values)


def _of(strategy: Strategy, option: str) -> str | None:
    """The value of an option as text; None if the strategy does not have it."""
    value = attribute(strategy, option, None)
    return f"{value:g}" if isinstance(value, (int, float)) else None


@contextmanager
def _without_sampling() -> Iterator[None]:
    """Leave out the lines in which FedAvg states how it would sample nodes."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).lstrip("\t│├└─> ").startswith(_SAMPLING_LINES)

    logger = logging.getLogger("flwr")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


# --- Combinations -----------------------------------------------------------------------------------------------------
# Which strategies cannot be combined with a quorum, or with local epochs that plans choose.

_CLIPS_ON_DEVICES = (DifferentialPrivacyClientSideAdaptiveClipping, DifferentialPrivacyClientSideFixedClipping)


def plans_each_training(strategy: Strategy) -> bool:
    """Whether a strategy, or one that it wraps, is FedBuff, which has no rounds that are planned as a whole."""
    return any(isinstance(layer, FedBuff) for layer in layers(strategy))


def require_combinable(strategy: Strategy, quorum: Quorum | None, epochs: EpochChoice) -> None:
    """Make sure that a strategy can be used with a quorum and with a choice of epochs.

    Raises:
        InvalidInputError: it cannot.
    """
    is_fedbuff = plans_each_training(strategy)
    if quorum is not None and is_fedbuff:
        raise InvalidInputError(
            "FedBuff never waits for all devices, so it has no quorum: leave the quorum out, or set buffer_size"
        )
    if quorum is not None and attribute(strategy, "num_sampled_clients", None) is not None:
        raise InvalidInputError(
            "differential privacy adds noise for a fixed number of replies with equal weights, which a quorum does not"
            " give: leave the quorum out"
        )
    if is_fedbuff and len(epochs.options) > 1:
        raise InvalidInputError(
            "FedBuff counts updates alike, whatever their local epochs: give it one number of local_epochs"
        )
    if epochs.is_per_device and any(isinstance(layer, _CLIPS_ON_DEVICES) for layer in layers(strategy)):
        raise InvalidInputError(
            "updates that devices have clipped must not be scaled to their epochs: leave is_per_device out of the"
            " EpochChoice, or clip on the server"
        )


# --- Simulation -------------------------------------------------------------------------------------------------------


class Simulation(Protocol):
    """What a simulation puts in the place of the coordinator and of the time; see `wattfleet.simulation`.

    Attributes:
        planner: a stub of the PlanningService.
        clock: the boards' own time, which passes without waiting.
    """

    planner: Any
    clock: Clock

    def aggregated(
        self,
        number: int,
        strategy: Strategy,
        aggregate: Callable[[], tuple[ArrayRecord | None, MetricRecord | None]],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return a round's result: it is kept, so that an interrupted simulation can go on from it.

        Args:
            number: the round's number.
            strategy: the wrapped strategy.
            aggregate: has the strategy aggregate the replies.
        """
        ...


SIMULATION: ContextVar[Simulation | None] = ContextVar("the simulation that runs this ServerApp", default=None)
"""Set by a simulation while it runs a ServerApp; None for real devices."""


# --- Power aware ------------------------------------------------------------------------------------------------------

ALLOWANCE_S = 90.0
"""Flower starts a Python process for each message, about ten seconds on a Jetson, and sends the model twice. It reports
a lost node or a killed process only after a minute."""

PATIENCE_S = 120.0
LOW_BUDGET_PATIENCE_S = 12 * 3600.0
"""One night."""


_NEW_OBJECT: Any = vars(copyreg)["__newobj__"]


class PowerAware(Strategy):  # type: ignore[misc]  # Flower is not typed for strict checking
    """Runs each training round on the devices and in the power modes that the coordinator plans.

    The wrapped strategy writes the messages, aggregates the replies and evaluates as usual, and a `start` of its own
    runs as it is. Its other attributes and methods are those of the wrapper, too. While the coordinator is unreachable,
    no device trains, unless `on_coordinator_away` says otherwise. `docs/flower.md` lists every failure and how it is
    handled.
    """

    def __init__(
        self,
        strategy: Strategy,
        coordinator: str | Any | None = None,
        local_epochs: float | EpochChoice = 1.0,
        *,
        workload: str | Workload | None = None,
        workload_keys: Iterable[str] = WORKLOAD_KEYS,
        run_name: str | None = None,
        labels: Mapping[str, str | int | float | bool] | None = None,
        batches: BatchChoice | None = None,
        select: Select | None = None,
        quorum: Quorum | None = None,
        energy_budget: str | float | None = None,
        survey_s: float | None = SURVEY_S,
        measures_left_out: bool = True,
        allowance_s: float | None = ALLOWANCE_S,
        patience_s: float = PATIENCE_S,
        low_budget_patience_s: float = LOW_BUDGET_PATIENCE_S,
        on_coordinator_away: OnCoordinatorAway = "wait",
        coordinator_patience_s: float | None = None,
        identity: str | Path | None = None,
        insecure: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Wrap a strategy.

        Args:
            strategy: one of Flower's strategies, or one of your own.
            coordinator: host:port of the coordinator, or a stub of its PlanningService; None for that of the
                environment variable `WATTFLEET_COORDINATOR`, else the one that the identity was enrolled with, else
                127.0.0.1:7070.
            local_epochs: passes over its data that each node trains in a round, or those that the plan may choose, for
                an app that trains `planned_work(...).epochs`.
            workload: what the app trains, or its name; None to derive the name from the app's id, from `workload_keys`
                and from the initial arrays.
            workload_keys: keys of the run config whose overridden values become part of a derived name. Hyphens and
                underscores count as the same.
            run_name: what people call the app's runs; a run whose name is taken gets a number, such as `night-2`. None
                for the app's own name with date and time. `flwr run -c 'run-name="night"'` names a single run.
            labels: words by which people find the runs, such as `{"site": "lab"}`. `flwr run -c
                'run-labels="site=lab lr=0.1"'` adds some to a single run.
            batches: the batch sizes that the plan may choose for each node; the app then trains with `planned_loader`.
                None to let the app train with its own batch size.
            select: returns the nodes that a plan may use, given the round's number and the predictions of the connected
                nodes. None to let the plan use all connected nodes.
            quorum: how many replies end a round. The other devices go on training, and a later round uses their
                updates. None to wait for all replies.
            energy_budget: what all trainings of a run may draw above the idle power of their boards, such as "2 kWh" or
                "500 kJ"; a number counts in joules. When what is left does not suffice for another training, `start`
                returns the result of the rounds until then. None for no energy budget.
            survey_s: before a round, devices that do not know the workload train for a short time, in order to measure
                a few power modes and the length of their epoch. They begin no measurement after these seconds. None
                plans the first round from predictions alone.
            measures_left_out: whether devices that a round leaves out measure further modes with the watts that its
                plan leaves, until the round ends.
            allowance_s: seconds to wait for replies beyond the plan's deadline. A plan without a deadline gets twice
                its predicted duration instead. `start`'s own timeout still applies. It is the only limit if this is
                None, or if a selected device does not know yet how many minibatches its epoch has.
            patience_s: seconds to wait for as many nodes as the strategy wants, for unknown nodes to identify
                themselves, and for a device to be ready. Then the round starts with the nodes that are available. If
                there are none, the run ends.
            low_budget_patience_s: seconds to wait for more watts if the budget has become too low for any device, in a
                run that has trained before.
            on_coordinator_away: what to do while the coordinator does not answer: "wait" until it does, "stop" the run
                with an error, or train "unplanned", with the wrapped strategy's own selection and without any budget.
                Drained and excluded devices never train.
            coordinator_patience_s: with "wait", seconds after which the run ends with an error; None to wait forever.
            identity: the folder with the key and the certificate from `wattfleet join`; None for the folder in the
                environment variable WATTFLEET_IDENTITY, or else that of `wattfleet join`,
                `~/.config/wattfleet/identity`, if it exists.
            insecure: whether to connect to another machine in plaintext if there is no identity.
            clock: measures the waiting; None for the system's clock.

        Raises:
            TwoStrategiesError: the strategy is power-aware already, or wraps a power-aware one.
            InvalidInputError: the strategy is not one of Flower's current API; `local_epochs`, `workload`, `run_name`,
                `labels`, `energy_budget`, `on_coordinator_away` or `coordinator_patience_s` is not valid; the strategy
                cannot be combined with a quorum, with the choice of epochs or with an energy budget; the identity is
                absent or damaged; or plaintext would leave this machine although it must not.
        """
        _require_current(strategy)
        if any(isinstance(layer, PowerAware) for layer in layers(strategy)):
            raise TwoStrategiesError("this strategy is power-aware already: use PowerAware only once, on the outside")
        if not isinstance(local_epochs, (int, float, EpochChoice)):
            raise InvalidInputError(
                f"local_epochs must be a number or an EpochChoice, not {local_epochs!r}: write EpochChoice.of([1, 2])"
                " to let the plan choose"
            )
        epochs = local_epochs if isinstance(local_epochs, EpochChoice) else EpochChoice.fixed(local_epochs)
        require_combinable(strategy, quorum, epochs)
        budget_j = None if energy_budget is None else joules_of("energy_budget", energy_budget)
        if budget_j is not None and (plans_each_training(strategy) or on_coordinator_away == "unplanned"):
            raise InvalidInputError(
                "an energy budget needs rounds that are all planned: leave energy_budget out, or use a strategy other"
                ' than FedBuff and on_coordinator_away="wait" or "stop"'
            )
        self.strategy = strategy
        self._own_methods: dict[str, Callable[..., Any]] = {}
        self._simulation = SIMULATION.get()
        if self._simulation is not None:
            coordinator, clock = self._simulation.planner, self._simulation.clock
        if coordinator is None or isinstance(coordinator, str):
            coordinator = _endpoint(coordinator, identity, insecure)
        self._clock = clock or SystemClock()
        client = PlanningClient(coordinator, self._clock)
        self._coordinator = client.name
        self._on_coordinator_away: OnCoordinatorAway = on_coordinator_away
        self._rounds = PlannedRounds(
            client,
            type(strategy).__name__,
            needs_all(strategy),
            epochs,
            WorkloadNaming(workload, workload_keys),
            RunNaming(run_name, labels),
            batches,
            select,
            WaitLimits(allowance_s, patience_s, low_budget_patience_s),
            AwayPolicy(on_coordinator_away, coordinator_patience_s),
            self._clock,
            budget_j,
        )
        self._late = LateReplies(quorum, self._rounds, self._clock)
        self._measurements = Measurements(self._rounds, survey_s, measures_left_out, allowance_s, self._clock)
        self._sent: SentRound | None = None
        self._evaluates_centrally = False
        self._so_far = Result()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute or a method of the wrapped strategy that this class does not have."""
        if name.startswith("__") or "strategy" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped strategy, unless this class has one of this name."""
        is_own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if is_own or "strategy" not in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self.strategy, name, value)

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *args: Any, **kwargs: Any) -> Result:
        """Run the rounds with the wrapped strategy's own `start`, and report each one to the coordinator.

        Args:
            grid: Flower's grid.
            initial_arrays: the model to start from.
            args: the further arguments of the wrapped strategy's `start`: of Flower's, `num_rounds`, `timeout`,
                `train_config`, `evaluate_config` and `evaluate_fn`.
            kwargs: the same by name.

        Raises:
            EnergyUsedUpError: the energy budget does not suffice for any training of the first round.
            PlanningError: a round cannot be planned, even after waiting; the coordinator is away and the run must not
                go on without it; or the strategy sends trainings that no plan has. The text gives the reason.
            SuperLinkError: Flower's SuperLink has answered with errors for too long.
            TwoStrategiesError: another power-aware strategy runs.
            InvalidInputError: no valid workload name can be derived from the app, or the run config has an invalid name
                or label.
        """
        arguments = _arguments_of(self.strategy.start, grid, initial_arrays, *args, **kwargs)
        evaluate_fn = arguments.get("evaluate_fn")

        def evaluate_and_report(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None, "only called with an evaluate_fn"
            metrics: MetricRecord | None = evaluate_fn(server_round, arrays)
            self._rounds.report_metrics(server_round, metrics)
            if metrics is not None:
                self._so_far.evaluate_metrics_serverapp[server_round] = metrics
            return metrics

        self._evaluates_centrally = evaluate_fn is not None
        self._so_far = Result()
        self._late.begin_run()
        grid = steady(grid, self._clock)
        self._measurements.begin_run()
        with self._rounds.run(grid, arguments.get("num_rounds", 0), initial_arrays):
            if isinstance(self.strategy, FedBuff):
                self.summary()
                return self.strategy.start_planned(
                    self._rounds,
                    grid,
                    initial_arrays,
                    arguments["num_rounds"],
                    arguments["timeout"],
                    arguments["train_config"],
                    evaluate_fn,
                )
            planned = _PlannedGrid(
                grid,
                self._reply_timeout_s,
                self._extended_timeout_s,
                self._clock,
                self._late,
                self._measurements,
                refuse_unplanned=self._refuse_unplanned,
            )

            def reporting(value: Any) -> Any:
                return evaluate_and_report if evaluate_fn is not None and value is evaluate_fn else value

            try:
                with self._in_place_of_own_methods():
                    return self.strategy.start(
                        planned,
                        initial_arrays,
                        *map(reporting, args),
                        **{name: reporting(value) for name, value in kwargs.items()},
                    )
            except EnergyUsedUpError as used_up:
                if not self._so_far.arrays:
                    raise
                log(logging.INFO, "The run ends, because no energy is left for another training: %s", used_up)
                return self._so_far

    @contextmanager
    def _in_place_of_own_methods(self) -> Iterator[None]:
        """Have the wrapped strategy's own `start` call the methods of this class, which call its own methods.

        Meanwhile, the strategy's class is a subclass with these methods. A copy of the strategy, such as in a pickled
        checkpoint, has the strategy's own class.
        """
        strategy = self.strategy
        own: Any = type(strategy)
        replaced = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary")
        self._own_methods = {name: getattr(strategy, name) for name in replaced}
        # A method that was set on the object itself would be called instead of the class's.
        set_on_object = {name: vars(strategy).pop(name) for name in replaced if name in vars(strategy)}

        def reduced(planned: Any, protocol: Any) -> Any:
            copied: Any = object.__new__(own)
            vars(copied).update(vars(planned), **set_on_object)
            how = copied.__reduce_ex__(protocol)
            # Pickle would compare the class with that of the planned object.
            return (object.__new__, *how[1:]) if isinstance(how, tuple) and how[0] is _NEW_OBJECT else how

        methods = {name: staticmethod(getattr(self, name)) for name in replaced}
        planned_class: Any = type(own)(own.__name__, (own,), {**methods, "__reduce_ex__": reduced})
        strategy.__class__ = planned_class
        try:
            yield
        finally:
            strategy.__class__ = own
            vars(strategy).update(set_on_object)
            self._own_methods = {}

    def _own(self, name: str) -> Callable[..., Any]:
        """Return a method of the wrapped strategy, also while its `start` calls that of this class instead."""
        found: Callable[..., Any] = self._own_methods.get(name) or getattr(self.strategy, name)
        return found

    def _refuse_unplanned(self, messages: Iterable[Message]) -> None:
        """Refuse trainings that a strategy sends besides those that its `configure_train` has returned."""
        # In a round without a plan, while the coordinator is away, the messages have no assignments.
        allowed = () if self._sent is None or isinstance(self._sent, PlannedRound) else self._sent.node_ids
        if any(
            message.metadata.message_type.startswith("train")
            and RECORD_KEY not in message.content
            and message.metadata.dst_node_id not in allowed
            for message in messages
        ):
            raise PlanningError(
                f"the start of {type(self.strategy).__name__} sends trainings that its configure_train has not"
                " returned, so no plan has them: have configure_train return them"
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Plan the round, let the wrapped strategy write its messages, and add each node's assignment."""
        sent, self._sent = self._sent, None
        if sent is not None and sent.number != server_round:  # its `aggregate_train` was not called
            self._rounds.give_up(sent)
        self._late.begin_round(None)
        if trains_nothing(self.strategy):
            return self._own("configure_train")(server_round, arrays, config, grid)  # type: ignore[no-any-return]
        grid = steady(grid, self._clock)  # an app may call this method without `start`
        self._rounds.require_start(grid, arrays)
        node_ids = self._rounds.connected(grid, max(1, attribute(self.strategy, "min_available_nodes", 1)))
        busy = self._measurements.wait_for_ends(grid)
        node_ids = self._late.without_resting(self._late.free_nodes(grid, node_ids), server_round)
        node_ids = [node_id for node_id in node_ids if node_id not in busy]
        written: list[Message] = []
        asked: set[int] = set()

        def write(wanted: Sequence[int]) -> list[Message]:
            """Have the strategy write its messages, once in a round, since some strategies change with each call."""
            if not written:
                asked.update(wanted)
                listed = SelectedNodesGrid(grid, wanted)
                with sampling_all(self.strategy):
                    written.extend(self._own("configure_train")(server_round, arrays, config, listed))
            return written

        if takes_turns(self.strategy):
            node_ids = self._rounds.able(grid, node_ids)
            write(node_ids)  # the plan is for the node that the strategy has chosen
        self._measurements.survey(grid, server_round, node_ids, lambda: write(node_ids))
        reached = {message.metadata.dst_node_id for message in written} or None
        free = FreeNodesGrid(grid, self._late, server_round, self._measurements, reached)
        busy = self._measurements.busy_nodes
        node_ids = [each for each in node_ids if each not in busy and (reached is None or each in reached)]
        self._sent = sent = self._rounds.plan(free, server_round, node_ids, is_busy=self._is_any_busy)
        if isinstance(sent, PlannedRound):
            chosen = set(sent.node_ids)
            left_out = [node_id for node_id in node_ids if node_id not in chosen]
            beside = self._measurements.plan_beside(grid, server_round, left_out)
            messages = write([*sent.node_ids, *(each.node_id for each in beside.assignments)])
            self._measurements.send(grid, server_round, beside, messages)
            # A message to a node that the strategy was not asked for is dropped with a warning.
            unused = asked - chosen
            messages = [each for each in messages if each.metadata.dst_node_id not in unused]
        else:
            selected = SelectedNodesGrid(grid, sent.node_ids)
            with sampling_at_most(self.strategy, len(sent.node_ids)):
                messages = list(self._own("configure_train")(server_round, arrays, config, selected))
        planned = self._rounds.with_assignments(sent, messages)
        self._late.begin_round(sent)
        return planned

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Report the round's results to the coordinator, and let the wrapped strategy aggregate."""
        sent, self._sent = self._sent, None
        if sent is not None:
            weighted_by_key = attribute(self.strategy, "weighted_by_key", "num-examples")
            own = self._rounds.finish(sent, replies, weighted_by_key, adds_metrics=True)
            if updates := self._measurements.take_updates(server_round, own):
                own = [*own, *updates]
                keep_common_metrics(own)
            replies = self._late.with_late_updates(own, weighted_by_key)
            self._late.begin_round(None)
        aggregate = partial(self._own("aggregate_train"), server_round, replies)
        if self._simulation is not None and isinstance(sent, PlannedRound):
            arrays, metrics = self._simulation.aggregated(server_round, self.strategy, aggregate)
        else:
            arrays, metrics = aggregate()
        if arrays is not None:
            self._so_far.arrays = arrays
        if metrics is not None:
            self._so_far.train_metrics_clientapp[server_round] = metrics
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the wrapped strategy configure evaluation, without waiting for more nodes than are connected.

        Drained and excluded devices do not evaluate, since evaluation draws power, too. Nodes that still train do not
        evaluate, since a node handles one message at a time.
        """
        grid = steady(grid, self._clock)
        self._measurements.wait_for_ends(grid)
        free = FreeNodesGrid(grid, self._late, measurements=self._measurements)
        node_ids = self._rounds.without_excluded(free.get_node_ids())
        if not node_ids:
            log(WARNING, "no evaluation after round %d: no node that may take part is connected and free", server_round)
            return []
        with sampling_at_most(self.strategy, len(node_ids)):
            selected = SelectedNodesGrid(grid, node_ids)
            return list(self._own("configure_evaluate")(server_round, arrays, config, selected))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the wrapped strategy aggregate the evaluation, and report its metrics to the coordinator.

        If the run has an `evaluate_fn`, the clients' metrics are reported with the prefix `clientapp_`.
        """
        metrics = self._own("aggregate_evaluate")(server_round, replies)
        if metrics is not None:
            self._so_far.evaluate_metrics_clientapp[server_round] = metrics
        if metrics is not None and not trains_nothing(self.strategy):  # without training, no round is planned
            prefix = CLIENT_METRICS_PREFIX if self._evaluates_centrally else ""
            self._rounds.report_metrics(server_round, metrics, prefix)
        return metrics

    def predictions(self, grid: Grid) -> list[NodePrediction]:
        """Predict the next round of each connected node, in the fastest mode within the device's own limit.

        Nothing is reserved. A node whose device is unknown is not in the table.

        Args:
            grid: Flower's grid.

        Raises:
            PlanningError: the run has not started, or the coordinator refused.
            CoordinatorUnreachableError: the coordinator does not answer.
        """
        return self._rounds.predictions(grid)

    def summary(self) -> None:
        """Log who chooses the nodes, which of the wrapped strategy's options count, and the rest of its summary."""
        log_summary(self.strategy, self._coordinator, self._on_coordinator_away, self._own("summary"))

    def _is_any_busy(self) -> bool:
        """Whether nodes still train for earlier rounds, or in order to measure."""
        return self._late.is_any_late() or bool(self._measurements.busy_nodes)

    def _reply_timeout_s(self, timeout_s: float | None) -> float | None:
        """Return how long to wait for a training's replies."""
        return timeout_s if self._sent is None else self._rounds.reply_timeout_s(self._sent, timeout_s)

    def _extended_timeout_s(self, timeout_s: float | None) -> float | None:
        """Return the timeout for missing replies once the first has passed."""
        return timeout_s if self._sent is None else self._rounds.extended_timeout_s(self._sent, timeout_s)


class _PlannedGrid(WaitingGrid):
    """The grid that a wrapped strategy's `start` gets: it waits as plans allow, and sends no training without one."""

    def __init__(self, *args: Any, refuse_unplanned: Callable[[Iterable[Message]], None]) -> None:
        super().__init__(*args)
        self._refuse_unplanned = refuse_unplanned

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push through the wrapped grid."""
        sent = list(messages)
        self._refuse_unplanned(sent)
        return super().push_messages(sent)


def _arguments_of(start: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a strategy's `start` by name, with its defaults; what it only passes on has Flower's names."""
    given = inspect.signature(start).bind(*args, **kwargs)
    flower = inspect.signature(Strategy.start).parameters
    passed_on = {each.kind for each in given.signature.parameters.values()} & {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }
    given.apply_defaults()
    found: dict[str, Any] = {}
    for name, value in given.arguments.items():
        kind = given.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found.update(zip([*flower][1 + len(found) :], value, strict=False))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    if passed_on:
        found.setdefault("num_rounds", flower["num_rounds"].default)
    return found


def _require_current(strategy: Any) -> None:
    """Make sure that a strategy is one of Flower's current API, and that its `start` can be planned."""
    kind = type(strategy)
    if isinstance(strategy, FedBuff) and kind.start is not FedBuff.start:
        raise InvalidInputError(
            f"{kind.__name__} has a start of its own, but that of FedBuff plans each training: leave it out"
        )
    if isinstance(strategy, Strategy):
        return
    if any(each.__module__.startswith("flwr.server.strategy") for each in kind.__mro__):
        raise InvalidInputError(
            f"{kind.__name__} is a strategy of Flower's former API (flwr.server), which takes no messages from a plan:"
            " use the one in flwr.serverapp.strategy, in a ServerApp whose main calls strategy.start(grid, ...)."
            " Flower's secure aggregation needs the former API, so it cannot be planned"
        )
    if any(each.__module__.startswith("flwr.server.workflow") for each in kind.__mro__):
        raise InvalidInputError(
            f"{kind.__name__} is a workflow of Flower's former API (flwr.server), which writes all messages by itself,"
            " so no plan can be added to them: wrap a strategy of flwr.serverapp.strategy instead, without secure"
            " aggregation"
        )
    raise InvalidInputError(
        f"{strategy!r} is no strategy: wrap an object of a class in flwr.serverapp.strategy, or of one derived from it"
    )


def _endpoint(address: str | None, identity: str | Path | None, is_insecure: bool) -> Endpoint:
    """The coordinator, and how to connect to it; without an address, that of the environment variable."""
    named = None if identity is None else Path(identity).expanduser()
    endpoint = Endpoint.of(
        address or os.environ.get(COORDINATOR_VARIABLE), named_folder(named, user_folder()), is_insecure
    )
    if endpoint.warning is not None:
        log(WARNING, "%s", endpoint.warning)
    return endpoint
