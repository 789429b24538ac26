"""Reads and writes settings in files with one number each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.tree import Tree
from wattfleet.errors import InvalidInputError


@dataclass(frozen=True)
class KnobNames:
    """The names under which a group of settings is saved.

    Attributes:
        required: names that are needed to restore the group.
        optional: names that are restored if they were saved.
    """

    required: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)


def set_value(tree: Tree, path: str, value: int) -> None:
    """Write a number; check with `differences` that it took effect.

    Raises:
        ModeNotAppliedError: the kernel refused it.
    """
    try:
        tree.write(path, str(value))
    except PermissionError:
        raise ModeNotAppliedError(f"{path}: no permission to write {value}; run the agent as root") from None
    except OSError as error:
        raise ModeNotAppliedError(f"{path}: wanted {value}, the kernel refused it: {error.strerror}") from None


def set_range(tree: Tree, lowest_path: str, highest_path: str, lowest: int, highest: int) -> None:
    """Write a frequency range in an order that never makes its minimum exceed its maximum.

    Kernel 4.9 would refuse that; 5.10 and later would silently clip the value.

    Raises:
        ModeNotAppliedError: the kernel refused it, or does not report the current range.
    """
    if highest > value_of(tree, highest_path):
        set_value(tree, highest_path, highest)
        set_value(tree, lowest_path, lowest)
    else:
        set_value(tree, lowest_path, lowest)
        set_value(tree, highest_path, highest)


def value_of(tree: Tree, path: str) -> int:
    """Return the number in a file.

    Raises:
        ModeNotAppliedError: it cannot be read, or is not a number.
    """
    try:
        return int(tree.read(path))
    except OSError as error:
        raise ModeNotAppliedError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ModeNotAppliedError(f"{path}: does not contain a number") from None


def differences(tree: Tree, wanted: Iterable[tuple[str, int]]) -> list[str]:
    """Describe which files have other values than these; empty if none has."""
    found = []
    for path, value in wanted:
        try:
            held = value_of(tree, path)
        except ModeNotAppliedError as error:
            found.append(f"{error}, wanted {value}")
            continue
        if held != value:
            found.append(f"{path}: wanted {value}, found {held}")
    return found


@contextmanager
def noting(failed: list[str]) -> Iterator[None]:
    """Collect a failure instead of raising it, so that the other settings are still restored."""
    try:
        yield
    except ModeNotAppliedError as error:
        failed.append(str(error))


def within(table: tuple[int, ...], limit: int) -> int:
    """Return the highest value of an ascending table within a limit; the limit need not be in the table."""
    return max((value for value in table if value <= limit), default=table[0])


def table_of(tree: Tree, path: str) -> tuple[int, ...]:
    """Return the possible values of a setting from the file that lists them, ascending.

    Raises:
        InvalidInputError: the file does not list any values.
    """
    try:
        table = tuple(sorted({int(value) for value in tree.read(path).split()}))
    except (OSError, ValueError):
        table = ()
    if not table:
        raise InvalidInputError(f"{path}: lists no values, so this board's power modes are unknown")
    return table
