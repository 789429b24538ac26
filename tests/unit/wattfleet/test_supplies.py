"""Trees of supplies: every path upwards ends at a site, and other structures are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.budgets import Supplies, Supply
from wattfleet.errors import InvalidInputError


def supplies(**parents: str | None) -> Supplies:
    return Supplies(tuple(Supply(name, parent) for name, parent in parents.items()))


def test_a_path_goes_from_a_supply_up_to_its_site() -> None:
    tree = supplies(socket="rack", rack="site", site=None, shed=None)
    assert tree.path("socket") == ("socket", "rack", "site")
    assert tree.path("site") == ("site",)
    assert tree.path("shed") == ("shed",)
    assert tree.roots == ("site", "shed")
    assert tree.names == ("socket", "rack", "site", "shed")
    assert (tree.parent_of("rack"), tree.parent_of("site")) == ("site", None)


@given(st.lists(st.integers(0, 30), max_size=30))
def test_any_tree_is_accepted_in_any_order_and_its_paths_follow_the_parents(picks: list[int]) -> None:
    """Supply k is a site, or is below one of the supplies before it."""
    parents = {"s0": None} | {
        f"s{k}": None if pick % (k + 1) == k else f"s{pick % (k + 1)}" for k, pick in enumerate(picks, start=1)
    }
    tree = Supplies(tuple(Supply(name, parents[name]) for name in reversed(parents)))
    for name in parents:
        path = tree.path(name)
        assert path[0] == name
        assert parents[path[-1]] is None
        assert [parents[below] for below in path[:-1]] == list(path[1:])


@pytest.mark.parametrize(
    ("parents", "said"),
    [
        ({}, "no supplies: give at least one"),
        ({" ": None}, "empty name"),
        ({"rack": "site"}, "has the unknown parent 'site'"),
        ({"site": None, "rack": "rack"}, "cycle (rack <- rack)"),
        ({"site": None, "a": "b", "b": "c", "c": "b"}, "cycle (b <- c <- b)"),
    ],
)
def test_what_is_no_tree_is_refused_and_the_error_names_it(parents: dict[str, str | None], said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        supplies(**parents)
    assert said in str(refused.value)


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="'site' is defined twice"):
        Supplies((Supply("site"), Supply("site")))


def test_a_supply_that_is_not_stated_has_no_path() -> None:
    with pytest.raises(InvalidInputError, match="unknown supply 'rack': use one of site"):
        supplies(site=None).path("rack")
