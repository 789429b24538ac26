"""Moves rounds that nobody waits for out of memory once they are stored, and back when somebody asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from coordinator.settings import StoreSettings
from coordinator.state.fleet import Fleet
from coordinator.state.records import RoundRecord, run_of
from coordinator.store.writer import Writer
from wattfleet.planning import History


async def archive(
    fleet: Fleet,
    writer: Writer,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    settings: StoreSettings = StoreSettings(),
) -> None:
    """Let go of rounds as long as the coordinator serves; see `Fleet.dispensable_rounds`."""
    while True:
        await sleep(settings.archive_check_s)
        unsaved = writer.unsaved_rounds()
        # Somebody is about to look at what was recalled, and what a history lacks is taken from the rounds at hand.
        fleet.memory.let_go(
            [
                plan_id
                for plan_id in fleet.dispensable_rounds()
                if plan_id not in unsaved
                and ("round", plan_id) not in writer.recalls
                and ("history", run_of(plan_id)) not in writer.recalls
            ]
        )


async def recalled(fleet: Fleet, writer: Writer, plan_id: str) -> None:
    """Have a round at hand, if there is one.

    Raises:
        NotOwnerError: another coordinator has taken the store over.
        StoreUnavailableError: it has to be read, and the database does not answer.
    """

    async def recall() -> None:
        if (record := await writer.round_of(plan_id)) is not None:
            fleet.memory.recall(record)

    if fleet.memory.lacks(plan_id):
        await writer.recalls.once(("round", plan_id), recall)


async def recalled_history(fleet: Fleet, writer: Writer, run_id: str) -> None:
    """Have at hand what a run's earlier rounds come to, to plan another.

    Raises:
        NotOwnerError: another coordinator has taken the store over.
        StoreUnavailableError: they have to be read, and the database does not answer.
    """

    async def recall() -> None:
        fleet.memory.recall_history(run_id, await writer.history_of(run_id))

    if fleet.memory.lacks_history(run_id):
        await writer.recalls.once(("history", run_id), recall)
    else:
        fleet.memory.recall_history(run_id, History())


async def recalled_newest(fleet: Fleet, writer: Writer, run_id: str) -> None:
    """Have the newest round of a run at hand, if there is one.

    Raises:
        NotOwnerError: another coordinator has taken the store over.
        StoreUnavailableError: it has to be read, and the database does not answer.
    """
    if fleet.memory.is_archived(run_id) and (plan_id := await writer.newest_plan_of(run_id)) is not None:
        await recalled(fleet, writer, plan_id)


async def rounds_of(fleet: Fleet, writer: Writer, run_id: str) -> AsyncIterator[RoundRecord]:
    """The rounds of a run in the order they were planned; those in the store are only looked at, and stay there.

    Raises:
        NotOwnerError: another coordinator has taken the store over.
        StoreUnavailableError: some have to be read, and the database does not answer.
    """
    at_hand = {record.plan_id: record for record in fleet.rounds_of(run_id)}
    if fleet.memory.is_archived(run_id):
        async for record in writer.rounds_of(run_id):
            yield at_hand.pop(record.plan_id, record)  # what is at hand may be newer
    for record in at_hand.values():
        yield record
