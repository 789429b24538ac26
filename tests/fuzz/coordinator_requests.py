"""Valid requests to a coordinator, from which hostile ones are derived."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.fakes.small_fleet import ORIN_FRONT
from tests.fuzz.hostile_input import Known
from tests.fuzz.remote_calls import Valid
from wattfleet.core.prediction import Artefact
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import identity_pb2, operator_pb2, planning_pb2, power_pb2, session_pb2, view_pb2

RUN = "4711"
DEVICES = ("orin", "nano", "xavier")
KNOWN_NODES = (2**64 - 1, 2**63 + 5, 0)
_PLAN = f"{RUN}/1"
WORKLOAD = power_pb2.Workload(
    name="small network", task=power_pb2.TASK_TRAINING, batch=16, loader_workers=2, parameters=1e6, precision="float32"
)


def known_values(artefact: Artefact) -> Known:
    """Values that requests may refer to."""
    ids: list[Any] = [*DEVICES, "new-1", "new-2"]
    runs = [RUN, "4712"]
    return {
        "device_id": ids,
        "device_ids": ids,
        "node_id": [*KNOWN_NODES, 1],
        "node_ids": [*KNOWN_NODES, 1],
        "run_id": runs,
        "run_ids": runs,
        "plan_id": [_PLAN, f"{RUN}/2", "4712/1"],
        "supply": ["site"],
        "digest": [artefact.digest, artefact.digest[:6], ""],
        "manifest": [artefact.manifest],
        "weights_chunk": [artefact.weights, artefact.weights[:100]],
        "board": ["agx-orin", "orin-nano", "toaster"],
        "round": [1, 2, 3],
        "epochs": [1.0, 0.1],
        "strategy": ["FedAvg"],
        "workload": [WORKLOAD.name, "another network", ""],
        "name": [WORKLOAD.name],
        "devices": ["id:orin", "id:*", "tag:slow"],
        "service": [""],
        "protocol": [],
    }


def valid_calls(artefact: Artefact) -> Valid:
    """For each RPC, valid calls, in an order in which a coordinator accepts them one after the other."""
    planning, operator, view = _planning(), _operator(artefact), _view()
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol="wattfleet.v1.ViewService")
    return {
        "/wattfleet.v1.SessionService/Session": [_session()],
        "/wattfleet.v1.SessionService/FetchReference": [[session_pb2.FetchReferenceRequest(digest=artefact.digest)]],
        "/wattfleet.v1.SessionService/FetchMetadata": [[session_pb2.FetchMetadataRequest(name="timestamp.json")]],
        **{f"/wattfleet.v1.OperatorService/{name}": [messages] for name, messages in operator.items()},
        **{f"/wattfleet.v1.IdentityService/{name}": [[request]] for name, request in _identity().items()},
        **{f"/wattfleet.v1.PlanningService/{name}": [[request]] for name, request in planning.items()},
        **{f"/wattfleet.v1.ViewService/{name}": [[request]] for name, request in view.items()},
        "/grpc.health.v1.Health/Check": [[health_pb2.HealthCheckRequest()]],
        "/grpc.health.v1.Health/Watch": [[health_pb2.HealthCheckRequest()]],
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": [[listing, symbol]],
    }


def _session() -> list[Message]:
    hello = session_pb2.Hello(
        device_id="new-1", board="agx-orin", provenance=power_pb2.PROVENANCE_SIMULATED, mode_count=7,
        protocol=own_version(), installation="an installation",
    )  # fmt: skip
    front = session_pb2.FrontReport(
        front=front_to_message(ORIN_FRONT), idle_w=5.0, profiled_modes=50, workload=WORKLOAD, minibatches_per_epoch=30
    )
    state = session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY, profiled_modes=50, detail="parked")
    lease = session_pb2.Lease(number=1, grant_id=1, plan_id=_PLAN, phase=session_pb2.GRANT_PHASE_OVER)
    seen = session_pb2.Observation(plan_id=_PLAN, epoch_s=20.0, power_w=30.0)
    return [
        session_pb2.SessionRequest(hello=hello),
        session_pb2.SessionRequest(lease=lease),
        session_pb2.SessionRequest(sequence=1, front=front),
        session_pb2.SessionRequest(sequence=2, state=state),
        session_pb2.SessionRequest(sequence=3, observation=seen),
        session_pb2.SessionRequest(
            sequence=6, energy=session_pb2.TrainingEnergy(plan_id=_PLAN, energy_j=500.0, lasted_s=20.0)
        ),
        session_pb2.SessionRequest(sequence=4, removed=session_pb2.WorkloadRemoved(workload="another network")),
        session_pb2.SessionRequest(sequence=5, unplanned=session_pb2.UnplannedTraining(run_id="another run")),
    ]


def _planning() -> dict[str, Message]:
    result = planning_pb2.DeviceResult(device_id="orin", num_examples=100.0, loss=0.5, share=1.0)
    of_node = planning_pb2.NodeResult(node_id=KNOWN_NODES[0], result=result)
    return {
        "StartRun": planning_pb2.StartRunRequest(
            run_id="another",  # an existing run keeps being without an energy budget
            strategy="FedAvg",
            rounds=100,
            workload=WORKLOAD,
            name="night",
            app="a/b",
            labels={"lr": "0.1"},
            energy_budget_j=1e6,
        ),  # fmt: skip
        "BindNodes": planning_pb2.BindNodesRequest(
            bindings=[planning_pb2.NodeBinding(node_id=KNOWN_NODES[0], device_id=DEVICES[0], pairing_problem="")]
        ),
        "ResolveNodes": planning_pb2.ResolveNodesRequest(node_ids=KNOWN_NODES),
        "PlanRound": planning_pb2.PlanRoundRequest(run_id=RUN, round=1, node_ids=KNOWN_NODES, epochs=1.0),
        "PlanMeasuring": planning_pb2.PlanMeasuringRequest(run_id=RUN, node_ids=KNOWN_NODES, epochs=1.0, survey_s=20.0),
        "PredictNodes": planning_pb2.PredictNodesRequest(run_id=RUN, node_ids=KNOWN_NODES, epochs=1.0),
        "GetPlan": planning_pb2.GetPlanRequest(plan_id=_PLAN),
        "FinishRound": planning_pb2.FinishRoundRequest(plan_id=_PLAN, wall_s=30.0, results=[result]),
        "ReportUnplannedRound": planning_pb2.ReportUnplannedRoundRequest(
            run_id=RUN,
            round=2,
            began_ago_s=60.0,
            wall_s=30.0,
            results=[of_node],
            metrics={"accuracy": 0.5},
        ),
        "ReportMetrics": planning_pb2.ReportMetricsRequest(run_id=RUN, round=1, metrics={"accuracy": 0.5}),
        "FinishRun": planning_pb2.FinishRunRequest(run_id=RUN, error="it failed"),
    }


def _operator(artefact: Artefact) -> dict[str, list[Message]]:
    half = len(artefact.weights) // 2
    another = Artefact(artefact.manifest.replace(b'"made"', b'"done"'), artefact.weights)
    return {
        "PreviewPlan": [operator_pb2.PreviewPlanRequest(run_id="4712", epochs=1.0, all_devices=True)],
        "GetBudgets": [operator_pb2.GetBudgetsRequest()],
        "SetBudget": [
            operator_pb2.SetBudgetRequest(supply="site", watts=90.0, for_s=100.0),
            operator_pb2.SetBudgetRequest(supply="site", energy_j=1e6, per="day", timezone="Europe/Berlin"),
        ],
        "GetBatteries": [operator_pb2.GetBatteriesRequest()],
        "SetCharge": [operator_pb2.SetChargeRequest(name="orin", share=0.5)],
        "ClearBudget": [operator_pb2.ClearBudgetRequest(supply="site")],
        "TagDevices": [operator_pb2.TagDevicesRequest(device_ids=["orin"], add=["fast"], remove=["slow"])],
        "DrainDevices": [operator_pb2.DrainDevicesRequest(device_ids=["orin"], undo=True)],
        "ProfileWorkload": [operator_pb2.ProfileWorkloadRequest(workload=WORKLOAD, modes=5, devices=["id:orin"])],
        "ListReferences": [operator_pb2.ListReferencesRequest()],
        "PublishReference": [
            operator_pb2.PublishReferenceRequest(manifest=another.manifest, weights_chunk=another.weights[:half]),
            operator_pb2.PublishReferenceRequest(weights_chunk=another.weights[half:]),
        ],
        "RemoveReference": [operator_pb2.RemoveReferenceRequest(digest=another.digest)],
        "PinReference": [operator_pb2.PinReferenceRequest(digest=artefact.digest)],
        "GetMetadata": [operator_pb2.GetMetadataRequest()],
        "PublishMetadata": [operator_pb2.PublishMetadataRequest(roots=[b"{}"], targets=b"{}")],
        "DeleteRuns": [operator_pb2.DeleteRunsRequest(run_ids=["4712"], end=True)],
        "ForgetDevices": [operator_pb2.ForgetDevicesRequest(device_ids=["new-1"])],
    }


def _identity() -> dict[str, Message]:
    return {
        "Invite": identity_pb2.InviteRequest(role="device", site="site", tags=["a"], uses=2, ttl_s=60.0),
        "ListInvites": identity_pb2.ListInvitesRequest(),
        "CancelInvite": identity_pb2.CancelInviteRequest(number="0f"),
        "ListCertificates": identity_pb2.ListCertificatesRequest(),
        "IssueCertificate": identity_pb2.IssueCertificateRequest(
            request_pem=b"-", role="viewer", name="p", lifetime_s=9.0
        ),
        "RevokeCertificates": identity_pb2.RevokeCertificatesRequest(name_or_serial="orin", reason="lost"),
        "BeginRotation": identity_pb2.BeginRotationRequest(),
        "FinishRotation": identity_pb2.FinishRotationRequest(),
        "ReadAuditLog": identity_pb2.ReadAuditLogRequest(),
    }


def _view() -> dict[str, Message]:
    return {
        "GetFleet": view_pb2.GetFleetRequest(),
        "ListDevices": view_pb2.ListDevicesRequest(
            device_ids=["orin"], with_fronts=True, with_times=True, workload=WORKLOAD.name
        ),
        "ListNodes": view_pb2.ListNodesRequest(),
        "ListWorkloads": view_pb2.ListWorkloadsRequest(),
        "ListRuns": view_pb2.ListRunsRequest(with_times=True),
        "ListEvents": view_pb2.ListEventsRequest(kinds=["device"], supply="site", since_unix_s=1.0, limit=10),
        "StreamRounds": view_pb2.StreamRoundsRequest(run_id=RUN, with_times=True),
    }
