"""Files that hold one number each: written with a reason when that fails, and read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.tree import Tree
from wattfleet.errors import InvalidInputError


@dataclass(frozen=True)
class KnobNames:
    """The names under which a group of knobs is kept.

    Attributes:
        required: without these nothing can be put back.
        optional: these are put back where they were kept.
    """

    required: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)


def set_value(tree: Tree, path: str, value: int) -> None:
    """Write a number; whether it took effect is for `differences` to say.

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
    """Write a range of frequencies so that its minimum never stands above its maximum.

    Kernel 4.9 refuses such a moment; 5.10 and later cut the value off without a word.

    Raises:
        ModeNotAppliedError: the kernel refused it, or does not say what the range is now.
    """
    if highest > value_of(tree, highest_path):
        set_value(tree, highest_path, highest)
        set_value(tree, lowest_path, lowest)
    else:
        set_value(tree, lowest_path, lowest)
        set_value(tree, highest_path, highest)


def value_of(tree: Tree, path: str) -> int:
    """The number in a file.

    Raises:
        ModeNotAppliedError: there is none to be read.
    """
    try:
        return int(tree.read(path))
    except OSError as error:
        raise ModeNotAppliedError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ModeNotAppliedError(f"{path}: holds no number") from None


def differences(tree: Tree, wanted: Iterable[tuple[str, int]]) -> list[str]:
    """What the files hold instead of these values; nothing where all is as wanted."""
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
    """Note a knob that fails instead of stopping at it, so that the others are put back all the same."""
    try:
        yield
    except ModeNotAppliedError as error:
        failed.append(str(error))


def within(table: tuple[int, ...], limit: int) -> int:
    """The highest value of an ascending table that a limit allows, which need not be in the table itself."""
    return max((value for value in table if value <= limit), default=table[0])


def table_of(tree: Tree, path: str) -> tuple[int, ...]:
    """The numbers in a file of a knob's possible values, ascending.

    Raises:
        InvalidInputError: it lists none.
    """
    try:
        table = tuple(sorted({int(value) for value in tree.read(path).split()}))
    except (OSError, ValueError):
        table = ()
    if not table:
        raise InvalidInputError(f"{path}: lists no values; without them this board's power modes are unknown")
    return table
