"""Devices and runs whose ids mean something in an address: the page's links lead to them in a real browser."""

from __future__ import annotations

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.browser import browsing
from tests.fakes.served import serving, status
from wattfleet_proto.v1 import planning_pb2

IDS = (
    "../../etc/passwd",
    "/absolute",
    "//host/path",
    "a/./b/../c/",
    "100%",
    "a%2Fb",
    "%2e%2e",
    "what?x=1&y#here",
    "back\\slash",
    "räck 1+2; 'orin'",
    "...",
)


async def test_every_device_and_run_has_a_page_that_its_link_opens(config: CoordinatorSettings) -> None:
    async with serving(config) as client:
        for name in IDS:
            agent = client.agent()
            await agent.hello(name)
            await agent.goodbye()
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=name, strategy="FedAvg", rounds=1))
        run_names = {run.run_id: run.name for run in await client.runs()}
        host = str(client.bound.page_address)
        async with browsing(host) as tab:
            for listed in ("/", "/runs", "/events"):
                for name in IDS:
                    await tab.page.goto(f"http://{host}{listed}")
                    shown = run_names[name] if listed == "/runs" else name
                    link = tab.page.locator("th").get_by_role("link", name=shown, exact=True).first
                    async with tab.page.expect_navigation() as opened:
                        await link.click()
                    answer = await opened.value
                    assert answer.status == 200, (listed, name, tab.page.url)
                    assert shown in await tab.page.inner_text("h1"), (listed, name, tab.page.url)


@pytest.mark.parametrize("name", [".", ".."])
async def test_a_device_or_run_cannot_be_named_like_a_folder_of_an_address(
    config: CoordinatorSettings, name: str
) -> None:
    async with serving(config) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.agent().hello(name)
        assert status(refused) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"a device's id must not be '{name}', which an address cannot name: choose another one",
        )
        with pytest.raises(grpc.aio.AioRpcError, match="a run's id must not be"):
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=name, strategy="FedAvg", rounds=1))
