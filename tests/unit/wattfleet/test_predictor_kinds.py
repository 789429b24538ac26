"""Kinds of predictors are found through entry points, and a missing one gives an error with the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

import wattfleet.prediction.predictor as kinds
from wattfleet.errors import InvalidInputError
from wattfleet.prediction import DEFAULT_PREDICTOR, RooflinePredictor, predictor_class, predictor_names

BASELINES = ("boosting", "forest", "linear", "powertrain", "scratch", "tree")
ROOFLINE = ("roofline", "wattfleet.prediction.roofline:RooflinePredictor")


@pytest.fixture(autouse=True)
def fresh_registry() -> Iterator[None]:
    kinds.registered_kinds.cache_clear()
    yield
    kinds.registered_kinds.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    """Replace the entry points of the installation by these, each given as a name and a class."""
    found = [EntryPoint(name, value, "wattfleet.predictors") for name, value in entries]
    monkeypatch.setattr(kinds, "entry_points", lambda group: found if group == "wattfleet.predictors" else [])


def test_this_installation_provides_the_default_and_the_baselines() -> None:
    assert predictor_names() == ("roofline", *BASELINES)
    assert DEFAULT_PREDICTOR == "roofline"


def test_every_registered_class_has_the_name_of_its_entry_point() -> None:
    for name in predictor_names():
        assert predictor_class(name).name == name


def test_a_package_can_register_a_kind_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("aardvark", ROOFLINE[1]), ROOFLINE)
    assert predictor_names() == ("roofline", "aardvark")
    assert predictor_class("aardvark") is RooflinePredictor


def test_an_unknown_kind_is_refused_with_the_installed_ones() -> None:
    with pytest.raises(
        InvalidInputError,
        match=f"^unknown predictor 'oracle': installed are roofline, {', '.join(BASELINES)}$",
    ):
        predictor_class("oracle")


def test_the_package_that_provides_the_baselines_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ROOFLINE)
    with pytest.raises(
        InvalidInputError,
        match=f"'wattfleet_evaluation' provides {', '.join(BASELINES)}: install it",
    ):
        predictor_class("powertrain")


def test_a_registered_kind_whose_package_is_absent_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ROOFLINE, ("oracle", "wattfleet_delphi.oracle:Oracle"))
    with pytest.raises(InvalidInputError, match="predictor 'oracle' needs the package 'wattfleet_delphi': install it"):
        predictor_class("oracle")


def test_a_missing_dependency_of_a_kind_is_not_mistaken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("broken", "wattfleet.no_such_module:Broken"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        predictor_class("broken")
