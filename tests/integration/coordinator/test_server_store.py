"""The coordinator process and its store: ownership, what is kept, and what clients see when the disk is full."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from sqlalchemy import URL, event
from sqlalchemy.pool import Pool

from coordinator.errors import NotOwnerError, StoreInUseError
from coordinator.server import serve
from coordinator.settings import CoordinatorSettings
from coordinator.store.ownership import AdvisoryLock, FileLock
from coordinator.store.store import Store
from tests.fakes.certified import CertifiedFleet, certified
from tests.fakes.postgresql import PostgresServer
from tests.fakes.running_coordinator import Running, runs_of, start_run
from wattfleet.errors import InvalidInputError
from wattfleet_identity.channels import open_async_channel
from wattfleet_identity.peers import Role
from wattfleet_io import cli
from wattfleet_proto.v1 import (
    identity_pb2,
    identity_pb2_grpc,
    view_pb2,
    view_pb2_grpc,
)

_WITHIN_S = 30.0


@pytest.fixture
def config(config: CoordinatorSettings) -> CoordinatorSettings:
    """A coordinator that checks often whether a store is free or has another owner."""
    return config.with_values(store={"standby_check_s": 0.01, "owner_check_s": 0.02})


async def test_a_second_coordinator_on_one_store_ends_at_once_and_the_first_serves_on(
    config: CoordinatorSettings,
) -> None:

    first = Running(config)
    async with first.channel() as channel:
        with pytest.raises(StoreInUseError, match="--standby"):
            await serve(config, lambda _: pytest.fail("it came up"))
        await start_run(channel, "1")
    await first.end()
    assert runs_of(config) == ["1"]


async def test_the_longest_lifetime_that_devices_were_told_is_stored(config: CoordinatorSettings) -> None:
    lifetimes_s = []
    for told_s in (60.0, 600.0, 30.0):
        running = Running(config.with_values(grants={"lifetime_s": told_s}))
        await running.bound
        store = sqlite3.connect(config.store.location)
        lifetimes_s += store.execute("SELECT lifetime_s FROM grant_lifetime").fetchall()
        store.close()
        await running.end()
    assert lifetimes_s == [(60.0,), (600.0,), (600.0,)], "devices may rely on 600 s for 600 s yet"


async def test_a_coordinator_on_standby_serves_once_the_first_is_gone(config: CoordinatorSettings) -> None:

    first, second = Running(config), None
    async with first.channel() as channel:
        await start_run(channel, "1")
        second = Running(config.with_values(store={"standby": True}))
        await asyncio.sleep(0.1)
        assert not second.bound.done(), "it listens only once it owns the store"
    await first.end()
    async with second.channel() as channel:
        view: Any = view_pb2_grpc.ViewServiceStub(channel)
        runs = [run async for answer in view.ListRuns(view_pb2.ListRunsRequest()) for run in answer.runs]
        assert runs[-1].run_id == "1"
        await start_run(channel, "2")
    await second.end()
    assert runs_of(config) == ["1", "2"]


async def test_a_standby_goes_on_with_the_authority_as_the_first_has_left_it(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    config = certified(config, fleet.authority.folder)
    first = Running(config)
    anna = fleet.identity(Role.OPERATOR, "anna")
    begin = identity_pb2.BeginRotationRequest()
    second = None
    address = (await first.bound).address
    second = Running(config.with_values(store={"standby": True}))
    async with open_async_channel(address, anna) as channel:
        await identity_pb2_grpc.IdentityServiceStub(channel).BeginRotation(begin)
    await first.end()
    async with open_async_channel((await second.bound).address, anna) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="is being replaced already"):
            await identity_pb2_grpc.IdentityServiceStub(channel).BeginRotation(begin)
    await second.end()


async def test_a_standby_takes_over_the_address_of_the_first_one(config: CoordinatorSettings) -> None:
    first = Running(config)
    async with first.channel() as channel:
        await start_run(channel, "1")
        address, metrics_address = (await first.bound).address, (await first.bound).metrics_address
        same = {"address": address, "metrics_address": metrics_address}
        second = Running(config.with_values(store={"standby": True}, server=same))
        await asyncio.sleep(0.1)
        assert not second.task.done(), "the address is in use by the one that it waits for"
    await first.end()
    async with second.channel() as channel:
        await start_run(channel, "2")
    assert (await second.bound).address == address
    await second.end()


async def test_a_standby_waits_until_its_address_is_free(config: CoordinatorSettings) -> None:
    """The previous coordinator may have lost the store, and still listen for a moment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        in_use = f"127.0.0.1:{taken.getsockname()[1]}"
        standby = Running(config.with_values(store={"standby": True}, server={"address": in_use}))
        await asyncio.sleep(2)
        assert not standby.task.done()
    assert (await standby.bound).address == in_use
    await standby.end()


async def test_a_standby_whose_address_another_program_uses_gives_the_store_back(config: CoordinatorSettings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        in_use = f"127.0.0.1:{taken.getsockname()[1]}"
        standby = config.with_values(store={"standby": True}, server={"address": in_use, "stop_limit_s": 0.1})
        with pytest.raises(InvalidInputError, match=f"cannot listen on {in_use}"):
            await serve(standby, lambda _: pytest.fail("it came up"))
    assert runs_of(config) == [], "another one can open it"


async def test_a_coordinator_that_was_taken_over_refuses_and_ends(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that the request notices it before the check does.
    first = Running(config.with_values(store={"owner_check_s": 60.0}))
    async with first.channel() as channel:
        await start_run(channel, "early")  # everything written at the start is stored
        # As if its lock had been released without its notice.
        monkeypatch.setattr(FileLock, "take", lambda _: True)
        second = Store(Path(config.store.location))
        with pytest.raises(grpc.aio.AioRpcError, match="another coordinator has taken the store over") as refused:
            await start_run(channel, "late")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(NotOwnerError):
            await first.task
        assert [run.run_id for run in second.load().runs] == ["early"]
        second.close()


async def test_a_coordinator_that_only_listens_learns_that_it_was_taken_over_and_ends(
    config: CoordinatorSettings, postgresql: PostgresServer, postgresql_database: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Running(config.with_values(store={"location": postgresql_database.render_as_string(hide_password=False)}))
    async with first.channel():
        # As if it had lost its database for a long time.
        monkeypatch.setattr(AdvisoryLock, "take", lambda _: True)
        second = await asyncio.to_thread(Store, postgresql_database)
        with pytest.raises(NotOwnerError, match="another coordinator has taken the store over"):
            await first.task
        second.close()


async def test_a_full_disk_is_reported_reads_work_and_all_is_stored_later(
    config: CoordinatorSettings,
) -> None:
    pages = [1_000_000_000]

    def limit(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count={pages[-1]}")

    event.listen(Pool, "checkout", limit)
    try:
        running = Running(config)
        async with running.channel() as channel:
            await start_run(channel, "before")
            view: Any = view_pb2_grpc.ViewServiceStub(channel)
            pages.append(1)
            refused: list[grpc.aio.AioRpcError] = []
            started = 0
            while not refused:
                try:
                    await start_run(channel, f"{started:0200}")
                    started += 1
                except grpc.aio.AioRpcError as error:
                    refused.append(error)
            assert refused[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "database or disk is full" in str(refused[0].details())
            assert (await view.GetFleet(view_pb2.GetFleetRequest())).site_budget_w == 100.0
            pages.append(1_000_000_000)
            await start_run(channel, "after")
        await running.end()
        assert len(runs_of(config)) == started + 3, "the one that was refused is stored as well"
    finally:
        event.remove(Pool, "checkout", limit)


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "options", "text"),
    [
        ("mysql://fleet:hunter2@db/watts", [], "sqlite:///PATH or postgresql://USER@HOST:PORT/DATABASE"),
        ("postgresql://fleet:hunter2@127.0.0.1:1/watts", [], "postgresql://127.0.0.1:1/watts cannot be used"),
        ("coordinator.db", ["--keep-days", "0"], "--keep-days must be above 0"),
        (
            "coordinator.db",
            ["--store", "postgresql://fleet:hunter2@db/watts"],
            "--store: a password on the command line",
        ),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_without_its_password(
    store: str, options: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTFLEET_COORDINATOR_STORE_LOCATION", store)
    serve_on = ("coordinator", "serve", "--site-budget-w", "60", "--address", "127.0.0.1:0", "--metrics-address")
    ran = CliRunner().invoke(cli.wattfleet, [*serve_on, "127.0.0.1:0", *options])
    assert ran.exception is not None and text in str(ran.exception)
    assert "hunter2" not in f"{ran.output} {ran.exception}"
