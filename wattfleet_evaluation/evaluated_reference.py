"""What an evaluation transfers from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reference_models import load, shipped
from reference_models.training import CORPUS_SHA256, ensure_apart
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Board, Profile, board_with_modes, read_profile
from wattfleet.prediction import Artefact, Predictor, adapt_to_board, predictor_class, restore_predictor


@dataclass(frozen=True)
class Source:
    """A reference that a command line names: it is there, and the target is none of what it was trained on.

    Attributes:
        name: the shipped name, or the path of a corpus.
        held: what ships under the name, or the corpus to train on.
    """

    name: str
    held: Artefact | Profile

    def predictor(self, name: str, board: Board | None) -> Predictor | None:
        """The reference for a kind of predictor; None where the kind transfers nothing.

        Args:
            name: the kind's name.
            board: the board to transfer to, to whose hardware it is adapted; None where it is not known.

        Raises:
            InvalidInputError: what ships under the name is of another kind, or the corpus is too small to train on.
        """
        wanted = predictor_class(name)
        if not wanted.transfers:
            return None
        if isinstance(self.held, Profile):
            trained = wanted.fit(self.held)
            return adapt_to_board(trained, board_with_modes(self.held.modes), board)
        if self.held.details.predictor != name:
            raise InvalidInputError(
                f"the reference {self.name!r} holds a predictor of the kind {self.held.details.predictor!r}, not"
                f" {name!r}: give the CSV of its corpus, to train one on"
            )
        return restore_predictor(self.held, board)


def source_of(reference: str, target: Profile) -> Source:
    """What a command line names as the reference, checked.

    A reference that ships does not hold its rows: it is only known whether the target is its whole corpus, and of one
    whose manifest does not pin its corpus, not even that.

    Args:
        reference: a shipped name, or the path of a corpus.
        target: what the reference is evaluated on.

    Raises:
        InvalidInputError: it is neither, or the target was in what it was trained on.
    """
    if reference in shipped():
        artefact = load(reference)
        if artefact.details.provenance.get(CORPUS_SHA256) == target.sha256():
            raise InvalidInputError(
                f"the target is the corpus that the reference {reference!r} was trained on, and would judge nothing:"
                " give a target of another workload or device"
            )
        return Source(reference, artefact)
    path = Path(reference)
    if not path.is_file():
        raise InvalidInputError(
            f"{reference!r} is neither a file nor a reference that ships: give the CSV of a corpus, or one of"
            f" {', '.join(shipped())}"
        )
    corpus = read_profile(path)
    ensure_apart(corpus, target)
    return Source(reference, corpus)
