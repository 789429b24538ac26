"""The numbers of local epochs that a plan may choose: valid choices, and the errors for invalid ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.errors import InvalidInputError
from wattfleet.planning import EpochChoice, EpochOption
from wattfleet.planning.epoch_choice import MAX_EPOCHS


def stated(choice: EpochChoice) -> list[tuple[float, float, float | None]]:
    return [(option.epochs, option.progress, option.half_devices) for option in choice.options]


# --- valid choices -------------------------------------------------------------------------------------------------


def test_epochs_without_progress_count_by_their_square_root() -> None:
    choice = EpochChoice.of([9, 1, 4])
    assert stated(choice) == [(1, 1.0, None), (4, 2.0, None), (9, 3.0, None)], "by ascending epochs"
    assert not choice.is_per_device
    assert choice.fewest == 1


def test_epochs_that_can_be_read_only_once_are_read_once() -> None:
    assert EpochChoice.of(map(int, "2,8".split(","))) == EpochChoice.of((8, 2))


def test_progress_and_devices_for_half_of_it_are_as_stated() -> None:
    choice = EpochChoice.of({5: 30.0, 2: 20.0, 1: 12.0}, half_devices={5: 8.0, 1: 2.5}, is_per_device=True)
    assert stated(choice) == [(1, 12.0, 2.5), (2, 20.0, None), (5, 30.0, 8.0)]
    assert choice.is_per_device


def test_plain_numbers_may_state_the_devices_for_half_of_the_progress() -> None:
    assert stated(EpochChoice.of([1, 4], half_devices={4: 6.0})) == [(1, 1.0, None), (4, 2.0, 6.0)]


@given(st.sets(st.integers(1, 10**6), min_size=1, max_size=16))
def test_up_to_sixteen_whole_numbers_are_a_choice(numbers: set[int]) -> None:
    choice = EpochChoice.of(numbers)
    assert [option.epochs for option in choice.options] == sorted(numbers)
    assert [option.progress**2 for option in choice.options] == pytest.approx(sorted(numbers))
    assert choice.fewest == min(numbers)


def test_a_fixed_number_is_a_choice_of_one_and_need_not_be_whole() -> None:
    assert stated(EpochChoice.fixed(0.5)) == [(0.5, 1.0, None)]
    assert EpochChoice.fixed(0.5).fewest == 0.5


def test_options_may_be_given_as_any_sequence_and_are_kept() -> None:
    options = [EpochOption(1), EpochOption(2, 1.5)]
    choice = EpochChoice(options)
    options.clear()
    assert choice == EpochChoice((EpochOption(1), EpochOption(2, 1.5)))
    assert hash(choice) == hash(EpochChoice((EpochOption(1), EpochOption(2, 1.5))))


# --- invalid options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1 / MAX_EPOCHS, 1, MAX_EPOCHS])
def test_the_most_and_the_fewest_epochs_are_within_the_range(epochs: float) -> None:
    assert EpochOption(epochs).epochs == epochs


@pytest.mark.parametrize("epochs", [0, -1, 0.9 / MAX_EPOCHS, 1.1 * MAX_EPOCHS, math.inf, -math.inf, math.nan])
def test_epochs_out_of_range_are_refused_with_the_range(epochs: float) -> None:
    for refused in (EpochOption, EpochChoice.fixed):
        with pytest.raises(InvalidInputError) as error:
            refused(epochs)
        assert str(error.value) == f"a round needs a number of epochs above 0 and at most 1,000,000, not {epochs:g}"


@pytest.mark.parametrize("progress", [0.0, -1.0, math.inf, math.nan])
def test_a_progress_out_of_range_is_refused_with_its_epochs(progress: float) -> None:
    with pytest.raises(InvalidInputError, match="the progress of a round with 3 epochs must be above 0") as error:
        EpochOption(3, progress)
    assert str(error.value).endswith(f"not {progress:g}")


@pytest.mark.parametrize("half", [0.0, -2.0, math.inf, math.nan])
def test_devices_for_half_the_progress_out_of_range_are_refused_with_their_epochs(half: float) -> None:
    with pytest.raises(InvalidInputError, match="half the progress of a round with 5 epochs must be above 0") as error:
        EpochOption(5, 1.0, half)
    assert str(error.value).endswith(f"not {half:g}")


# --- invalid choices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"progress": []}, "give 1 to 16 numbers of local epochs to choose from, not 0"),
        ({"progress": {}}, "give 1 to 16 numbers of local epochs to choose from, not 0"),
        ({"progress": range(1, 18)}, "give 1 to 16 numbers of local epochs to choose from, not 17"),
        ({"progress": [1, 2, 2]}, r"state each number of local epochs once, not \(1, 2, 2\)"),
        ({"progress": [0, 1]}, "a whole number of local epochs, 1 or more, not 0"),
        ({"progress": [-3, 1]}, "a whole number of local epochs, 1 or more, not -3"),
        ({"progress": {0: 1.0}}, "a whole number of local epochs, 1 or more, not 0"),
        ({"progress": [1, 2.5]}, "a whole number of local epochs, 1 or more, not 2.5"),
        ({"progress": {0.5: 1.0, 1: 2.0}}, "a whole number of local epochs, 1 or more, not 0.5"),
        ({"progress": [1, 2 * 10**6]}, "at most 1,000,000, not 2e"),
        ({"progress": {1: 1.0, 2: -1.0}}, "the progress of a round with 2 epochs must be above 0"),
        (
            {"progress": {1: 1.0, 2: 2.0}, "half_devices": {3: 1.0}},
            "half_devices states 3 local epochs, .* not an option",
        ),
        (
            {"progress": [1, 2], "half_devices": {9: 1.0, 4: 1.0}},
            "half_devices states 4 local epochs, .* not an option",
        ),
        ({"progress": [1, 2], "half_devices": {2: 0.0}}, "half the progress of a round with 2 epochs"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_with_what_is_wrong(wrong: Mapping[str, Any], error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        EpochChoice.of(**wrong)


@pytest.mark.parametrize("more", [2.0, 1.5])
def test_more_epochs_that_make_no_more_progress_are_named(more: float) -> None:
    with pytest.raises(InvalidInputError) as error:
        EpochChoice.of({1: 1.0, 2: 2.0, 4: more})
    assert str(error.value).startswith(f"4 local epochs with a progress of {more:g} follow 2 with 2: ")
    assert "leave out numbers that bring no more progress" in str(error.value)


@pytest.mark.parametrize("options", [((2, 1.0), (1, 2.0)), ((1, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0))])
def test_options_out_of_order_are_refused(options: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(InvalidInputError, match="by ascending epochs and progress"):
        EpochChoice([EpochOption(*option) for option in options])


def test_sixteen_options_are_not_too_many() -> None:
    assert len(EpochChoice.of(range(1, 17)).options) == 16
