"""Wraps the iteration of a data loader, and otherwise leaves it unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")


class WrappedLoader(Generic[Batch]):
    """A loader with wrapped iterations, and with the length and attributes of the original loader.

    Attributes:
        loader: the wrapped loader.
        shares_device: whether its minibatches hold the device, so that they must not wait for the agent.
    """

    shares_device = False

    def __init__(self, loader: Iterable[Batch], wrap: Callable[[Iterable[Batch]], Iterator[Batch]]) -> None:
        """Wrap a loader.

        Args:
            loader: yields minibatches.
            wrap: returns an iterator over the loader.
        """
        self.loader = loader
        self._wrap = wrap

    def __iter__(self) -> Iterator[Batch]:
        return self._wrap(self.loader)

    def __len__(self) -> int:
        length = length_of(self.loader)
        if length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":  # of this class itself, such as during unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)


def innermost(loader: Iterable[Batch]) -> Iterable[Batch]:
    """Return the app's own loader inside any wrappers."""
    while isinstance(loader, WrappedLoader):
        loader = loader.loader
    return loader


def shares_device(loader: Iterable[object]) -> bool:
    """Return whether a loader, or one that it wraps, holds the device while a minibatch is trained."""
    while isinstance(loader, WrappedLoader):
        if loader.shares_device:
            return True
        loader = loader.loader
    return False


def length_of(loader: Iterable[object]) -> int | None:
    """Return the number of minibatches of a loader; None if it has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]  # this checks whether it has a length
    except (TypeError, NotImplementedError):  # torch's iterable datasets may raise the latter
        return None
