"""Stored predictors: the weights, and a manifest that describes them and pins their SHA-256.

An artefact's digest is the SHA-256 of its manifest, so it pins the weights, too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from wattfleet.core.errors import CorruptReferenceError, InvalidInputError
from wattfleet.core.modes import BOARDS, Board, FittedWorkload, Measurement, WorkloadFacts, modes_to_array
from wattfleet.core.prediction.predictor import (
    Prediction,
    Predictor,
    adapt_to_board,
    normal_quantile,
    predictor_class,
    registered_kind,
)

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.safetensors"
CARD_FILE = "MODEL_CARD.md"

Found = TypeVar("Found")

_REMEDY = "fetch the reference again, or train it with `wattfleet reference train`"


@dataclass(frozen=True)
class PopulationEntry:
    """The origin of one workload of a predictor's population.

    Attributes:
        corpus: the name of its file.
        sha256: the SHA-256 of the corpus's rows, in hexadecimal.
        network: the network that it runs.
        board: the kind of board that it was measured on.
    """

    corpus: str
    sha256: str
    network: str
    board: str


@dataclass(frozen=True)
class ArtefactDetails:
    """The description of a predictor in its manifest.

    Attributes:
        predictor: the kind of predictor, such as `roofline`.
        workload: the workload it was trained for.
        board: the kind of board it was measured on, such as `agx-orin`.
        provenance: the source of the measurements and how the predictor was made, by name.
        figures: its accuracy, by name; numbers and mappings of numbers.
        facts: the known facts of the workload; None if they are not stated.
        population: the workloads from which a transfer learns its prior, in the same order as in the predictor.
    """

    predictor: str
    workload: FittedWorkload
    board: str
    provenance: Mapping[str, str]
    figures: Mapping[str, Any]
    facts: WorkloadFacts | None = None
    population: tuple[PopulationEntry, ...] = ()


@dataclass(frozen=True)
class Artefact:
    """A stored predictor, verified at construction.

    Attributes:
        manifest: the bytes of `manifest.json`.
        weights: the bytes of `weights.safetensors`.
        details: the contents of the manifest.

    Raises:
        CorruptReferenceError: the manifest is damaged, or the weights do not match it.
        InvalidInputError: this version does not know the manifest's format.
    """

    manifest: bytes
    weights: bytes = field(repr=False)
    details: ArtefactDetails = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "details", verify_artefact(self.manifest, self.weights))

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest, in hexadecimal."""
        return hashlib.sha256(self.manifest).hexdigest()


def verify_artefact(manifest: bytes, weights: bytes) -> ArtefactDetails:
    """Check that a manifest is complete and that the weights match it.

    Raises:
        CorruptReferenceError: the manifest is damaged, or the weights do not match it.
        InvalidInputError: this version does not know the manifest's format.
    """
    try:
        content = json.loads(manifest)
        version = content["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptReferenceError(f"{MANIFEST_FILE} is damaged ({_defect(error)}): {_REMEDY}") from None
    if version != FORMAT_VERSION:
        raise InvalidInputError(
            f"{MANIFEST_FILE} has format {version!r}, but this version of Wattfleet reads format {FORMAT_VERSION}:"
            " install the version that wrote it, or train the reference again"
        )
    try:
        pinned = content["files"][WEIGHTS_FILE]
        sha256, size = str(pinned["sha256"]), int(pinned["size"])
        details = ArtefactDetails(
            predictor=str(content["predictor"]),
            workload=FittedWorkload(**content["workload"]),
            board=str(content["board"]),
            provenance=dict(content["provenance"]),
            figures=dict(content["figures"]),
            facts=WorkloadFacts(**content["facts"]) if "facts" in content else None,
            population=tuple(PopulationEntry(**entry) for entry in content.get("population", ())),
        )
    except (KeyError, TypeError, ValueError, OverflowError, InvalidInputError) as error:
        raise CorruptReferenceError(f"{MANIFEST_FILE} is damaged ({_defect(error)}): {_REMEDY}") from None
    if len(weights) != size:
        raise CorruptReferenceError(f"{WEIGHTS_FILE} has {len(weights)} bytes instead of {size}: {_REMEDY}")
    found = hashlib.sha256(weights).hexdigest()
    if found != sha256:
        raise CorruptReferenceError(
            f"{WEIGHTS_FILE} has the SHA-256 {found[:12]}... instead of {sha256[:12]}...: {_REMEDY}"
        )
    return details


def _defect(error: Exception) -> str:
    """Describe what is wrong with a manifest."""
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def pack_artefact(
    predictor: Predictor,
    workload: FittedWorkload,
    board: str,
    provenance: Mapping[str, str],
    figures: Mapping[str, Any],
    facts: WorkloadFacts | None = None,
    population: Sequence[PopulationEntry] = (),
) -> Artefact:
    """Pack a predictor into an artefact; the same predictor and details give the same bytes.

    Args:
        predictor: the predictor to store.
        workload: the workload it was trained for.
        board: the kind of board it was measured on.
        provenance: the source of the measurements and how the predictor was made, by name.
        figures: its accuracy, by name; finite numbers and mappings of them.
        facts: the known facts of the workload; None to state none.
        population: the workloads from which a transfer learns its prior.
    """
    weights = predictor.save()
    content = {
        "format_version": FORMAT_VERSION,
        "predictor": predictor.name,
        "workload": asdict(workload),
        "board": board,
        **({} if facts is None else {"facts": _known(facts)}),
        **({"population": [asdict(entry) for entry in population]} if population else {}),
        "provenance": dict(provenance),
        "figures": dict(figures),
        "files": {WEIGHTS_FILE: {"sha256": hashlib.sha256(weights).hexdigest(), "size": len(weights)}},
    }
    return Artefact((json.dumps(content, indent=2, allow_nan=False) + "\n").encode(), weights)


def _known(facts: WorkloadFacts) -> dict[str, str | float]:
    """The facts that are known, for a manifest."""
    known = {name: value for name, value in asdict(facts).items() if value is not None}
    return known | {"task": str(facts.task), "processor": str(facts.processor)}


def restore_predictor(artefact: Artefact, board: Board | None = None) -> Predictor:
    """Restore the predictor of an artefact.

    Args:
        artefact: the artefact.
        board: the board to transfer it to. The predictor is adapted to its hardware if the board it was trained on is
            known, too. None leaves it as it was trained.

    Raises:
        InvalidInputError: this kind of predictor is not installed.
        CorruptReferenceError: the weights do not hold such a predictor, or its predictions are not finite and positive.
    """
    predictor = _kind_of(artefact, predictor_class).load(artefact.weights)
    _ensure_sound(predictor, artefact.details.workload.minibatch)
    return adapt_to_board(predictor, BOARDS.get(artefact.details.board), board)


def require_kind(artefact: Artefact) -> None:
    """Check that an artefact's kind of predictor is installed, without importing it.

    Raises:
        InvalidInputError: it is not.
    """
    _kind_of(artefact, registered_kind)


def _kind_of(artefact: Artefact, find: Callable[[str], Found]) -> Found:
    try:
        return find(artefact.details.predictor)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"cannot read the reference: {error}. Install the version of Wattfleet that wrote it, or train it again"
        ) from None


def _ensure_sound(predictor: Predictor, batch: int) -> None:
    """Check a predictor at the highest and the lowest mode of every known board, with one batch size."""
    modes = modes_to_array(mode for board in BOARDS.values() for mode in (board.space.highest, board.space.lowest))
    try:
        with np.errstate(all="ignore"):
            at = predictor.predict(modes, np.full(len(modes), batch))
        values = np.concatenate([at.minibatch_ms, at.power_mw, at.time_log_sd, at.power_log_sd])
        sound = bool((np.isfinite(values) & (values > 0)).all())
    except np.linalg.LinAlgError:
        sound = False
    if not sound:
        raise CorruptReferenceError(f"{WEIGHTS_FILE} predicts values that are not finite and positive: {_REMEDY}")


def read_artefact(directory: Path) -> Artefact:
    """Read and verify a stored artefact.

    Raises:
        CorruptReferenceError: a file is missing or damaged.
        InvalidInputError: the directory is missing, or this version does not know its format.
    """
    if not directory.is_dir():
        raise InvalidInputError(f"{directory}: no such directory; a reference is a directory with a {MANIFEST_FILE}")
    try:
        return Artefact((directory / MANIFEST_FILE).read_bytes(), (directory / WEIGHTS_FILE).read_bytes())
    except OSError as error:
        raise CorruptReferenceError(f"{directory}: {error.strerror}: {error.filename}; {_REMEDY}") from None
    except CorruptReferenceError as error:
        raise CorruptReferenceError(f"{directory}: {error}") from None


def write_artefact(artefact: Artefact, directory: Path, card: str | None = None) -> None:
    """Store an artefact; the directory appears complete, and replaces an older artefact.

    Args:
        artefact: the artefact to store.
        directory: its directory; parents are created.
        card: text of the model card, if there is one.

    Raises:
        InvalidInputError: the directory holds other files, or cannot be written.
    """
    files = {MANIFEST_FILE: artefact.manifest, WEIGHTS_FILE: artefact.weights}
    if card is not None:
        files[CARD_FILE] = card.encode()
    try:
        ensure_replaceable(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        # On the same file system, so that moving it into place is a rename.
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
            fresh, old = Path(scratch, "fresh"), Path(scratch, "old")
            fresh.mkdir()
            for name, content in files.items():
                _write_durably(fresh / name, content)
            if directory.exists():
                os.replace(directory, old)
            try:
                os.replace(fresh, directory)
            except OSError:
                if old.exists():
                    os.replace(old, directory)
                raise
    except OSError as error:
        raise InvalidInputError(f"{directory}: cannot be written: {error}") from None


def ensure_replaceable(directory: Path) -> None:
    """Check that a directory is missing or holds only an artefact, since replacing it removes its contents.

    Raises:
        InvalidInputError: it holds other files, or cannot be read.
    """
    if not directory.exists():
        return
    try:
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise InvalidInputError(f"{directory}: cannot be written: {error.strerror}") from None
    others = sorted(names - {MANIFEST_FILE, WEIGHTS_FILE, CARD_FILE})
    if others:
        raise InvalidInputError(
            f"{directory}: holds {others[0]!r}, which is not part of a reference: choose an empty or new directory"
        )


def _write_durably(path: Path, content: bytes) -> None:
    """Write a file and flush it to disk, so that it survives a power cut after the rename."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# --- Drift detection --------------------------------------------------------------------------------------------------
# Detecting drift: whether a device no longer behaves as predicted.
#
# Each round's training is compared with the prediction made before it. A correct predictor misses its 90 % interval
# once in ten rounds, on either side. A board that has changed (another power supply, a blocked fan, other data)
# misses it repeatedly on the same side.


@dataclass(frozen=True)
class DriftRule:
    """The criterion for drift, and the number of modes that are then measured again.

    Time or power has drifted when `outside` of the last `of_last` rounds lie beyond the same end of the interval.
    With a correct predictor, each round does so with a probability of 5 %. With the default numbers, false alarms are
    rarer than one in 1,000 rounds, so even intervals that are somewhat too narrow cause few of them.

    Attributes:
        interval: probability of the predictor's interval.
        outside: number of rounds beyond the same end of the interval that count as drift.
        of_last: number of latest rounds that are considered.
        modes: maximum number of modes to measure again after drift.

    Raises:
        InvalidInputError: a number is out of range.
    """

    interval: float = 0.90
    outside: int = 4
    of_last: int = 6
    modes: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.interval < 1 or not 1 <= self.outside <= self.of_last or self.modes < 1:
            raise InvalidInputError(
                "a drift rule needs an interval between 0 and 1, outside from 1 to of_last rounds, and at least 1 mode,"
                f" not {self.interval:g}, {self.outside} of {self.of_last} and {self.modes}"
            )


DEFAULT_DRIFT_RULE = DriftRule()


@dataclass(frozen=True)
class Residual:
    """The standardised residuals of a round: deviations in standard deviations of the prediction's logarithm.

    Attributes:
        time: deviation of the time; positive if the round took longer.
        power: deviation of the power; positive if the round drew more.
    """

    time: float
    power: float

    @classmethod
    def of(cls, observed: Measurement, predicted: Prediction) -> Residual:
        """The residual of one round.

        Args:
            observed: the measurement of the round.
            predicted: the prediction for its one mode, made before the round.
        """
        return cls(
            math.log(observed.minibatch_ms / float(predicted.minibatch_ms[0])) / float(predicted.time_log_sd[0]),
            math.log(observed.power_mw / float(predicted.power_mw[0])) / float(predicted.power_log_sd[0]),
        )


def detect_drift(residuals: Sequence[Residual], rule: DriftRule = DEFAULT_DRIFT_RULE) -> str | None:
    """Describe what has drifted; None while the predictor may still be correct.

    Args:
        residuals: residuals of the rounds since the device was last measured, the newest last.
        rule: when a device counts as drifted.
    """
    edge = normal_quantile(0.5 + rule.interval / 2)
    last = residuals[-rule.of_last :]
    for values, more, less in (
        ([residual.time for residual in last], "took longer", "took less time"),
        ([residual.power for residual in last], "drew more power", "drew less power"),
    ):
        for beyond, words in ((sum(v > edge for v in values), more), (sum(v < -edge for v in values), less)):
            if beyond >= rule.outside:
                return (
                    f"{beyond} of the last {len(last)} rounds {words} than the predictor's {rule.interval:.0%} interval"
                )
    return None
