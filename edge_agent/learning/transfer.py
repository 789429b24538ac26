"""Fits a device's predictor, usually from a reference, and stores both; used by the daemon and the commands."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge_agent.paths import PREDICTOR_DIRECTORY, REFERENCES_DIRECTORY
from edge_agent.profiling.journal import JournalHeader
from wattfleet.errors import CorruptReferenceError, InvalidInputError
from wattfleet.modes import BOARDS, FittedWorkload, MeasuredUnit, Profile, Task, WorkloadFacts
from wattfleet.prediction import (
    DEFAULT_PREDICTOR,
    Artefact,
    Predictor,
    fit_from,
    mixes_references,
    pack_artefact,
    predictor_class,
    require_kind,
    restore_predictor,
    write_artefact,
)

_log = logging.getLogger(__name__)

_NO_REFERENCE = "none"  # used in place of the digest


class UnusableReferenceError(CorruptReferenceError):
    """A reference matches its manifest, but cannot be used as a predictor for this device."""


@dataclass(frozen=True)
class Transfer:
    """The transfer of reference predictors to a device.

    Attributes:
        references: the predictors to transfer from, the most important first; if empty, the fit uses the measurements
            only.
        header: describes the device and its workload.
        minibatches_per_epoch: minibatches of one pass over the device's data.
        reported: what the app or its data loader has reported of the workload.
        others: predictors of other workloads of the same device, which adapt the references to the board.
        units: what a few other devices, of the same kind and of others, have measured of the workload.
        batches: batch sizes that a plan may choose; empty if the app always trains with its own.
    """

    references: tuple[Artefact, ...]
    header: JournalHeader
    minibatches_per_epoch: int
    reported: WorkloadFacts = WorkloadFacts()
    others: tuple[Artefact, ...] = ()
    units: tuple[MeasuredUnit, ...] = ()
    batches: tuple[int, ...] = ()

    @property
    def facts(self) -> WorkloadFacts:
        """The known facts of the device's workload; the batch size is always known."""
        return replace(self.reported, batch=self.batch)

    @property
    def batch(self) -> int:
        """The current batch size, samples."""
        return self.reported.batch or self.header.minibatch

    def priors(self) -> Sequence[Predictor]:
        """Return the references, adapted to the hardware of the device's board.

        A further reference is used only if it is usable and can be mixed with the first; otherwise the reason is
        logged.

        Raises:
            UnusableReferenceError: the first one is damaged or for another task, or this version or installation cannot
                read its kind of predictor.
        """
        if not self.references:
            return ()
        first, *further = self.references
        priors = [self._prior(first)]
        for reference in further:
            try:
                prior = self._prior(reference)
            except UnusableReferenceError as error:
                _log.error("the reference %s is not used: %s", reference.digest[:12], error)
                continue
            if type(prior) is type(priors[0]) and mixes_references(type(prior)):
                priors.append(prior)
            else:
                _log.error("the reference %s is not used: it cannot be mixed with the first one", reference.digest[:12])
        return priors

    def _prior(self, reference: Artefact) -> Predictor:
        """Return one reference, adapted to the hardware of the device's board."""
        _require_usable(reference)
        try:
            return self._with_known(restore_predictor(reference, BOARDS.get(self.header.board_kind)))
        except (InvalidInputError, CorruptReferenceError) as error:
            raise UnusableReferenceError(str(error)) from None
        except ModuleNotFoundError as error:
            raise UnusableReferenceError(
                f"a predictor of kind {reference.details.predictor!r} needs {error.name}: install it here"
            ) from None

    def _with_known(self, prior: Predictor) -> Predictor:
        """Return the reference, refined with the board's other workloads and with other boards of its kind."""
        if not self.others and not self.units:
            return prior
        # Imported here to keep SciPy out of the agent's memory: predictors are fitted in separate processes.
        from wattfleet.prediction import RooflinePredictor

        if not isinstance(prior, RooflinePredictor):
            return prior
        for other in self.others:
            try:
                known = restore_predictor(other)
            except (InvalidInputError, CorruptReferenceError) as error:
                _log.warning("nothing was learned from the workload %s: %s", other.details.workload.name, error)
                continue
            if isinstance(known, RooflinePredictor):
                prior = prior.with_workload(known, other.details.facts or WorkloadFacts())
        own = self.header.board_kind
        alike = [Profile.of(each.measured) for each in self.units if each.board in ("", own)]
        elsewhere = [
            (BOARDS[each.board].hardware, Profile.of(each.measured))
            for each in self.units
            if each.board != own and each.board in BOARDS  # of an unknown board, the data sheet is not known
        ]
        return prior.with_units(alike).with_elsewhere(elsewhere)

    def fitted(self, profile: Profile, priors: Sequence[Predictor]) -> Predictor:
        """Fit the device's predictor to its measurements.

        Args:
            profile: measurements, and observations of rounds.
            priors: the result of `priors`.

        Raises:
            InvalidInputError: there is no reference, and too few modes are measured for a fit without one.
        """
        kind = type(priors[0]) if priors else predictor_class(DEFAULT_PREDICTOR)
        return fit_from(kind, profile, priors, self.facts)

    def packed(self, predictor: Predictor, measured_modes: int) -> Artefact:
        """Return the device's predictor in its stored form.

        Args:
            predictor: the predictor fitted to the device.
            measured_modes: number of measured modes.
        """
        workload = FittedWorkload(self.header.workload, self.batch, self.minibatches_per_epoch)
        provenance = {
            "reference": ", ".join(each.digest for each in self.references) or _NO_REFERENCE,
            "device": self.header.device_id,
            "provenance": self.header.provenance,
        }
        figures = {"profiled_modes": measured_modes}
        return pack_artefact(predictor, workload, self.header.board_kind, provenance, figures, self.facts)


def usable_references(references: Sequence[Artefact]) -> tuple[Artefact, ...]:
    """Return the references that this installation can read, by their manifests; log why others are not used.

    Raises:
        UnusableReferenceError: no reference is usable.
    """
    problems: dict[str, UnusableReferenceError] = {}
    for reference in references:
        try:
            _require_usable(reference)
        except UnusableReferenceError as error:
            problems[reference.digest] = error
    usable = tuple(reference for reference in references if reference.digest not in problems)
    if not usable:
        raise next(iter(problems.values()))
    for digest, problem in problems.items():
        _log.error("the reference %s is not used: %s", digest[:12], problem)
    return usable


def _require_usable(reference: Artefact) -> None:
    known = reference.details.facts
    if known is not None and known.task is not Task.TRAINING:
        raise UnusableReferenceError(
            f"the reference is for {known.task}, but this device trains: choose a reference for training"
        )
    try:
        require_kind(reference)
    except InvalidInputError as error:
        raise UnusableReferenceError(str(error)) from None


def references_of(fitted: Artefact) -> list[str]:
    """Return the digests of the references from which a device's predictor was fitted."""
    digests = fitted.details.provenance["reference"]
    return [] if digests == _NO_REFERENCE else digests.split(", ")


def keep_predictor(artefact: Artefact, workload_folder: Path) -> None:
    """Store a device's predictor in the folder of its workload.

    Raises:
        InvalidInputError: the predictor cannot be written, or another kind of file is in its place.
    """
    write_artefact(artefact, workload_folder / PREDICTOR_DIRECTORY)


def keep_reference(reference: Artefact, state_directory: Path) -> None:
    """Store a reference by its digest, so that later fits and the daemon do not need the coordinator for it.

    Raises:
        InvalidInputError: the reference cannot be written.
    """
    kept = state_directory / REFERENCES_DIRECTORY / reference.digest
    if not kept.is_dir():
        write_artefact(reference, kept)
