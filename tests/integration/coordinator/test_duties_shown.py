"""The operator's commands show how devices keep their duties."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.fronts import front
from tests.fakes.shell import asked, served_with_shell
from wattfleet.duties import KeptDuty
from wattfleet_proto.convert import front_to_message, kept_duty_from_message, kept_duty_to_message
from wattfleet_proto.v1 import duty_pb2, session_pb2

KEPT = KeptDuty("camera", 500, 0.95, 29.5, 12, 2, (*[1] * 11, *[0] * 6), 1500.0, 350.0, 4, 0.5, 1, "too long")


@pytest.mark.parametrize("kept", [KEPT, replace(KEPT, latency_at_quantile_ms=None, waits="")])
def test_figures_survive_their_message(kept: KeptDuty) -> None:
    assert kept_duty_from_message(kept_duty_to_message(kept)) == kept


async def test_a_device_with_a_duty_is_shown_with_its_figures(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        assert (await asked(shell, "device", "orin"))["duty"] is None
        await orin.send(lease=session_pb2.Lease(number=1, duty=kept_duty_to_message(KEPT)))
        shown = await asked(shell, "device", "orin")
        assert shown["duty"]["missed"] == 2 and shown["duty"]["waits"] == "too long"
        words = " ".join((await shell("device", "orin")).stdout.split())
        assert "camera: 95% of requests within 500 ms" in words
        assert "29.5 per second, in batches of 4; 95% within 350 ms" in words
        assert "2 of 12 (16.7%)" in words
        assert "50% of the last half minute; it waits: too long" in words


async def test_figures_that_no_device_can_have_are_left_out_and_the_session_lasts(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await orin.send(lease=session_pb2.Lease(number=1, duty=kept_duty_to_message(KEPT)))
        hostile = duty_pb2.DutyFigures(workload="camera", latency_ms=float("nan"))
        await orin.send(lease=session_pb2.Lease(number=2, duty=hostile))
        shown = await asked(shell, "device", "orin")
        assert shown["state"] == "ready" and shown["duty"]["missed"] == 2
        await orin.send(lease=session_pb2.Lease(number=3))
        assert (await asked(shell, "device", "orin"))["duty"] is None


async def test_watts_at_rest_that_change_in_a_session_are_reserved(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        before = (await asked(shell, "budget", "show"))[0]["set_aside_w"]
        for watts, added in ((40.0, 35.0), (12.0, 7.0)):
            # More than 35 W are only accepted with a duty.
            report = session_pb2.FrontReport(no_front="the duty takes the board", idle_w=watts, is_idle_with_duty=True)
            await orin.send(front=report)
            assert (await asked(shell, "device", "orin"))["idle_w"] == watts
            assert (await asked(shell, "budget", "show"))[0]["set_aside_w"] == before + added


async def test_a_training_that_a_duty_makes_longer_gets_a_longer_grant(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await client.plan()
        granted = await orin.grant()
        training = session_pb2.Lease(
            number=1,
            grant_id=granted.id,
            plan_id=granted.plan_id,
            phase=session_pb2.GRANT_PHASE_TRAINING,
            duty=kept_duty_to_message(KEPT),
        )
        await orin.send(lease=training)
        slower = front_to_message(front((30, 50), (60, 30), (120, 20)))
        await orin.send(front=session_pb2.FrontReport(front=slower, idle_w=5.0))
        longer = await orin.grant()
        assert (longer.plan_id, longer.mode, longer.power_limit_w) == (
            granted.plan_id,
            granted.mode,
            granted.power_limit_w,
        )
        assert longer.longest_s > granted.longest_s
        said = (await shell("rounds")).stdout
        assert "round 1 takes up to 60.0 s instead of 35.0 s: epochs take longer beside a duty" in said
