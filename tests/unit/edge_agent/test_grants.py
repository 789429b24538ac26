"""How an agent handles a coordinator's grants."""

from __future__ import annotations

import asyncio

import pytest

from edge_agent.session.grants import Grants, NoGrantError
from wattfleet_proto.limits import MAX_PLAN_ID_CHARACTERS
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


class SetClock:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_training_is_awaited_from_its_grant_until_it_begins_or_the_grant_lapses() -> None:
    clock = SetClock()
    grants = Grants(clock)
    seen = [grants.awaits_training]
    grants.greeting()
    await grants.welcomed(120.0)
    for plan in ("7/1", "7/2"):
        await grants.receive(session_pb2.Grant(id=1, plan_id=plan, mode=MODE, power_limit_w=25.0, longest_s=60.0))
        seen.append(grants.awaits_training)
        if plan == "7/1":
            grants.begin(plan)
            seen.append(grants.awaits_training)
            grants.ended()
    clock.now_s = 121.0
    seen.append(grants.awaits_training)
    assert seen == [False, True, False, True, False]


async def test_a_session_that_delivers_no_newer_grant_does_not_renew_the_old_one() -> None:
    clock = SetClock()
    grants = Grants(clock)
    grants.greeting()
    await grants.welcomed(120.0)
    await grants.receive(session_pb2.Grant(id=1, plan_id="7/1", mode=MODE, power_limit_w=25.0, longest_s=6000.0))
    grants.begin("7/1")
    for clock.now_s in (50.0, 100.0):  # the sessions break off after the Welcome, or before the newest grant
        grants.greeting()
        await grants.welcomed(120.0)
        await grants.acknowledged(grants.lease().number, 120.0, is_renewed=False)
    clock.now_s = 120.0
    assert await grants.next_change() == "the agent could not reach the coordinator for too long"


async def test_a_lease_that_names_the_newest_grant_renews_it_from_when_it_was_sent() -> None:
    clock = SetClock()
    grants = Grants(clock)
    grants.greeting()
    await grants.welcomed(120.0)
    await grants.receive(session_pb2.Grant(id=1, plan_id="7/1", mode=MODE, power_limit_w=25.0, longest_s=6000.0))
    grants.begin("7/1")
    clock.now_s = 60.0
    lease = grants.lease()
    clock.now_s = 90.0
    await grants.acknowledged(lease.number, 120.0, is_renewed=True)
    clock.now_s = 180.0
    assert await grants.next_change() == "the agent could not reach the coordinator for too long"


async def test_a_training_that_the_device_itself_stops_says_why_and_the_next_one_may_run() -> None:
    grants = Grants(SetClock())
    grants.greeting()
    await grants.welcomed(120.0)
    for plan_id in ("7/1", "7/2"):
        await grants.receive(session_pb2.Grant(id=1, plan_id=plan_id, mode=MODE, power_limit_w=25.0, longest_s=60.0))
        grants.begin(plan_id)
        assert not await stops(grants)
        await grants.stop("no mode keeps within the watts")
        assert await grants.next_change() == "no mode keeps within the watts"
        grants.ended()


@pytest.mark.parametrize("ends", ["trained", "stopped", "lapsed"])
async def test_a_plan_that_is_over_stays_over_when_granted_again_after_other_plans(ends: str) -> None:
    clock = SetClock()
    grants = Grants(clock)
    grants.greeting()
    await grants.welcomed(120.0)
    grant = session_pb2.Grant(id=1, plan_id="7/1", mode=MODE, power_limit_w=25.0, longest_s=60.0)
    await grants.receive(grant)
    if ends == "trained":
        grants.begin("7/1")
        grants.ended()
    elif ends == "stopped":
        await grants.receive(session_pb2.Grant(id=2, plan_id="7/1"))
    else:
        clock.now_s = 121.0
    assert grants.lease().phase == session_pb2.GRANT_PHASE_OVER
    grants.greeting()
    await grants.welcomed(120.0)
    for number, other in enumerate(("7/measuring-3", "8/1"), start=3):
        await grants.receive(session_pb2.Grant(id=number, plan_id=other, mode=MODE, power_limit_w=5.0, longest_s=60.0))
        grants.begin(other)
        grants.ended()
    grant.id = 9
    await grants.receive(grant)
    lease = grants.lease()
    assert (lease.grant_id, lease.plan_id, lease.phase) == (9, "7/1", session_pb2.GRANT_PHASE_OVER)
    assert not grants.awaits_training
    with pytest.raises(NoGrantError):
        grants.begin("7/1")


async def stops(grants: Grants) -> bool:
    change = asyncio.ensure_future(grants.next_change())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return change.done() or not change.cancel()
