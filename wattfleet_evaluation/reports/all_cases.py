"""The report's data: all predictors and choice methods, evaluated on every file of a folder.

Every reference is trained on one file of the folder. A shipped reference is not used, since its population has other
networks than the one file from which the published method transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from time import perf_counter
from typing import Any

import numpy as np

from wattfleet.choosing import pareto_front
from wattfleet.modes import Profile, WorkloadFacts, board_with_modes, stated_facts
from wattfleet.prediction import DEFAULT_PREDICTOR, MIN_CORPUS_MODES, Predictor, adapt_to_board, predictor_class
from wattfleet_evaluation.choice_methods.measurement_session import MeasurementSession
from wattfleet_evaluation.choice_methods.random_best import measure_random
from wattfleet_evaluation.choice_methods.registry import choice_method_named
from wattfleet_evaluation.corpus_predictions import Fit
from wattfleet_evaluation.judging.audited_target import AuditedTarget, audited
from wattfleet_evaluation.judging.choice import evaluate_choice
from wattfleet_evaluation.judging.minibatches import RawRun, evaluate_minibatches, read_raw_runs
from wattfleet_evaluation.judging.transfer import evaluate_transfer
from wattfleet_evaluation.reports.cases import (
    CHOICE_MODES,
    Case,
    Extent,
    Folder,
    budgets_w,
    choice_cases,
    corpus_size_cases,
    pairs,
    references,
    transfer_cases,
)

_SCATTER_POINTS = 1500

Figures = dict[str, Any]
Report = Callable[[str, int, int], None]
"""Called with the current step, the number of finished runs and the number of all runs."""


def build_report(folder: Folder, extent: Extent, report: Report = lambda *_: None) -> Figures:
    """Evaluate all predictors and choice methods, and return the content of `report.json`.

    Args:
        folder: the measured files. Those large enough serve as references for the others.
        extent: how much to evaluate.
        report: called at every step.

    Raises:
        InvalidInputError: a raw log cannot be read, or a kind of predictor lacks its library.
    """
    return _Evaluation(folder, extent, report).figures()


class _Evaluation:
    """One evaluation: its trained references, its audits and its progress."""

    def __init__(self, folder: Folder, extent: Extent, report: Report) -> None:
        self._folder = folder
        self._profiles = folder.profiles
        self._extent = extent
        self._report = report
        self._transfers = list(transfer_cases(self._profiles, extent))
        self._choices = list(choice_cases(self._profiles, extent))
        self._corpus_sizes = list(corpus_size_cases(self._profiles, extent))
        cases = (*self._transfers, *self._choices, *(case for _, case in self._corpus_sizes))
        self._total = sum(case.runs for case in cases)
        self._done = 0
        self._trained: dict[tuple[str, str, int], Predictor] = {}
        self._audits: dict[str, AuditedTarget] = {}

    def figures(self) -> Figures:
        """Evaluate everything."""
        # Read the logs first, so that an unreadable one fails before half an hour of work.
        raw_runs = {stem: read_raw_runs(path) for stem, path in self._folder.raw_logs.items()}
        self._audits = {stem: self._audited(stem) for stem in self._profiles}
        return {
            "wattfleet_version": version("wattfleet"),
            "settings": asdict(self._extent),
            "files": {stem: _about(profile, self._audits[stem]) for stem, profile in self._profiles.items()},
            "left_out": list(self._folder.left_out),
            "transfers": [asdict(case) | self._transfer(case) for case in self._transfers],
            "choices": [asdict(case) | self._choice(case) for case in self._choices],
            "corpus_sizes": [
                asdict(case) | {"corpus_modes": size} | self._transfer(case, size) for size, case in self._corpus_sizes
            ],
            "minibatches": [row for stem, runs in raw_runs.items() for row in self._minibatches(stem, runs)],
            "fronts": [
                {"target": stem, "reference": reference, **self._front(stem, reference)}
                for reference, stem in pairs(self._profiles)
            ],
        }

    def _audited(self, stem: str) -> AuditedTarget:
        self._report(f"audit {stem}", self._done, self._total)
        first = next((reference for reference, target in pairs(self._profiles) if target == stem), None)
        return audited(self._profiles[stem], self._known(DEFAULT_PREDICTOR, first, stem))

    def _known(self, name: str, stem: str | None, target: str, size: int | None = None) -> Predictor | None:
        """The reference of a kind for a target, trained on `size` random rows of a file, or on all of them."""
        if stem is None or not predictor_class(name).transfers:
            return None
        corpus = self._profiles[stem]
        size = size or len(corpus)
        if (name, stem, size) not in self._trained:
            self._report(f"reference {stem}, {name}", self._done, self._total)
            drawn = np.random.default_rng(self._extent.seed).permutation(len(corpus))[:size]
            rows = corpus.rows(np.sort(drawn))
            self._trained[name, stem, size] = predictor_class(name).fit(rows, facts=self._facts(stem))
        boards = (board_with_modes(profile.modes) for profile in (corpus, self._profiles[target]))
        return adapt_to_board(self._trained[name, stem, size], *boards)

    def _transfer(self, case: Case, size: int | None = None) -> Figures:
        def track(runs: Iterable[int]) -> Iterator[int]:
            for run in runs:
                self._begin(case)
                yield run
                self._done += 1

        known = self._known(case.name, case.reference, case.target, size)
        return evaluate_transfer(
            predictor_class(case.name),
            [] if known is None else [known],
            self._profiles[case.target],
            case.modes,
            case.runs,
            self._extent.seed,
            perf_counter,
            self._audits[case.target].trusted,
            self._facts(case.target),
            track,
        ).summary()

    def _choice(self, case: Case) -> Figures:
        self._begin(case)
        target, extent = self._profiles[case.target], self._extent
        method = choice_method_named(case.name, lambda name: self._fit(name, case), board_with_modes(target.modes))
        trusted = self._audits[case.target].trusted
        cases = evaluate_choice(target, method, case.modes, budgets_w(target), case.runs, extent.seed, trusted=trusted)
        self._done += case.runs
        by_budget = {
            "budget_w": cases.budgets_w.tolist(),
            "median_penalty_pct": np.median(cases.penalty_pct, axis=0).round(3).tolist(),
            "mean_excess_w": cases.excess_w.mean(axis=0).round(4).tolist(),
        }
        return {**cases.figures(), "by_budget": by_budget}

    def _fit(self, name: str, case: Case) -> Fit:
        """The function that fits a kind of predictor in a case. Networks are trained for all its runs together."""
        known = self._known(name, case.reference, case.target)
        fitted, facts = predictor_class(name), self._facts(case.target)
        if (fit_all := getattr(fitted, "fit_all", None)) is None:
            return lambda profile: fitted.fit(profile, known, facts)
        target = self._profiles[case.target]
        measurements = {measurement.mode: measurement for measurement in target.measurements()}
        drawn = []
        for run in range(case.runs):
            session = MeasurementSession(target.modes, measurements.__getitem__, case.modes)
            measure_random(session, self._extent.seed + run)
            drawn.append(session.profile())
        trained = dict(zip((profile.sha256() for profile in drawn), fit_all(drawn, known, facts), strict=True))
        return lambda profile: trained[profile.sha256()]

    def _facts(self, stem: str) -> WorkloadFacts:
        """The facts that a file states about its workload."""
        return stated_facts(stem, self._profiles[stem])

    def _begin(self, case: Case) -> None:
        self._report(f"{case.name}, {case.modes} modes, {case.target}", self._done, self._total)

    def _minibatches(self, stem: str, runs: list[RawRun]) -> Iterator[Figures]:
        """The transfer from the first other reference, with fewer minibatches for each mode."""
        reference = next((one for one in references(self._profiles) if one != stem), None)
        for name in self._transferring():
            for minibatches in self._extent.minibatches:
                self._report(f"{name}, {minibatches} minibatches, {stem}", self._done, self._total)
                known = self._known(name, reference, stem)
                target, facts = self._profiles[stem], self._facts(stem)
                scores = evaluate_minibatches(predictor_class(name), known, target, facts, runs, minibatches)
                if scores is not None:
                    yield {"target": stem, "reference": reference, "name": name} | asdict(scores)

    def _transferring(self) -> list[str]:
        """The evaluated kinds of predictors that transfer from a reference."""
        return list(dict.fromkeys(case.name for _, case in self._corpus_sizes))

    def _front(self, stem: str, reference: str) -> Figures:
        """The measured front, the front predicted from some modes, and the measurements of the predicted front."""
        target, draw = self._profiles[stem], np.random.default_rng(self._extent.seed)
        drawn = draw.choice(len(target), min(CHOICE_MODES, len(target) - 1), replace=False)
        known = self._known(DEFAULT_PREDICTOR, reference, stem)
        fitted = predictor_class(DEFAULT_PREDICTOR).fit(target.rows(drawn), known, self._facts(stem))
        predicted = fitted.predict(target.modes)
        best = pareto_front(target.minibatch_ms, target.power_mw)
        chosen = pareto_front(predicted.minibatch_ms, predicted.power_mw)
        plotted = draw.choice(len(target), min(_SCATTER_POINTS, len(target)), replace=False)
        return {
            "measured": _points(target.minibatch_ms[plotted], target.power_mw[plotted]),
            "measured_front": _points(target.minibatch_ms[best], target.power_mw[best]),
            "predicted_front": _points(predicted.minibatch_ms[chosen], predicted.power_mw[chosen]),
            "predicted_front_measured": _points(target.minibatch_ms[chosen], target.power_mw[chosen]),
        }


def _points(ms: Any, mw: Any) -> dict[str, list[float]]:
    return {"minibatch_ms": ms.round(2).tolist(), "power_w": (mw / 1e3).round(3).tolist()}


def _about(profile: Profile, audit: AuditedTarget) -> Figures:
    board = board_with_modes(profile.modes)
    return {
        "modes": len(profile),
        "suspect_rows": audit.suspect_rows,
        "no_audit": audit.no_audit_reason,
        "board": None if board is None else board.title,
        "watts": [float(profile.power_mw.min() / 1e3), float(profile.power_mw.max() / 1e3)],
        "reference": len(profile) >= MIN_CORPUS_MODES,
    }
