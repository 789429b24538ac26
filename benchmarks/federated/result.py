"""The benchmark's result: the figures of all seeds, their medians, and whether the goals are met."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from benchmarks.federated.experiment import Experiment
from benchmarks.federated.figures import OVERHEADS_S, median_figures
from benchmarks.federated.jobs import LOCAL_EPOCHS
from benchmarks.federated.methods import METHODS
from benchmarks.federated.tasks import TASKS

Result = dict[str, Any]

PRESETS, ORACLE = "presets", "oracle-"
"""The baselines of Wattfleet's policies: `presets`, and the oracle of the same policy."""


def result_of(experiment: Experiment, seeds: Sequence[Mapping[str, Any]]) -> Result:
    """Return the JSON document of an experiment.

    Args:
        experiment: the settings.
        seeds: the results of `run_seed` for each seed, from 0.
    """
    targets = TASKS[experiment.task]().targets
    settings = {name: value for name, value in asdict(experiment).items() if name != "boards"}
    runs = {
        name: {budget: _runs([seed["runs"][name][budget] for seed in seeds]) for budget in _budgets(experiment)}
        for name in experiment.methods
    }
    return {
        "provenance": "simulated",
        "wattfleet_version": version("wattfleet"),
        "settings": {
            **settings,
            "seeds": len(seeds),
            "local_epochs": LOCAL_EPOCHS,
            "overheads_s": OVERHEADS_S,
            "targets": targets,
            "fedcs_deadline_s": [seed["deadline_s"] for seed in seeds],
        },
        "runs": runs,
        "compared": {
            budget: {name: _compared(runs, name, budget, targets) for name in runs if f"{ORACLE}{name}" in METHODS}
            for budget in _budgets(experiment)
        },
    }


def _budgets(experiment: Experiment) -> list[str]:
    return [f"{watts:g}" for watts in experiment.budgets_w]


def _runs(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the runs of one method at one budget over all seeds; none if one of the seeds could not be run."""
    words = next((seed["infeasible"] for seed in seeds if "infeasible" in seed), None)
    if words is not None:
        return {"infeasible": words}
    figures = [{name: value for name, value in seed.items() if name != "series"} for seed in seeds]
    return {"median": median_figures(figures), "seeds": seeds}


def _compared(runs: Mapping[str, Any], name: str, budget: str, targets: Sequence[float]) -> dict[str, Any]:
    """Return median factors: how much sooner targets are reached than with presets, and later than with the oracle."""

    def ratio(other: str, quantity: str, inverted: bool) -> dict[str, float | None]:
        both = [runs.get(each, {}).get(budget, {}).get("seeds") for each in (name, other)]
        if None in both:
            return {}
        found = {}
        for target in (f"{target:g}" for target in targets):
            pairs = [(own[quantity][target], its[quantity][target]) for own, its in zip(*both, strict=True)]
            known = [(own, its) for own, its in pairs if own is not None and its is not None]
            ratios = [its / own if inverted else own / its for own, its in known]
            found[target] = statistics.median(ratios) if len(ratios) == len(pairs) else None
        return found

    return {
        "times_sooner_than_presets": ratio(PRESETS, "time_s", True),
        "times_sooner_than_presets_equal": ratio(f"{PRESETS}-equal", "time_s", True),
        "times_less_energy_than_presets": ratio(PRESETS, "energy_kj", True),
        "time_over_oracle": ratio(f"{ORACLE}{name}", "time_s", False),
    }
