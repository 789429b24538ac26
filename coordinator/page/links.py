"""The addresses of the pages of devices and runs, whose ids may have any printable characters."""

from __future__ import annotations

from urllib.parse import quote


def device_link(device_id: str) -> str:
    """The path of a device's page. A browser would resolve a slash or dots that are not encoded."""
    return f"/devices/{quote(device_id, safe='')}"


def run_link(run_id: str, number: int | None = None) -> str:
    """The path of a run's page.

    Args:
        run_id: the run.
        number: the round that is shown in full; None for the newest.
    """
    return f"/runs/{quote(run_id, safe='')}" + ("" if number is None else f"?round={number}")
