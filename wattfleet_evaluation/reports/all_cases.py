"""The report's data: all predictors and choice methods, evaluated on every file of a folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from wattfleet.choosing import pareto_front
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile, board_with_modes, read_profile, require_one_training
from wattfleet.prediction import (
    DEFAULT_PREDICTOR,
    MIN_CORPUS_MODES,
    MIN_MODES,
    Predictor,
    adapt_to_board,
    predictor_class,
    predictor_names,
)
from wattfleet_evaluation.choice_methods.random_then_predict import Fit
from wattfleet_evaluation.choice_methods.registry import NAMES, choice_method_named
from wattfleet_evaluation.judging.audited_target import AuditedTarget, Mask, audited
from wattfleet_evaluation.judging.choice import evaluate_choice
from wattfleet_evaluation.judging.transfer import evaluate_transfer

CHOICE_MODES = 50
"""Number of modes that choice methods may measure, and that the plotted fronts are fitted to."""

PUBLISHED_BUDGETS_W = (17, 50)
"""First and last budget of the published evaluation on the AGX Orin."""

_DEFAULT_SIZES, _NETWORK_SIZES = (5, 10, 20, 50, 100), (10, 50)
_SCATTER_POINTS = 1500
_MOST_BUDGETS = 40
# One run is enough: these methods do not depend on the seed.
_DETERMINISTIC = ("maxn", "binary-search", "brute-force", "presets")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Extent:
    """How many runs are evaluated.

    Attributes:
        runs: runs of all methods but the networks.
        network_runs: runs of the published networks, which take many seconds per fit; 0 skips them.
        seed: seed of the first run; the following runs count up.

    Raises:
        InvalidInputError: there are no runs, or a number is negative.
    """

    runs: int = 5
    network_runs: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.runs < 1 or self.network_runs < 0 or self.seed < 0:
            raise InvalidInputError("give 1 run or more, and a seed and network runs of 0 or more")

    def runs_of(self, name: str) -> int:
        """Number of runs of a predictor or choice method."""
        if name in predictor_names() and name != DEFAULT_PREDICTOR:
            return self.network_runs
        return 1 if name in _DETERMINISTIC else self.runs


@dataclass(frozen=True)
class Case:
    """One evaluation of a predictor or choice method.

    Attributes:
        target: the file to transfer to or choose from.
        reference: the file to transfer from; None without a reference.
        name: the predictor or choice method.
        modes: number of modes that it is fitted to or may measure.
        runs: number of runs.
    """

    target: str
    reference: str | None
    name: str
    modes: int
    runs: int


def read_folder(folder: Path) -> dict[str, Profile]:
    """Read every CSV file of a folder, by its name without the ending.

    Raises:
        InvalidInputError: there are no files, a file is not a profile, or there is nothing to transfer from or to.
    """
    if not folder.is_dir():
        raise InvalidInputError(f"{folder}: no such folder")
    profiles = {path.stem: read_profile(path) for path in sorted(folder.glob("*.csv"))}
    if not profiles:
        raise InvalidInputError(f"{folder}: contains no CSV files of measured modes")
    for stem, profile in profiles.items():
        require_one_training(f"{folder / stem}.csv", profile)
        if len(profile) <= MIN_MODES:
            raise InvalidInputError(
                f"{folder / stem}.csv: {len(profile)} modes are too few to evaluate: give {MIN_MODES + 1} or more"
            )
    if not _references(profiles):
        raise InvalidInputError(
            f"{folder}: a reference needs {MIN_CORPUS_MODES} or more modes; none of {', '.join(profiles)} has as many"
        )
    if len(profiles) == 1:
        raise InvalidInputError(f"{folder}: contains a reference, but no other file to transfer to: add one")
    return profiles


def build_report(
    profiles: Mapping[str, Profile], extent: Extent, report: Callable[[str, int, int], None] = lambda *_: None
) -> Figures:
    """Evaluate all predictors and choice methods, and return the content of `report.json`.

    Args:
        profiles: measured modes by file name. Those large enough serve as references for the others.
        extent: how many runs to evaluate.
        report: called with the current step, the number of finished runs and the number of all runs.
    """
    transfers, choices = list(transfer_cases(profiles, extent)), list(choice_cases(profiles, extent))
    total = sum(case.runs for case in (*transfers, *choices))
    done = 0

    @cache
    def reference(name: str, stem: str) -> Predictor:
        report(f"reference {stem}, {name}", done, total)
        return predictor_class(name).fit(profiles[stem])

    def known(name: str, stem: str | None, target: Profile) -> Predictor | None:
        if stem is None or not predictor_class(name).transfers:
            return None
        return adapt_to_board(
            reference(name, stem), board_with_modes(profiles[stem].modes), board_with_modes(target.modes)
        )

    def fit_with(stem: str | None, target: Profile) -> Callable[[str], Fit]:
        def fit_of(name: str) -> Fit:
            transferred = known(name, stem, target)
            return lambda profile: predictor_class(name).fit(profile, transferred)

        return fit_of

    def track(case: Case) -> Callable[[Iterable[int]], Iterator[int]]:
        def reported(runs: Iterable[int]) -> Iterator[int]:
            nonlocal done
            for run in runs:
                report(f"{case.name}, {case.modes} modes, {case.target}", done, total)
                yield run
                done += 1

        return reported

    def audited_file(stem: str) -> AuditedTarget:
        first_reference = next((reference for reference, target in _pairs(profiles) if target == stem), None)
        return audited(profiles[stem], known(DEFAULT_PREDICTOR, first_reference, profiles[stem]))

    report("audit", done, total)
    audits = {stem: audited_file(stem) for stem in profiles}
    found: Figures = {
        "wattfleet_version": version("wattfleet"),
        "settings": asdict(extent),
        "files": {stem: _about(profile, audits[stem]) for stem, profile in profiles.items()},
        "transfers": [],
        "choices": [],
        "fronts": [],
    }
    for case in transfers:
        fitted, target = predictor_class(case.name), profiles[case.target]
        transferred = known(case.name, case.reference, target)
        trusted = audits[case.target].trusted
        scores = evaluate_transfer(
            fitted, transferred, target, case.modes, case.runs, extent.seed, perf_counter, trusted, track=track(case)
        )
        found["transfers"].append(asdict(case) | scores.summary())
    for case in choices:
        target = profiles[case.target]
        found["choices"].append(
            asdict(case) | _choice(case, target, fit_with(case.reference, target), extent, audits[case.target].trusted)
        )
        done += case.runs
        report(f"{case.name}, {case.modes} modes, {case.target}", done, total)
    for reference_stem, stem in _pairs(profiles):
        front = _front(profiles[stem], known(DEFAULT_PREDICTOR, reference_stem, profiles[stem]), extent.seed)
        found["fronts"].append({"target": stem, "reference": reference_stem, **front})
    return found


def _references(profiles: Mapping[str, Profile]) -> list[str]:
    return [stem for stem, profile in profiles.items() if len(profile) >= MIN_CORPUS_MODES]


def _pairs(profiles: Mapping[str, Profile]) -> list[tuple[str, str]]:
    """Every reference paired with every other file."""
    return [
        (reference, target)
        for reference in reversed(_references(profiles))
        for target in profiles
        if target != reference
    ]


def _cases(profiles: Mapping[str, Profile], name: str, modes: int, runs: int, transfers: bool) -> Iterator[Case]:
    """A case for every target, and for every reference if the method transfers."""
    for reference, target in _pairs(profiles) if transfers else ((None, target) for target in profiles):
        if runs and modes <= len(profiles[target]):
            yield Case(target, reference, name, modes, runs)


def transfer_cases(profiles: Mapping[str, Profile], extent: Extent) -> Iterator[Case]:
    """The cases of every kind of predictor, from few modes to many."""
    for name in predictor_names():
        for modes in _DEFAULT_SIZES if name == DEFAULT_PREDICTOR else _NETWORK_SIZES:
            for case in _cases(profiles, name, modes, extent.runs_of(name), predictor_class(name).transfers):
                if modes < len(profiles[case.target]):
                    yield case


def choice_cases(profiles: Mapping[str, Profile], extent: Extent) -> Iterator[Case]:
    """The cases of every choice method; presets only if the board is known."""
    for name in NAMES:
        transfers = name == "wattfleet" or (name in predictor_names() and predictor_class(name).transfers)
        for case in _cases(profiles, name, 0, extent.runs_of(name), transfers):
            target = profiles[case.target]
            modes = len(target) if name == "brute-force" else min(CHOICE_MODES, len(target))
            if name != "presets" or board_with_modes(target.modes) is not None:
                yield Case(case.target, case.reference, name, modes, case.runs)


def _choice(case: Case, target: Profile, fit_of: Callable[[str], Fit], extent: Extent, trusted: Mask | None) -> Figures:
    method = choice_method_named(case.name, fit_of, board_with_modes(target.modes))
    cases = evaluate_choice(target, method, case.modes, budgets_w(target), case.runs, extent.seed, trusted=trusted)
    by_budget = {
        "budget_w": cases.budgets_w.tolist(),
        "median_penalty_pct": np.median(cases.penalty_pct, axis=0).round(3).tolist(),
        "mean_excess_w": cases.excess_w.mean(axis=0).round(4).tolist(),
    }
    return {**cases.figures(), "by_budget": by_budget}


def budgets_w(target: Profile) -> Sequence[float]:
    """The published budgets for the AGX Orin; otherwise whole watts over the file's range."""
    board = board_with_modes(target.modes)
    if board is not None and board.kind == "agx-orin":
        first, last = PUBLISHED_BUDGETS_W
    else:
        first, last = math.ceil(target.power_mw.min() / 1e3), max(target.power_mw.max() // 1e3, 1)
    every = max(1, math.ceil((last + 1 - first) / _MOST_BUDGETS))
    return [float(watts) for watts in range(first, max(int(last), first) + 1, every)]


def _about(profile: Profile, audit: AuditedTarget) -> Figures:
    board = board_with_modes(profile.modes)
    return {
        "modes": len(profile),
        "suspect_rows": audit.suspect_rows,
        "no_audit": audit.why_not,
        "board": None if board is None else board.title,
        "watts": [float(profile.power_mw.min() / 1e3), float(profile.power_mw.max() / 1e3)],
        "reference": len(profile) >= MIN_CORPUS_MODES,
    }


def _front(target: Profile, reference: Predictor | None, seed: int) -> Figures:
    """The measured front, the front predicted from some modes, and the measurements of the predicted front's modes."""
    draw = np.random.default_rng(seed)
    drawn = draw.choice(len(target), min(CHOICE_MODES, len(target) - 1), replace=False)
    predicted = predictor_class(DEFAULT_PREDICTOR).fit(target.rows(drawn), reference).predict(target.modes)
    best = pareto_front(target.minibatch_ms, target.power_mw)
    chosen = pareto_front(predicted.minibatch_ms, predicted.power_mw)
    plotted = draw.choice(len(target), min(_SCATTER_POINTS, len(target)), replace=False)

    def points(ms: Any, mw: Any) -> dict[str, list[float]]:
        return {"minibatch_ms": ms.round(2).tolist(), "power_w": (mw / 1e3).round(3).tolist()}

    return {
        "measured": points(target.minibatch_ms[plotted], target.power_mw[plotted]),
        "measured_front": points(target.minibatch_ms[best], target.power_mw[best]),
        "predicted_front": points(predicted.minibatch_ms[chosen], predicted.power_mw[chosen]),
        "predicted_front_measured": points(target.minibatch_ms[chosen], target.power_mw[chosen]),
    }
