"""Fronts as messages."""

from __future__ import annotations

import numpy as np

from wattfleet.choosing import MAX_FRONT_POINTS, Front
from wattfleet.errors import InvalidInputError
from wattfleet.modes import modes_to_array
from wattfleet_proto.convert.modes import mode_from_message, mode_to_message
from wattfleet_proto.v1 import power_pb2


def front_to_message(front: Front) -> power_pb2.Front:
    """Convert a front into its message."""
    return power_pb2.Front(
        points=[
            power_pb2.FrontPoint(
                mode=mode_to_message(front.mode(k)),
                epoch_s=front.epoch_s[k],
                power_w=front.power_w[k],
                epoch_log_sd=front.epoch_log_sd[k],
                power_log_sd=front.power_log_sd[k],
                warmup_s=front.warmup_s[k],
                batch=0 if front.batch is None else int(front.batch[k]),
            )
            for k in range(len(front))
        ]
    )


def front_from_message(message: power_pb2.Front) -> Front:
    """Read a front from its message.

    Raises:
        InvalidInputError: it is not a valid front (see `Front`).
    """
    if len(message.points) > MAX_FRONT_POINTS:  # checked before the arrays are built
        raise InvalidInputError(f"a front holds 1 to {MAX_FRONT_POINTS} points, not {len(message.points)}")
    columns = np.array(
        [[p.epoch_s, p.power_w, p.epoch_log_sd, p.power_log_sd, p.warmup_s] for p in message.points], dtype=np.float64
    ).reshape(-1, 5)
    batch = np.array([point.batch for point in message.points], dtype=np.int64)
    modes = modes_to_array(mode_from_message(p.mode) for p in message.points)
    epoch_s, power_w, epoch_log_sd, power_log_sd, warmup_s = columns.T
    return Front(modes, epoch_s, power_w, epoch_log_sd, power_log_sd, warmup_s, batch if batch.any() else None)
