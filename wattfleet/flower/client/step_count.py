"""Counts a network's parameters and the floating-point operations of one step, without measuring anything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wattfleet.core.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class StepCount:
    """The size of a network and of one of its steps.

    Attributes:
        parameters: number of parameters of the network, trained or not.
        step_flops: floating-point operations of one step with the given batch; a multiplication with an addition
            counts as two.
    """

    parameters: int
    step_flops: int


def count_step(
    module: nn.Module, example_inputs: tuple[Tensor, ...], loss: Callable[[Any], Tensor] | None = None
) -> StepCount:
    """Count one step of a torch network: forward and backward for training, only forward for inference.

    The step is run once on a copy, so neither weights, gradients nor random numbers change. Counted are matrix
    products, convolutions and attention, as in `torch.utils.flop_counter.FlopCounterMode`. Other operations are not
    counted, among them possibly recurrent layers.

    Args:
        module: the network, on the device of the inputs.
        example_inputs: the positional arguments of one step, with a whole batch.
        loss: maps the network's output to the scalar that training minimizes; None counts inference.

    Returns:
        The counts, for `wattfleet.core.modes.WorkloadFacts`.

    Raises:
        InvalidInputError: training is to be counted, but no parameter requires a gradient.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    parameters = sum(parameter.numel() for parameter in module.parameters())
    counted = copy.deepcopy(module)
    trained = [parameter for parameter in counted.parameters() if parameter.requires_grad]
    if loss is not None and not trained:
        raise InvalidInputError(
            "no parameter of the network can be trained: set requires_grad, or leave the loss out to count inference"
        )
    with torch.random.fork_rng(), FlopCounterMode(display=False) as counter, torch.set_grad_enabled(loss is not None):
        outputs = counted(*example_inputs)
        if loss is not None:
            torch.autograd.grad(loss(outputs), trained, allow_unused=True)
    return StepCount(parameters, int(counter.get_total_flops()))
