"""Serves the agent's own metrics if the settings name an address for them."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from edge_agent.devices.device import Device
from edge_agent.exporter.figures import AgentFigures, DeviceFacts
from edge_agent.runtime.board_sampler import BoardSampler
from edge_agent.runtime.state_reporter import StateReporter
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.outbox import Outbox
from edge_agent.session.revoked_certificates import RevokedCertificates
from edge_agent.settings import AgentSettings

_ANSWER_S = 5.0
"""A scrape fails if the agent's event loop does not answer within this time."""


@dataclass(frozen=True)
class OwnMetrics:
    """The metrics of one running agent; all of its parts belong to one event loop."""

    settings: AgentSettings
    device: Device
    session: CoordinatorSession
    outbox: Outbox
    sampler: BoardSampler
    turns: DeviceTurns
    reporter: StateReporter
    revoked: RevokedCertificates

    def served(self) -> AbstractAsyncContextManager[str | None]:
        """Serve the metrics within this context. Yields their URL, or None if the settings name no address.

        Raises:
            InvalidInputError: the address is in use or does not exist, or would be served as plaintext where that is
                not allowed.
        """
        address = self.settings.metrics.address
        if address is None:
            return nullcontext()
        # Imported here, since the HTTP and Prometheus libraries take memory.
        from edge_agent.exporter.server import metrics_served

        facts = DeviceFacts(self.settings.device.id, self.device.board_kind, self.device.provenance)
        loop = asyncio.get_running_loop()
        return metrics_served(
            self.settings,
            address,
            facts,
            lambda: asyncio.run_coroutine_threadsafe(self._figures(), loop).result(_ANSWER_S),
            self.revoked.is_revoked,
        )

    async def _figures(self) -> AgentFigures:
        reporter, session = self.reporter, self.session
        return AgentFigures(
            self.sampler.latest,
            reporter.state,
            reporter.profiled_modes,
            reporter.modes_to_measure,
            session.connected,
            self.outbox.waiting,
            reporter.trainings,
            session.grants.training_w,
            self.turns.kept_duty(),
        )
