"""The extent of a report: its files, its cases and their numbers of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wattfleet.errors import InvalidInputError
from wattfleet.modes import PROFILE_COLUMNS, Profile, board_with_modes, read_profile, require_one_training
from wattfleet.prediction import MIN_CORPUS_MODES, MIN_MODES, predictor_class, predictor_names
from wattfleet_evaluation.choice_methods.registry import NAMES

CHOICE_MODES = 50
"""Number of modes that choice methods may measure, and that the plotted fronts are fitted to."""

PUBLISHED_BUDGETS_W = (17, 50)
"""First and last budget of the published evaluation on the AGX Orin."""

PUBLISHED_REFERENCE = "agx_orin_resnet18"
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
    """

    profiles: Mapping[str, Profile]
    left_out: tuple[str, ...]
    raw_logs: Mapping[str, Path]


def read_folder(folder: Path) -> Folder:
    """Read every CSV file of a folder that has the columns of a training profile.

    Raises:
        InvalidInputError: there are no such files, a file holds bad rows or several batch sizes, or there is no
            reference or no target.
    """
    if not folder.is_dir():
        raise InvalidInputError(f"{folder}: no such folder")
    paths = sorted(folder.glob("*.csv"))
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
    return Folder(profiles, left_out, {stem: path for stem, path in logs.items() if path.is_dir()})


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
    for name in NAMES:
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
