"""Names of the metrics that a run reports for its rounds."""

CLIENT_METRICS_PREFIX = "clientapp_"
"""Tells the metrics of the clients' evaluation from those of `evaluate_fn`; Flower's `Result` names both kinds so."""


def metric_order(name: str) -> tuple[bool, str]:
    """A key to sort names by: the metrics of `evaluate_fn` before those of the clients, each by name."""
    return name.startswith(CLIENT_METRICS_PREFIX), name
