"""Fewer cases of a test for `make test`; `make test-all` tries all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

ALL_EXAMPLES = 100
"""Examples of a property test that sets no number itself, in the slow form: the default of Hypothesis."""

FEW_EXAMPLES = 25
"""The same in the short form."""


def examples(count: int) -> settings:
    """Try this many examples of a property in the slow form, and a quarter of them in the short one."""
    return settings(max_examples=max(5, count * settings().max_examples // ALL_EXAMPLES))


def first(short: int, cases: Sequence[Any]) -> list[Any]:
    """Parameters of a test, of which the short form tries the first ones."""
    marked = [pytest.param(*each if isinstance(each, tuple) else (each,), marks=pytest.mark.slow) for each in cases]
    return [each if k < short else marked[k] for k, each in enumerate(cases)]
