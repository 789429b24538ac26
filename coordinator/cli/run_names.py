"""What the commands about runs share: how a run is named by the beginning of Flower's id, and the styles of states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from wattfleet.errors import InvalidInputError, first_few

if TYPE_CHECKING:
    from coordinator.cli.client import CoordinatorClient

_NEWEST = 5

NO_RUNS = (
    "no runs yet: start a Flower app whose strategy is wrapped in PowerAware, such as with `flwr run` (docs/flower.md)"
)
RUN_HELP = "Flower's id of the run, or its beginning"
RUN_STYLES = {"failed": "bold red", "stopped": "yellow", "running": "bold green"}


def run_id_of(known: Iterable[str], given: str) -> str:
    """Find the id of the run that a user named.

    Args:
        known: the ids of all runs, oldest first.
        given: an id, or the unique beginning of one.

    Raises:
        InvalidInputError: no run matches, or several do.
    """
    ids: Sequence[str] = list(known)
    if given in ids:
        return given
    found = [each for each in ids if given and each.startswith(given)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidInputError(f"{given!r} is the beginning of several runs, {first_few(found)}: give more of its id")
    newest = f"the newest runs are {', '.join(ids[-_NEWEST:])}" if ids else NO_RUNS
    raise InvalidInputError(f"unknown run {given!r}: it never started, or was deleted; {newest}")


def run_ids_of(client: CoordinatorClient, given: Iterable[str]) -> list[str]:
    """Find the ids of the runs that a user named, without duplicates; errors as for `run_id_of`."""
    known = [each.run_id for each in client.runs()]
    return list(dict.fromkeys(run_id_of(known, each) for each in given))
