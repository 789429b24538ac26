"""Batch efficiency: how many samples training needs with each batch size to reach a target accuracy.

Larger batches use a board better, but need more samples to reach the same accuracy. The samples needed with a batch are
stated relative to the largest batch, which is R_b of Ahmed et al., "Accelerated Training on Low-Power Edge Devices"
(arXiv:2502.18323, equation 3). They do not depend on the board, so a server measures them on a proxy data set (section
4.2 there). Without such a measurement, the gradient noise scale of McCandlish et al., "An Empirical Model of
Large-Batch Training" (arXiv:1812.06162), gives an estimate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import numpy as np

from wattfleet.core.errors import InvalidInputError, first_few
from wattfleet.core.modes import LARGEST_COUNT

Found = TypeVar("Found")
Number = TypeVar("Number", int, float)

FORMAT_VERSION = 1
MAX_BATCHES = 64
MAX_TEXT_CHARACTERS = 200

# The learning rate grows with this power of the batch size. Square root for Adam and AdamW: Krizhevsky, "One weird
# trick for parallelizing convolutional neural networks" (arXiv:1404.5997); linear for SGD: Goyal et al., "Accurate,
# Large Minibatch SGD" (arXiv:1706.02677).
_EXPONENTS = {"adam": 0.5, "adamw": 0.5, "sgd": 1.0, "none": 0.0}

_UNITY_TOLERANCE = 1e-9


@dataclass(frozen=True)
class BatchEfficiency:
    """Samples that a model needs to reach a target accuracy with each batch size, relative to the largest batch size.

    Attributes:
        model: the model's name.
        batches: `[b]` batch sizes, ascending, samples.
        relative_samples: `[b]` samples to the target accuracy, divided by those needed with the largest of `batches`
            (R_b).
        spread: `[b]` standard deviation of the logarithm of the samples over the seeds; 0 if it is unknown.
        origin: where the figures come from, such as the proxy data set.
        is_estimate: whether they were estimated instead of measured by training.
        unreached: batch sizes, ascending, with which training did not reach the target accuracy.

    Raises:
        InvalidInputError: a text is empty, too long or not printable; there are no batches or too many; they are not
            distinct, ascending and whole; the lengths differ; a value is out of range; or the value of the largest
            batch is not 1.
    """

    model: str
    batches: tuple[int, ...]
    relative_samples: tuple[float, ...]
    spread: tuple[float, ...]
    origin: str
    is_estimate: bool = False
    unreached: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require_text("model", self.model)
        _require_text("origin", self.origin)
        if not 1 <= len(self.batches) <= MAX_BATCHES:
            raise InvalidInputError(f"batches: needs 1 to {MAX_BATCHES} batch sizes, not {len(self.batches)}")
        _require_ascending("batches", self.batches)
        _require_ascending("unreached", self.unreached)
        both = set(self.batches) & set(self.unreached)
        if both:
            raise InvalidInputError(
                f"unreached: {_listed(sorted(both))} is also among the batches that reached the accuracy"
            )
        for name, values in (("relative_samples", self.relative_samples), ("spread", self.spread)):
            if len(values) != len(self.batches):
                raise InvalidInputError(f"{name}: {len(values)} values for {len(self.batches)} batch sizes")
        if not all(0 < value < math.inf for value in self.relative_samples):
            raise InvalidInputError(f"relative_samples: must be finite and above 0, not {self.relative_samples}")
        if not all(0 <= value < math.inf for value in self.spread):
            raise InvalidInputError(f"spread: must be finite and at least 0, not {self.spread}")
        if abs(self.relative_samples[-1] - 1) > _UNITY_TOLERANCE:
            raise InvalidInputError(
                f"relative_samples: must be 1 for the largest batch, {self.batches[-1]}, not"
                f" {self.relative_samples[-1]:g}: divide all of them by it"
            )

    @classmethod
    def from_runs(
        cls, model: str, samples_by_batch: Mapping[int, Sequence[float | None]], origin: str = "training on a proxy"
    ) -> BatchEfficiency:
        """Compute the efficiency from training runs, several with each batch size.

        The samples of a batch size are the median over its runs, where a run that never reached the accuracy counts
        as infinitely long. A batch size is unreached if that median is infinite. The largest batch that reached the
        accuracy is the reference, with the value 1.

        Args:
            model: the model's name.
            samples_by_batch: samples to the target accuracy of each run, by batch size; None for a run that never
                reached it.
            origin: where the runs come from.

        Raises:
            InvalidInputError: no batch size reached the accuracy in most of its runs, or a value is out of range.
        """
        reached: dict[int, tuple[float, float]] = {}
        unreached = []
        for batch, runs in samples_by_batch.items():
            _require_batch("samples_by_batch", batch)
            finite = [float(run) for run in runs if run is not None]
            if not all(0 < run < math.inf for run in finite):
                raise InvalidInputError(
                    f"the runs with batch {batch} must have finite numbers of samples above 0, not {finite}"
                )
            median = float(np.median(finite + [math.inf] * (len(runs) - len(finite)))) if runs else math.inf
            if math.isinf(median):
                unreached.append(batch)
            else:
                reached[batch] = median, float(np.std(np.log(finite), ddof=1)) if len(finite) > 1 else 0.0
        if not reached:
            raise InvalidInputError(
                f"{model}: no batch size reached the target accuracy in most of its runs: lower the accuracy, or train"
                " for more epochs"
            )
        batches = tuple(sorted(reached))
        unit = reached[batches[-1]][0]
        return cls(
            model,
            batches,
            tuple(reached[batch][0] / unit for batch in batches),
            tuple(reached[batch][1] for batch in batches),
            origin,
            unreached=tuple(sorted(unreached)),
        )

    @classmethod
    def from_noise_scale(cls, model: str, batches: Sequence[int], noise_scale: float) -> BatchEfficiency:
        """Estimate the efficiency from the gradient noise scale.

        A step with batch B improves the loss in proportion to 1 / (1 + B_noise / B) (arXiv:1812.06162, equation 2.7),
        so the number of samples needed to reach a loss is proportional to 1 + B / B_noise.

        Args:
            model: the model's name.
            batches: distinct batch sizes, in any order.
            noise_scale: the gradient noise scale B_noise, samples (`gradient_noise_scale`).

        Raises:
            InvalidInputError: there are no batches, they are not distinct and whole, or the scale is not above 0.
        """
        _require_positive("the noise scale", noise_scale)
        for batch in batches:
            _require_batch("batches", batch)
        samples = [1 + batch / noise_scale for batch in sorted(batches)]
        return cls(
            model,
            tuple(sorted(batches)),
            tuple(each / samples[-1] for each in samples),
            (0.0,) * len(samples),
            f"estimate from a gradient noise scale of {noise_scale:.4g} samples",
            is_estimate=True,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> BatchEfficiency:
        """Read what `to_json` wrote.

        Raises:
            InvalidInputError: it is not JSON, has another format, or a key is missing, unknown or of the wrong type.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"batch efficiency: not JSON ({error}): create it again") from None
        if not isinstance(content, dict):
            raise InvalidInputError("batch efficiency: must be a JSON object: create it again")
        version = content.pop("format_version", None)
        if type(version) is not int or version != FORMAT_VERSION:
            raise InvalidInputError(
                f"batch efficiency: has format {version!r}, but this version of Wattfleet reads {FORMAT_VERSION}"
            )
        names = {each.name for each in fields(cls)}
        if content.keys() != names:
            wrong = [f"lacks {name}" for name in sorted(names - content.keys())]
            wrong += [f"has an unknown {name}" for name in sorted(content.keys() - names)]
            raise InvalidInputError(f"batch efficiency: {first_few(wrong)}: create it again")
        return cls(
            _of_type(content, "model", str),
            _numbers(content, "batches", int),
            _numbers(content, "relative_samples", float),
            _numbers(content, "spread", float),
            _of_type(content, "origin", str),
            _of_type(content, "is_estimate", bool),
            _numbers(content, "unreached", int),
        )

    def to_json(self) -> str:
        """Serialize as JSON text, which `from_json` reads."""
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=2, allow_nan=False) + "\n"

    def knows(self, batch: int) -> bool:
        """Whether `of` has a value for a batch size."""
        return self.batches[0] <= batch <= self.batches[-1] and batch not in self.unreached

    def of(self, batch: int) -> float:
        """The samples needed to reach the target accuracy with a batch size, relative to the largest known one.

        Between two known batch sizes, the logarithm is interpolated linearly over the logarithm of the batch size.
        Values are not extrapolated.

        Raises:
            InvalidInputError: the batch size is below or above all known ones, or did not reach the accuracy.
        """
        if batch in self.unreached:
            raise InvalidInputError(
                f"{self.model}: training with batch {batch} did not reach the target accuracy: choose among"
                f" {_listed(self.batches)}"
            )
        if not self.knows(batch):
            raise InvalidInputError(
                f"{self.model}: the efficiency of batch {batch} is not known: choose from {self.batches[0]} to"
                f" {self.batches[-1]} (known: {_listed(self.batches)}), or train the proxy with it"
            )
        if batch in self.batches:
            return self.relative_samples[self.batches.index(batch)]
        return float(np.exp(np.interp(np.log(batch), np.log(self.batches), np.log(self.relative_samples))))

    def for_model(self, name: str) -> BatchEfficiency:
        """Return this efficiency after checking that it belongs to the model.

        Raises:
            InvalidInputError: it belongs to another model.
        """
        if name != self.model:
            raise InvalidInputError(
                f"the batch efficiency belongs to {self.model}, not to {name}: train {name} on the proxy, or estimate"
                " it from its gradient noise scale"
            )
        return self


def gradient_noise_scale(small_batch: int, small_norm_squared: float, big_batch: int, big_norm_squared: float) -> float:
    """The simple gradient noise scale from gradients of two batch sizes, samples (arXiv:1812.06162, appendix A.1).

    The estimates of |G|² and of tr(Σ) are unbiased; their ratio is not, so average each norm over many minibatches.

    Args:
        small_batch: samples of the small batch.
        small_norm_squared: mean squared norm of its gradient.
        big_batch: samples of the big batch.
        big_norm_squared: mean squared norm of its gradient.

    Raises:
        InvalidInputError: a batch size or a norm is out of range, the big batch is not bigger, or the norms are too
            uncertain for an estimate.
    """
    _require_batch("small_batch", small_batch)
    _require_batch("big_batch", big_batch)
    _require_positive("small_norm_squared", small_norm_squared)
    _require_positive("big_norm_squared", big_norm_squared)
    if not small_batch < big_batch:
        raise InvalidInputError(f"the big batch must be above the small one, {small_batch}, not {big_batch}")
    gradient = (big_batch * big_norm_squared - small_batch * small_norm_squared) / (big_batch - small_batch)
    noise = (small_norm_squared - big_norm_squared) / (1 / small_batch - 1 / big_batch)
    if not (gradient > 0 and noise > 0 and 0 < noise / gradient < math.inf):
        raise InvalidInputError(
            f"squared gradient norms of {small_norm_squared:g} with batch {small_batch} and {big_norm_squared:g} with"
            f" batch {big_batch} give no noise scale: average over more minibatches, or use a bigger big batch"
        )
    return noise / gradient


def scaled_learning_rate(base_lr: float, base_batch: int, batch: int, optimizer: str) -> float:
    """The learning rate for a batch size, scaled from that of another.

    Args:
        base_lr: learning rate for `base_batch`.
        base_batch: samples in the batch that it was tuned for.
        batch: samples in the batch to be used.
        optimizer: `adam` or `adamw` for square-root scaling, `sgd` for linear scaling, `none` to keep the rate.

    Raises:
        InvalidInputError: the optimizer is unknown, or a number is out of range.
    """
    if optimizer not in _EXPONENTS:
        raise InvalidInputError(f"no scaling is known for the optimizer {optimizer!r}: state one of {[*_EXPONENTS]}")
    _require_positive("the learning rate", base_lr)
    _require_batch("base_batch", base_batch)
    _require_batch("batch", batch)
    return float(base_lr * (batch / base_batch) ** _EXPONENTS[optimizer])


def _require_text(name: str, text: str) -> None:
    if not (text.strip() and len(text) <= MAX_TEXT_CHARACTERS and text.isprintable()):
        raise InvalidInputError(f"{name}: must have 1 to {MAX_TEXT_CHARACTERS} printable characters")


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InvalidInputError(f"{name} must be finite and above 0, not {value:g}")


def _require_batch(name: str, batch: int) -> None:
    if type(batch) is not int or not 1 <= batch <= LARGEST_COUNT:
        raise InvalidInputError(f"{name}: a batch must be a whole number from 1 to {LARGEST_COUNT:,}, not {batch!r}")


def _require_ascending(name: str, batches: tuple[int, ...]) -> None:
    for batch in batches:
        _require_batch(name, batch)
    if any(left >= right for left, right in zip(batches, batches[1:], strict=False)):
        raise InvalidInputError(f"{name}: must be distinct and ascending, not {_listed(batches)}")


def _listed(batches: Sequence[int]) -> str:
    return first_few([str(batch) for batch in batches])


def _of_type(content: dict[str, Any], name: str, wanted: type[Found]) -> Found:
    value = content[name]
    if type(value) is not wanted:
        raise InvalidInputError(f"batch efficiency: {name} must be {wanted.__name__}, not {type(value).__name__}")
    return value


def _numbers(content: dict[str, Any], name: str, wanted: type[Number]) -> tuple[Number, ...]:
    # JSON may state a whole number where a float is wanted, but true and false are not numbers.
    allowed = (int,) if wanted is int else (int, float)
    values = _of_type(content, name, list)
    if len(values) > MAX_BATCHES or any(type(value) not in allowed for value in values):
        raise InvalidInputError(f"batch efficiency: {name} must be a list of at most {MAX_BATCHES} {wanted.__name__}")
    try:
        return tuple(wanted(value) for value in values)
    except OverflowError:
        raise InvalidInputError(f"batch efficiency: {name} has a number that is too large") from None
