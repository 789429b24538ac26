"""Garbage collection in a long-running service: objects that survive a collection are frozen, and garbage is freed."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from coordinator.server import serve_many


class Ring:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    switch_s, callbacks = sys.getswitchinterval(), list(gc.callbacks)
    yield
    sys.setswitchinterval(switch_s)
    gc.callbacks[:] = callbacks


def test_what_outlives_a_collection_is_left_out_of_the_next_and_new_garbage_goes() -> None:
    serve_many()
    session = Ring()
    gc.collect()
    assert not any(each is session for each in gc.get_objects()), "otherwise each collection would visit it"
    garbage = weakref.ref(Ring())
    gc.collect()
    assert garbage() is None
