"""How a predictor is stored and sent: its weights, and a manifest that pins them and says what they are.

The digest of an artefact is the SHA-256 of the manifest's bytes; the manifest holds those of the other files, so
the digest pins everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wattfleet.errors import CorruptReferenceError, InvalidInputError
from wattfleet.modes import BOARDS, Board, Workload, modes_to_array
from wattfleet.prediction.kinds import predictor_class
from wattfleet.prediction.predictor import Predictor, adapt_to_board

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.safetensors"
CARD_FILE = "MODEL_CARD.md"

_AGAIN = "fetch the reference again, or train it with `wattfleet reference train`"


@dataclass(frozen=True)
class Details:
    """What a manifest says of the predictor.

    Attributes:
        predictor: the kind of predictor, such as `roofline`.
        workload: what it was trained for.
        board: the kind of board it was measured on, such as `agx-orin`.
        provenance: where the measurements come from and how the predictor was made, by name.
        figures: how well it predicts, by name; numbers and mappings of them.
    """

    predictor: str
    workload: Workload
    board: str
    provenance: Mapping[str, str]
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class Artefact:
    """A stored predictor, verified when it is made.

    Attributes:
        manifest: the bytes of `manifest.json`.
        weights: the bytes of `weights.safetensors`.
        details: what the manifest says.

    Raises:
        CorruptReferenceError: the manifest is damaged, or the weights are not those that it pins.
        InvalidInputError: the manifest is of a format that this version does not know.
    """

    manifest: bytes
    weights: bytes = field(repr=False)
    details: Details = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "details", verify_artefact(self.manifest, self.weights))

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest, hexadecimal."""
        return hashlib.sha256(self.manifest).hexdigest()


def verify_artefact(manifest: bytes, weights: bytes) -> Details:
    """Check that a manifest is whole and that the weights are the ones it pins.

    Raises:
        CorruptReferenceError: they are not.
        InvalidInputError: the manifest is of a format that this version does not know.
    """
    try:
        content = json.loads(manifest)
        version = content["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptReferenceError(f"{MANIFEST_FILE} is damaged ({_what(error)}): {_AGAIN}") from None
    if version != FORMAT_VERSION:
        raise InvalidInputError(
            f"{MANIFEST_FILE} is of format {version!r}, this Wattfleet reads format {FORMAT_VERSION}:"
            " install the version that wrote it, or train the reference anew"
        )
    try:
        pinned = content["files"][WEIGHTS_FILE]
        sha256, size = str(pinned["sha256"]), int(pinned["size"])
        details = Details(
            predictor=str(content["predictor"]),
            workload=Workload(**content["workload"]),
            board=str(content["board"]),
            provenance=dict(content["provenance"]),
            figures=dict(content["figures"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError, InvalidInputError) as error:
        raise CorruptReferenceError(f"{MANIFEST_FILE} is damaged ({_what(error)}): {_AGAIN}") from None
    if len(weights) != size:
        raise CorruptReferenceError(f"{WEIGHTS_FILE} has {len(weights)} bytes instead of {size}: {_AGAIN}")
    found = hashlib.sha256(weights).hexdigest()
    if found != sha256:
        raise CorruptReferenceError(
            f"{WEIGHTS_FILE} has the SHA-256 {found[:12]}... instead of {sha256[:12]}...: {_AGAIN}"
        )
    return details


def _what(error: Exception) -> str:
    """What is wrong with a manifest."""
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def pack_artefact(
    predictor: Predictor,
    workload: Workload,
    board: str,
    provenance: Mapping[str, str],
    figures: Mapping[str, Any],
) -> Artefact:
    """Make the artefact of a predictor; the same predictor and details give the same bytes.

    Args:
        predictor: what to store.
        workload: what it was trained for.
        board: the kind of board it was measured on.
        provenance: where the measurements come from and how the predictor was made, by name.
        figures: how well it predicts, by name; finite numbers and mappings of them.
    """
    weights = predictor.save()
    content = {
        "format_version": FORMAT_VERSION,
        "predictor": predictor.name,
        "workload": asdict(workload),
        "board": board,
        "provenance": dict(provenance),
        "figures": dict(figures),
        "files": {WEIGHTS_FILE: {"sha256": hashlib.sha256(weights).hexdigest(), "size": len(weights)}},
    }
    return Artefact((json.dumps(content, indent=2, allow_nan=False) + "\n").encode(), weights)


def restore_predictor(artefact: Artefact, board: Board | None = None) -> Predictor:
    """The predictor that an artefact holds.

    Args:
        artefact: the artefact.
        board: the board that it is to be transferred to, to whose hardware it is adapted if the board that it was
            trained on is known, too. None leaves it as it was trained.

    Raises:
        InvalidInputError: this version does not know the kind of predictor.
        CorruptReferenceError: the weights hold no such predictor, or it does not predict.
    """
    try:
        kind = predictor_class(artefact.details.predictor)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"cannot read the reference: {error}. Install the version of Wattfleet that wrote it, or train it again"
        ) from None
    predictor = kind.load(artefact.weights)
    _ensure_sound(predictor)
    return adapt_to_board(predictor, BOARDS.get(artefact.details.board), board)


def _ensure_sound(predictor: Predictor) -> None:
    """Try a predictor at the highest and the lowest mode of every known board.

    Raises:
        CorruptReferenceError: a prediction is not finite and positive.
    """
    modes = modes_to_array(mode for board in BOARDS.values() for mode in (board.space.highest, board.space.lowest))
    try:
        with np.errstate(all="ignore"):
            found = predictor.predict(modes)
        values = np.concatenate([found.minibatch_ms, found.power_mw, found.time_log_sd, found.power_log_sd])
        sound = bool((np.isfinite(values) & (values > 0)).all())
    except np.linalg.LinAlgError:
        sound = False
    if not sound:
        raise CorruptReferenceError(f"{WEIGHTS_FILE} predicts what is not finite and positive: {_AGAIN}")


def read_artefact(directory: Path) -> Artefact:
    """Read and verify a stored artefact.

    Raises:
        CorruptReferenceError: a file is missing or damaged.
        InvalidInputError: the directory is missing, or of a format that this version does not know.
    """
    if not directory.is_dir():
        raise InvalidInputError(f"{directory}: no such directory; a reference is a directory with a {MANIFEST_FILE}")
    try:
        return Artefact((directory / MANIFEST_FILE).read_bytes(), (directory / WEIGHTS_FILE).read_bytes())
    except OSError as error:
        raise CorruptReferenceError(f"{directory}: {error.strerror}: {error.filename}; {_AGAIN}") from None
    except CorruptReferenceError as error:
        raise CorruptReferenceError(f"{directory}: {error}") from None


def write_artefact(artefact: Artefact, directory: Path, card: str | None = None) -> None:
    """Store an artefact; the directory is complete when it appears, and replaces an older artefact there.

    Args:
        artefact: what to store.
        directory: where; its parents are made.
        card: text of the model card to lay beside it, if there is one.

    Raises:
        InvalidInputError: something else is stored there, or it cannot be written.
    """
    files = {MANIFEST_FILE: artefact.manifest, WEIGHTS_FILE: artefact.weights}
    if card is not None:
        files[CARD_FILE] = card.encode()
    try:
        ensure_replaceable(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that moving it there is one rename.
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
            fresh, old = Path(scratch, "fresh"), Path(scratch, "old")
            fresh.mkdir()
            for name, content in files.items():
                _write_through(fresh / name, content)
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
    """Check that a directory is missing or holds an artefact alone: replacing it removes all in it.

    Raises:
        InvalidInputError: something else is in it, or it cannot be looked into.
    """
    if not directory.exists():
        return
    try:
        held = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise InvalidInputError(f"{directory}: cannot be written: {error.strerror}") from None
    strangers = sorted(held - {MANIFEST_FILE, WEIGHTS_FILE, CARD_FILE})
    if strangers:
        raise InvalidInputError(
            f"{directory}: holds {strangers[0]!r}, which belongs to no reference: choose an empty or new directory"
        )


def _write_through(path: Path, content: bytes) -> None:
    """Write a file that survives a power cut after the rename."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
