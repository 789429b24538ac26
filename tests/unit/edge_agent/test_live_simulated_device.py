"""A simulated board in real time: its physics sets the duration and power of each turn."""

from __future__ import annotations

import numpy as np
import pytest

from edge_agent.devices.selection import folder_of_device, is_virtual, open_device
from edge_agent.devices.virtual.simulated import LiveSimulatedDevice, SimulatedDevice
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Task, Workload, WorkloadFacts, array_to_modes
from wattfleet_io.clock import Clock, SystemClock, VirtualClock

SPEC = "simulated:agx-orin:real-time"


class BoardOnATestsClock(LiveSimulatedDevice):
    """The board with a clock that the test advances."""

    def _new_clock(self) -> Clock:
        self.test_clock = VirtualClock(1000.0)
        return self.test_clock

    def power_after(self, seconds: float) -> float:
        self.test_clock.sleep_s(seconds)
        return self._power_mw()


@pytest.fixture
def board() -> BoardOnATestsClock:
    return BoardOnATestsClock("agx-orin", 3)


@pytest.fixture
def physics() -> SimulatedDevice:
    return SimulatedDevice("agx-orin", 3)


def served(batch: int) -> Workload:
    return Workload("mobilenetv3", WorkloadFacts(batch=batch, task=Task.INFERENCE))


def test_the_option_opens_a_board_on_the_machines_clock() -> None:
    device = open_device(SPEC, seed=3)
    assert isinstance(device.clock, SystemClock)
    assert (device.board_kind, device.provenance) == ("agx-orin", "simulated")


def test_it_is_a_virtual_board_with_a_folder_of_its_own(tmp_path) -> None:
    assert is_virtual(SPEC)
    assert folder_of_device(SPEC, tmp_path).is_relative_to(tmp_path)


@pytest.mark.parametrize("spec", ["simulated:tx2:real-time", "simulated:real-time", "simulated:agx-orin:fast"])
def test_other_options_are_refused(spec: str) -> None:
    with pytest.raises(InvalidInputError, match="simulated:<kind>:real-time"):
        open_device(spec, seed=0)


def test_minibatches_take_the_time_of_the_mode_in_force(board: BoardOnATestsClock, physics: SimulatedDevice) -> None:
    for mode in (physics.current_mode(), array_to_modes(physics.modes)[0]):
        board.apply(mode)
        found_ms = np.median([board.begin_minibatch() for _ in range(400)])
        assert found_ms == pytest.approx(physics.load(mode).minibatch_ms, rel=0.05)


def test_minibatches_take_the_time_of_the_apps_workload(board: BoardOnATestsClock, physics: SimulatedDevice) -> None:
    small = Workload("digits", WorkloadFacts(batch=32, parameters=3_000))
    board.begin_training().learned(small)
    found_ms = np.median([board.begin_minibatch() for _ in range(400)])
    assert found_ms == pytest.approx(physics.load(physics.current_mode(), small).minibatch_ms, rel=0.05)


def test_batches_take_the_time_of_their_size(board: BoardOnATestsClock, physics: SimulatedDevice) -> None:
    found_ms = np.median([board.begin_inference("mobilenetv3", 1, 12) for _ in range(400)], axis=0)
    expected_ms = [physics.load(physics.current_mode(), served(batch)).minibatch_ms for batch in (1, 2, 4, 8, 16)]
    assert found_ms == pytest.approx(expected_ms, rel=0.05)


def test_power_is_that_of_what_has_the_device(board: BoardOnATestsClock, physics: SimulatedDevice) -> None:
    mode = physics.current_mode()
    idle_mw = board.power_after(60)
    board.begin_minibatch()
    training_mw = board.power_after(60)
    board.begin_inference("mobilenetv3", 6, 16)
    inference_mw = board.power_after(60)
    board.rest()
    assert idle_mw == pytest.approx(physics.load(mode).idle_mw, rel=0.03)
    assert training_mw == pytest.approx(physics.load(mode).power_mw, rel=0.03)
    assert inference_mw == pytest.approx(physics.load(mode, served(8)).power_mw, rel=0.03)
    assert board.power_after(60) == pytest.approx(idle_mw)


def test_power_approaches_another_load_as_on_a_real_board(board: BoardOnATestsClock) -> None:
    idle_mw = board.power_after(60)
    board.begin_minibatch()
    soon_mw, later_mw = board.power_after(0.2), board.power_after(60)
    assert idle_mw < soon_mw < idle_mw + 0.5 * (later_mw - idle_mw)
