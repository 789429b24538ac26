"""Assembles the servicers of a coordinator, which answer its RPCs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from coordinator.fleet_in_service import FleetInService
from coordinator.identity.callers import certificate_of
from coordinator.identity.first_operator import adopted
from coordinator.preparation import Preparation
from coordinator.services.enrolment import EnrolmentServicer
from coordinator.services.identities import IdentityServicer
from coordinator.services.issuing import Issuing, PublicAddresses
from coordinator.services.operations import OperatorServicer
from coordinator.services.planning import PlanningServicer
from coordinator.services.round_planning import RoundPlanning
from coordinator.services.sessions import SessionServicer
from coordinator.services.superlink import SuperLinkServicer
from coordinator.services.views import ViewServicer
from wattfleet_io.clock import utc_now
from wattfleet_proto.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    identity_pb2,
    identity_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    planning_pb2,
    planning_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    superlink_pb2,
    superlink_pb2_grpc,
    view_pb2,
    view_pb2_grpc,
)

SERVICES = [  # with their methods, so that a test finds RPCs that are missing in the table of roles
    service
    for module in (
        session_pb2,
        planning_pb2,
        view_pb2,
        operator_pb2,
        identity_pb2,
        enrolment_pb2,
        superlink_pb2,
        health_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
]


class RpcServices:
    """The servicers of one coordinator, which all its addresses share.

    Attributes:
        sessions: the agents' sessions.
        viewer: answers queries about the fleet.
        operator: answers queries and changes what is planned and allowed.
        identity: manages invites and certificates, and lists what operators changed.
        healthy: reports whether the coordinator serves.
    """

    def __init__(
        self, preparation: Preparation, serving: FleetInService, addresses: Callable[[], PublicAddresses]
    ) -> None:
        """Build the servicers.

        Args:
            preparation: the settings, and the files that they name.
            serving: the fleet.
            addresses: returns the addresses that enrolled machines receive; ports are known once the server has
                started.
        """
        settings, identities, repository = preparation.settings, preparation.identities, serving.repository
        leases, orders, references = serving.leases, serving.orders, serving.references
        self.healthy = HealthServicer()
        events = serving.events
        self.sessions = SessionServicer(
            repository,
            leases,
            orders,
            references,
            settings.profiling.modes,
            serving.state_times,
            settings=settings.sessions,
            peers=settings.peers,
            metadata=serving.metadata,
            has_certificate=lambda device_id: identities.has_certificate(device_id, utc_now()),
            events=events,
        )
        planning = RoundPlanning(
            repository,
            leases,
            orders,
            settings=settings.rounds,
            figures=serving.figures,
            events=events,
            profile_modes=settings.profiling.modes,
        )
        self._planner = PlanningServicer(repository, planning, orders, settings=settings.rounds, events=events)
        self.viewer = ViewServicer(repository, serving.state_times, events)
        reconnect_all = self.sessions.reconnect_all
        self.operator = OperatorServicer(
            repository,
            planning,
            serving.budgets,
            references,
            reconnect_all,
            leases,
            orders,
            settings.site,
            serving.metadata,
            revoke=lambda device_ids: identities.forget(device_ids, utc_now()),
            events=events,
        )
        issuing = self._enrolment = self._superlink = None
        if preparation.credentials is not None:
            repository.save_soon(*adopted(preparation.credentials.folder, identities, utc_now()))
            lifetime = timedelta(days=settings.identity.certificate_days)
            issuing = Issuing(identities, preparation.credentials, addresses, lifetime)
            self._enrolment = EnrolmentServicer(repository, issuing, certificate_of, preparation.calls.end_invalid)
            self._superlink = SuperLinkServicer(issuing, settings.superlink.hosts)
        self.identity = IdentityServicer(
            repository, issuing, certificate_of, preparation.calls.end_invalid, orders.announce_revocations
        )

    def add_to(self, server: Any) -> None:
        """Add the services to a gRPC server."""
        session_pb2_grpc.add_SessionServiceServicer_to_server(self.sessions, server)
        planning_pb2_grpc.add_PlanningServiceServicer_to_server(self._planner, server)
        view_pb2_grpc.add_ViewServiceServicer_to_server(self.viewer, server)
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(self.operator, server)
        identity_pb2_grpc.add_IdentityServiceServicer_to_server(self.identity, server)
        if self._enrolment is not None:
            enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(self._enrolment, server)
        if self._superlink is not None:
            superlink_pb2_grpc.add_SuperLinkServiceServicer_to_server(self._superlink, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.healthy, server)
        absent = ("wattfleet.v1.EnrolmentService", "wattfleet.v1.SuperLinkService") if self._enrolment is None else ()
        names = [service.full_name for service in SERVICES if service.full_name not in absent]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
