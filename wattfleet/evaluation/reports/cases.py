"""The cases of a report, with the published figures beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from reference_models.logs import RunLog, read_run_logs
from wattfleet.core.choosing import pareto_front
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    PROFILE_COLUMNS,
    Profile,
    WorkloadFacts,
    board_with_modes,
    read_profile,
    require_one_training,
    stated_facts,
)
from wattfleet.core.prediction import (
    DEFAULT_PREDICTOR,
    MIN_CORPUS_MODES,
    MIN_MODES,
    Predictor,
    adapt_to_board,
    predictor_class,
    predictor_names,
)
from wattfleet.evaluation.judging.choices import evaluate_choice
from wattfleet.evaluation.judging.sources import AuditedTarget, audited, evaluate_minibatches
from wattfleet.evaluation.judging.transfer import evaluate_transfer
from wattfleet.evaluation.methods import CHOICE_METHODS, Fit, Session, TrainingBench, choice_method_named

# --- Published --------------------------------------------------------------------------------------------------------
# The figures of the paper PowerTrain (doi:10.1016/j.future.2024.07.001), to show beside those of a run.

PUBLISHED_REFERENCE = "agx_orin_resnet18"


class Published(NamedTuple):
    """A published error of a transfer.

    Attributes:
        target: the file of the same workload and device.
        method: `powertrain` or `scratch`.
        modes: number of fitted modes.
        time_mape: median MAPE of the time, %; None if the paper's text does not give it.
        power_mape: median MAPE of the power, likewise.
        where: the paper's section or figure.
        reference: the file of the workload that it transfers from; None for `scratch`.
    """

    target: str
    method: str
    modes: int
    time_mape: float | None
    power_mape: float | None
    where: str
    reference: str | None = PUBLISHED_REFERENCE


_MOBILENET, _YOLO, _NANO = "agx_orin_mobilenetv3", "agx_orin_yolov8n", "orin_nano_resnet18"

PUBLISHED = (
    Published(_MOBILENET, "powertrain", 10, 26.7, None, "4.2"),
    Published(_MOBILENET, "powertrain", 20, None, 8.5, "4.2"),
    Published(_MOBILENET, "powertrain", 50, 15.7, 5.2, "4.2"),
    Published(_MOBILENET, "powertrain", 100, 11.9, 4.3, "4.2"),
    Published(_MOBILENET, "scratch", 10, 52.6, None, "4.2", None),
    Published(_MOBILENET, "scratch", 20, None, 12.0, "4.2", None),
    Published(_MOBILENET, "scratch", 30, 35.0, None, "4.2", None),
    Published(_YOLO, "powertrain", 10, 24.7, 6.8, "4.2"),
    Published(_YOLO, "powertrain", 50, 11.7, 4.9, "4.2"),
    Published(_YOLO, "powertrain", 100, 10.18, None, "4.2"),
    Published(_YOLO, "scratch", 10, None, 21.0, "4.2", None),
    Published(_NANO, "powertrain", 50, 7.85, 5.96, "4.3.4"),
    Published(PUBLISHED_REFERENCE, "powertrain", 50, 15.03, 7.98, "figure 6", _MOBILENET),
    Published(_YOLO, "powertrain", 50, 11.77, 4.98, "figure 6", _MOBILENET),
    Published(_MOBILENET, "powertrain", 50, 17.03, 9.71, "figure 6", _YOLO),
    Published(PUBLISHED_REFERENCE, "powertrain", 50, 19.76, 12.88, "figure 6", _YOLO),
)


class PublishedChoice(NamedTuple):
    """Published figures of choices under 17 to 50 W, as text; `–` if the paper's text does not give one.

    Attributes:
        target: the file of the same workload and device.
        label: the method, and the paper's section.
        penalty_pct: median time penalty, %, in which a mode that is over the budget and faster counts as negative.
        over_1w_pct: share of the budgets exceeded by more than 1 W, %.
    """

    target: str
    label: str
    penalty_pct: str
    over_1w_pct: str


PUBLISHED_CHOICES = (
    PublishedChoice(_MOBILENET, "powertrain, paper, 5", "0.7", "25"),
    PublishedChoice(_MOBILENET, "powertrain, paper, 1", "1", "26.5"),
    PublishedChoice(_MOBILENET, "scratch, paper, 5", "5", "–"),
    PublishedChoice(_MOBILENET, "random, paper, 5, its 7 cases", "12 to 28", "0"),
    PublishedChoice(_YOLO, "powertrain, paper, 5", "0", "below 20"),
    PublishedChoice(_YOLO, "scratch, paper, 5", "4", "–"),
)


# --- Cases ------------------------------------------------------------------------------------------------------------
# The extent of a report: its files, its cases and their numbers of runs.

CHOICE_MODES = 50
"""Number of modes that choice methods may measure, and that the plotted fronts are fitted to."""

PUBLISHED_BUDGETS_W = (17, 50)
"""First and last budget of the published evaluation on the AGX Orin."""

"""The file of the workload that the paper transfers from, unless it names another one."""

NETWORKS = ("powertrain", "scratch")
"""The published kinds of predictors, which take many seconds to fit."""

_MAX_BUDGETS = 40
# One run is enough: these methods do not depend on the seed.
_DETERMINISTIC = ("maxn", "binary-search", "brute-force", "presets")
# The paper reports other references than its own at one size only (figure 6).
_OTHER_REFERENCE_SIZES = (10, 50)


@dataclass(frozen=True)
class Extent:
    """How much a report evaluates.

    Attributes:
        runs: runs of all methods but the networks.
        network_runs: runs of the published networks, which take many seconds per fit; 0 skips them.
        seed: seed of the first run; each further run adds 1.
        sizes: numbers of modes that predictors are fitted to. The networks skip those below 10.
        corpus_sizes: numbers of rows of the reference's corpus that references are trained on, in addition to the whole
            corpus.
        minibatches: numbers of minibatches for each mode, for the files that come with raw logs.

    Raises:
        InvalidInputError: there are no runs, or a number is negative.
    """

    runs: int = 10
    network_runs: int = 10
    seed: int = 0
    sizes: tuple[int, ...] = (5, 10, 20, 30, 50, 100)
    corpus_sizes: tuple[int, ...] = (500, 1000, 2000)
    minibatches: tuple[int, ...] = (10, 20, 30, 40)

    def __post_init__(self) -> None:
        if self.runs < 1 or self.network_runs < 0 or self.seed < 0:
            raise InvalidInputError("give 1 run or more, and a seed and network runs of 0 or more")

    @classmethod
    def quick(cls, seed: int = 0) -> Extent:
        """One run of everything but the networks, at two sizes: 3 minutes instead of 35."""
        return cls(runs=1, network_runs=0, seed=seed, sizes=(10, 50), corpus_sizes=(500,), minibatches=(10, 40))

    def runs_of(self, name: str) -> int:
        """Number of runs of a predictor or choice method."""
        if name in NETWORKS:
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


@dataclass(frozen=True)
class Folder:
    """The measured files of a folder.

    Attributes:
        profiles: measured modes by file name without the ending.
        left_out: names of CSV files without the columns of a training profile.
        raw_logs: the folders `<file name>_telemetry` of raw logs, by the file's name.
        hosts: measured times without power, ms of a minibatch, by device and workload.
    """

    profiles: Mapping[str, Profile]
    left_out: tuple[str, ...]
    raw_logs: Mapping[str, Path]
    hosts: Mapping[str, Mapping[str, float]]


def read_folder(folder: Path) -> Folder:
    """Read every CSV file of a folder that has the columns of a training profile.

    Raises:
        InvalidInputError: there are no such files, a file holds bad rows or several batch sizes, or there is no
            reference or no target.
    """
    if not folder.is_dir():
        raise InvalidInputError(f"{folder}: no such folder")
    paths = sorted(path for path in folder.glob("*.csv") if path.name != _HOSTS_FILE)
    left_out = tuple(path.name for path in paths if not _is_profile(path))
    profiles = {path.stem: read_profile(path) for path in paths if path.name not in left_out}
    if not profiles:
        raise InvalidInputError(f"{folder}: contains no CSV files with the columns {', '.join(PROFILE_COLUMNS)}")
    for stem, profile in profiles.items():
        require_one_training(f"{folder / stem}.csv", profile)
        if len(profile) <= MIN_MODES:
            raise InvalidInputError(
                f"{folder / stem}.csv: {len(profile)} modes are too few to evaluate: give {MIN_MODES + 1} or more"
            )
    if not references(profiles):
        raise InvalidInputError(
            f"{folder}: a reference needs {MIN_CORPUS_MODES} or more modes; none of {', '.join(profiles)} has as many"
        )
    if len(profiles) == 1:
        raise InvalidInputError(f"{folder}: contains a reference, but no other file to transfer to: add one")
    logs = {stem: folder / f"{stem}_telemetry" for stem in profiles}
    found_logs = {stem: path for stem, path in logs.items() if path.is_dir()}
    return Folder(profiles, left_out, found_logs, _read_hosts(folder / _HOSTS_FILE))


_HOSTS_FILE = "hosts.csv"


def _read_hosts(path: Path) -> dict[str, dict[str, float]]:
    """Read the times of machines whose power was not measured; none if there is no such file.

    Raises:
        InvalidInputError: the file cannot be read, or a time is not above 0.
    """
    import pandas as pd

    if not path.is_file():
        return {}
    hosts: dict[str, dict[str, float]] = {}
    try:
        table = pd.read_csv(path)
        for device, workload, ms in zip(table["device"], table["workload"], table["minibatch_ms"], strict=True):
            if not 0 < float(ms) < math.inf:
                raise ValueError(f"minibatch_ms is {ms}")
            hosts.setdefault(str(device), {})[str(workload)] = float(ms)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path}: cannot be read ({error}): it needs the columns device, workload and minibatch_ms"
        ) from None
    return hosts


def _is_profile(path: Path) -> bool:
    """Whether a file's header has the columns of a training profile, rather than those of another table."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        header = {name.strip().strip('"') for name in lines.readline().split(",")}
    return header.issuperset(PROFILE_COLUMNS)


def references(profiles: Mapping[str, Profile]) -> list[str]:
    """The files large enough to train a reference on, the published one first."""
    large = [stem for stem, profile in profiles.items() if len(profile) >= MIN_CORPUS_MODES]
    return sorted(large, key=lambda stem: stem != PUBLISHED_REFERENCE)


def pairs(profiles: Mapping[str, Profile]) -> list[tuple[str, str]]:
    """Every reference paired with every other file."""
    return [(reference, target) for reference in references(profiles) for target in profiles if target != reference]


def _cases(profiles: Mapping[str, Profile], name: str, modes: int, runs: int, transfers: bool) -> Iterator[Case]:
    """A case for every target, and for every reference if the method transfers."""
    for reference, target in pairs(profiles) if transfers else ((None, target) for target in profiles):
        if runs and modes <= len(profiles[target]):
            yield Case(target, reference, name, modes, runs)


def transfer_cases(profiles: Mapping[str, Profile], extent: Extent) -> Iterator[Case]:
    """The cases of every kind of predictor, from few modes to many."""
    first = references(profiles)[0]
    for name in predictor_names():
        for modes in extent.sizes:
            for case in _cases(profiles, name, modes, extent.runs_of(name), predictor_class(name).transfers):
                costly = name in NETWORKS and case.reference not in (None, first)
                wanted = _OTHER_REFERENCE_SIZES if costly else extent.sizes
                if modes < len(profiles[case.target]) and modes in wanted and (modes >= 10 or name not in NETWORKS):
                    yield case


def choice_cases(profiles: Mapping[str, Profile], extent: Extent) -> Iterator[Case]:
    """The cases of every choice method; presets only if the board is known."""
    for name in CHOICE_METHODS:
        transfers = name == "wattfleet" or (name in predictor_names() and predictor_class(name).transfers)
        for case in _cases(profiles, name, 0, extent.runs_of(name), transfers):
            target = profiles[case.target]
            modes = len(target) if name == "brute-force" else min(CHOICE_MODES, len(target))
            if name != "presets" or board_with_modes(target.modes) is not None:
                yield Case(case.target, case.reference, name, modes, case.runs)


def corpus_size_cases(profiles: Mapping[str, Profile], extent: Extent) -> Iterator[tuple[int, Case]]:
    """Rows of the first reference's corpus, and the transfer from a reference that is trained on them."""
    first = references(profiles)[0]
    sizes = [size for size in extent.corpus_sizes if MIN_CORPUS_MODES <= size < len(profiles[first])]
    for name in (name for name in predictor_names() if predictor_class(name).transfers and extent.runs_of(name)):
        for target in (stem for stem in profiles if stem != first):
            for size in (*sizes, len(profiles[first])):
                modes = min(CHOICE_MODES, len(profiles[target]) - 1)
                yield size, Case(target, first, name, modes, extent.runs_of(name))


def budgets_w(target: Profile) -> Sequence[float]:
    """The published budgets for the AGX Orin; otherwise whole watts over the file's range."""
    board = board_with_modes(target.modes)
    if board is not None and board.kind == "agx-orin":
        first, last = PUBLISHED_BUDGETS_W
    else:
        first, last = math.ceil(target.power_mw.min() / 1e3), max(target.power_mw.max() // 1e3, 1)
    every = max(1, math.ceil((last + 1 - first) / _MAX_BUDGETS))
    return [float(watts) for watts in range(first, max(int(last), first) + 1, every)]


# --- All cases --------------------------------------------------------------------------------------------------------
# The report's data: all predictors and choice methods, evaluated on every file of a folder.
#
# Every reference is trained on one file of the folder. A shipped reference is not used, since its population has
# other networks than the one file from which the published method transfers.

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
        raw_runs = {stem: read_run_logs(path) for stem, path in self._folder.raw_logs.items()}
        self._audits = {stem: self._audited(stem) for stem in self._profiles}
        return {
            "wattfleet_version": version("wattfleet"),
            "settings": asdict(self._extent),
            "files": {stem: _about(profile, self._audits[stem]) for stem, profile in self._profiles.items()},
            "left_out": list(self._folder.left_out),
            "hosts": {device: dict(times) for device, times in self._folder.hosts.items()},
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
        bench, drawn = TrainingBench(self._profiles[case.target]), []
        for run in range(case.runs):
            session = Session(bench, case.modes)
            session.measure_random(self._extent.seed + run)
            drawn.append(session.profile())
        trained = dict(zip((profile.sha256() for profile in drawn), fit_all(drawn, known, facts), strict=True))
        return lambda profile: trained[profile.sha256()]

    def _facts(self, stem: str) -> WorkloadFacts:
        """The facts that a file states about its workload."""
        return stated_facts(stem, self._profiles[stem])

    def _begin(self, case: Case) -> None:
        self._report(f"{case.name}, {case.modes} modes, {case.target}", self._done, self._total)

    def _minibatches(self, stem: str, runs: list[RunLog]) -> Iterator[Figures]:
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
        "fastest_ms": float(profile.minibatch_ms.min()),
        "watts": [float(profile.power_mw.min() / 1e3), float(profile.power_mw.max() / 1e3)],
        "reference": len(profile) >= MIN_CORPUS_MODES,
    }
