"""How a reference predictor is made from a corpus, and how well it predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wattfleet.errors import InvalidInputError
from wattfleet.modes import BOARDS, Profile, Workload, array_to_modes, board_with_modes
from wattfleet.prediction import MIN_CORPUS_MODES, Artefact, RooflinePredictor, adapt_to_board, pack_artefact

CORPUS_SHA256 = "corpus_sha256"
"""Names the SHA-256 of the corpus's rows in a reference's provenance."""

# So many rows may be alike by chance, or because a baseline mode was copied.
_MOST_SHARED = 3
_FOLDS = 5
_TRANSFER_MODES = 50
_TRANSFER_RUNS = 20

_WHAT = {"corpus": "the corpus itself", "held_out": f"the corpus, {_FOLDS}-fold held out"}

Report = Callable[[str], None]
"""Told, in words, of every step."""


def train(
    corpus: Profile,
    workload: Workload,
    board: str,
    provenance: Mapping[str, str],
    targets: Mapping[str, Profile],
    report: Report,
) -> Artefact:
    """Fit a reference to a corpus and measure it.

    Args:
        corpus: many measured modes of one workload on one board.
        workload: what was trained.
        board: kind of board it was measured on.
        provenance: where the measurements come from.
        targets: further profiles, by name, that transfers to are measured on.
        report: told of every step.

    Raises:
        InvalidInputError: the corpus is too small for a reference, or a target is too small or shares rows with it.
    """
    if len(corpus) < MIN_CORPUS_MODES:
        raise InvalidInputError(
            f"a reference needs a corpus of {MIN_CORPUS_MODES} or more measured modes, this one has {len(corpus)}:"
            " transfer a shipped reference instead"
        )
    for name, target in targets.items():
        if len(target) <= _TRANSFER_MODES:
            raise InvalidInputError(
                f"{name}: a transfer with {_TRANSFER_MODES} modes is measured on the others, and it holds {len(target)}"
            )
        ensure_apart(corpus, target)
    report(f"fitting {len(corpus)} modes")
    predictor = RooflinePredictor.fit(corpus)
    figures: dict[str, Any] = {"corpus_modes": len(corpus), "corpus": _errors_pct(predictor, corpus)}
    report(f"holding out each of {_FOLDS} parts")
    figures["held_out"] = _held_out(corpus)
    for name, target in targets.items():
        report(f"transferring to {name}")
        start = adapt_to_board(predictor, BOARDS.get(board), board_with_modes(target.modes))
        figures[f"transfer_{name}"] = _transfers(start, target)
    return pack_artefact(predictor, workload, board, {**provenance, CORPUS_SHA256: corpus.sha256()}, figures)


def ensure_apart(corpus: Profile, target: Profile) -> None:
    """Check that a target is none of what the reference was trained on: it would judge nothing.

    Raises:
        InvalidInputError: more than a few rows of the target, or all, stand in the corpus.
    """
    shared = len(set(corpus.canonical_rows()) & set(target.canonical_rows()))
    if shared > min(_MOST_SHARED, len(target) - 1):
        raise InvalidInputError(
            f"{shared} of the target's {len(target)} rows stand in the reference's corpus, too: it would be judged by"
            " what it was trained on; give a target of another workload or device, or another reference"
        )


def ensure_offers(board: str, corpus: Profile) -> None:
    """Check that a corpus can have been measured on a kind of board.

    A board that Wattfleet does not know is taken at its word where no known board offers the corpus's modes.

    Raises:
        InvalidInputError: the board offers not all of the modes, or it is not known and another offers them.
    """
    modes = array_to_modes(corpus.modes)
    offering = [known.kind for known in BOARDS.values() if all(mode in known.space for mode in modes)]
    if board in offering or not (offering or board in BOARDS or not board.strip()):
        return
    if offering:
        advice = f"these boards do: give --board {' or '.join(offering)}"
    else:
        advice = f"nor does any of {', '.join(BOARDS)}: give --board a name of your own, of none of these"
    told = f"the board {board!r} does not offer all modes of the corpus"
    if board not in BOARDS:
        told = f"unknown device kind {board!r}, which is not known to offer the modes of the corpus"
    raise InvalidInputError(f"{told}; {advice}")


def _errors_pct(predictor: RooflinePredictor, profile: Profile) -> dict[str, float]:
    """Mean and median absolute percentage errors of time and power."""
    predicted = predictor.predict(profile.modes)
    time = 100 * np.abs(predicted.minibatch_ms / profile.minibatch_ms - 1)
    power = 100 * np.abs(predicted.power_mw / profile.power_mw - 1)
    return {
        "time_mape_pct": round(float(time.mean()), 2),
        "time_median_ape_pct": round(float(np.median(time)), 2),
        "power_mape_pct": round(float(power.mean()), 2),
        "power_median_ape_pct": round(float(np.median(power)), 2),
    }


def _held_out(corpus: Profile) -> dict[str, float]:
    """Errors on modes that were not fitted, over a partition of the corpus."""
    part = np.random.default_rng(0).permutation(len(corpus)) % _FOLDS
    folds = [_errors_pct(RooflinePredictor.fit(corpus.rows(part != k)), corpus.rows(part == k)) for k in range(_FOLDS)]
    return {name: round(float(np.mean([fold[name] for fold in folds])), 2) for name in folds[0]}


def _transfers(reference: RooflinePredictor, target: Profile) -> dict[str, float]:
    """Median errors over random draws of modes to transfer with, on all the other modes."""
    runs = []
    for seed in range(_TRANSFER_RUNS):
        drawn = np.random.default_rng(seed).permutation(len(target)) < _TRANSFER_MODES
        runs.append(_errors_pct(RooflinePredictor.fit(target.rows(drawn), reference), target.rows(~drawn)))
    return {name: round(float(np.median([run[name] for run in runs])), 2) for name in runs[0]}


def model_card(artefact: Artefact, name: str, command: str) -> str:
    """The text of `MODEL_CARD.md`.

    Args:
        artefact: the reference.
        name: its name.
        command: what reproduces it.
    """
    details = artefact.details
    rows = "\n".join(
        f"| {_WHAT.get(key, key.removeprefix('transfer_') + f', transfer with {_TRANSFER_MODES} modes')}"
        f" | {value['time_mape_pct']} / {value['time_median_ape_pct']}"
        f" | {value['power_mape_pct']} / {value['power_median_ape_pct']} |"
        for key, value in details.figures.items()
        if isinstance(value, Mapping)
    )
    sources = "\n".join(f"- {key}: {value}" for key, value in details.provenance.items())
    return f"""# {name}

A reference predictor of training time and power over power modes, for transfer to other workloads and devices.

| | |
|---|---|
| board | {details.board} |
| workload | {details.workload.name}, minibatch {details.workload.minibatch}, \
{details.workload.minibatches_per_epoch} minibatches an epoch |
| predictor | `{details.predictor}`: physics fitted robustly, and a smooth remainder (see `docs/predicting.md`) |
| corpus | {details.figures["corpus_modes"]} measured power modes |
| digest | `{artefact.digest}` |

## Provenance
{sources}

## Figures
Absolute percentage error, mean / median, of measured hardware figures.

| on | time % | power % |
|---|---|---|
{rows}

Transfers: median of {_TRANSFER_RUNS} draws, error over all modes that were not drawn.

## Reproduce
    {command}

The same corpus gives the same bytes with the same versions of numpy and scipy.

## Use and limits
For transfer with 5 or more measured modes of the target; agents measure 50 by default. With fewer its intervals are
wide; with none it speaks of its own workload, and of other boards by what their data sheets say. The corpus holds rows
whose mode was not applied; the fit is robust to them, and the figures above count them. Fan at maximum, no throttling:
a device that throttles is not described.
"""
