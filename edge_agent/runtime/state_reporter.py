"""Holds the device's state, and reports its changes to the coordinator."""

from __future__ import annotations

import logging

from edge_agent.runtime.states import Action, Decision, Event, ModeMeasured, ProfileEnded, TrainingBegan, decide
from edge_agent.session.coordinator_session import CoordinatorSession
from wattfleet_io.console import count_of
from wattfleet_io.logs import fields
from wattfleet_proto.convert import state_to_message
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.message_sizes import MAX_DETAIL_CHARACTERS
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)


class StateReporter:
    """The only place that changes the state. Use it only on the event loop's thread.

    Args:
        session: reports states to the coordinator.

    Attributes:
        remark: another problem to mention, for people; it is added to every report.
        profiled_modes: modes measured so far, as last reported.
        modes_to_measure: maximum of modes that the profile in progress measures; None while no profile is in progress.
        trainings: number of trainings begun since the agent started.
    """

    def __init__(self, session: CoordinatorSession) -> None:
        self._session = session
        self.state = DeviceState.ENROLLED
        self.remark = ""
        self.profiled_modes = 0
        self.modes_to_measure: int | None = None
        self.trainings = 0
        self._reprofiling = False

    def decide(self, event: Event) -> Decision:
        """Enter the state that follows from an event, without reporting it."""
        decision = decide(self.state, event, self._reprofiling)
        self.state = decision.state
        if isinstance(event, TrainingBegan):
            self.trainings += 1
        if isinstance(event, ModeMeasured):
            self.modes_to_measure = event.total
        elif decision.state is not DeviceState.PROFILING:
            self.modes_to_measure = None
        if Action.REPROFILE in decision.actions:
            self._reprofiling = True
        elif isinstance(event, ProfileEnded):
            self._reprofiling = False
        return decision

    def report(self, decision: Decision, profiled_modes: int) -> None:
        """Report a decision to the coordinator, unless nothing has changed.

        Args:
            decision: the result of `decide`.
            profiled_modes: modes measured so far.
        """
        self.profiled_modes = profiled_modes
        if decision.detail is not None:
            detail = f"{decision.detail}; {self.remark}" if self.remark else decision.detail
            state = decision.state.value
            level = logging.WARNING if decision.state is DeviceState.DEGRADED else logging.INFO
            _log.log(
                level,
                "%s, %s measured%s",
                state,
                count_of(profiled_modes, "mode"),
                f": {detail}" if detail else "",
                extra=fields(state=state, profiled_modes=profiled_modes, detail=detail or None),
            )
            self._session.report_state(
                session_pb2.StateReport(
                    state=state_to_message(decision.state),
                    profiled_modes=profiled_modes,
                    detail=detail[:MAX_DETAIL_CHARACTERS],
                )
            )
