"""What an agent makes of a coordinator's grants."""

from __future__ import annotations

from edge_agent.session.grants import Grants
from wattfleet_proto.message_sizes import MAX_PLAN_ID_CHARACTERS
from wattfleet_proto.v1 import power_pb2, session_pb2

MODE = power_pb2.PowerMode(cores=6, cpu_khz=1_510_400, gpu_hz=624_750_000, mem_hz=2_133_000_000)


async def test_a_grant_of_an_endless_plan_id_allows_nothing_and_keeps_leases_short() -> None:
    grants = Grants()
    grants.greeting()
    await grants.welcomed(120.0)
    message = session_pb2.Grant(id=1, plan_id="x" * 100_000, mode=MODE, power_limit_w=25.0, longest_s=600.0)
    await grants.receive(message)
    lease = grants.lease()
    assert lease.grant_id == 1 and lease.phase == session_pb2.GRANT_PHASE_OVER
    assert len(lease.plan_id) <= MAX_PLAN_ID_CHARACTERS
