"""The garbage collector of a process that serves: what lives for long is left alone, garbage is not."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from coordinator.interpreter import serve_many


class Ring:
    """Refers to itself, so that only the collector frees it."""

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
