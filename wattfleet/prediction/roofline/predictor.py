"""The default predictor: a physical model fitted to the measured modes, and a Gaussian process on its residuals.

A reference serves as the prior of the parameters, so that a few modes suffice. The task is that of PowerTrain
(doi:10.1016/j.future.2024.07.001, section 3.3), but the method is not a neural network.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchArray, Hardware, ModeArray, PowerMode, Profile, WorkloadFacts
from wattfleet.prediction.predictor import MIN_CORPUS_MODES, MIN_MODES, Prediction, require_one_batch
from wattfleet.prediction.roofline.estimation import (
    Model,
    Prior,
    generalised_fit,
    jacobian,
    residual_weights,
    robust_fit,
)
from wattfleet.prediction.roofline.explanation import Explanation, explain
from wattfleet.prediction.roofline.physics import (
    PowerParameters,
    TimeParameters,
    active_power_mw,
    activity,
    power_mw,
    step_time_ms,
)
from wattfleet.prediction.roofline.priors import (
    UNMEASURED_NUGGET_SD,
    UNMEASURED_POWER_SD,
    UNMEASURED_TIME_SD,
    general_power_prior,
    general_time_prior,
    transfer_power_prior,
    transfer_time_prior,
)
from wattfleet.prediction.roofline.residual import (
    MAX_INDUCING,
    Correction,
    Process,
    Remainder,
    Surface,
    both_at,
    expected_process,
)
from wattfleet.prediction.roofline.serialization import read_remainder, remainder_tensors
from wattfleet.prediction.tensors import Tensors, read_parameters, read_tensors, write_tensors

Values = NDArray[np.float64]
# Prior of the share of a reference's residual that another workload or board shows: mean and standard deviation.
_SHARE = (0.5, 0.3)
# Log residuals of time and power beyond which a row is rather wrong than typical of the workload.
_TIME_WIDTH, _POWER_WIDTH = 0.15, 0.08


@dataclass(frozen=True)
class RooflinePredictor:
    """Predicts time and power at every mode of one device for one workload.

    Attributes:
        time: parameters of the step time.
        power: parameters of the power.
        time_remainder: what is added to the logarithm of the modelled time.
        power_remainder: what is added to the logarithm of the modelled power.
    """

    name: ClassVar[str] = "roofline"
    transfers: ClassVar[bool] = True

    time: TimeParameters
    power: PowerParameters
    time_remainder: Remainder
    power_remainder: Remainder

    @classmethod
    def fit(
        cls, profile: Profile, reference: RooflinePredictor | None = None, facts: WorkloadFacts = WorkloadFacts()
    ) -> RooflinePredictor:
        """Fit to measured modes, or transfer a reference to them.

        Args:
            profile: measured modes; at least `MIN_MODES` without a reference. With a reference it may be empty: then
                the reference's medians are predicted, with intervals as wide as workloads and boards differ. A knob
                that the device lacks has the same value in every row, and the fit is valid at that value.
            reference: the predictor of another workload or device; None starts from general priors.
            facts: ignored.

        Raises:
            InvalidInputError: too few modes, or several batch sizes.
        """
        require_one_batch(cls.name, profile.batches)
        if reference is None and len(profile) < MIN_MODES:
            raise InvalidInputError(
                f"{len(profile)} measured modes are too few to fit a predictor: measure at least {MIN_MODES},"
                " or give a reference to transfer from"
            )
        if reference is not None and not len(profile):
            return cls._unmeasured(reference)
        log_ms, log_mw = np.log(profile.minibatch_ms), np.log(profile.power_mw)
        if reference is None:
            prior, surface = general_time_prior(float(np.median(profile.minibatch_ms))), Surface.zero()
        else:
            ratio = log_ms - np.log(step_time_ms(reference.time, profile.modes))
            prior = transfer_time_prior(reference.time, float(np.median(ratio)))
            surface = reference.time_remainder.surface
        log_time, time_remainder = _fit(
            _time_physics(profile.modes), profile.modes, log_ms, prior, surface, _TIME_WIDTH
        )
        time = TimeParameters.from_log(log_time)
        if reference is None:
            prior, surface = general_power_prior(), Surface.zero()
        else:
            ratio = log_mw - np.log(power_mw(reference.power, time, profile.modes))
            prior = transfer_power_prior(reference.power, float(np.median(ratio)))
            surface = reference.power_remainder.surface
        physics = _power_physics(time, profile.modes)
        log_power, power_remainder = _fit(physics, profile.modes, log_mw, prior, surface, _POWER_WIDTH)
        return cls(time, PowerParameters.from_log(log_power), time_remainder, power_remainder)

    @classmethod
    def _unmeasured(cls, reference: RooflinePredictor) -> RooflinePredictor:
        """The predictor for a workload and board of which nothing was measured."""
        time = _unmeasured_remainder(
            transfer_time_prior(reference.time, 0.0), reference.time_remainder.surface, UNMEASURED_TIME_SD
        )
        power = _unmeasured_remainder(
            transfer_power_prior(reference.power, 0.0), reference.power_remainder.surface, UNMEASURED_POWER_SD
        )
        return cls(reference.time, reference.power, time, power)

    def adapted(self, of: Hardware, to: Hardware) -> RooflinePredictor:
        """This predictor scaled to another board's hardware, as a start for a transfer.

        A GPU with half the cores needs twice the cycles for the same work. So does a memory bus of half the width, at
        half the power. A board's lowest power is assumed to be proportional to its lowest preset.
        """
        gpu, bus = of.gpu_cores / to.gpu_cores, of.mem_bus_bits / to.mem_bus_bits
        time = replace(
            self.time,
            compute_mcycles=self.time.compute_mcycles * gpu,
            serial_compute_mcycles=self.time.serial_compute_mcycles * gpu,
            traffic_mcycles=self.time.traffic_mcycles * bus,
        )
        power = replace(
            self.power,
            floor_mw=self.power.floor_mw * to.lowest_preset_w / of.lowest_preset_w,
            mem_clock_mw=self.power.mem_clock_mw / bus,
            mem_traffic_mw=self.power.mem_traffic_mw / bus,
            mem_compute_mw=self.power.mem_compute_mw / bus,
        )
        return replace(self, time=time, power=power)

    def predict(self, modes: ModeArray, batch: BatchArray | None = None) -> Prediction:
        """Predict `[n, 4]` modes, measured or not.

        Raises:
            InvalidInputError: `[n]` batch sizes that differ.
        """
        require_one_batch(self.name, () if batch is None else batch.tolist())
        of_time, of_power = both_at(modes, self.time_remainder.surface, self.power_remainder.surface)
        log_ms, time_sd = _predict(_time_physics(modes), self.time.log(), self.time_remainder, modes, of_time)
        physics = _power_physics(self.time, modes)
        log_mw, power_sd = _predict(physics, self.power.log(), self.power_remainder, modes, of_power)
        return Prediction(np.exp(log_ms), np.exp(log_mw), time_sd, power_sd)

    def explain(self, mode: PowerMode) -> Explanation:
        """Which resources bound a step at a mode, by the physical model without its correction."""
        return explain(self.time, np.array([mode], dtype=np.float64))[0]

    def save(self) -> bytes:
        """Serialize in safetensors format; the same predictor gives the same bytes."""
        tensors: Tensors = {"time": np.array(astuple(self.time)), "power": np.array(astuple(self.power))}
        tensors |= remainder_tensors("time_remainder", self.time_remainder)
        tensors |= remainder_tensors("power_remainder", self.power_remainder)
        return write_tensors(tensors)

    @classmethod
    def load(cls, weights: bytes) -> RooflinePredictor:
        """Read what `save` wrote.

        Raises:
            CorruptReferenceError: the bytes do not hold such a predictor.
        """
        tensors = read_tensors(weights)
        return cls(
            TimeParameters(*read_parameters(tensors, "time", len(fields(TimeParameters)))),
            PowerParameters(*read_parameters(tensors, "power", len(fields(PowerParameters)))),
            read_remainder(tensors, "time_remainder", len(fields(TimeParameters))),
            read_remainder(tensors, "power_remainder", len(fields(PowerParameters))),
        )


def _time_physics(modes: ModeArray) -> Model:
    """The model from log time parameters to log times at `[n, 4]` modes."""
    return lambda log_time: np.log(step_time_ms(TimeParameters.from_log(log_time), modes))


def _power_physics(time: TimeParameters, modes: ModeArray) -> Model:
    """The model from log power parameters to log powers at `[n, 4]` modes."""
    busy = activity(time, modes)
    return lambda log_power: np.log(active_power_mw(PowerParameters.from_log(log_power), busy))


def _with_surface(physics: Model, surface: Values) -> Model:
    """Extend a model with one more parameter: the share of a surface with these `[n]` values."""
    return lambda parameters: physics(parameters[:-1]) + parameters[-1] * surface


def _fit(
    physics: Model, modes: ModeArray, observed: Values, prior: Prior, surface: Surface, width: float
) -> tuple[Values, Remainder]:
    """Fit one quantity: its log parameters, and the remainder to add to the model."""
    if len(modes) >= MIN_CORPUS_MODES:
        return _fit_corpus(physics, modes, observed, prior, width)
    mean, sd = _SHARE
    prior = Prior(np.append(prior.mean, mean), np.append(prior.sd, sd))
    model = _with_surface(physics, surface.at(modes))
    parameters = robust_fit(model, observed, prior, width / 5, "soft_l1", starts=1)
    residuals = observed - model(parameters)
    row_weights = residual_weights(residuals, width)
    # The model is nearly linear around these parameters, so residuals around the prior's mean are nearly normal.
    gradient = jacobian(model, parameters)
    target = residuals + gradient @ (parameters - prior.mean)
    spread = gradient * prior.sd
    process = expected_process(modes, target, row_weights, spread @ spread.T)
    measurement_var = process.measurement_var(row_weights)
    covariance = process.covariance(modes, modes) + np.diag(measurement_var)
    parameters = generalised_fit(model, observed, prior, covariance, parameters)
    weights = np.linalg.solve(covariance, observed - model(parameters))
    correction = Correction(process, modes, jacobian(model, parameters), prior.sd, measurement_var, np.asarray(weights))
    return parameters[:-1], Remainder(float(parameters[-1]), surface, correction)


def _unmeasured_remainder(prior: Prior, surface: Surface, scale_sd: float) -> Remainder:
    """The remainder of an unmeasured quantity, whose scale and parameters are both uncertain."""
    mean, share_sd = _SHARE
    sd = np.append(prior.sd, share_sd)
    nothing = np.empty(0)
    correction = Correction(
        Process(scale_sd, UNMEASURED_NUGGET_SD), np.empty((0, 4)), np.empty((0, len(sd))), sd, nothing, nothing
    )
    return Remainder(mean, surface, correction)


def _fit_corpus(
    physics: Model, modes: ModeArray, observed: Values, prior: Prior, width: float
) -> tuple[Values, Remainder]:
    """Fit one quantity to a whole corpus with some wrong rows; the order of the rows does not matter."""
    order = np.lexsort(modes.T)
    parameters = robust_fit(physics, observed, prior, 0.02, "cauchy", starts=3)
    residuals = observed - physics(parameters)
    inducing = order[np.random.default_rng(0).permutation(len(modes))[:MAX_INDUCING]]
    surface = Surface.fit(modes, residuals, residual_weights(residuals, width), inducing)
    remaining = np.abs(residuals - surface.at(modes))
    # The standard deviation whose 90 % interval holds 90 % of the plausible rows; wrong rows do not widen it.
    sd = float(np.quantile(remaining[remaining <= width], 0.9)) / 1.645
    return parameters, Remainder(1.0, surface, Correction.none(len(parameters) + 1, sd))


def _predict(
    physics: Model, log_parameters: Values, remainder: Remainder, modes: ModeArray, surface: Values
) -> tuple[Values, Values]:
    """Predict the mean and standard deviation of one quantity's logarithm at `[n, 4]` modes, `[n]` each."""
    model = _with_surface(physics, surface)
    parameters = np.append(log_parameters, remainder.share)
    correction, sd = remainder.correction.at(modes, jacobian(model, parameters))
    return model(parameters) + correction, sd
