"""How the end of a run is described in `FinishRunRequest.error` and `RunView.error`."""

STOPPED = "stopped "
"""Begins the text if somebody has stopped the run. Any other text is the error that has ended it."""


def is_stopped(error: str) -> bool:
    """Whether somebody has stopped a run.

    Args:
        error: why the run ended early.
    """
    return error.startswith(STOPPED)
