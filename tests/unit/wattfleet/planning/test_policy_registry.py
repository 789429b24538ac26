"""Policies that installed packages provide, and the errors for defective ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from wattfleet.errors import InvalidInputError
from wattfleet.planning.policies import (
    POLICIES,
    PlanningContext,
    SelectionRequest,
    any_devices,
    policy_named,
    policy_names,
    registry,
)


@dataclass(frozen=True)
class Own:
    """A user-defined policy."""

    count: int | None = None
    name: str = "own"
    has_count: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.count == 13:
            raise ValueError("13 is unlucky")

    def request(self, context: PlanningContext) -> SelectionRequest:
        return any_devices(context, self.count)


class NoPolicy:
    """A class that is not a policy."""


def install(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str, str]) -> None:
    """Register entry points for policies, each given as name, value and distribution."""
    found = []
    for name, value, package in entries:
        entry = EntryPoint(name, value, "wattfleet.policies")
        vars(entry).update(dist=cast(Distribution, SimpleNamespace(name=package)))
        found.append(entry)
    monkeypatch.setattr(registry, "_entries", lambda path: tuple(found))
    monkeypatch.setitem(
        __import__("sys").modules, "own_policies", SimpleNamespace(Own=Own, NoPolicy=NoPolicy, word="a")
    )


def test_a_policy_of_an_installed_package_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("own", "own_policies:Own", "acme"), ("aardvark", "own_policies:Own", "acme"))
    assert policy_names() == (*POLICIES, "aardvark", "own"), "the built-in ones come first"
    assert policy_named("own", count=3, seed=1, floor=None) == Own(3)
    with pytest.raises(InvalidInputError, match="policy 'own' does not take floor: its options are count"):
        policy_named("own", floor=0.5)


def test_a_package_that_is_found_twice_on_the_path_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("own", "own_policies:Own", "acme"), ("own", "own_policies:Own", "acme"))
    assert policy_named("own") == Own()


@pytest.mark.parametrize(
    ("entries", "asked", "reason"),
    [
        ([("own", "own_policies:Own", "acme")], "oracle", "unknown policy 'oracle': choose one of .*, progress, own$"),
        (
            [("own", "own_policies:Own", "acme"), ("own", "own_policies:Own", "zenith")],
            "own",
            "'own' is provided 2 times, by acme and zenith: rename one of the entry points, or uninstall one of",
        ),
        (
            [("all", "own_policies:Own", "acme")],
            "all",
            "'all' is built in, and acme provides another one of this name: rename its entry point, or uninstall acme",
        ),
        (
            [("own", "no_such_module:Own", "acme")],
            "own",
            "'own' of acme cannot be loaded from 'no_such_module:Own' .ModuleNotFoundError: No module named",
        ),
        ([("own", "own_policies:Absent", "acme")], "own", "'own' of acme cannot be loaded .* .AttributeError: "),
        ([("own", "own_policies:word", "acme")], "own", "'own' of acme cannot be loaded .* .TypeError: 'a' is not a"),
        ([("own", "own_policies:NoPolicy", "acme")], "own", "'own' of acme lacks name, has_count or request"),
    ],
)
def test_a_defective_policy_is_refused_with_its_package(
    monkeypatch: pytest.MonkeyPatch, entries: list[Any], asked: str, reason: str
) -> None:
    install(monkeypatch, *entries)
    with pytest.raises(InvalidInputError, match=reason):
        policy_named(asked)
    assert policy_named("progress"), "the others can be used"


def test_a_policy_that_rejects_its_options_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("own", "own_policies:Own", "acme"))
    with pytest.raises(InvalidInputError, match=re.escape("'own' of acme cannot be built (ValueError: 13 is unlucky)")):
        policy_named("own", count=13)
