"""Supplies: the tree of power supplies of a fleet, with a site's connection at the root and circuits below it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from wattfleet.errors import InvalidInputError


@dataclass(frozen=True)
class Supply:
    """One supply.

    Attributes:
        name: its name, unique in the tree.
        parent: the supply that feeds it; None for a site's own connection.
    """

    name: str
    parent: str | None = None


@dataclass(frozen=True)
class Supplies:
    """One or more trees of supplies. Every path upwards ends at a site's own connection.

    Attributes:
        supplies: all supplies, each once, in any order.

    Raises:
        InvalidInputError: there are none, a name is empty or used twice, a parent is unknown, or the supplies form a
            cycle.
    """

    supplies: tuple[Supply, ...]

    def __post_init__(self) -> None:
        if not self.supplies:
            raise InvalidInputError("no supplies: give at least one, without a parent")
        seen: set[str] = set()
        for supply in self.supplies:
            if not supply.name.strip():
                raise InvalidInputError("a supply has an empty name: give it a name")
            if supply.name in seen:
                raise InvalidInputError(f"supply {supply.name!r} is defined twice: give each supply its own name")
            seen.add(supply.name)
        for supply in self.supplies:
            if supply.parent is not None and supply.parent not in seen:
                raise InvalidInputError(
                    f"supply {supply.name!r} has the unknown parent {supply.parent!r}: use one of"
                    f" {', '.join(sorted(seen))}"
                )
        for name in self.names:
            self._require_root(name)

    @cached_property
    def _parents(self) -> Mapping[str, str | None]:
        return {supply.name: supply.parent for supply in self.supplies}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the given order."""
        return tuple(supply.name for supply in self.supplies)

    @property
    def roots(self) -> tuple[str, ...]:
        """The sites' own connections, in the given order."""
        return tuple(supply.name for supply in self.supplies if supply.parent is None)

    def parent_of(self, name: str) -> str | None:
        """The supply that feeds another; None for a site's own connection.

        Raises:
            InvalidInputError: the name is unknown.
        """
        if name not in self._parents:
            raise InvalidInputError(f"unknown supply {name!r}: use one of {', '.join(self.names)}")
        return self._parents[name]

    def path(self, name: str) -> tuple[str, ...]:
        """A supply and all supplies above it, up to the site's own connection.

        Raises:
            InvalidInputError: the name is unknown.
        """
        path = [name]
        while (parent := self.parent_of(path[-1])) is not None:
            path.append(parent)
        return tuple(path)

    def behind(self, name: str) -> tuple[str, ...]:
        """A supply and all supplies that it feeds, directly or not, in the given order.

        Raises:
            InvalidInputError: the name is unknown.
        """
        self.parent_of(name)
        return tuple(each for each in self.names if name in self.path(each))

    def _require_root(self, name: str) -> None:
        """Check that the path upwards from a supply ends at a root.

        Raises:
            InvalidInputError: the path contains a cycle.
        """
        path = [name]
        while (parent := self._parents[path[-1]]) is not None:
            if parent in path:
                cycle = " <- ".join([*path[path.index(parent) :], parent])
                raise InvalidInputError(f"the supplies form a cycle ({cycle}): remove the parent of one of them")
            path.append(parent)
