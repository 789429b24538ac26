"""What an evaluation transfers from."""

from __future__ import annotations

from pathlib import Path

from reference_models import load, shipped
from wattfleet.artefact import restore
from wattfleet.boards import Board, board_offering
from wattfleet.errors import InvalidInputError
from wattfleet.predictor import Predictor, transferable
from wattfleet.predictors import Kind
from wattfleet.profile import read_csv


def reference_for(name: str, kind: Kind, reference: str, target: Board | None) -> Predictor | None:
    """The reference that a command line names, for a kind of predictor; None where the kind transfers nothing.

    Args:
        name: the kind's name.
        kind: the kind.
        reference: a shipped name, or the path of a corpus to train on.
        target: the board to transfer to, to whose hardware it is adapted; None where it is not known.

    Raises:
        InvalidInputError: it is neither, or what ships under the name is of another kind.
    """
    if reference in shipped():
        if not kind.transfers:
            return None
        artefact = load(reference)
        if artefact.details.predictor != name:
            raise InvalidInputError(
                f"the reference {reference!r} holds a predictor of the kind {artefact.details.predictor!r}, not"
                f" {name!r}: give the CSV of its corpus, to train one on"
            )
        return restore(artefact, target)
    path = Path(reference)
    if not path.is_file():
        raise InvalidInputError(
            f"{reference!r} is neither a file nor a reference that ships: give the CSV of a corpus, or one of"
            f" {', '.join(shipped())}"
        )
    corpus = read_csv(path)
    if not kind.transfers:
        return None
    return transferable(kind.predictor_class().fit(corpus), board_offering(corpus.modes), target)
