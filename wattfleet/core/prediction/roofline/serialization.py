"""The roofline predictor as named arrays.

All values are checked as they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields

import numpy as np

from wattfleet.core.modes import LARGEST_COUNT, Hardware, Task, WorkloadFacts
from wattfleet.core.prediction.predictor import MIN_CORPUS_MODES
from wattfleet.core.prediction.roofline.estimation import MAX_INDUCING, Correction, Points, Process, Remainder, Surface
from wattfleet.core.prediction.roofline.hypothesis import Hypothesis
from wattfleet.core.prediction.roofline.physics import PowerParameters, TimeParameters
from wattfleet.core.prediction.roofline.population import MAX_MEMBERS, Estimate, Member, Population
from wattfleet.core.prediction.tensors import (
    LARGEST_LOG,
    Tensors,
    Values,
    batch_array,
    corrupt_weights,
    read_array,
    read_batch,
    read_parameters,
    tensor_size,
)

MAX_BATCHES = 1000
"""Maximum number of batch sizes of a corpus."""

_MAX_CORRECTIONS = MIN_CORPUS_MODES - 1
"""A fit to more modes has a surface instead of a correction."""

_MAX_HYPOTHESES = 8
_TIME, _POWER = len(fields(TimeParameters)), len(fields(PowerParameters))

Contents = tuple[tuple[Hypothesis, ...], "int | None", "Hardware | None", "Population | None"]


def predictor_tensors(
    hypotheses: Sequence[Hypothesis], batch: int | None, hardware: Hardware | None, population: Population | None
) -> Tensors:
    """A predictor's hypotheses, batch size, board and population, as named arrays."""
    tensors: Tensors = {
        "probabilities": np.array([each.probability for each in hypotheses]),
        "batch": batch_array(batch),
    }
    for k, each in enumerate(hypotheses):
        tensors |= {f"{k}.time": np.array(astuple(each.time)), f"{k}.power": np.array(astuple(each.power))}
        tensors |= _remainder_tensors(f"{k}.time_remainder", each.time_remainder)
        tensors |= _remainder_tensors(f"{k}.power_remainder", each.power_remainder)
        if each.loader_workers is not None:
            tensors[f"{k}.loader_workers"] = np.array([float(each.loader_workers)])
    tensors["hardware"] = np.array(astuple(hardware) if hardware else (), dtype=np.float64)
    members = population.members if population else ()
    tensors["members"] = np.array([float(len(members))])
    for k, member in enumerate(members):
        prefix = f"member.{k}"
        tensors[f"{prefix}.facts"] = np.array(
            [float(member.facts.task is Task.INFERENCE), float(member.facts.loader_workers or 0)]
        )
        tensors[f"{prefix}.hardware"] = np.array(astuple(member.hardware), dtype=np.float64)
        for name, estimate in (("time", member.time), ("power", member.power)):
            tensors[f"{prefix}.{name}.mean"] = estimate.mean
            tensors[f"{prefix}.{name}.information"] = estimate.information
            tensors |= _surface_tensors(f"{prefix}.{name}.surface", estimate.surface)
    return tensors


def read_predictor_tensors(tensors: Tensors) -> Contents:
    """Read what `predictor_tensors` wrote.

    Raises:
        CorruptReferenceError: an array is missing or of the wrong shape, or a number is out of range.
    """
    count = tensor_size(tensors, "probabilities")
    probabilities = read_array(tensors, "probabilities", count)
    if not (1 <= count <= _MAX_HYPOTHESES and (probabilities > 0).all() and abs(probabilities.sum() - 1) < 1e-6):
        raise corrupt_weights(f"hold {count} hypotheses whose probabilities do not add up to 1")
    batch = read_batch(tensors)
    hypotheses = tuple(_read_hypothesis(tensors, k, each) for k, each in enumerate(probabilities.tolist()))
    hardware = _read_hardware(tensors, "hardware") if tensor_size(tensors, "hardware") else None
    if hardware is None:
        read_array(tensors, "hardware", 0)
    return hypotheses, batch, hardware, _read_population(tensors)


def _read_hypothesis(tensors: Tensors, k: int, probability: float) -> Hypothesis:
    of_time = _read_remainder(tensors, f"{k}.time_remainder", _TIME)
    # A fit to a whole corpus assumes no number of workers.
    is_corpus = not of_time.correction.prior_root.any()
    return Hypothesis(
        probability,
        TimeParameters(*read_parameters(tensors, f"{k}.time", _TIME)),
        PowerParameters(*read_parameters(tensors, f"{k}.power", _POWER)),
        of_time,
        _read_remainder(tensors, f"{k}.power_remainder", _POWER),
        None if is_corpus else _read_workers(tensors, f"{k}.loader_workers"),
    )


def _read_workers(tensors: Tensors, name: str) -> int:
    workers = float(read_array(tensors, name, 1)[0])
    if workers % 1 or not 0 <= workers <= LARGEST_COUNT:
        raise corrupt_weights(f"hold {workers:g} loader workers")
    return int(workers)


def _remainder_tensors(prefix: str, remainder: Remainder) -> Tensors:
    """The correction of one quantity's physics, as named arrays."""
    correction = remainder.correction
    process = correction.process
    return {
        f"{prefix}.share": np.array([remainder.share]),
        **_surface_tensors(f"{prefix}.surface", remainder.surface),
        f"{prefix}.process": np.array([process.amplitude, process.nugget_sd]),
        f"{prefix}.settings": correction.points.settings,
        f"{prefix}.gpu_share": correction.points.gpu_share,
        f"{prefix}.gradient": correction.gradient,
        f"{prefix}.prior_root": correction.prior_root,
        f"{prefix}.measurement_var": correction.measurement_var,
        f"{prefix}.weights": correction.weights,
        f"{prefix}.interval_scale": np.array([correction.interval_scale]),
        f"{prefix}.known_batches": correction.known_batches,
    }


def _read_remainder(tensors: Tensors, prefix: str, parameters: int) -> Remainder:
    """Read what `_remainder_tensors` wrote.

    Args:
        tensors: all arrays of the predictor.
        prefix: prefix of the arrays' names.
        parameters: number of parameters of the physics.
    """
    # The share of the surface is one more parameter.
    k = parameters + 1
    n = tensor_size(tensors, f"{prefix}.weights")
    _require_bounded(prefix, tensor_size(tensors, f"{prefix}.surface.weights"), n)
    process = read_array(tensors, f"{prefix}.process", 2)
    root = read_array(tensors, f"{prefix}.prior_root", k, k)
    share, scale = read_array(tensors, f"{prefix}.share", 1), read_array(tensors, f"{prefix}.interval_scale", 1)
    gpu_share = read_array(tensors, f"{prefix}.gpu_share", n)
    batches = tensor_size(tensors, f"{prefix}.known_batches")
    if batches > MAX_BATCHES:
        raise corrupt_weights(f"hold {batches:,} batch sizes in {prefix!r}; at most {MAX_BATCHES} are allowed")
    correction = Correction(
        process=Process(*process.tolist()),
        points=Points(read_array(tensors, f"{prefix}.settings", n, 5, positive=True), gpu_share),
        gradient=read_array(tensors, f"{prefix}.gradient", n, k),
        prior_root=root,
        measurement_var=read_array(tensors, f"{prefix}.measurement_var", n, positive=True),
        weights=read_array(tensors, f"{prefix}.weights", n),
        interval_scale=float(scale[0]),
        known_batches=read_array(tensors, f"{prefix}.known_batches", batches, positive=True),
    )
    sds = np.concatenate([process, np.diag(root), scale])
    if not ((sds >= 0) & (sds <= LARGEST_LOG)).all():
        raise corrupt_weights(f"hold a standard deviation in {prefix!r} that is negative or above {LARGEST_LOG:g}")
    if not (np.abs(np.concatenate([share, gpu_share, root.ravel()])) <= LARGEST_LOG).all():
        raise corrupt_weights(f"hold a residual in {prefix!r} beyond {LARGEST_LOG:g}")
    return Remainder(float(share[0]), _read_surface(tensors, f"{prefix}.surface"), correction)


def _require_bounded(prefix: str, inducing: int, corrections: int) -> None:
    """Refuse numbers of rows with which a prediction would take too much memory; it grows with the square of both."""
    if inducing > MAX_INDUCING or corrections > _MAX_CORRECTIONS:
        raise corrupt_weights(
            f"hold {inducing:,} inducing and {corrections:,} correcting modes in {prefix!r}; at most {MAX_INDUCING}"
            f" inducing and {_MAX_CORRECTIONS} correcting modes are allowed"
        )


def _surface_tensors(prefix: str, surface: Surface) -> Tensors:
    return {f"{prefix}.settings": surface.settings, f"{prefix}.weights": surface.weights}


def _read_surface(tensors: Tensors, prefix: str) -> Surface:
    m = tensor_size(tensors, f"{prefix}.weights")
    _require_bounded(prefix, m, 0)
    weights = read_array(tensors, f"{prefix}.weights", m)
    if not (np.abs(weights) <= LARGEST_LOG).all():
        raise corrupt_weights(f"hold a residual in {prefix!r} beyond {LARGEST_LOG:g}")
    return Surface(read_array(tensors, f"{prefix}.settings", m, 5, positive=True), weights)


def _read_hardware(tensors: Tensors, name: str) -> Hardware:
    cores, bus, watts = read_array(tensors, name, 3, positive=True).tolist()
    if cores % 1 or bus % 1 or cores < 1 or bus < 1:
        raise corrupt_weights(f"hold {name!r} with {cores:g} GPU cores and {bus:g} bits of a memory bus")
    return Hardware(int(cores), int(bus), int(watts) if watts % 1 == 0 else watts)


def _read_population(tensors: Tensors) -> Population | None:
    count = float(read_array(tensors, "members", 1)[0])
    if count % 1 or not 0 <= count <= MAX_MEMBERS:
        raise corrupt_weights(f"hold a population of {count:g} workloads; at most {MAX_MEMBERS} are allowed")
    found: list[Member] = []
    for k in range(int(count)):
        prefix = f"member.{k}"
        inference, workers = read_array(tensors, f"{prefix}.facts", 2).tolist()
        if inference not in (0, 1) or workers % 1 or not 0 <= workers <= LARGEST_COUNT:
            raise corrupt_weights(f"hold facts in {prefix!r} that are not a task and a number of loader workers")
        facts = WorkloadFacts(Task.INFERENCE if inference else Task.TRAINING, loader_workers=int(workers))
        found.append(
            Member(
                facts,
                _read_hardware(tensors, f"{prefix}.hardware"),
                _read_estimate(tensors, f"{prefix}.time", _TIME),
                _read_estimate(tensors, f"{prefix}.power", _POWER),
            )
        )
    return Population(tuple(found)) if found else None


def _read_estimate(tensors: Tensors, prefix: str, k: int) -> Estimate:
    mean = read_array(tensors, f"{prefix}.mean", k)
    information: Values = read_array(tensors, f"{prefix}.information", k, k)
    scale = max(float(np.abs(information).max()), 1.0)
    is_symmetric = bool(np.allclose(information, information.T, atol=1e-9 * scale))
    if (
        not (np.abs(mean) <= LARGEST_LOG).all()
        or not is_symmetric
        or np.linalg.eigvalsh(information)[0] < -1e-6 * scale
    ):
        raise corrupt_weights(f"hold an estimate in {prefix!r} that is not a mean with its information")
    return Estimate(mean, information, _read_surface(tensors, f"{prefix}.surface"))
