"""The explanation of what limits a training step, as shares and as text."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest

import reference_models
from wattfleet.modes import PowerMode, board_named
from wattfleet.prediction import RooflinePredictor, restore_predictor
from wattfleet.prediction.roofline import TimeParameters, explain, settings_of, step_time_ms
from wattfleet.prediction.roofline.physics import step_shares

SPACE = settings_of(board_named("agx-orin").space.array(), None)
BALANCED = TimeParameters(
    loading_mcycles=40,
    loading_stall_mcycles=10,
    launch_mcycles=20,
    compute_mcycles=20,
    serial_compute_mcycles=8,
    traffic_mcycles=30,
    fixed_ms=1,
    workers=4,
    main_cores=1,
    background_ghz=0.1,
    gpu_overlap=0.8,
    launch_overlap=1.2,
    loading_overlap=3,
)
MODE = PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000)
WORK = {
    "loading": ("loading_mcycles", "loading_stall_mcycles"),
    "launch": ("launch_mcycles",),
    "compute": ("compute_mcycles", "serial_compute_mcycles"),
    "memory": ("traffic_mcycles",),
    "fixed": ("fixed_ms",),
}


def test_shares_are_positive_and_sum_to_one() -> None:
    shares = np.array(astuple(step_shares(BALANCED, SPACE)))
    assert (shares >= 0).all()
    np.testing.assert_allclose(shares.sum(0), 1, rtol=1e-12)


@pytest.mark.parametrize("resource", WORK)
def test_a_share_is_the_time_saved_by_less_work(resource: str) -> None:
    less = 1 - 1e-6
    changed = replace(BALANCED, **{name: less * getattr(BALANCED, name) for name in WORK[resource]})
    saved = 1 - step_time_ms(changed, SPACE[::50]) / step_time_ms(BALANCED, SPACE[::50])
    np.testing.assert_allclose(saved / 1e-6, getattr(step_shares(BALANCED, SPACE[::50]), resource), atol=1e-4)


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        ("loading", "more cores or a higher CPU clock"),
        ("launch", "more cores do not help"),
        ("compute", "a higher GPU clock"),
        ("memory", "a higher memory clock"),
        ("fixed", "No knob makes it faster"),
    ],
)
def test_the_resource_with_the_most_work_is_named(resource: str, expected: str) -> None:
    theta = replace(BALANCED, **{name: 200 * getattr(BALANCED, name) for name in WORK[resource]})
    (found,) = explain(theta, np.array([[*MODE, 16]], dtype=np.float64))
    assert found.mode == MODE
    assert found.bound == resource
    assert list(found.shares.values()) == sorted(found.shares.values(), reverse=True)
    assert expected in found.words()


def test_a_second_important_resource_is_named() -> None:
    theta = replace(BALANCED, gpu_overlap=1e-6, compute_mcycles=1e4, traffic_mcycles=2e4)
    (found,) = explain(theta, np.array([[*MODE, 16]], dtype=np.float64))
    assert ", then by " in found.words()


def test_the_shipped_reference_is_bound_by_the_slowed_resource() -> None:
    reference = restore_predictor(reference_models.load("agx_orin_resnet18"))
    assert isinstance(reference, RooflinePredictor)
    assert reference.explain(MODE._replace(cores=2, cpu_khz=268_800)).bound == "loading"
    assert reference.explain(MODE._replace(mem_hz=204_000_000)).bound == "memory"
    assert reference.explain(MODE._replace(gpu_hz=114_750_000)).bound == "compute"
