"""The duty of a simulated board: its option, and the measurements made for it."""

import numpy as np
import pytest

from edge_agent.devices.virtual.simulated import ReplayDevice, SimulatedDevice
from edge_agent.serving.inference import InferenceRows
from edge_agent.serving.serving_board import measure_inference, require_simulated, served, simulated_duty
from wattfleet.duties import ConstantArrivals, Duty
from wattfleet.errors import InvalidInputError


@pytest.mark.parametrize(
    ("text", "duty"),
    [
        ("mobilenetv3:60:500", Duty("mobilenetv3", ConstantArrivals(60), 500, 0.95)),
        ("resnet:0.5:1500.5:0.99", Duty("resnet", ConstantArrivals(0.5), 1500.5, 0.99)),
    ],
)
def test_a_duty_is_read(text, duty):
    assert simulated_duty(text) == duty


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("vgg:60:500", "there are no measurements of the inference of 'vgg': choose one of mobilenetv3, resnet"),
        ("mobilenetv3", "write network:requests per second:latency in ms, such as mobilenetv3:60:500"),
        ("mobilenetv3:60", "cannot be parsed"),
        ("mobilenetv3:60:fast", "cannot be parsed"),
        ("mobilenetv3:60:500:0.9:7", "cannot be parsed"),
        ("", "cannot be parsed"),
        ("mobilenetv3:0:500", "requests per second must be above 0"),
        ("mobilenetv3:-1:500", "requests per second must be above 0"),
        ("mobilenetv3:nan:500", "requests per second must be above 0"),
        ("mobilenetv3:60:0", "latency_ms must be above 0"),
        ("mobilenetv3:60:500:1", "quantile must be 0.5 to below 1"),
    ],
)
def test_a_duty_that_cannot_be_is_refused(text, error):
    with pytest.raises(InvalidInputError, match=error):
        simulated_duty(text)


def test_a_replayed_board_has_no_inference(tmp_path):
    rows = "".join(f"4,{khz},306000000,665600000,462.3,10931\n" for khz in (1190400, 1344000))
    file = tmp_path / "board.csv"
    file.write_text("cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw\n" + rows)
    with pytest.raises(InvalidInputError, match="replayed.*omit --simulated-duty"):
        require_simulated(ReplayDevice(file, 0))


def test_inference_is_measured_once_and_close_to_the_truth(tmp_path):
    board, rows = SimulatedDevice("orin-nano", 3), InferenceRows(tmp_path)
    measure_inference(board, "mobilenetv3", rows, 3)
    measured = rows.read("mobilenetv3")
    assert len(measured) >= 40
    assert board.clock.now_s() == 0.0
    for each in measured.measurements():
        (batch_ms,), (power_mw,) = board.truth(np.array([each.mode]), served("mobilenetv3", each.batch))
        assert each.minibatch_ms == pytest.approx(batch_ms, rel=0.1)
        assert each.power_mw == pytest.approx(power_mw, rel=0.1)
    measure_inference(board, "mobilenetv3", rows, 4)
    assert rows.read("mobilenetv3").sha256() == measured.sha256()
