"""The reference that an evaluation transfers from: one that ships, or one trained on a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reference_models import load, shipped
from reference_models.scoring import require_disjoint
from reference_models.training import CORPUS_SHA256, network_of, without_target
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Board, Profile, board_with_modes, read_profile, require_same_task
from wattfleet.prediction import (
    Artefact,
    Predictor,
    RooflinePredictor,
    adapt_to_board,
    predictor_class,
    restore_predictor,
)


@dataclass(frozen=True)
class ReferenceSource:
    """A checked reference: it exists, and it was not trained on the target.

    Attributes:
        name: the name of a shipped reference, or the path of a corpus.
        content: the shipped reference, or the corpus to train one on.
        target: the measured modes that it is evaluated on.
    """

    name: str
    content: Artefact | Profile
    target: Profile

    @property
    def left_out(self) -> str | None:
        """The network that is left out of the reference's population, because the target runs it."""
        if isinstance(self.content, Profile):
            return None
        return network_of(self.content.details.population, self.target)

    def predictor(self, name: str, board: Board | None) -> Predictor | None:
        """The reference predictor of a kind; None if this kind does not transfer.

        Args:
            name: the kind's name.
            board: the target's board. The reference is adapted to its hardware. None if the board is unknown.

        Raises:
            InvalidInputError: the shipped reference is of another kind, or the corpus is too small to train on.
        """
        wanted = predictor_class(name)
        if not wanted.transfers:
            return None
        if isinstance(self.content, Profile):
            trained = wanted.fit(self.content)
            return adapt_to_board(trained, board_with_modes(self.content.modes), board)
        if self.content.details.predictor != name:
            raise InvalidInputError(
                f"the reference {self.name!r} holds a predictor of the kind {self.content.details.predictor!r}, not"
                f" {name!r}: give the CSV of its corpus to train a {name!r} reference on"
            )
        restored = restore_predictor(self.content, board)
        if isinstance(restored, RooflinePredictor):
            return without_target(restored, self.content.details.population, self.target)
        return restored


def references_of(sources: Sequence[ReferenceSource], kind: str, board: Board | None) -> list[Predictor]:
    """The reference predictors of a kind; none if this kind does not transfer.

    Args:
        sources: where they come from.
        kind: the kind's name.
        board: the target's board, see `ReferenceSource.predictor`.

    Raises:
        InvalidInputError: see `ReferenceSource.predictor`.
    """
    found = (source.predictor(kind, board) for source in sources)
    return [each for each in found if each is not None]


def find_reference(reference: str, target: Profile) -> ReferenceSource:
    """Find the reference that a command line names, and check that it was not trained on the target.

    A shipped reference does not hold the rows of its corpus. The check detects only a target that is the whole corpus,
    and only if the manifest states the corpus's digest.

    Args:
        reference: name of a shipped reference, or path of a corpus.
        target: measured modes that the reference is evaluated on.

    Raises:
        InvalidInputError: there is no such reference or file, the reference was trained on the target, or one of them
            is for training and the other for inference.
    """
    if reference in shipped():
        artefact = load(reference)
        if artefact.details.facts is not None:
            require_same_task("the target", target, f"the reference {reference!r}", artefact.details.facts.task)
        in_population = network_of(artefact.details.population, target) is not None
        if artefact.details.provenance.get(CORPUS_SHA256) == target.sha256() and not in_population:
            raise InvalidInputError(
                f"the target is the corpus that the reference {reference!r} was trained on: give a target of another"
                " workload or device"
            )
        return ReferenceSource(reference, artefact, target)
    path = Path(reference)
    if not path.is_file():
        raise InvalidInputError(
            f"{reference!r} is neither a file nor a shipped reference: give the CSV of a corpus, or one of"
            f" {', '.join(shipped())}"
        )
    corpus = read_profile(path)
    require_same_task("the target", target, f"the reference {reference!r}", corpus.task)
    require_disjoint(corpus, target)
    return ReferenceSource(reference, corpus, target)
