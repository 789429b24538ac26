"""A board that replays a measured profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.virtual.virtual_board import Load, VirtualBoard
from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeArray, PowerMode, Workload, array_to_modes, read_profile, require_one_training

# A profile does not contain idle power; in the Orin Nano's logs, it is 0.75 to 0.85 of the lowest training power.
_IDLE_SHARE = 0.8
# Nor does it contain the jitter of minibatches: this is the median over the Orin Nano's 26 logged modes.
_JITTER = 0.05


class ReplayDevice(VirtualBoard):
    """A board whose modes and true values are the rows of a measured profile.

    Every workload gets the times of its file, since nothing else is known of its board.

    Args:
        csv_path: a CSV file with the columns of `wattfleet.modes.PROFILE_COLUMNS`.
        seed: random seed of the noise around the recorded values.

    Raises:
        InvalidInputError: the file is not a valid profile, or not a profile of training with one batch size.
    """

    def __init__(self, csv_path: Path, seed: int) -> None:
        profile = read_profile(csv_path)
        require_one_training(str(csv_path), profile)
        self._recorded = {
            mode: (float(minibatch_ms), float(power_mw))
            for mode, minibatch_ms, power_mw in zip(
                array_to_modes(profile.modes), profile.minibatch_ms, profile.power_mw, strict=True
            )
        }
        self._idle_mw = _IDLE_SHARE * float(profile.power_mw.min())
        fastest = array_to_modes(profile.modes)[int(profile.minibatch_ms.argmin())]
        super().__init__(f"replay:{csv_path.stem}", "replayed", profile.modes, fastest, seed)

    def truth(
        self, modes: ModeArray, workload: Workload | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the recorded values in `[n, 4]` recorded modes: `[n]` ms per minibatch and `[n]` mW.

        Raises:
            InvalidInputError: a mode was not recorded.
        """
        wanted = array_to_modes(modes)
        unknown = [mode for mode in wanted if mode not in self._recorded]
        if unknown:
            raise InvalidInputError(f"{self.board_kind} has no measurement of {unknown[0].label()}")
        rows = np.array([self._recorded[mode] for mode in wanted]).reshape(-1, 2)
        return rows[:, 0], rows[:, 1]

    def _jitter(self, modes: ModeArray, workload: Workload | None) -> NDArray[np.float64]:
        return np.full(len(modes), _JITTER)

    def _load_at(self, mode: PowerMode) -> Load:
        minibatch_ms, power_mw = self._recorded[mode]
        return Load(minibatch_ms, power_mw, self._idle_mw, _JITTER)
