"""Which strategies cannot be combined with a quorum, or with local epochs that plans choose."""

from __future__ import annotations

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    Strategy,
)

from wattfleet.errors import InvalidInputError
from wattfleet.planning import EpochChoice
from wattfleet_flower.server.fedbuff import FedBuff
from wattfleet_flower.server.quorum import Quorum
from wattfleet_flower.server.sampling import attribute, layers

_CLIPS_ON_DEVICES = (DifferentialPrivacyClientSideAdaptiveClipping, DifferentialPrivacyClientSideFixedClipping)


def require_combinable(strategy: Strategy, quorum: Quorum | None, epochs: EpochChoice) -> None:
    """Make sure that a strategy can be used with a quorum and with a choice of epochs.

    Raises:
        InvalidInputError: it cannot.
    """
    is_fedbuff = any(isinstance(layer, FedBuff) for layer in layers(strategy))
    if quorum is not None and is_fedbuff:
        raise InvalidInputError(
            "FedBuff never waits for all devices, so it has no quorum: leave the quorum out, or set buffer_size"
        )
    if quorum is not None and attribute(strategy, "num_sampled_clients", None) is not None:
        raise InvalidInputError(
            "differential privacy adds noise for a fixed number of replies with equal weights, which a quorum does not"
            " give: leave the quorum out"
        )
    if is_fedbuff and len(epochs.options) > 1:
        raise InvalidInputError(
            "FedBuff counts updates alike, whatever their local epochs: give it one number of local_epochs"
        )
    if epochs.is_per_device and any(isinstance(layer, _CLIPS_ON_DEVICES) for layer in layers(strategy)):
        raise InvalidInputError(
            "updates that devices have clipped must not be scaled to their epochs: leave is_per_device out of the"
            " EpochChoice, or clip on the server"
        )
