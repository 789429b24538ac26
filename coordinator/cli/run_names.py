"""What the commands about runs share: how a run is named, by its name or Flower's id, and the styles of states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from wattfleet.errors import InvalidInputError, first_few

if TYPE_CHECKING:
    from coordinator.cli.client import CoordinatorClient
    from wattfleet_proto.v1 import view_pb2

_NEWEST = 5

NO_RUNS = (
    "no runs yet: start a Flower app whose strategy is wrapped in PowerAware, such as with `flwr run` (docs/flower.md)"
)
RUN_HELP = "the run's name, Flower's id of it, or the beginning of either"
RUN_STYLES = {"failed": "bold red", "stopped": "yellow", "running": "bold green"}


def names_of(runs: Iterable[view_pb2.RunView]) -> dict[str, str]:
    """The name of each run by its id, oldest first; older coordinators name no run, so that it has its id."""
    return {each.run_id: each.name or each.run_id for each in runs}


def run_id_of(known: Mapping[str, str], given: str) -> str:
    """Find the id of the run that a user named.

    Args:
        known: the names of all runs by id, oldest first.
        given: a run's name or id, or the unique beginning of one.

    Raises:
        InvalidInputError: no run matches, or several do.
    """
    if given in known:
        return given
    exactly = [run_id for run_id, name in known.items() if name == given]
    found = exactly or [each for each in known if given and (each.startswith(given) or known[each].startswith(given))]
    if len(found) == 1:
        return found[0]
    if found:
        names = first_few([each if known[each] == each else f"{known[each]} ({each})" for each in found])
        raise InvalidInputError(f"{given!r} is the beginning of several runs, {names}: give more of the name")
    newest = f"the newest runs are {', '.join(list(known.values())[-_NEWEST:])}" if known else NO_RUNS
    raise InvalidInputError(f"unknown run {given!r}: it never started, or was deleted; {newest}")


def run_ids_of(client: CoordinatorClient, given: Iterable[str]) -> dict[str, str]:
    """Find the runs that a user named, without duplicates: their names by id; errors as for `run_id_of`."""
    known = names_of(client.runs())
    return {run_id: known[run_id] for run_id in (run_id_of(known, each) for each in given)}
