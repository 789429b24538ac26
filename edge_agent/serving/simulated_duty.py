"""The duty of a simulated board, with simulated requests; its inference is measured before they arrive."""

from __future__ import annotations

import numpy as np

from edge_agent.devices.device import Device
from edge_agent.devices.virtual.board_parameters import inference_workloads
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.profiling.profiler import Profiler
from edge_agent.serving.inference_rows import InferenceRows
from wattfleet.duties import ConstantArrivals, Duty
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, PowerMode, Profile, Task, Workload, WorkloadFacts, array_to_modes

LARGEST_BATCH = 64
"""Maximum of requests that a simulated inference server accepts at once: the largest measured batch."""

SWITCH_MS = 5.0
"""Time of a simulated board between inference and training, ms. Assumed, since no measured file states it."""

_MEASURED_ROWS = 40
_FORM = "write network:requests per second:latency in ms, such as mobilenetv3:60:500, and :0.99 for another quantile"


def simulated_duty(text: str) -> Duty:
    """Read a duty such as `mobilenetv3:60:500`, or `mobilenetv3:60:500:0.99`.

    Args:
        text: the network, requests per second, the limit of their latency in ms, and the share of the requests that
            must be answered within it (0.95 by default).

    Raises:
        InvalidInputError: the text has another form, the network was not measured, or a number is out of range.
    """
    network, *numbers = text.split(":")
    try:
        per_s, latency_ms, *quantile = map(float, numbers)
        is_complete = len(quantile) <= 1
    except ValueError:
        is_complete = False
    if not is_complete:
        raise InvalidInputError(f"the duty {text[:60]!r} cannot be parsed: {_FORM}")
    if network not in inference_workloads():
        raise InvalidInputError(
            f"there are no measurements of the inference of {network[:40]!r}: choose one of "
            f"{', '.join(inference_workloads())}"
        )
    try:
        return Duty(network, ConstantArrivals(per_s), latency_ms, *quantile)
    except InvalidInputError as error:
        raise InvalidInputError(f"the duty {text[:60]!r}: {error}") from None


def require_simulated(device: Device) -> SimulatedDevice:
    """Return the device if requests can be simulated on it.

    Raises:
        InvalidInputError: it is not a simulated board.
    """
    if isinstance(device, SimulatedDevice):
        return device
    raise InvalidInputError(
        f"{device.board_kind} is not simulated ({device.provenance}), and requests can be simulated only on "
        f"simulated boards: omit --simulated-duty, or pass --device simulated:<kind>"
    )


def served(network: str, requests: int) -> Workload:
    """Return the workload of inference with a given batch size."""
    return Workload(network, WorkloadFacts(Task.INFERENCE, batch=requests))


def measure_inference(board: SimulatedDevice, network: str, rows: InferenceRows, seed: int) -> None:
    """Measure the inference of a network in some modes and batches, unless its rows are already stored.

    Each is measured on a restarted board, so that the board's own clock does not advance.

    Args:
        board: the board.
        network: the network's name.
        rows: stores the measured rows.
        seed: seed for the modes, the batches and the noise.

    Raises:
        InvalidInputError: the rows cannot be stored.
    """
    if len(rows.usable(network)):
        return
    rng = np.random.default_rng([seed, 4])
    modes = array_to_modes(board.modes[rng.choice(len(board.modes), _MEASURED_ROWS, replace=False)])
    batches = rng.choice([2**power for power in range(LARGEST_BATCH.bit_length())], _MEASURED_ROWS).tolist()
    fast = array_to_modes(board.modes[[int(np.lexsort(board.modes.T)[-1])]])
    settings = [*zip(modes, batches, strict=True), *((fast[0], batch) for batch in (1, LARGEST_BATCH))]
    found = [_measured(board.restarted(int(rng.integers(2**32))), network, *each) for each in dict.fromkeys(settings)]
    rows.add(network, Profile.of(found, Task.INFERENCE))


def _measured(board: SimulatedDevice, network: str, mode: PowerMode, batch: int) -> Measurement:
    board.pace(served(network, batch))
    record = Profiler(board).measure(mode, board.step)
    return Measurement(mode, record.minibatch_ms, record.power_mw, batch)
