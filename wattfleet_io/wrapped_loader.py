"""A data loader whose iteration is wrapped, and which otherwise is what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")


class WrappedLoader(Generic[Batch]):
    """A loader whose every iteration is wrapped; it has the loader's length and attributes.

    Attributes:
        loader: the wrapped loader.
        shares_device: whether its minibatches hold the device, so that nothing may wait for the agent within them.
    """

    shares_device = False

    def __init__(self, loader: Iterable[Batch], wrap: Callable[[Iterable[Batch]], Iterator[Batch]]) -> None:
        """Wrap a loader.

        Args:
            loader: yields minibatches.
            wrap: makes an iterator over the loader.
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
        if name.startswith("_") or name == "loader":  # of this class itself, such as while it is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


def innermost(loader: Iterable[Batch]) -> Iterable[Batch]:
    """The app's own loader inside of any wrappers."""
    while isinstance(loader, WrappedLoader):
        loader = loader.loader
    return loader


def shares_device(loader: Iterable[object]) -> bool:
    """Whether a loader, or one that it wraps, holds the device while a minibatch is trained."""
    while isinstance(loader, WrappedLoader):
        if loader.shares_device:
            return True
        loader = loader.loader
    return False


def length_of(loader: Iterable[object]) -> int | None:
    """Return how many minibatches a loader has; None if it has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]  # the question is whether it has a length
    except (TypeError, NotImplementedError):  # torch's iterable datasets may raise the latter
        return None
