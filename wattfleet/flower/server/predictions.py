"""Predicted time, power and energy of trainings, for strategies and apps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from wattfleet.core.modes import PowerMode
from wattfleet_proto.convert import mode_from_message
from wattfleet_proto.v1 import planning_pb2

_HIGH_PROBABILITY = 0.95
_HIGH_QUANTILE = NormalDist().inv_cdf(_HIGH_PROBABILITY)


@dataclass(frozen=True)
class Quantiles:
    """The distribution of a predicted quantity.

    Attributes:
        low: 5 % quantile.
        median: median.
        high: 95 % quantile.
    """

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class TrainingPrediction:
    """The predicted time, power and energy of a node's training in a round.

    Errors of time and power are lognormal, and are assumed to be independent for the energy. The start of a training is
    included in `training_s` and `training_kj`, with the power of the training.

    Attributes:
        mode: power mode of the training.
        epoch_s: seconds of an epoch.
        training_s: seconds of the whole training.
        power_w: mean power, watts.
        epoch_kj: energy of an epoch, kJ.
        training_kj: energy of the whole training, kJ.
        batch: the batch size that the prediction is for; None if unknown.
        profiled_modes: modes of the workload that the device has measured; with 0, the prediction comes from other
            devices or workloads alone.
        is_length_assumed: whether the number of minibatches in an epoch is assumed, since the device has not trained
            yet. Seconds and energy may then be far off.
    """

    mode: PowerMode
    epoch_s: Quantiles
    training_s: Quantiles
    power_w: Quantiles
    epoch_kj: Quantiles
    training_kj: Quantiles
    batch: int | None
    profiled_modes: int
    is_length_assumed: bool

    def to_record(self, reason: str) -> dict[str, str | int | float]:
        """Return the values of the ConfigRecord in a training message.

        Args:
            reason: why the device was selected.
        """
        record: dict[str, str | int | float] = {
            "mode": self.mode.label(),
            "cores": self.mode.cores,
            "cpu-khz": self.mode.cpu_khz,
            "gpu-hz": self.mode.gpu_hz,
            "mem-hz": self.mode.mem_hz,
            "profiled-modes": self.profiled_modes,
            "length-assumed": self.is_length_assumed,
            "reason": reason,
        }
        if self.batch is not None:
            record["batch"] = self.batch
        for name in ("epoch_s", "training_s", "power_w", "epoch_kj", "training_kj"):
            quantiles: Quantiles = getattr(self, name)
            key = name.replace("_", "-")
            record |= {key: quantiles.median, f"{key}-low": quantiles.low, f"{key}-high": quantiles.high}
        return record


@dataclass(frozen=True)
class NodePrediction:
    """The prediction for a node, in case it is selected for the next round.

    Attributes:
        node_id: Flower's id of the node.
        device_id: its device; empty if the coordinator knows no device for it.
        training: the prediction in the fastest mode within the device's own limit; None if there is none.
        reason: why the node cannot be selected now; empty if it can.
    """

    node_id: int
    device_id: str
    training: TrainingPrediction | None
    reason: str


def training_prediction(assignment: planning_pb2.Assignment) -> TrainingPrediction:
    """Return the prediction in an assignment.

    Args:
        assignment: the assignment of one node.
    """
    epoch_s, start_s, power_w = assignment.epoch_s, assignment.warmup_s, assignment.power_w
    training_s = start_s + assignment.epochs * epoch_s
    energy_sd = math.hypot(assignment.epoch_log_sd, assignment.power_log_sd)
    trained_s = _quantiles(assignment.epochs * epoch_s, assignment.epoch_log_sd)
    return TrainingPrediction(
        mode=mode_from_message(assignment.mode),
        epoch_s=_quantiles(epoch_s, assignment.epoch_log_sd),
        training_s=Quantiles(start_s + trained_s.low, training_s, start_s + trained_s.high),
        power_w=_quantiles(power_w, assignment.power_log_sd),
        epoch_kj=_quantiles(epoch_s * power_w / 1e3, energy_sd),
        training_kj=_quantiles(training_s * power_w / 1e3, energy_sd),
        batch=assignment.batch or None,
        profiled_modes=assignment.profiled_modes,
        is_length_assumed=assignment.length_assumed,
    )


def prediction_records(plan: planning_pb2.PlanRoundResponse) -> dict[int, dict[str, str | int | float]]:
    """Return the values of the prediction record in each selected node's message, by node id.

    Args:
        plan: the coordinator's plan.
    """
    reasons = {decision.device_id: decision.reason for decision in plan.decisions}
    return {
        assignment.node_id: training_prediction(assignment).to_record(reasons.get(assignment.device_id, ""))
        for assignment in plan.assignments
    }


def predicted_metrics(plan: planning_pb2.PlanRoundResponse) -> dict[str, dict[str, float]]:
    """Return the medians that a plan predicts, as metrics by device.

    Args:
        plan: the coordinator's plan.
    """
    predicted = {each.device_id: training_prediction(each) for each in plan.assignments}
    return {
        device_id: {
            "predicted-epoch-s": training.epoch_s.median,
            "predicted-power-w": training.power_w.median,
            "predicted-epoch-kj": training.epoch_kj.median,
        }
        for device_id, training in predicted.items()
    }


def node_predictions(answers: Sequence[planning_pb2.NodePrediction]) -> list[NodePrediction]:
    """Read the coordinator's predictions of nodes.

    Args:
        answers: the coordinator's prediction for each node.
    """
    return [
        NodePrediction(
            answer.node_id,
            answer.device_id,
            training_prediction(answer.assignment) if answer.HasField("assignment") else None,
            answer.reason,
        )
        for answer in answers
    ]


def _quantiles(median: float, log_sd: float) -> Quantiles:
    factor = math.exp(_HIGH_QUANTILE * log_sd)
    return Quantiles(median / factor, median, median * factor)
