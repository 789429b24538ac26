"""The data that methods are judged on: audited corpora, references and raw minibatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reference_models import named_reference, shipped
from reference_models.logs import RunLog
from reference_models.training import CORPUS_SHA256, network_of, percentage_errors, require_disjoint, without_target
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    Board,
    Profile,
    WorkloadFacts,
    board_with_modes,
    read_profile,
    require_same_task,
)
from wattfleet.core.prediction import (
    MIN_CORPUS_MODES,
    MIN_MODES,
    Artefact,
    NoAuditError,
    Predictor,
    RooflinePredictor,
    adapt_to_board,
    audit_rows,
    passing_rows,
    predictor_class,
    restore_predictor,
)

# --- Rounding ---------------------------------------------------------------------------------------------------------
# Rounding of printed figures.


def rounded(value: np.floating) -> float:
    """Round a figure to the four decimals that are printed."""
    return round(float(value), 4)


# --- Audited target ---------------------------------------------------------------------------------------------------
# The audit of an evaluation's target: which of its rows can be trusted.

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class AuditedTarget:
    """The result of a target's audit.

    Attributes:
        trusted: `[n]` whether each row passes; None if the target cannot be audited.
        no_audit_reason: why the target cannot be audited, as text for people; None if it was audited.
    """

    trusted: NDArray[np.bool_] | None
    no_audit_reason: str | None = None

    @property
    def suspect_rows(self) -> int | None:
        """Number of rows that do not pass; None if the target cannot be audited."""
        return None if self.trusted is None else int((~self.trusted).sum())


def audited(target: Profile, known: Predictor | None) -> AuditedTarget:
    """Audit a target if possible.

    Args:
        target: measured modes.
        known: the reference. The audit's fit uses it if the target is smaller than a corpus and the reference is a
            roofline predictor.
    """
    reference = known if isinstance(known, RooflinePredictor) and len(target) < MIN_CORPUS_MODES else None
    try:
        return AuditedTarget(passing_rows(target, audit_rows(target, reference)))
    except NoAuditError as error:
        return AuditedTarget(None, str(error))


# --- Reference source -------------------------------------------------------------------------------------------------
# The reference that an evaluation transfers from: one that ships, or one trained on a corpus.


@dataclass(frozen=True)
class ReferenceSource:
    """A checked reference: it exists, and it was not trained on the target.

    Attributes:
        name: the name of a shipped reference, or the path of a trained one or of a corpus.
        content: the reference, or the corpus to train one on.
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

    A trained reference does not hold the rows of its corpus. The check detects only a target that is the whole corpus,
    and only if the manifest states the corpus's digest.

    Args:
        reference: name of a shipped reference, directory of one that `wattfleet reference train` wrote, or path of a
            corpus.
        target: measured modes that the reference is evaluated on.

    Raises:
        InvalidInputError: there is no such reference or file, the reference was trained on the target, or one of them
            is for training and the other for inference.
    """
    path = Path(reference)
    if reference in shipped() or path.is_dir():
        artefact = named_reference(reference)
        if artefact.details.facts is not None:
            require_same_task("the target", target, f"the reference {reference!r}", artefact.details.facts.task)
        in_population = network_of(artefact.details.population, target) is not None
        if artefact.details.provenance.get(CORPUS_SHA256) == target.sha256() and not in_population:
            raise InvalidInputError(
                f"the target is the corpus that the reference {reference!r} was trained on: give a target of another"
                " workload or device"
            )
        return ReferenceSource(reference, artefact, target)
    if not path.is_file():
        raise InvalidInputError(
            f"{reference!r} is neither a file nor a shipped reference: give a corpus, a directory that `wattfleet"
            f" reference train` has written, or one of {', '.join(shipped())}"
        )
    corpus = read_profile(path)
    require_same_task("the target", target, f"the reference {reference!r}", corpus.task)
    require_disjoint(corpus, target)
    return ReferenceSource(reference, corpus, target)


# --- Minibatches ------------------------------------------------------------------------------------------------------
# Scores of a profile that was measured with fewer minibatches for each mode, from raw logs.
#
# PowerTrain (doi:10.1016/j.future.2024.07.001, section 2.5) varies the minibatches of a mode from 10 to 40.


@dataclass(frozen=True)
class MinibatchScores:
    """Scores of a predictor that was fitted to modes measured with a limited number of minibatches.

    Attributes:
        minibatches: minibatches for each mode.
        modes: number of modes with a power sample within these minibatches, which were fitted.
        without_power: number of modes without one.
        time_mape: mean absolute percentage error of the time at the modes without raw logs, %.
        power_mape: mean absolute percentage error of the power there, %.
    """

    minibatches: int
    modes: int
    without_power: int
    time_mape: float
    power_mape: float


def evaluate_minibatches(
    predictor: type[Predictor],
    reference: Predictor | None,
    target: Profile,
    facts: WorkloadFacts,
    runs: list[RunLog],
    minibatches: int,
) -> MinibatchScores | None:
    """Fit a predictor to the modes with raw logs, and predict the other modes of the target.

    Args:
        predictor: the class to fit.
        reference: a predictor of this class to transfer from; None to fit without a reference.
        target: measured modes of the workload of the raw logs.
        facts: known facts of that workload.
        runs: the raw logs.
        minibatches: number of minibatches of each log that count.

    Returns:
        The scores. None if too few modes have a power sample, or no other mode is left.
    """
    measured = [run.measurement(minibatches) for run in runs]
    profile = Profile.of(one for one in measured if one is not None)
    logged = {tuple(map(float, run.mode)) for run in runs}
    unseen = target.rows(np.array([tuple(mode) not in logged for mode in target.modes.tolist()]))
    if len(profile) < MIN_MODES or not len(unseen):
        return None
    predicted = predictor.fit(profile, reference, facts).predict(unseen.modes, unseen.batch)
    time, power = percentage_errors(predicted, unseen)
    return MinibatchScores(minibatches, len(profile), measured.count(None), float(time.mean()), float(power.mean()))
