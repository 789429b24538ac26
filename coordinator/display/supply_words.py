"""The order of supplies in a list, and texts about their budgets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.display.view_values import Values

_ROUNDING = 1 + 1e-9


def as_tree(budgets: Iterable[Values]) -> list[Values]:
    """Sort supplies so that each follows the one that feeds it, and add their `depth`; by name within each."""
    found = list(budgets)
    parents = {each["supply"]: each["parent"] for each in found}

    def path(supply: str) -> tuple[str, ...]:
        parent = parents.get(supply)
        return (*(() if parent is None else path(parent)), supply)

    ordered = sorted(found, key=lambda each: path(each["supply"]))
    return [{**each, "depth": len(path(each["supply"])) - 1} for each in ordered]


def behind(supply: str, budgets: Iterable[Values]) -> set[str]:
    """A supply and all supplies that it feeds, directly or not."""
    tree = as_tree(budgets)
    found = {supply}
    for each in tree:  # each follows the one that feeds it
        if each["parent"] in found:
            found.add(each["supply"])
    return found


def source_word(budget: Values) -> str:
    """Where the watts in force come from, in one word."""
    return "fallback" if budget["fallback"] else str(budget["source"])


def source_detail(budget: Values) -> str:
    """More about where the watts in force come from; empty for a source that says everything."""
    says_all = not budget["fallback"] and budget["source"] in ("constant", "operator", "query")
    return "" if says_all else str(budget["reason"])


def is_exceeded(budget: Values) -> bool:
    """Whether more watts are set aside than the budget allows."""
    return bool(budget["set_aside_w"] > budget["watts"] * _ROUNDING)


def why_in_force(budget: Values) -> str | None:
    """Why a fallback or an override is in force; None for the watts of the configured source."""
    if budget["fallback"]:
        return f"fallback of its {budget['source']} in force: {budget['reason']}"
    return str(budget["reason"]) if budget["source"] == "operator" else None
