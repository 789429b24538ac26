"""Supplies: the tree of what feeds a fleet, a site's connection at its root and circuits below it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from wattfleet.errors import InvalidInputError


@dataclass(frozen=True)
class Supply:
    """One supply.

    Attributes:
        name: what it is called, once in a tree.
        parent: the supply that feeds it; None for a site's own connection.
    """

    name: str
    parent: str | None = None


@dataclass(frozen=True)
class Supplies:
    """A tree of supplies, or several: every path upwards ends at a site's own connection.

    Attributes:
        supplies: each once, in any order.

    Raises:
        InvalidInputError: none is given, one has no name or the name of another, a parent is not among them, or
            some feed each other in a circle.
    """

    supplies: tuple[Supply, ...]

    def __post_init__(self) -> None:
        if not self.supplies:
            raise InvalidInputError("no supply is stated: state one at least, without a parent")
        seen: set[str] = set()
        for supply in self.supplies:
            if not supply.name.strip():
                raise InvalidInputError("a supply has no name: give it one")
            if supply.name in seen:
                raise InvalidInputError(f"supply {supply.name!r} is stated twice: give each a name of its own")
            seen.add(supply.name)
        for supply in self.supplies:
            if supply.parent is not None and supply.parent not in seen:
                raise InvalidInputError(
                    f"supply {supply.name!r}: its parent {supply.parent!r} is not stated; known are"
                    f" {', '.join(sorted(seen))}"
                )
        for name in self.names:
            self._require_root(name)

    @cached_property
    def _parents(self) -> Mapping[str, str | None]:
        return {supply.name: supply.parent for supply in self.supplies}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order given."""
        return tuple(supply.name for supply in self.supplies)

    @property
    def roots(self) -> tuple[str, ...]:
        """The sites' own connections, in the order given."""
        return tuple(supply.name for supply in self.supplies if supply.parent is None)

    def parent_of(self, name: str) -> str | None:
        """The supply that feeds another; None for a site's own connection.

        Raises:
            InvalidInputError: no such supply.
        """
        if name not in self._parents:
            raise InvalidInputError(f"no supply {name!r} is stated; known are {', '.join(self.names)}")
        return self._parents[name]

    def path(self, name: str) -> tuple[str, ...]:
        """A supply and all that feed it, from itself up to the site's own connection.

        Raises:
            InvalidInputError: no such supply.
        """
        path = [name]
        while (parent := self.parent_of(path[-1])) is not None:
            path.append(parent)
        return tuple(path)

    def _require_root(self, name: str) -> None:
        """Make sure that the way up from a supply ends.

        Raises:
            InvalidInputError: it comes by a supply twice.
        """
        path = [name]
        while (parent := self._parents[path[-1]]) is not None:
            if parent in path:
                circle = " <- ".join([*path[path.index(parent) :], parent])
                raise InvalidInputError(
                    f"supplies feed each other in a circle ({circle}): one of them has to have no parent"
                )
            path.append(parent)
