"""The rounds of runs that ended before this coordinator started: in the store, until somebody asks for them."""

from __future__ import annotations

from coordinator.fleet import Fleet
from coordinator.store.writer import Writer


async def recalled(fleet: Fleet, writer: Writer, run_id: str) -> None:
    """Have the rounds of a run at hand.

    Raises:
        NotOwnerError: another coordinator has taken the store over.
        StoreUnavailableError: they have to be read, and the database does not answer.
    """
    if fleet.is_archived(run_id):
        fleet.recall(run_id, await writer.rounds_of(run_id))
