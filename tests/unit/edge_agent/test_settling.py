import numpy as np
import pandas as pd
import pytest

from benchmarks.raw_logs import read_raw_logs
from edge_agent.devices.device import Conditions, PowerTrace
from edge_agent.profiling.mode_measurement import ProfilerSettings, level_mw, settled_minibatch_ms, settled_power_mw
from edge_agent.profiling.profiler import Profiler
from wattfleet_io.clock import VirtualClock


def trace(*samples):
    at_s, power_mw = np.array(samples, dtype=float).T
    return PowerTrace(at_s, power_mw)


# The first minibatch ends at 10 s, the last at 24 s.
ENDS = np.arange(10.0, 24.1, 0.35)
IDLE = [(0, 7000), (0, 7000), (0.7, 7100), (2, 7050), (5, 7000), (9.5, 7100)]


def test_the_first_minibatch_does_not_count():
    time = settled_minibatch_ms(np.array([7068.0, 351.0, 353.0, 352.0, 360.0]))
    assert (time.median, time.count) == (352.5, 4)
    # The absolute deviations from 352.5 are 1.5, 0.5, 0.5 and 7.5, so their median is 1.
    assert time.spread == pytest.approx(1.4826 * 1.0 / 352.5)


@pytest.mark.parametrize("times_ms", [[], [7068.0]])
def test_a_single_minibatch_tells_nothing(times_ms):
    with pytest.raises(ValueError, match="at least 2"):
        settled_minibatch_ms(np.array(times_ms))


def test_idling_the_rise_and_what_follows_the_training_do_not_count():
    rise = [(10.7, 10_000), (11.9, 12_500)]
    level = [(13.1, 12_900), (14.3, 13_100), (15.5, 13_000), (16.7, 13_050)]
    after = [(25.0, 9000), (26.2, 7000)]
    power = settled_power_mw(trace(*IDLE, *rise, *level, *after), ENDS)
    assert (power.median, power.count) == (13_025, 4)


def test_a_slow_rise_is_waited_for():
    rise = [(12.1 + k, 8000 + 1000 * k) for k in range(5)]
    level = [(17.1 + k, 13_000 + 10 * k) for k in range(6)]
    power = settled_power_mw(trace(*IDLE, *rise, *level), ENDS)
    # The sample of 12,000 is within the tolerance of the level; the samples before it are not.
    assert power.count == 7 and 13_000 <= power.median <= 13_050


def test_a_missing_sample_is_missing_and_never_zero():
    level = [(12.5 + k, 13_000) for k in range(10)]
    with_gaps = [(at, np.nan if k % 3 == 0 else mw) for k, (at, mw) in enumerate(level)]
    power = settled_power_mw(trace(*IDLE, *with_gaps), ENDS)
    assert (power.median, power.count) == (13_000, 6)
    assert settled_power_mw(trace(*[(at, np.nan) for at, _ in level]), ENDS) is None


def test_a_repeated_sample_counts_once():
    power = settled_power_mw(trace((13, 13_000), (13, 13_000), (14, 13_000), (14, 13_000), (15, 13_000)), ENDS)
    assert power.count == 3


def test_single_dips_do_not_move_the_level():
    level = [(12.5 + k, 9500 if k in (3, 7) else 13_000) for k in range(11)]
    power = settled_power_mw(trace(*level), ENDS)
    assert (power.median, power.count) == (13_000, 11)


@pytest.mark.parametrize(
    "samples",
    [
        [(13, 13_000), (14, 13_000)],
        [(12.5 + k, 8000 * 1.3**k) for k in range(8)],
    ],
    ids=["too few", "still rising"],
)
def test_what_has_not_settled_is_not_reported(samples):
    assert settled_power_mw(trace(*samples), ENDS) is None


def test_a_level_needs_three_samples_that_could_be_read():
    assert level_mw(trace((0, 7000), (0, 7000), (1, np.nan), (2, 7200))) is None
    level = level_mw(trace((0, 7000), (0, 7000), (1, np.nan), (2, 7200), (3, 7100)))
    assert (level.median, level.count) == (7100, 3)


@pytest.mark.data
def test_it_finds_the_values_that_the_raw_logs_were_condensed_to(corpora):
    table = pd.read_csv(corpora / "orin_nano_resnet18.csv").set_index(["cores", "cpu_khz", "gpu_hz", "mem_hz"])
    runs = sorted((corpora / "orin_nano_resnet18_telemetry").iterdir())
    assert len(runs) == 26
    for run in runs:
        minibatches, samples = pd.read_csv(run / "minibatch.csv"), pd.read_csv(run / "jtop.csv")
        recorded = table.loc[tuple(int(knob) for knob in run.name.split("_")[1:])]
        time = settled_minibatch_ms(minibatches["epochtime_ms"].to_numpy())
        power = settled_power_mw(
            PowerTrace(samples["log_time"].to_numpy(), samples["power cur"].to_numpy(dtype=float)),
            minibatches["log_time"].to_numpy(),
        )
        assert time.median == pytest.approx(recorded.minibatch_ms, rel=0.01), run.name
        assert power.median == pytest.approx(recorded.power_mw, rel=0.02), run.name


class LoggedDevice:
    """A board that replays one logged run, minibatch by minibatch."""

    def __init__(self, log):
        self.log = log
        self.clock = VirtualClock()
        self.begin_s = log.minibatch_end_s - log.minibatch_ms / 1e3
        self.trained = 0

    def apply(self, mode):
        self.clock.sleep_s(max(0.0, self.begin_s[0]))

    def differences(self, mode):
        return [] if self.log.mode == mode else [f"{self.log.mode.label()} is in force"]

    def conditions(self):
        return Conditions(None, None)

    def start_meter(self):
        return self

    def read(self):
        seen = self.log.power.at_s <= self.clock.now_s()
        return PowerTrace(self.log.power.at_s[seen], self.log.power.power_mw[seen])

    def stop(self):
        return self.read()

    def step(self):
        self.clock.sleep_s(max(0.0, self.log.minibatch_end_s[self.trained] - self.clock.now_s()))
        self.trained += 1


@pytest.mark.data
def test_the_profiler_reproduces_the_tables_from_the_logged_runs(corpora):
    table = pd.read_csv(corpora / "orin_nano_resnet18.csv").set_index(["cores", "cpu_khz", "gpu_hz", "mem_hz"])
    logs = read_raw_logs(corpora / "orin_nano_resnet18_telemetry")
    assert len(logs) == 26
    for log in logs:
        device = LoggedDevice(log)
        used = len(log.minibatch_ms) - 1
        settings = ProfilerSettings(minibatches=used, fewest_minibatches=used, power_samples=3)
        record = Profiler(device, settings).measure(log.mode, device.step)
        recorded = table.loc[tuple(log.mode)]
        # The logger wrote its files between two minibatches. That time is in this loop, but not in the table's times.
        between_ends_ms = np.diff(log.minibatch_end_s) * 1e3
        assert record.minibatch_ms == pytest.approx(np.median(between_ends_ms), rel=0.001), log.mode.label()
        assert record.power_mw == pytest.approx(recorded.power_mw, rel=0.02), log.mode.label()
