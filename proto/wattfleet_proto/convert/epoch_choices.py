"""The local epochs that a plan may choose, as messages."""

from __future__ import annotations

from wattfleet.planning import EpochChoice, EpochOption
from wattfleet_proto.v1 import planning_pb2


def epoch_choice_to_message(choice: EpochChoice) -> planning_pb2.EpochChoice:
    """Convert a choice of local epochs into its message."""
    return planning_pb2.EpochChoice(
        options=[
            planning_pb2.EpochOption(
                epochs=int(option.epochs), progress=option.progress, half_devices=option.half_devices or 0.0
            )
            for option in choice.options
        ],
        per_device=choice.is_per_device,
    )


def epochs_of_request(request: planning_pb2.PlanRoundRequest) -> float | EpochChoice:
    """The local epochs of the requested round, or those that its plan may choose.

    Raises:
        InvalidInputError: the choice is not valid.
    """
    if not request.HasField("epoch_choice"):
        return request.epochs
    return EpochChoice(
        [EpochOption(each.epochs, each.progress, each.half_devices or None) for each in request.epoch_choice.options],
        request.epoch_choice.per_device,
    )
