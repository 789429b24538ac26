"""Selection of nodes by the app, from their predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import grpc

from wattfleet.errors import InvalidInputError
from wattfleet_flower.server.errors import RefusedError
from wattfleet_flower.server.predictions import NodePrediction

Select = Callable[[int, Sequence[NodePrediction]], Iterable[int]]
"""Maps a round's number and the predictions of the connected nodes to the ids of the nodes that a plan may use."""


def selected_nodes(select: Select, number: int, predictions: Sequence[NodePrediction]) -> list[int]:
    """Return the nodes that the app selects for a round, each once.

    Args:
        select: the app's selection.
        number: the round's number, from 1.
        predictions: of the connected nodes.

    Raises:
        RefusedError: it selects none; it may select some once more devices are ready.
        InvalidInputError: it selects something that is not the id of a predicted node.
    """
    selected = list(dict.fromkeys(select(number, predictions)))
    known = {prediction.node_id for prediction in predictions}
    for node_id in selected:
        if node_id not in known:
            raise InvalidInputError(
                f"select chose {node_id!r} in round {number}, which is not the id of a predicted node: return the"
                " node_id of predictions"
            )
    if not selected:
        reasons = {prediction.reason for prediction in predictions if prediction.reason}
        raise RefusedError(
            f"select chose none of {len(predictions)} nodes in round {number}"
            + (f" ({'; '.join(sorted(reasons)[:3])})" if reasons else "")
            + ": let it choose at least one",
            grpc.StatusCode.UNAVAILABLE,
        )
    return selected
