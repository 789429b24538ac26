"""Finds the workloads that an agent has stored in a test."""

from __future__ import annotations

from pathlib import Path


def only_workload(state: Path) -> Path:
    """The folder of the only workload in a state directory."""
    (folder,) = (state / "workloads").iterdir()
    return folder
