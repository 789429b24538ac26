"""Reads and writes settings in files with one number each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.tree import Tree
from wattfleet.errors import InvalidInputError

Step = Callable[[], None]
"""One write, or a few that belong together, of a change of settings. May raise `ModeNotAppliedError`."""


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


def range_reductions(tree: Tree, paths: tuple[str, str], limits: tuple[int, int]) -> Iterator[Step]:
    """Yield the writes of a frequency range that do not raise a limit.

    With `range_increases` after it, the minimum never exceeds the maximum. Kernel 4.9 would refuse that; 5.10 and later
    would silently clip the value. A limit that cannot be read is written here, so that a change to a lower mode lowers
    it all the same.

    Args:
        tree: the board's files.
        paths: the files of the minimum and the maximum.
        limits: the minimum and the maximum to be set.
    """
    for path, limit in zip(paths, limits, strict=True):
        held = _held(tree, path)
        if held is None or limit <= held:
            yield partial(set_value, tree, path, limit)


def range_increases(tree: Tree, paths: tuple[str, str], limits: tuple[int, int]) -> Iterator[Step]:
    """Yield the writes of a frequency range that raise a limit; see `range_reductions`."""
    for path, limit in zip(reversed(paths), reversed(limits), strict=True):
        held = _held(tree, path)
        if held is not None and limit > held:
            yield partial(set_value, tree, path, limit)


def set_range(tree: Tree, paths: tuple[str, str], limits: tuple[int, int]) -> None:
    """Set a frequency range at once, and check that it took effect.

    Raises:
        ModeNotAppliedError: the kernel refused it, or holds another value afterwards.
    """
    for change in (range_reductions, range_increases):
        for step in change(tree, paths, limits):
            step()
    if found := differences(tree, zip(paths, limits, strict=True)):
        raise ModeNotAppliedError("; ".join(found))


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


def _held(tree: Tree, path: str) -> int | None:
    """Return the number in a file; None if it cannot be read."""
    try:
        return value_of(tree, path)
    except ModeNotAppliedError:
        return None


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


def not_lowered(tree: Tree, wanted: Iterable[tuple[str, int]]) -> list[str]:
    """Describe which files have a higher value than these, or cannot be read; empty if none has."""
    return differences(tree, [each for each in wanted if (held := _held(tree, each[0])) is None or held > each[1]])


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
