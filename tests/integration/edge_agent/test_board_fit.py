import json

import numpy as np
import pytest

from wattfleet.modes import BOARDS, modes_to_array
from wattfleet.prediction.roofline import power_mw, settings_of, step_time_ms
from wattfleet_simulation import board_fit


@pytest.mark.data
def test_the_data_file_is_what_the_command_makes_of_the_corpora(corpora):
    lines = []
    assert board_fit.main(["--data", str(corpora), "--check"], lines.append) == 0, lines


def test_a_changed_parameter_or_another_form_of_physics_is_found():
    kept = json.loads(board_fit.TARGET.read_text())
    assert board_fit.differences(kept, kept) == []
    changed = json.loads(board_fit.TARGET.read_text())
    changed["boards"]["orin-nx"]["time"]["compute_mcycles"] *= 1.2
    changed["boards"]["orin-nano"]["power"]["new_term_mw"] = 1.0
    changed["deviation"]["time"][0] = -1.0
    found = board_fit.differences(changed, kept)
    assert [line.split(" is off")[0] for line in found] == [
        "orin-nano: the parameters do not match those of the current physics",
        "orin-nx: time",
        "orin-nx: power",
        "deviation: time differs",
    ]


def test_a_folder_without_the_corpora_is_named(tmp_path):
    lines = []
    assert board_fit.main(["--data", str(tmp_path)], lines.append) == 2
    assert "agx_orin_resnet18.csv: no such file" in lines[0]


@pytest.mark.data
def test_a_xavier_is_an_orin_with_a_quarter_of_the_cores_at_the_published_power(corpora):
    agx = board_fit.fit_board(board_fit.read_profile(corpora / board_fit.AGX_CORPUS))
    time, power = board_fit.xavier_agx(agx)
    assert time.compute_mcycles == pytest.approx(4 * agx.time.compute_mcycles)
    assert time.traffic_mcycles == agx.time.traffic_mcycles
    maxn = settings_of(modes_to_array([BOARDS["xavier-agx"].space.highest]), None)
    assert power_mw(power, time, maxn)[0] == pytest.approx(36_400)
    # Without the adjustment: 8.47 minutes for 3,125 minibatches.
    assert step_time_ms(time, maxn)[0] == pytest.approx(8.47 * 60e3 / 3125, rel=0.02)
    assert np.abs(np.log(step_time_ms(agx.time, maxn) / step_time_ms(time, maxn)))[0] > 0.5
