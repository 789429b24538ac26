"""Settings and waiting times of an agent in a test, and the workload that it has stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_agent.runtime import device_trainings, recovery_supervisor
from edge_agent.settings import (
    AgentSettings,
    ConnectionSettings,
    DeviceSettings,
    MetricsSettings,
    ProfileSettings,
    WorkloadSettings,
)

# --- Agent settings ---------------------------------------------------------------------------------------------------
# Settings of an agent in a test.


def agent_settings(
    state_dir: Path,
    device_id: str = "orin-nano-0",
    *,
    coordinator: str = "127.0.0.1:7070",
    socket: Path | None = None,
    seed: int = 0,
    minibatches_per_epoch: int | None = 100,
    modes_first: int | None = 10_000,
    max_workloads: int = 32,
    simulated_duty: str | None = None,
    reference_retry_s: float = 300.0,
    metrics_address: str | None = None,
    insecure: bool = False,
) -> AgentSettings:
    """The settings of an agent on a simulated board; its socket is in the state directory unless given.

    All modes are measured before the first round, unless `modes_first` is given.
    """
    return AgentSettings(
        device=DeviceSettings(
            spec="simulated:orin-nano",
            id=device_id,
            state_dir=state_dir,
            socket=socket or state_dir / "agent.sock",
            seed=seed,
            simulated_duty=simulated_duty,
        ),
        profile=ProfileSettings(minibatches_per_epoch=minibatches_per_epoch, modes_first=modes_first),
        workload=WorkloadSettings(max_workloads=max_workloads),
        session=ConnectionSettings(
            coordinator=coordinator,
            reference_retry_s=reference_retry_s,
            insecure=insecure,
        ),
        metrics=MetricsSettings(address=metrics_address),
    )


@contextmanager
def waiting_times(retry_s: float, grant_timeout_s: float) -> Iterator[None]:
    """Within this context, agents wait this long between attempts to recover, and for a grant."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery_supervisor, "RETRY_S", retry_s)
        patch.setattr(device_trainings, "GRANT_TIMEOUT_S", grant_timeout_s)
        yield


# --- Stored workloads -------------------------------------------------------------------------------------------------
# Finds the workloads that an agent has stored in a test.


def only_workload(state: Path) -> Path:
    """The folder of the only workload in a state directory."""
    (folder,) = (state / "workloads").iterdir()
    return folder
