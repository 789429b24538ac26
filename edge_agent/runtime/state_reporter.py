"""Where an agent stands: the state that `edge_agent.runtime.states` decides on, reported over the link."""

from __future__ import annotations

from edge_agent.runtime.states import Action, Decision, Event, ProfileEnded, decide
from edge_agent.session.coordinator_session import CoordinatorSession
from wattfleet_proto.convert import state_to_message
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import session_pb2


class StateReporter:
    """The one place that holds and changes the state; to be used on the event loop's thread only.

    Args:
        link: where states and fronts are reported.
    """

    def __init__(self, link: CoordinatorSession) -> None:
        self._link = link
        self.state = DeviceState.ENROLLED
        self._unfinished = False

    def decide(self, event: Event) -> Decision:
        """Enter the state that follows from an event; nothing is reported yet."""
        decision = decide(self.state, event, self._unfinished)
        self.state = decision.state
        if Action.MEASURE_ANEW in decision.actions:
            self._unfinished = True
        elif isinstance(event, ProfileEnded):
            self._unfinished = False
        return decision

    def report(self, decision: Decision, profiled_modes: int) -> None:
        """Tell the coordinator what was decided, where there is something new to tell.

        Args:
            decision: what `decide` returned.
            profiled_modes: modes measured so far.
        """
        if decision.detail is not None:
            self._link.report_state(
                session_pb2.StateReport(
                    state=state_to_message(decision.state), profiled_modes=profiled_modes, detail=decision.detail
                )
            )
