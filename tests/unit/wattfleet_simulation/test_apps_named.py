"""The apps that the option `--app` names."""

from __future__ import annotations

import pytest

from wattfleet.errors import InvalidInputError
from wattfleet.modes import MAX_BATCH_OPTIONS
from wattfleet_simulation.settings import SimulatedApp, apps_named


@pytest.mark.parametrize(
    ("text", "apps"),
    [
        ("perceptron:32", [("perceptron", 32, ())]),
        ("perceptron:16/32/64", [("perceptron", 16, (32, 64))]),
        ("perceptron:64/16", [("perceptron", 64, (16,))]),
        ("convolutional:8/16+perceptron:32", [("convolutional", 8, (16,)), ("perceptron", 32, ())]),
    ],
)
def test_the_first_size_is_the_apps_own(text: str, apps: list[tuple[str, int, tuple[int, ...]]]) -> None:
    named = apps_named(text)
    assert named == tuple(SimulatedApp(*app) for app in apps)
    assert "+".join(map(str, named)) == text, "reports name an app as it was asked for"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("perceptron:16/", "write network:minibatch size"),
        ("perceptron:/16", "write network:minibatch size"),
        ("perceptron:16/many", "write network:minibatch size"),
        ("perceptron:16/-32", "write network:minibatch size"),
        ("perceptron:16,32", "write network:minibatch size"),
        ("perceptron:16/0", "at least 1 sample, not 0"),
        ("perceptron:16/32/16", "perceptron:16/32/16"),
        ("transformer:16/32", "unknown network 'transformer'"),
    ],
)
def test_sizes_that_cannot_be_are_refused(text: str, error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        apps_named(text)


def test_more_sizes_than_a_plan_can_choose_from_are_refused() -> None:
    with pytest.raises(InvalidInputError):
        apps_named(f"perceptron:{'/'.join(map(str, range(1, MAX_BATCH_OPTIONS + 2)))}")
