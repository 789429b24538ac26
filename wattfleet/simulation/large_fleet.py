"""A fleet of thousands of simulated devices in virtual time, which plans and measures for an app that trains elsewhere.

The coordinator's state and plans are the real ones. In the place of the agents, which would need a process and hundreds
of fits each, devices of a kind share a predictor:

- A few devices of each kind measure modes first, as in a real fleet, and the others learn from these. The predictor is
  fitted to their measurements, and is the same for all devices of the kind.
- What a device measures and observes itself corrects this predictor by one factor for its time and one for its power.
- A device that trains in a round trains in its planned mode only. Modes are measured in surveys and beside rounds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import Any

import grpc
import numpy as np

from coordinator.errors import NoDevicesError
from coordinator.services.request_limits import STATUS
from coordinator.state.fleet import Fleet
from coordinator.state.preview import predict_nodes
from coordinator.state.records import DeviceResult, RoundRecord
from coordinator.state.stores import PlacedBattery
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.devices.virtual.virtual_board import WorkSpan
from edge_agent.learning.transfer import Transfer
from edge_agent.runtime.readiness import parked_mode
from wattfleet.core.choosing import Front, predicted_front, spread_modes
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError, WattfleetError
from wattfleet.core.modes import (
    ASSUMED_MINIBATCHES_PER_EPOCH,
    JournalHeader,
    MeasuredUnit,
    Measurement,
    PowerMode,
    Profile,
    Workload,
    WorkloadFacts,
    array_to_modes,
)
from wattfleet.core.planning import Allowance
from wattfleet.core.planning.policies import Policy
from wattfleet.core.prediction import Artefact, Prediction
from wattfleet.simulation.baselines import TrueBoard, Way
from wattfleet.simulation.client_process import ClientReport
from wattfleet.simulation.virtual_time import MEASURING, TRAINING, Draw, Stretch
from wattfleet_proto.convert import (
    assignment_to_message,
    epochs_of_request,
    mode_to_message,
    plan_to_message,
    workload_from_message,
)
from wattfleet_proto.device_state import DeviceState, GrantPhase
from wattfleet_proto.error_boundary import status_of
from wattfleet_proto.limits import MAX_OTHER_KINDS, MAX_SHARED_MODES, MAX_UNITS, MeasuringLimits
from wattfleet_proto.v1 import planning_pb2

MOST_UNITS = 100
"""Different boards of a kind that are simulated. Further devices have the parameters of these, with noise of their own:
each board's parameters take memory, and time to draw."""

SAMPLES_PER_MINIBATCH = 16
"""An app that reports no minibatches trains one for so many of the examples that it states."""

_SHORTEST_OBSERVED_S = 3.0
"""A shorter training has too few power samples."""

# As `wattfleet agent` measures: at least so many minibatches, for the samples of power that has settled.
_MEASURED_MINIBATCHES, _MEASURED_S = 10, 9.5
_MEASURED_POWER_LOG_SD = 0.007
_UNIT_SHARE = 0.5
"""The share of a prediction's variance that all modes of a device have in common; the rest differs between modes."""

_REFIT_GROWTH = 1.25
"""A kind's predictor is fitted again when its measured modes have become more by this factor."""


# --- Devices ----------------------------------------------------------------------------------------------------------


@dataclass
class LargeFleetDevice:
    """A simulated device.

    Attributes:
        device_id: its name.
        node_id: Flower's node.
        partition: index of its part of the data.
        board: its board.
        idle_w: its true watts while it idles.
        report: what its app has reported of its loader.
        rows: the modes that it has measured.
        deviations: the logarithms of its own time and power as multiples of the kind's prediction, `[n]` pairs.
        observed: ms of a minibatch and mW in its latest training in each mode.
    """

    device_id: str
    node_id: int
    partition: int
    board: SimulatedDevice
    idle_w: float
    report: ClientReport | None = None
    rows: dict[PowerMode, Measurement] = field(default_factory=dict)
    deviations: list[tuple[float, float]] = field(default_factory=list)
    observed: dict[PowerMode, tuple[float, float]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Its kind of board."""
        return self.board.board_kind

    @property
    def length(self) -> int | None:
        """Minibatches in its epoch; None if unknown."""
        return None if self.report is None else self.report.length

    def paced(self, workload: Workload) -> Workload:
        """Return the workload with what its app has reported, which sets the board's true time and power."""
        if self.report is None:
            return workload
        return workload.completed(WorkloadFacts(batch=self.report.batch, loader_workers=self.report.loader_workers))


def open_devices(kinds: Mapping[str, int], seed: int) -> dict[str, LargeFleetDevice]:
    """Open the boards of a fleet; return its devices by id, in the order of their data.

    Raises:
        InvalidInputError: there is no such kind of board.
    """
    found: dict[str, LargeFleetDevice] = {}
    for kind, count in kinds.items():
        units = [SimulatedDevice(kind, 1000 * seed + k) for k in range(min(count, MOST_UNITS))]
        idle_w = [_idle_w(unit) for unit in units]
        for k in range(count):
            partition = len(found)
            board = units[k % len(units)].restarted(1_000_000 * seed + partition)
            board.apply(_parked(kind, board))
            device = LargeFleetDevice(f"{kind}-{k}", 2 + partition, partition, board, idle_w[k % len(units)])
            found[device.device_id] = device
    return found


def _idle_w(board: SimulatedDevice) -> float:
    parked = board.restarted(0)
    parked.apply(_parked(board.board_kind, board))
    return parked.load_in_force.idle_mw / 1e3


_PARKED: dict[str, PowerMode] = {}


def _parked(kind: str, board: SimulatedDevice) -> PowerMode:
    """Return the mode of an idle board: the same for all boards of a kind."""
    if kind not in _PARKED:
        _PARKED[kind] = parked_mode(board)
    return _PARKED[kind]


# --- Predictions of a kind --------------------------------------------------------------------------------------------


class KindPredictor:
    """Predicts a workload for all devices of a kind of board, from a reference and from what a few have measured."""

    def __init__(self, kind: str, board: SimulatedDevice, reference: Artefact) -> None:
        """Begin with the reference alone.

        Args:
            kind: kind of board.
            board: one of its boards, for the modes.
            reference: the predictor to transfer from.
        """
        self.kind, self.modes = kind, board.modes
        self._first_gcycles = board.mean_first_gcycles
        self._places = {mode: k for k, mode in enumerate(array_to_modes(self.modes))}
        self._reference = reference
        self.units: dict[str, tuple[Measurement, ...]] = {}
        self._fitted_to = -1.0

    def learn(self, device: LargeFleetDevice) -> None:
        """Add a device's first measurements, if it is one of the few whose measurements are shared."""
        if device.device_id in self.units or len(self.units) <= MAX_UNITS:
            self.units[device.device_id] = tuple(itertools.islice(device.rows.values(), MAX_SHARED_MODES))

    def fit(self, workload: Workload, others: Iterable[KindPredictor]) -> bool:
        """Fit to what is measured now; returns whether the predictions have changed."""
        measured = sum(map(len, self.units.values()))
        if self._fitted_to >= 0 and measured < max(1.0, _REFIT_GROWTH * self._fitted_to):
            return False
        self._fitted_to = measured
        own = sorted(self.units.values(), key=len, reverse=True)[:MAX_UNITS]
        elsewhere = [
            MeasuredUnit(other.kind, max(other.units.values(), key=len))
            for other in others
            if any(other.units.values())
        ]
        units = [MeasuredUnit("", each) for each in own if each] + elsewhere[:MAX_OTHER_KINDS]
        batch = workload.facts.batch or SAMPLES_PER_MINIBATCH
        header = JournalHeader(f"any {self.kind}", self.kind, "simulated", workload.name, batch)
        transfer = Transfer(
            (self._reference,), header, ASSUMED_MINIBATCHES_PER_EPOCH, workload.facts, units=tuple(units)
        )
        nothing = Profile(np.empty((0, 4)), np.empty(0), np.empty(0), np.empty(0, dtype=np.int64))
        predictor = transfer.fitted(nothing, transfer.priors())
        self._prediction = predictor.predict(self.modes, np.full(len(self.modes), batch))
        # Devices differ by factors, which leave the best modes as they are.
        front = predicted_front(self.modes, self._prediction, 1.0)
        chosen = np.array([self._places[mode] for mode in array_to_modes(front.modes)])
        self._front_modes, self._front_prediction = self.modes[chosen], _among(self._prediction, chosen)
        return True

    def deviation(self, mode: PowerMode, minibatch_ms: float, power_mw: float) -> tuple[float, float]:
        """Return the logarithms of a measured time and power as multiples of the prediction."""
        at = self._places[mode]
        return (
            math.log(minibatch_ms / float(self._prediction.minibatch_ms[at])),
            math.log(power_mw / float(self._prediction.power_mw[at])),
        )

    def front(self, device: LargeFleetDevice) -> Front:
        """Return a device's front: that of its kind, corrected by what it has measured and observed."""
        known = self._front_prediction
        count = len(device.deviations)
        weight = count * _UNIT_SHARE / (count * _UNIT_SHARE + 1 - _UNIT_SHARE)
        time, power = np.mean(device.deviations, axis=0) * weight if count else (0.0, 0.0)
        certain = math.sqrt(1 - _UNIT_SHARE * weight)
        own = Prediction(
            known.minibatch_ms * math.exp(time),
            known.power_mw * math.exp(power),
            known.time_log_sd * certain,
            known.power_log_sd * certain,
        )
        length = device.length or ASSUMED_MINIBATCHES_PER_EPOCH
        return predicted_front(self._front_modes, own, length, self._first_gcycles)


def _among(prediction: Prediction, chosen: np.ndarray) -> Prediction:
    return Prediction(
        prediction.minibatch_ms[chosen],
        prediction.power_mw[chosen],
        prediction.time_log_sd[chosen],
        prediction.power_log_sd[chosen],
    )


# --- Virtual time -----------------------------------------------------------------------------------------------------


class FleetClock:
    """The fleet's time: trainings end while somebody sleeps."""

    def __init__(self) -> None:
        """Begin at 0 s."""
        self._now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def now_s(self) -> float:
        """Return the time, s."""
        return self._now_s

    def sleep_s(self, seconds: float) -> None:
        """Let time pass, with all that happens meanwhile."""
        until_s = self._now_s + seconds
        while self._due and self._due[0][0] <= until_s:
            at_s, _, happen = heapq.heappop(self._due)
            self._now_s = max(self._now_s, at_s)
            happen()
        self._now_s = until_s

    def at(self, moment_s: float, happen: Callable[[], None]) -> None:
        """Have something happen at a moment."""
        heapq.heappush(self._due, (moment_s, next(self._count), happen))


# --- Planners ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedTraining:
    """What a device is to do.

    Attributes:
        plan_id: the plan.
        device: the device.
        mode: the mode to train in.
        epochs: local epochs.
        measuring: the limits of its measurements, if it trains in order to measure.
    """

    plan_id: str
    device: LargeFleetDevice
    mode: PowerMode
    epochs: float
    measuring: MeasuringLimits | None = None


class Planner:
    """Plans for `PowerAware` in the place of the coordinator's PlanningService, and lets the boards work.

    Args:
        devices: the fleet, by device id.
        seed: seed of the noise of measurements.

    Attributes:
        clock: the fleet's time.
        workload: what the run trains.
        planned: what devices are to do, by plan id and device id.
        metrics: what the strategy reported, by round; 0 is before the first round.
        rounds: for each round, what the report states of it.
    """

    ends_without_watts = False
    """Whether a run ends at once if the watts are too few for any device, instead of waiting for more."""

    def __init__(self, devices: Mapping[str, LargeFleetDevice], seed: int) -> None:
        self.devices = devices
        self.clock = FleetClock()
        self.workload = Workload("app")
        self.planned: dict[tuple[str, str], PlannedTraining] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        self.rounds: list[dict[str, Any]] = []
        self.problem = ""
        self.on_round: Callable[[int], None] = lambda number: None
        self.strategy = ""
        self._by_node = {device.node_id: device for device in devices.values()}
        self._rng = np.random.default_rng([seed, 77])
        self._draws: list[Draw] = []
        self._stretches: list[Stretch] = []
        self._began_s = 0.0
        self._idle_total_w = sum(device.idle_w for device in devices.values())

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a call of the service."""
        if method.startswith("_") or method not in _METHODS:
            raise AttributeError(method)

        def call(request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
            try:
                return getattr(self, f"_{method.lower()}")(request)
            except WattfleetError as error:
                if self.ends_without_watts and isinstance(error, InfeasibleBudgetError):
                    raise  # nothing will change
                none = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(status_of(error, STATUS), none, none, str(error), "") from None

        return call

    # The calls that all planners answer alike.

    def _startrun(self, request: planning_pb2.StartRunRequest) -> planning_pb2.StartRunResponse:
        if request.energy_budget_j:
            raise InvalidInputError(
                "energy budgets are not simulated with --app DIR: leave energy_budget out of PowerAware, or simulate a"
                " network that ships, such as --app perceptron:32 --energy-budget 20kJ"
            )
        self.workload, self.strategy = workload_from_message(request.workload), request.strategy
        return planning_pb2.StartRunResponse(name=request.name or "simulation")

    def _resolvenodes(self, request: planning_pb2.ResolveNodesRequest) -> planning_pb2.ResolveNodesResponse:
        return planning_pb2.ResolveNodesResponse(
            bindings=[
                planning_pb2.NodeBinding(node_id=each, device_id=self._by_node[each].device_id)
                for each in request.node_ids
                if each in self._by_node
            ]
        )

    def _bindnodes(self, request: planning_pb2.BindNodesRequest) -> planning_pb2.BindNodesResponse:
        return planning_pb2.BindNodesResponse()

    def _reportmetrics(self, request: planning_pb2.ReportMetricsRequest) -> planning_pb2.ReportMetricsResponse:
        self.metrics.setdefault(request.round, {}).update(request.metrics)
        return planning_pb2.ReportMetricsResponse()

    def _reportunplannedround(self, request: Any) -> planning_pb2.ReportUnplannedRoundResponse:
        return planning_pb2.ReportUnplannedRoundResponse()

    def _finishrun(self, request: planning_pb2.FinishRunRequest) -> planning_pb2.FinishRunResponse:
        self.problem = request.error
        return planning_pb2.FinishRunResponse()

    def _begin_stretch(self) -> None:
        """Begin a round: what boards did since the last one, such as a survey, is a stretch of its own."""
        if self._draws:
            self._end_stretch(0)
        self._began_s = self.clock.now_s()

    def _end_stretch(self, number: int) -> None:
        """End a round, or the time before one, which has number 0."""
        end_s = self.clock.now_s()
        begin_s = self._stretches[-1].end_s if self._stretches else 0.0
        extra_j = sum(draw.extra_w * (draw.end_s - draw.begin_s) for draw in self._draws)
        energy_j = self._idle_total_w * (end_s - begin_s) + extra_j
        self._stretches.append(Stretch(number, begin_s, end_s, energy_j, tuple(self._draws)))
        self._draws = []

    @property
    def stretches(self) -> Sequence[Stretch]:
        """The rounds, and the surveys before them, with what the boards drew."""
        return self._stretches

    # The boards' work.

    def most_minibatches(self, training: PlannedTraining, deadline_s: float | None) -> int | None:
        """Return how many minibatches a device trains before a deadline, at least 1; None without a deadline."""
        if deadline_s is None:
            return None
        device = training.device
        load = device.board.load(training.mode, device.paced(self.workload))
        warm_s = device.board.mean_first_gcycles / (training.mode.cpu_khz / 1e6)
        return max(1, int((deadline_s - warm_s) / (load.minibatch_ms / 1e3)))

    def train(self, training: PlannedTraining, report: ClientReport, examples: float | None, failed: bool) -> float:
        """Let a board train from now on; return when it ends, s.

        Args:
            training: what is planned.
            report: what its app has done.
            examples: the examples that its app states; None if it states none.
            failed: whether the app has failed.
        """
        device, board = training.device, training.device.board
        self._note(device, report)
        minibatches = report.minibatches
        if minibatches is None:
            per_epoch = ASSUMED_MINIBATCHES_PER_EPOCH if not examples else math.ceil(examples / SAMPLES_PER_MINIBATCH)
            minibatches = max(1, round(training.epochs * per_epoch))
            if device.length is None and not failed:
                # As an agent estimates it from a whole training.
                device.report = ClientReport(length=max(1, round(minibatches / training.epochs)))
        self._begin(device, training.mode)
        app = board.begin_training(device.paced(self.workload))
        trained_s = board.clock.now_s()
        if not failed:
            app.finish(minibatches)
        lasted_s = board.clock.now_s() - trained_s
        observed = None
        if not failed and lasted_s >= _SHORTEST_OBSERVED_S:
            observed = lasted_s / minibatches, board.load_in_force.power_mw / 1e3
        end_s = self._end(device)
        self.clock.at(end_s, lambda: self._ended(training, observed))
        return end_s

    def _note(self, device: LargeFleetDevice, report: ClientReport) -> None:
        """Note the facts of a device's loader."""
        if report.length is not None:
            device.report = report

    def _begin(self, device: LargeFleetDevice, mode: PowerMode) -> None:
        """Let a board work in a mode from now on."""
        board = device.board
        board.clock.sleep_s(max(0.0, self.clock.now_s() - board.clock.now_s()))
        board.apply(mode)

    def _end(self, device: LargeFleetDevice) -> float:
        """Let a board idle again, note what it drew since it began, and return when it ended, s."""
        board, spans = device.board, list[WorkSpan]()
        board.on_work = spans.append
        board.apply(_parked(device.kind, board))
        board.on_work = None
        return self._note_draw(device, spans, TRAINING, self.clock.now_s(), math.inf)

    def _note_draw(
        self, device: LargeFleetDevice, spans: Sequence[WorkSpan], kind: str, begin_s: float, until_s: float
    ) -> float:
        """Note what a board drew from a moment on, at most until another; return when that ended, s."""
        worked_s = sum(span.end_s - span.begin_s for span in spans)
        end_s = min(begin_s + worked_s, until_s)
        if end_s > begin_s:
            extra_w = sum(span.energy_j for span in spans) / worked_s - device.idle_w
            self._draws.append(Draw(begin_s, end_s, extra_w, kind))
        return end_s

    def _ended(self, training: PlannedTraining, observed: tuple[float, float] | None) -> None:
        """A device's training has ended, in which it observed seconds of a minibatch and watts, if it lasted."""

    def measure(self, training: PlannedTraining, report: ClientReport | None) -> float | None:
        """Let a device measure from now on; return when it ends, s; None if that is when its round ends."""
        raise NotImplementedError("only the coordinator's plans have devices measure")


_BEGINNING = datetime(2026, 1, 1, tzinfo=timezone.utc)

_METHODS = frozenset(planning_pb2.DESCRIPTOR.services_by_name["PlanningService"].methods_by_name)


class CoordinatorPlanner(Planner):
    """Plans with the coordinator's own state of a fleet, whose devices obey at once.

    Args:
        devices: the fleet.
        seed: seed of the noise of measurements.
        policy: the client-selection policy.
        site_budget_w: watts for the whole fleet.
        reference: the predictor to transfer from.
        profile_modes: the most modes that each device measures.
        batteries: the batteries of the devices.
        begins: the date at which the clock begins.
    """

    def __init__(
        self,
        devices: Mapping[str, LargeFleetDevice],
        seed: int,
        policy: Policy,
        site_budget_w: float,
        reference: Artefact,
        profile_modes: int,
        batteries: Sequence[PlacedBattery] = (),
        begins: datetime = _BEGINNING,
    ) -> None:
        super().__init__(devices, seed)
        self._reference, self._profile_modes, self._seed = reference, profile_modes, seed
        self._fleet = Fleet(
            Allowance.of_site(site_budget_w),
            policy,
            now_s=self.clock.now_s,
            now=lambda: begins + timedelta(seconds=self.clock.now_s()),
            batteries=batteries,
        )
        self._kinds: dict[str, KindPredictor] = {}
        for device in devices.values():
            if device.kind not in self._kinds:
                self._kinds[device.kind] = KindPredictor(device.kind, device.board, reference)
            self._fleet.agents.connect(device.device_id, device.kind, "simulated", len(device.board.modes))
            self._fleet.agents.report_state(device.device_id, DeviceState.READY, 0, "parked")
            self._fleet.flower.bind_node(device.node_id, device.device_id)
        self._beside: list[tuple[PlannedTraining, float]] = []
        self._rounds: set[str] = set()
        self._changed: set[str] = set(devices)
        self._last: RoundRecord | None = None
        self.ends_beside: Callable[[PlannedTraining], None] = lambda training: None

    def _startrun(self, request: planning_pb2.StartRunRequest) -> planning_pb2.StartRunResponse:
        answer = super()._startrun(request)
        self._fleet.flower.start_run(
            request.run_id,
            request.strategy,
            request.rounds,
            request.run_token,
            self.workload,
            needs_all=request.needs_all,
        )
        self._report_fronts()
        return answer

    def _planround(self, request: planning_pb2.PlanRoundRequest) -> planning_pb2.PlanRoundResponse:
        self._report_fronts()
        flower = self._fleet.flower
        if not flower.is_planned(request.run_id, request.round):
            flower.stop_measuring(request.run_id, request.node_ids)
            self._confirm()
            flower.release(request.run_id, request.node_ids)
            self._confirm()
            self._begin_stretch()
        record = flower.plan(request.run_id, request.round, request.node_ids, epochs_of_request(request))
        self._rounds.add(record.plan_id)
        self._confirm()
        for each in record.plan.assignments:
            device = self.devices[each.device_id]
            key = record.plan_id, each.device_id
            self.planned[key] = PlannedTraining(record.plan_id, device, each.mode, each.epochs)
        return plan_to_message(record.plan_id, record.plan, record.nodes)

    def _planmeasuring(self, request: planning_pb2.PlanMeasuringRequest) -> planning_pb2.PlanMeasuringResponse:
        self._report_fronts()
        survey_s = request.survey_s if request.HasField("survey_s") else None
        flower = self._fleet.flower
        flower.end_unused_measuring(request.run_id, request.node_ids)
        self._confirm()
        asked = flower.request_measuring(
            request.run_id, request.node_ids, request.epochs, self._profile_modes, survey_s
        )
        plan = asked.planned()
        plan_id = ""
        if plan.assignments:
            plan_id = flower.accept_measuring(request.run_id, plan)
            self._confirm()
            for each in plan.assignments:
                device, limits = self.devices[each.device_id], plan.measuring[each.device_id]
                self.planned[plan_id, each.device_id] = PlannedTraining(plan_id, device, each.mode, each.epochs, limits)
        return planning_pb2.PlanMeasuringResponse(
            plan_id=plan_id,
            assignments=[assignment_to_message(each, asked.nodes[each.device_id]) for each in plan.assignments],
            waiting=plan.waiting,
            not_ready=plan.not_ready,
        )

    def _predictnodes(self, request: planning_pb2.PredictNodesRequest) -> planning_pb2.PredictNodesResponse:
        self._report_fronts()
        found = predict_nodes(self._fleet.copy(), request.run_id, request.node_ids, request.epochs)
        return planning_pb2.PredictNodesResponse(
            predictions=[
                planning_pb2.NodePrediction(
                    node_id=each.node_id,
                    device_id=each.device_id,
                    assignment=None
                    if each.assignment is None
                    else assignment_to_message(each.assignment, each.node_id),
                    reason=each.reason,
                )
                for each in found
            ]
        )

    def _getplan(self, request: planning_pb2.GetPlanRequest) -> planning_pb2.GetPlanResponse:
        record = self._fleet.rounds.get(request.plan_id)
        return planning_pb2.GetPlanResponse(plan=plan_to_message(record.plan_id, record.plan, record.nodes))

    def _finishround(self, request: planning_pb2.FinishRoundRequest) -> planning_pb2.FinishRoundResponse:
        results = [
            DeviceResult(
                each.device_id,
                each.failure[:500],
                each.num_examples if each.HasField("num_examples") else None,
                each.loss if each.HasField("loss") and math.isfinite(each.loss) else None,
                each.share,
                each.late and not each.failure,
            )
            for each in request.results
        ]
        record = self._fleet.rounds.finish(request.plan_id, results, request.wall_s)
        self._rounds.discard(record.plan_id)
        self._end_beside()
        self._fleet.flower.end_measuring(record.run_id)
        self._confirm()
        self._end_stretch(record.number)
        self.rounds.append(_round_of(record))
        for key in [key for key in self.planned if key[0] == record.plan_id]:
            del self.planned[key]
        self.on_round(record.number)
        return planning_pb2.FinishRoundResponse()

    def _finishrun(self, request: planning_pb2.FinishRunRequest) -> planning_pb2.FinishRunResponse:
        self._fleet.flower.finish_run(request.run_id, request.error)
        return super()._finishrun(request)

    def _confirm(self) -> None:
        """Deliver the grants that are due; every device confirms at once."""
        for device_id, grant in self._fleet.take_orders():
            known = self._fleet.rounds.grants.of(device_id)
            assert known is not None, "it was just told"
            phase = GrantPhase.OVER if grant.assignment is None else known.phase
            self._fleet.rounds.grants.confirm(device_id, grant.grant_id, grant.plan_id, phase)

    def train(self, training: PlannedTraining, report: ClientReport, examples: float | None, failed: bool) -> float:
        """See `Planner.train`."""
        self._phase(training, GrantPhase.TRAINING, DeviceState.TRAINING)
        return super().train(training, report, examples, failed)

    def _ended(self, training: PlannedTraining, observed: tuple[float, float] | None) -> None:
        device = training.device
        if observed is not None:
            minibatch_s, power_w = observed
            device.observed[training.mode] = minibatch_s * 1e3, power_w * 1e3
            length = device.length or ASSUMED_MINIBATCHES_PER_EPOCH
            try:
                self._fleet.observe(device.device_id, training.plan_id, minibatch_s * length, power_w)
            except WattfleetError:
                pass  # as with a real agent, an observation that cannot be right is dropped
        self._phase(training, GrantPhase.OVER, DeviceState.READY)
        self._changed.add(device.device_id)

    def _phase(self, training: PlannedTraining, phase: GrantPhase, state: DeviceState) -> None:
        device = training.device
        known = self._fleet.rounds.grants.of(device.device_id)
        if known is not None and known.plan_id == training.plan_id:
            self._fleet.rounds.grants.confirm(device.device_id, known.grant.grant_id, known.plan_id, phase)
        self._fleet.agents.report_state(device.device_id, state, len(device.rows), "")

    def _note(self, device: LargeFleetDevice, report: ClientReport) -> None:
        if device.length != report.length and report.length is not None:
            self._changed.add(device.device_id)
        super()._note(device, report)

    # Measurements.

    def measure(self, training: PlannedTraining, report: ClientReport | None) -> float | None:
        """See `Planner.measure`."""
        assert training.measuring is not None, "it is to measure"
        self._phase(training, GrantPhase.TRAINING, DeviceState.TRAINING)
        if report is not None:
            self._note(training.device, report)
        if self._rounds:
            self._beside.append((training, self.clock.now_s()))
            return None
        end_s = self._measured(training, self.clock.now_s(), math.inf)
        self.clock.at(end_s, lambda: self._ended(training, None))
        return end_s

    def _measured(self, training: PlannedTraining, begin_s: float, until_s: float) -> float:
        """Measure modes from one moment to another; return when that ended."""
        device, limits = training.device, training.measuring
        assert limits is not None, "it is to measure"
        board, clock, kind = device.board, device.board.clock, self._kinds[device.kind]
        paced, spans = device.paced(self.workload), list[WorkSpan]()
        clock.sleep_s(max(0.0, begin_s - clock.now_s()))
        offset_s = clock.now_s() - begin_s
        board.on_work = spans.append
        board.apply(training.mode)
        board.pace(paced)
        board.run(1)
        for mode in self._modes_to_measure(device, limits.modes):
            passed_s = clock.now_s() - offset_s
            if passed_s >= until_s or passed_s - begin_s >= limits.longest_s:
                break
            board.apply(mode)
            board.stay_warm()
            load = board.load_in_force
            board.run(max(_MEASURED_MINIBATCHES, math.ceil(_MEASURED_S / (load.minibatch_ms / 1e3))))
            if clock.now_s() - offset_s > until_s:
                break  # the round has ended first
            power_mw = load.power_mw * math.exp(self._rng.normal(0.0, _MEASURED_POWER_LOG_SD))
            device.rows[mode] = Measurement(mode, load.minibatch_ms, power_mw, paced.facts.batch)
        board.apply(_parked(device.kind, board))
        board.on_work = None
        if device.rows:
            kind.learn(device)
        return self._note_draw(device, spans, MEASURING, begin_s, until_s)

    def _modes_to_measure(self, device: LargeFleetDevice, count: int) -> Iterator[PowerMode]:
        """Yield the modes that a device measures next, spread over its modes."""
        if count < 1:
            return
        spread = _spread(device.kind, self._profile_modes)
        # Devices of a kind begin at different modes, so that together they know more of them.
        turned = [spread[(k + 7 * device.partition) % len(spread)] for k in range(len(spread))]
        yield from itertools.islice((mode for mode in turned if mode not in device.rows), count)

    def _end_beside(self) -> None:
        """The round has ended, and with it what was measured beside it."""
        beside, self._beside = self._beside, []
        for training, begin_s in beside:
            self._measured(training, begin_s, self.clock.now_s())
            self._ended(training, None)
            self.ends_beside(training)

    def _report_fronts(self) -> None:
        """Fit what has been learned, and report the fronts that have changed."""
        for kind in self._kinds.values():
            facts = Counter(
                device.report.batch
                for device in self.devices.values()
                if device.kind == kind.kind and device.report is not None and device.report.batch
            )
            batch = facts.most_common(1)[0][0] if facts else None
            known = self.workload.completed(WorkloadFacts(batch=batch))
            if kind.fit(known, [each for each in self._kinds.values() if each is not kind]):
                self._changed |= {each for each in self.devices if self.devices[each].kind == kind.kind}
        digest = self._reference.digest
        for device_id in sorted(self._changed):
            device = self.devices[device_id]
            kind = self._kinds[device.kind]
            device.deviations = [
                kind.deviation(row.mode, row.minibatch_ms, row.power_mw) for row in device.rows.values()
            ]
            device.deviations += [
                kind.deviation(mode, *seen) for mode, seen in device.observed.items() if mode not in device.rows
            ]
            workload = device.paced(self.workload)
            self._fleet.agents.report_front(
                device_id, kind.front(device), device.idle_w, len(device.rows), digest, workload, device.length
            )
        self._changed.clear()


@cache
def _spread(kind: str, count: int) -> tuple[PowerMode, ...]:
    """Return modes that are spread over those of a kind of board."""
    modes = SimulatedDevice(kind, 0).modes
    return tuple(array_to_modes(spread_modes(modes, min(count, len(modes)), 0)))


def _round_of(record: RoundRecord) -> dict[str, Any]:
    """Return what the report states of a round."""
    plan = record.plan
    errors = [
        abs(seen.epoch_s / each.epoch_s - 1)
        for each in plan.assignments
        if not each.is_length_assumed and (seen := record.observations.get(each.device_id)) is not None
    ]
    return {
        "round": record.number,
        "selected": [each.device_id for each in plan.assignments],
        "failed": [each.device_id for each in record.results if each.failure],
        "site_budget_w": plan.site_budget_w,
        "planned_site_w": plan.planned_w,
        "observed_site_w": record.observed_site_w,
        "predicted_duration_s": plan.duration_s,
        "observed_duration_s": record.observed_s,
        "observed_trainings": len(record.observations),
        "median_epoch_error": float(np.median(errors)) if errors else None,
        "reasons": dict(Counter(each.reason for each in plan.decisions if not each.selected).most_common(5)),
    }


class BaselinePlanner(Planner):
    """Plans as a baseline chooses, which knows the boards' true time and power, and measures nothing.

    Args:
        devices: the fleet, with what the app has reported of each device's loader.
        seed: seed of the noise.
        way_of: returns the baseline, given the true boards.
        site_budget_w: watts for the whole fleet.
    """

    ends_without_watts = True

    def __init__(
        self,
        devices: Mapping[str, LargeFleetDevice],
        seed: int,
        way_of: Callable[[Mapping[str, TrueBoard]], Way],
        site_budget_w: float,
    ) -> None:
        super().__init__(devices, seed)
        self._way_of, self._site_budget_w = way_of, site_budget_w
        self._boards: Mapping[str, TrueBoard] = {}
        self._way: Way | None = None
        self._plans: dict[str, planning_pb2.PlanRoundResponse] = {}

    def _planround(self, request: planning_pb2.PlanRoundRequest) -> planning_pb2.PlanRoundResponse:
        plan_id = f"{request.run_id}/{request.round}"
        if plan_id in self._plans:
            return self._plans[plan_id]
        if self._way is None:
            self._boards = {
                device_id: TrueBoard(
                    device.board,
                    device.paced(self.workload),
                    device.length or ASSUMED_MINIBATCHES_PER_EPOCH,
                    device.idle_w,
                )
                for device_id, device in self.devices.items()
            }
            self._way = self._way_of(self._boards)
        modes = self._way.modes(request.round)
        if not modes:
            raise NoDevicesError("no device is chosen")
        self._begin_stretch()
        plan = planning_pb2.PlanRoundResponse(plan_id=plan_id, site_budget_w=self._site_budget_w)
        for device_id, mode in modes.items():
            true, device = self._boards[device_id], self.devices[device_id]
            load = device.board.load(mode, true.workload)
            epoch_s, power_w = load.minibatch_ms * true.minibatches_per_epoch / 1e3, load.power_mw / 1e3
            warm_s = true.board.mean_first_gcycles / (mode.cpu_khz / 1e6)
            plan.assignments.add(
                node_id=device.node_id,
                device_id=device_id,
                mode=mode_to_message(mode),
                epoch_s=epoch_s,
                power_w=power_w,
                power_limit_w=power_w,
                warmup_s=warm_s,
                epochs=request.epochs,
            )
            plan.duration_s = max(plan.duration_s, warm_s + request.epochs * epoch_s)
            plan.planned_w += power_w - true.idle_w
            self.planned[plan_id, device_id] = PlannedTraining(plan_id, device, mode, request.epochs)
        plan.planned_w += self._idle_total_w
        self._plans = {plan_id: plan}
        return plan

    def _planmeasuring(self, request: Any) -> planning_pb2.PlanMeasuringResponse:
        return planning_pb2.PlanMeasuringResponse()

    def _predictnodes(self, request: planning_pb2.PredictNodesRequest) -> planning_pb2.PredictNodesResponse:
        return planning_pb2.PredictNodesResponse(
            predictions=[
                planning_pb2.NodePrediction(node_id=each, device_id=self._by_node[each].device_id)
                for each in request.node_ids
            ]
        )

    def _getplan(self, request: planning_pb2.GetPlanRequest) -> planning_pb2.GetPlanResponse:
        return planning_pb2.GetPlanResponse(plan=self._plans[request.plan_id])

    def _finishround(self, request: planning_pb2.FinishRoundRequest) -> planning_pb2.FinishRoundResponse:
        number = int(request.plan_id.rpartition("/")[2])
        plan = self._plans[request.plan_id]
        self._end_stretch(number)
        self.rounds.append(
            {
                "round": number,
                "selected": [each.device_id for each in plan.assignments],
                "failed": [each.device_id for each in request.results if each.failure],
                "site_budget_w": self._site_budget_w,
                "planned_site_w": plan.planned_w,
                "predicted_duration_s": plan.duration_s,
            }
        )
        self.planned.clear()
        self.on_round(number)
        return planning_pb2.FinishRoundResponse()
