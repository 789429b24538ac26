"""Training a reference predictor on a corpus, scoring it, and writing its model card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wattfleet.common.parsing import parse_toml
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    BOARDS,
    LARGEST_COUNT,
    Board,
    FittedWorkload,
    Profile,
    WorkloadFacts,
    array_to_modes,
    board_with_modes,
    read_profile,
    require_same_task,
    stated_facts,
)
from wattfleet.core.prediction import (
    MAX_MEMBERS,
    MIN_CORPUS_MODES,
    Artefact,
    Member,
    Population,
    PopulationEntry,
    Prediction,
    RooflinePredictor,
    adapt_to_board,
    measured_member,
    pack_artefact,
)

# --- Scoring ----------------------------------------------------------------------------------------------------------
# Scores of predictions against measurements, and the check that these were not trained on.


Values = NDArray[np.float64]

# A few equal rows can be chance, or a copied baseline mode.
_MAX_SHARED = 3


def percentage_errors(predicted: Prediction, measured: Profile) -> tuple[Values, Values]:
    """`[n]` absolute percentage errors of time and of power, for predictions of `[n]` measured modes."""
    time_pct = 100 * np.abs(predicted.minibatch_ms / measured.minibatch_ms - 1)
    power_pct = 100 * np.abs(predicted.power_mw / measured.power_mw - 1)
    return time_pct, power_pct


def require_disjoint(corpus: Profile, target: Profile) -> None:
    """Check that a target is not part of the corpus that its reference was trained on.

    Raises:
        InvalidInputError: more than 3 rows of the target, or all of them, are also in the corpus.
    """
    shared = len(set(corpus.canonical_rows()) & set(target.canonical_rows()))
    if shared > min(_MAX_SHARED, len(target) - 1):
        raise InvalidInputError(
            f"{shared} of the target's {len(target)} rows are also in the reference's corpus, so the score would be"
            " too good: give a target of another workload or device, or another reference"
        )


# --- Population file --------------------------------------------------------------------------------------------------
# The TOML file that lists the corpora from which a reference learns its prior.


@dataclass(frozen=True)
class PopulationCorpus:
    """A measured workload of the population.

    Attributes:
        name: its file's name.
        network: the network that it runs; all corpora of one network are left out together.
        board: the board that it was measured on.
        facts: its task, and the number of loader workers.
        profile: its measured rows.
    """

    name: str
    network: str
    board: Board
    facts: WorkloadFacts
    profile: Profile


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    csv: Annotated[str, Field(min_length=1)]
    network: Annotated[str, Field(min_length=1)]
    board: str
    loader_workers: Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
    batch: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    corpus: Annotated[list[_Entry], Field(min_length=1, max_length=MAX_MEMBERS)]


def read_population(path: Path, data: Path) -> list[PopulationCorpus]:
    """Read the corpora that a TOML file lists.

    Args:
        path: the TOML file, with a table `[[corpus]]` for each corpus.
        data: the folder of the CSV files.

    Raises:
        InvalidInputError: the file or a corpus cannot be read, an entry is wrong, or a corpus is listed twice.
    """
    try:
        listed = _File.model_validate(parse_toml(path.read_bytes())).corpus
    except FileNotFoundError:
        raise InvalidInputError(f"{path}: no such file") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInputError(f"{path}, {where}: {first['msg']}; expected keys are {', '.join(_KEYS)}") from None
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path}: cannot be read as TOML: {error}") from None
    corpora = [_read(entry, data / entry.csv, path) for entry in listed]
    known: set[str] = set()
    for corpus in corpora:
        sha256 = corpus.profile.sha256()
        if sha256 in known:
            raise InvalidInputError(f"{path}, {corpus.name}: its rows are listed twice: remove one of the two entries")
        known.add(sha256)
    return corpora


_KEYS = tuple(_Entry.model_fields)


def _read(entry: _Entry, csv: Path, path: Path) -> PopulationCorpus:
    if entry.board not in BOARDS:
        raise InvalidInputError(f"{path}, {entry.csv}: unknown board {entry.board!r}: give one of {', '.join(BOARDS)}")
    profile = read_profile(csv)
    facts = stated_facts(str(csv), profile, None, entry.batch, entry.loader_workers)
    return PopulationCorpus(csv.name, entry.network, BOARDS[entry.board], facts, profile)


# --- Training ---------------------------------------------------------------------------------------------------------

CORPUS_SHA256 = "corpus_sha256"
"""Key of the SHA-256 of the corpus's rows in a reference's provenance."""

_FOLDS = 5
_TRANSFER_MODES = 50
_TRANSFER_RUNS = 20

_POPULATION = """
## Population
A transfer learns its prior from these workloads. A workload that is itself a target below is left out, with all other
corpora of its network.

| corpus | network | board | SHA-256 of the rows |
|---|---|---|---|
{rows}
"""

_LABELS = {"corpus": "the corpus itself", "held_out": f"the corpus, {_FOLDS}-fold held out"}

Report = Callable[[str], None]
"""Called with a description of every step."""


def train(
    corpus: Profile,
    workload: FittedWorkload,
    board: str,
    provenance: Mapping[str, str],
    targets: Mapping[str, Profile],
    report: Report,
    facts: WorkloadFacts | None = None,
    population: Sequence[PopulationCorpus] = (),
) -> Artefact:
    """Fit a reference to a corpus and score it.

    Args:
        corpus: many measured modes of one workload on one board.
        workload: the workload that was measured.
        board: kind of board it was measured on.
        provenance: where the measurements come from.
        targets: further profiles, by name, to score transfers on.
        report: called before every step.
        facts: known facts of the workload, such as its number of loader workers; None if only the task is known.
        population: the workloads from which a transfer learns its prior, the corpus itself among them. If there are
            none, the corpus alone is used.

    Raises:
        InvalidInputError: the corpus is too small for a reference, not of the task that the facts name, or missing from
            the population; or a target is too small, shares rows with the corpus, or is of another task although there
            is no population.
    """
    if facts is None:
        facts = WorkloadFacts(corpus.task)
    require_same_task("the corpus", corpus, "the workload", facts.task)
    if len(corpus) < MIN_CORPUS_MODES:
        raise InvalidInputError(
            f"a reference needs a corpus of {MIN_CORPUS_MODES} or more measured modes, this one has {len(corpus)}:"
            " transfer from a shipped reference instead"
        )
    for name, target in targets.items():
        if len(target) <= _TRANSFER_MODES:
            raise InvalidInputError(
                f"{name}: has {len(target)} measured modes, but a transfer is fitted to {_TRANSFER_MODES} and scored on"
                f" the others: give {_TRANSFER_MODES + 1} or more"
            )
        if not population:
            require_same_task(name, target, "the corpus", corpus.task)
        require_disjoint(corpus, target)
    ordered = _own_first(corpus, population)
    report(f"fitting {len(corpus)} modes")
    predictor = RooflinePredictor.fit(corpus, facts=facts)
    figures: dict[str, Any] = {"corpus_modes": len(corpus), "corpus": _errors_pct(predictor, corpus)}
    report(f"cross-validating with {_FOLDS} folds")
    figures["held_out"] = _held_out(corpus, facts)
    if ordered:
        members: list[Member] = []
        for each in ordered:
            report(f"estimating {each.name}")
            members.append(measured_member(each.profile, each.facts, each.board.hardware))
        predictor = replace(predictor, population=Population(tuple(members)))
    entries = [PopulationEntry(each.name, each.profile.sha256(), each.network, each.board.kind) for each in ordered]
    for name, target in targets.items():
        report(f"transferring to {name}")
        start = without_target(predictor, entries, target)
        start = adapt_to_board(start, BOARDS.get(board), board_with_modes(target.modes))
        figures[f"transfer_{name}"] = _transfers(start, target)
    # A mixed population describes training and inference alike.
    stated = None if population else facts
    details = {**provenance, CORPUS_SHA256: corpus.sha256()}
    return pack_artefact(predictor, workload, board, details, figures, stated, entries)


def _own_first(corpus: Profile, population: Sequence[PopulationCorpus]) -> list[PopulationCorpus]:
    """Sort the corpora of a population so that the reference's own is the first, because its board is the base."""
    own = corpus.sha256()
    ordered = sorted(population, key=lambda each: each.profile.sha256() != own)
    if ordered and ordered[0].profile.sha256() != own:
        raise InvalidInputError("the population does not list the reference's own corpus: add it to the file")
    return ordered


def network_of(entries: Sequence[PopulationEntry], target: Profile) -> str | None:
    """The network of a target; None if the target is not part of a population."""
    sha256 = target.sha256()
    return next((entry.network for entry in entries if entry.sha256 == sha256), None)


def without_target(
    predictor: RooflinePredictor, entries: Sequence[PopulationEntry], target: Profile
) -> RooflinePredictor:
    """Leave all workloads of a target's network out of a reference's population, so that they do not bias its score.

    Args:
        predictor: the reference.
        entries: the origin of its population.
        target: measured rows to evaluate the reference on.

    Raises:
        InvalidInputError: no other network is left.
    """
    network = network_of(entries, target)
    if network is None or predictor.population is None:
        return predictor
    same = [k for k, entry in enumerate(entries) if entry.network == network]
    if len(same) == len(entries):
        raise InvalidInputError(
            f"the reference's population has no other network than {network!r}: give another target"
        )
    return replace(predictor, population=predictor.population.without(same))


def require_board_offers(board: str, corpus: Profile) -> None:
    """Check that a board offers the modes of a corpus.

    An unknown board is accepted if no known board offers them.

    Raises:
        InvalidInputError: the board does not offer all modes, or it is unknown and a known one offers them.
    """
    modes = array_to_modes(corpus.modes)
    offering = [known.kind for known in BOARDS.values() if all(mode in known.space for mode in modes)]
    if board in offering or not (offering or board in BOARDS or not board.strip()):
        return
    if offering:
        advice = f"give --board {' or '.join(offering)}"
    else:
        advice = f"no known board does ({', '.join(BOARDS)}), so give --board a name of your own"
    if board in BOARDS:
        raise InvalidInputError(f"the board {board!r} does not offer all modes of the corpus: {advice}")
    raise InvalidInputError(f"unknown board {board!r}: {advice}")


def _errors_pct(predictor: RooflinePredictor, profile: Profile) -> dict[str, float]:
    """Mean and median absolute percentage errors of time and power."""
    time, power = percentage_errors(predictor.predict(profile.modes, profile.batch), profile)
    return {
        "time_mape_pct": round(float(time.mean()), 2),
        "time_median_ape_pct": round(float(np.median(time)), 2),
        "power_mape_pct": round(float(power.mean()), 2),
        "power_median_ape_pct": round(float(np.median(power)), 2),
    }


def _held_out(corpus: Profile, facts: WorkloadFacts) -> dict[str, float]:
    """Errors on modes that were not fitted, by cross-validation over the corpus."""
    part = np.random.default_rng(0).permutation(len(corpus)) % _FOLDS
    folds = [
        _errors_pct(RooflinePredictor.fit(corpus.rows(part != k), facts=facts), corpus.rows(part == k))
        for k in range(_FOLDS)
    ]
    return {name: round(float(np.mean([fold[name] for fold in folds])), 2) for name in folds[0]}


def _transfers(reference: RooflinePredictor, target: Profile) -> dict[str, float]:
    """Median errors over random draws of the modes to fit, on all other modes."""
    runs = []
    for seed in range(_TRANSFER_RUNS):
        drawn = np.random.default_rng(seed).permutation(len(target)) < _TRANSFER_MODES
        fitted = RooflinePredictor.fit(target.rows(drawn), reference, WorkloadFacts(target.task))
        runs.append(_errors_pct(fitted, target.rows(~drawn)))
    return {name: round(float(np.median([run[name] for run in runs])), 2) for name in runs[0]}


def model_card(artefact: Artefact, name: str, command: str) -> str:
    """The text of `MODEL_CARD.md`.

    Args:
        artefact: the reference.
        name: the reference's name.
        command: the command that reproduces it.
    """
    details = artefact.details
    rows = "\n".join(
        f"| {_LABELS.get(key, key.removeprefix('transfer_') + f', transfer with {_TRANSFER_MODES} modes')}"
        f" | {value['time_mape_pct']} / {value['time_median_ape_pct']}"
        f" | {value['power_mape_pct']} / {value['power_median_ape_pct']} |"
        for key, value in details.figures.items()
        if isinstance(value, Mapping)
    )
    sources = "\n".join(f"- {key}: {value}" for key, value in details.provenance.items())
    learned = "\n".join(
        f"| {entry.corpus} | {entry.network} | {entry.board} | `{entry.sha256[:12]}` |" for entry in details.population
    )
    population = _POPULATION.format(rows=learned) if learned else ""
    return f"""# {name}

A reference predictor of training time and power over power modes, for transfer to other workloads and devices.

| | |
|---|---|
| board | {details.board} |
| workload | {details.workload.name}, minibatch {details.workload.minibatch}, \
{details.workload.minibatches_per_epoch} minibatches per epoch |
| predictor | `{details.predictor}`: a physical model fitted robustly, and a smooth residual \
(see `docs/predicting.md`) |
| corpus | {details.figures["corpus_modes"]} measured power modes |
| digest | `{artefact.digest}` |

## Provenance
{sources}
{population}
## Figures
Absolute percentage error, mean / median, of the measured figures.

| on | time % | power % |
|---|---|---|
{rows}

Transfers: median of {_TRANSFER_RUNS} draws, error over all rows that were not drawn.

## Reproduce
    {command}

The same corpus gives the same bytes with the same versions of numpy and scipy.

## Use and limits
For transfer with any number of measured modes of the target; agents measure 50 by default. The fewer the modes, the
wider the intervals. Without measured modes, the mean of the population is predicted, adapted to the board by its data
sheet. The corpora contain rows whose mode was not applied. The fit is robust to them, but the figures above include
them. The fan ran at full speed, so the predictor does not describe a device that throttles.
"""
