"""Fits a device's predictor, usually from a reference, and stores both; used by the daemon and the commands."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from edge_agent.paths import PREDICTOR_DIRECTORY, REFERENCES_DIRECTORY
from edge_agent.profiling.stored_profile import FittedDevice
from reference_models import load, shipped
from wattfleet.core.errors import CorruptReferenceError, InvalidInputError
from wattfleet.core.modes import (
    BOARDS,
    FittedWorkload,
    JournalHeader,
    MeasuredUnit,
    PowerMode,
    Profile,
    Task,
    WorkloadFacts,
    modes_to_array,
)
from wattfleet.core.prediction import (
    DEFAULT_PREDICTOR,
    Artefact,
    Predictor,
    fit_from,
    mixes_references,
    pack_artefact,
    predictor_class,
    read_artefact,
    require_kind,
    restore_predictor,
    write_artefact,
)

_log = logging.getLogger(__name__)


# --- Reference choice -------------------------------------------------------------------------------------------------
# Finds the reference predictor of a stored predictor, without a coordinator.


def reference_of(digest: str, state_directory: Path) -> Artefact:
    """Load the reference from which a stored predictor was fitted.

    Args:
        digest: the reference's digest.
        state_directory: the agent's state directory.

    Raises:
        InvalidInputError: the reference is not on this machine.
        CorruptReferenceError: it is damaged.
    """
    kept = state_directory / REFERENCES_DIRECTORY / digest
    if kept.is_dir():
        return read_artefact(kept)
    for name in shipped():
        if (reference := load(name)).digest == digest:
            return reference
    raise InvalidInputError(f"{kept}: the predictor's reference is missing: pass one with --reference")


# --- Transfer ---------------------------------------------------------------------------------------------------------

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
        from wattfleet.core.prediction import RooflinePredictor

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


# --- Expectation ------------------------------------------------------------------------------------------------------
# Expected time and power of one mode: measured, or predicted with an interval.

INTERVAL = 0.9
"""The share of modes whose true value lies within the interval."""


@dataclass(frozen=True)
class Expectation:
    """Time and power of one mode.

    Attributes:
        measured: whether the values were measured; otherwise they are predicted medians.
        minibatch_ms: milliseconds per minibatch.
        power_w: watts while training.
        time_log_sd: standard deviation of the time's logarithm; 0 if measured.
        power_log_sd: standard deviation of the power's logarithm; 0 if measured.
        minibatches_per_epoch: minibatches of one pass over the device's data.
    """

    measured: bool
    minibatch_ms: float
    power_w: float
    time_log_sd: float
    power_log_sd: float
    minibatches_per_epoch: int

    @property
    def epoch_s(self) -> float:
        """Seconds per epoch."""
        return self.minibatch_ms * self.minibatches_per_epoch / 1e3

    def keeps_power(self, watts: float) -> float | None:
        """Return the probability that training draws at most this power, W; None if the power was measured."""
        return None if self.measured else _below(watts / self.power_w, self.power_log_sd)

    def keeps_epoch(self, seconds: float) -> float | None:
        """Return the probability that an epoch takes at most this time, s; None if the time was measured."""
        return None if self.measured else _below(seconds / self.epoch_s, self.time_log_sd)

    def content(self) -> dict[str, Any]:
        """Return the expectation as a JSON object."""
        return {
            "measured": self.measured,
            "minibatch_ms": self.minibatch_ms,
            "epoch_s": self.epoch_s,
            "epoch_s_interval": interval(self.epoch_s, self.time_log_sd),
            "power_w": self.power_w,
            "power_w_interval": interval(self.power_w, self.power_log_sd),
            "epoch_kj": self.epoch_s * self.power_w / 1e3,
        }


def expectation_of(fitted: FittedDevice, mode: PowerMode) -> Expectation:
    """Return the expectation of a mode that the device offers."""
    known = fitted.known
    place = int(np.flatnonzero((known.modes == modes_to_array([mode])).all(axis=1))[0])
    return Expectation(
        bool(known.measured[place]),
        float(known.minibatch_ms[place]),
        float(known.power_mw[place]) / 1e3,
        float(known.time_log_sd[place]),
        float(known.power_log_sd[place]),
        fitted.minibatches_per_epoch,
    )


def lines_of(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the lines of text for `Expectation.content`."""
    return {
        "source": "measured" if content["measured"] else f"predicted, with {INTERVAL:.0%} interval",
        "minibatch": f"{content['minibatch_ms']:.1f} ms",
        "epoch": f"{content['epoch_s']:.1f} s{bracket(content['epoch_s_interval'])}",
        "power": f"{content['power_w']:.1f} W{bracket(content['power_w_interval'])}",
        "energy": f"{content['epoch_kj']:.1f} kJ per epoch",
    }


def assumed_length(minibatches_per_epoch: int) -> str:
    """Return the remark that an epoch's length is assumed, and how to state it."""
    return (
        f"An epoch is assumed to have {minibatches_per_epoch:,} minibatches: no app has reported their number yet. "
        f"State it with `wattfleet agent fit --minibatches-per-epoch`."
    )


def _below(ratio: float, log_sd: float) -> float:
    return NormalDist().cdf(float(np.log(ratio)) / log_sd)


def interval(median: float, log_sd: float) -> list[float] | None:
    """Return the two ends of the `INTERVAL` of a predicted value; None for a measured one."""
    if log_sd == 0:
        return None
    factor = float(np.exp(NormalDist().inv_cdf((1 + INTERVAL) / 2) * log_sd))
    return [median / factor, median * factor]


def bracket(ends: list[float] | None) -> str:
    """Return an interval as text; empty if there is none."""
    return "" if ends is None else f" [{ends[0]:.1f} to {ends[1]:.1f}]"
