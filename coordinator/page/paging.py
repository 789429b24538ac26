"""Pages of a long list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

_ROWS = 50


@dataclass(frozen=True)
class ListPage:
    """One page of a list.

    Attributes:
        rows: its rows.
        number: the number of the page, from 1.
        pages: number of pages.
        total: number of rows of the whole list.
    """

    rows: Sequence[Any]
    number: int
    pages: int
    total: int


def page_of(rows: Sequence[Any], request: Request) -> ListPage:
    """The page of a list that a request names; the nearest one if that page does not exist."""
    asked = request.query_params.get("page", "1")
    pages = max(1, -(-len(rows) // _ROWS))
    number = min(max(int(asked), 1), pages) if asked.isdecimal() and len(asked) < 10 else 1
    return ListPage(rows[(number - 1) * _ROWS : number * _ROWS], number, pages, len(rows))
