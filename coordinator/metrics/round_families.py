"""Metric families of rounds: gauges of the newest rounds, and counters and histograms of all rounds of this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from coordinator.histograms import Histogram
from coordinator.state.records import RoundRecord, RunRecord
from coordinator.state.rounds.latest_results import LatestResults
from coordinator.state.rounds.round_statistics import RoundStatistics

_NAMED_RUNS = 20
"""The most live runs with their own label, because each label is a time series in Prometheus."""

_OTHER_RUNS = "other"


def round_families(
    rounds: Sequence[RoundRecord], newest: LatestResults, site_budget_w: float, live_runs: Set[str]
) -> Iterator[GaugeMetricFamily]:
    """The newest planned, observed and evaluated rounds; they disappear when their run ends."""
    number = GaugeMetricFamily("wattfleet_round_number", "Number of the newest planned round")
    duration = GaugeMetricFamily(
        "wattfleet_round_duration_seconds",
        "Makespan of the round: seconds until its slowest device has finished",
        labels=["kind"],
    )
    site = GaugeMetricFamily(
        "wattfleet_site_power_watts", "Power of the site in watts, including idle devices", labels=["kind"]
    )
    accuracy = GaugeMetricFamily("wattfleet_round_accuracy", "Accuracy after the newest evaluated round")
    site.add_metric(["allowed"], site_budget_w)
    if rounds:
        number.add_metric([], rounds[-1].number)
        duration.add_metric(["predicted"], rounds[-1].plan.duration_s)
        site.add_metric(["planned"], rounds[-1].plan.planned_w)
    if (seen := newest.observed_round) is not None and seen.run_id in live_runs:
        site.add_metric(["observed"], seen.site_w)
        # The plan and the budget may have changed since, so those of the observed round are exported as well.
        site.add_metric(["planned_then"], seen.planned_w)
        site.add_metric(["allowed_then"], seen.allowed_w)
        duration.add_metric(["observed"], seen.duration_s)
        duration.add_metric(["predicted_then"], seen.predicted_s)
    if (evaluated := newest.evaluated_round) is not None and evaluated.run_id in live_runs:
        accuracy.add_metric([], evaluated.accuracy)
    yield from (number, duration, site, accuracy)


def run_info_family(live_runs: Sequence[RunRecord]) -> GaugeMetricFamily:
    """The names and labels of live runs, to be joined with other metrics by the label `run`.

    Args:
        live_runs: the runs that have not ended, the newest first.
    """
    family = GaugeMetricFamily(
        "wattfleet_run_info",
        "Always 1; the labels say what a run that has not ended is. Each of its labels has a comma before and after it",
        labels=["run", "name", "labels"],
    )
    for run in live_runs[:_NAMED_RUNS]:
        labels = ",".join(f"{key}={value}" for key, value in sorted(run.labels.items()))
        family.add_metric([run.run_id, run.name, f",{labels}," if labels else ""], 1.0)
    return family


def in_flight_family(rounds: Sequence[RoundRecord], since_s: Mapping[str, float], now_s: float) -> GaugeMetricFamily:
    """The duration so far of each run's oldest round in flight, with the prediction for the same round.

    Args:
        rounds: the rounds of live runs, oldest first.
        since_s: when each round in flight was planned, by plan id.
        now_s: the time now, of the same clock.
    """
    family = GaugeMetricFamily(
        "wattfleet_round_in_flight_seconds",
        "Seconds since the run's oldest round that has not ended was planned, and its predicted makespan",
        labels=["run", "kind"],
    )
    oldest: dict[str, RoundRecord] = {}
    for record in rounds:
        if record.plan_id in since_s and record.wall_s is None and record.plan.assignments:
            oldest.setdefault(record.run_id, record)
    for run_id, record in list(oldest.items())[-_NAMED_RUNS:]:
        family.add_metric([run_id, "elapsed"], now_s - since_s[record.plan_id])
        family.add_metric([run_id, "predicted"], record.plan.duration_s)
    return family


def statistics_families(statistics: RoundStatistics, live_runs: Sequence[str]) -> Iterator[Metric]:
    """Counters and histograms of the rounds since the start.

    Args:
        statistics: the counts.
        live_runs: ids of the runs that have not ended, the newest first.
    """
    yield CounterMetricFamily("wattfleet_rounds_planned", "Rounds that were planned", statistics.planned)
    ended = CounterMetricFamily("wattfleet_rounds_ended", "Rounds that have ended, by how", labels=["reason"])
    for reason, count in statistics.ended.items():
        ended.add_metric([reason], count)
    yield ended
    yield CounterMetricFamily(
        "wattfleet_rounds_over_budget",
        "Rounds whose devices drew more watts than the site's budget at their time",
        statistics.over_budget,
    )
    parts = CounterMetricFamily(
        "wattfleet_participations", "Devices in rounds, by what came of their part", labels=["reason"]
    )
    for reason, count in statistics.participations.items():
        parts.add_metric([reason], count)
    yield parts
    yield _histograms(
        "wattfleet_observed_to_predicted_ratio",
        "Observed by predicted seconds and watts of trainings",
        "quantity",
        statistics.ratios,
    )
    yield _histograms(
        "wattfleet_prediction_deviations",
        "Distance of observed from predicted values in predicted standard deviations; 90 % should be below 1.645",
        "quantity",
        statistics.deviations,
    )
    yield _histograms(
        "wattfleet_round_seconds", "Seconds of completely observed rounds, by kind", "kind", statistics.round_s
    )
    yield _histograms(
        "wattfleet_round_watts", "Watts of the site in completely observed rounds, by kind", "kind", statistics.round_w
    )
    energy = HistogramMetricFamily(
        "wattfleet_round_energy_joules", "Joules of the trainings of completely observed rounds"
    )
    energy.add_metric([], statistics.round_j.buckets, statistics.round_j.sum)
    yield energy
    yield _run_family(statistics.run_j.copy(), live_runs)


def _run_family(run_j: Mapping[str, float], live_runs: Sequence[str]) -> GaugeMetricFamily | CounterMetricFamily:
    """The joules of each live run; the oldest runs share one label."""
    family = CounterMetricFamily(
        "wattfleet_run_energy_joules",
        "Joules of the observed trainings of a run that has not ended, since the coordinator started",
        labels=["run"],
    )
    known = [run_id for run_id in live_runs if run_id in run_j]
    for run_id in known[:_NAMED_RUNS]:
        family.add_metric([run_id], run_j[run_id])
    if others := known[_NAMED_RUNS:]:
        family.add_metric([_OTHER_RUNS], sum(run_j[run_id] for run_id in others))
    return family


def _histograms(name: str, text: str, label: str, histograms: Mapping[str, Histogram]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, histogram in histograms.items():
        family.add_metric([value], histogram.buckets, histogram.sum)
    return family
