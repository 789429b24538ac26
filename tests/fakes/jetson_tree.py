"""A folder with a Jetson's kernel files, which react to writes as the kernel does."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from edge_agent.devices.sysfs import SysfsDevice
from edge_agent.devices.tree import Tree
from tests.fakes.jetson_boards import CAP_4_5, CAP_6, FakedBoard
from wattfleet_io.clock import VirtualClock
from wattfleet_io.programs import ProgramResult

CPU = "/sys/devices/system/cpu"
BPMP = "/sys/kernel/debug/bpmp/debug"
LOCK = f"{BPMP}/clk/emc"
INA_HWMON = "/sys/bus/i2c/drivers/ina3221"
INA_IIO = "/sys/bus/i2c/drivers/ina3221x"
_FAN_SERVICE = "/run/nvfancontrol"


class FakedJetson(Tree):
    """The files of a `FakedBoard`.

    `unreadable` and `unwritable` map paths to the errno of their failure, `deaf` are paths where a write succeeds and
    changes nothing, and `written` lists the writes in order. `offline_policy` is the errno of a CPU policy without an
    online core: EINVAL for writes, as in the kernels of JetPack 4 to 6, or EBUSY for reads too, as in later ones; with
    None, the policy's folder disappears. An existing tree is used as it is.
    """

    def __init__(self, root: Path, board: FakedBoard, offline_policy: int | None = errno.EINVAL) -> None:
        super().__init__(root)
        self.board = board
        self.offline_policy = offline_policy
        self.unreadable: dict[str, int] = {}
        self.unwritable: dict[str, int] = {}
        self.deaf: set[str] = set()
        self.written: list[tuple[str, str]] = []
        self.fan_service_starts = True
        if not self.exists(_FAN_SERVICE):
            self._make_identity()
            self._make_cpu()
            self._make_gpu()
            self._make_memory()
            self._make_rails()
            self._make_thermal_zones()
            self.fan_service_runs = board.has_fan

    @property
    def gpu(self) -> str:
        return f"/sys/class/devfreq/{self.board.gpu}"

    @property
    def fan(self) -> str:
        return self.glob("/sys/devices/platform/pwm-fan*/hwmon/hwmon*/pwm1")[0]

    @property
    def fan_service_runs(self) -> bool:
        return self.location(_FAN_SERVICE).read_text() == "1\n"

    @fan_service_runs.setter
    def fan_service_runs(self, runs: bool) -> None:
        self.put(_FAN_SERVICE, int(runs))

    def policy(self, number: int) -> str:
        return f"{CPU}/cpufreq/policy{number}"

    def put(self, path: str, value: object) -> None:
        """Create a file, as the kernel would."""
        place = self.location(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{value}\n")

    def everything(self) -> dict[str, str | bool]:
        """All settable values, to compare the settings in force."""
        knobs = [*self.glob(f"{CPU}/cpu*/online"), *self.glob(f"{CPU}/cpufreq/policy*/scaling_m*_freq")]
        knobs += [f"{self.gpu}/min_freq", f"{self.gpu}/max_freq", self.board.emc_cap]
        knobs += [f"{LOCK}/mrq_rate_locked"] if self.board.has_bpmp else []
        knobs += [self.fan] if self.board.has_fan else []
        return {path: self.location(path).read_text().strip() for path in knobs} | {"fan": self.fan_service_runs}

    def read(self, path: str) -> str:
        if path in self.unreadable:
            raise OSError(self.unreadable[path], os.strerror(self.unreadable[path]), path)
        if self.offline_policy == errno.EBUSY and self._is_of_offline_policy(path):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        return super().read(path)

    def write(self, path: str, text: str) -> None:
        if path in self.unwritable:
            raise OSError(self.unwritable[path], os.strerror(self.unwritable[path]), path)
        if not self.exists(path):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if self.offline_policy is not None and self._is_of_offline_policy(path):
            raise OSError(self.offline_policy, os.strerror(self.offline_policy), path)
        self.written.append((path, text))
        if path in self.deaf:
            return
        folder, _, name = path.rpartition("/")
        if name == "online":
            self._set_online(int(folder.rpartition("cpu")[2]), text)
        elif name in ("scaling_min_freq", "scaling_max_freq", "min_freq", "max_freq"):
            self._set_limit(path, folder, name, int(text))
        elif path == self.board.emc_cap:
            self._set_cap(int(text))
        elif path == f"{LOCK}/rate":
            self._set_rate(int(text))
        else:
            super().write(path, text)
        if path in (self.board.emc_cap, f"{LOCK}/mrq_rate_locked"):
            self._follow_cap()

    def run(self, command: Sequence[str], answer: str) -> ProgramResult:
        """The system's programs: a `RunProgram`."""
        assert command[0] == "systemctl" and command[-1] == "nvfancontrol"
        if command[1] == "is-active":
            return ProgramResult(0 if self.fan_service_runs else 3, "")
        if command[1] == "start" and not self.fan_service_starts:
            return ProgramResult(1, "Job for nvfancontrol.service failed.")
        self.fan_service_runs = command[1] == "start"
        if self.fan_service_runs:
            self.put(self.fan, 80)
        return ProgramResult(0, "")

    def renumber_hwmon(self) -> None:
        """Give every hwmon folder another number, as a reboot may."""
        for path in self.glob("/sys/**/hwmon/hwmon*"):
            place = self.location(path)
            place.rename(place.parent / f"hwmon{int(place.name.removeprefix('hwmon')) + 20}")

    def _make_identity(self) -> None:
        self.put("/proc/device-tree/model", f"{self.board.model}\0")
        self.put("/proc/device-tree/compatible", f"{self.board.compatible}\0")
        self.put("/etc/nv_tegra_release", self.board.release)

    def _make_cpu(self) -> None:
        for policy in self.board.policies:
            for core in policy:
                self.location(f"{CPU}/cpu{core}").mkdir(parents=True)
                if core:
                    self.put(f"{CPU}/cpu{core}/online", 1)
            self._make_policy(policy)

    def _make_policy(self, cores: tuple[int, ...]) -> None:
        folder = self.policy(cores[0])
        self.put(f"{folder}/scaling_available_frequencies", " ".join(map(str, self.board.cpu_khz)))
        for name in ("related_cpus", "affected_cpus"):
            self.put(f"{folder}/{name}", " ".join(map(str, cores)))
        self.put(f"{folder}/scaling_min_freq", self.board.cpu_khz[0])
        self.put(f"{folder}/scaling_max_freq", self.board.cpu_khz[-1])

    def _make_gpu(self) -> None:
        self.put("/sys/class/devfreq/15340000.vic/device/of_node/name", "vic")
        self.put("/sys/class/devfreq/15340000.vic/available_frequencies", "115200000 601600000")
        self.put(f"{self.gpu}/device/of_node/name", f"{self.board.gpu_of_node}\0")
        self.put(f"{self.gpu}/available_frequencies", " ".join(map(str, self.board.gpu_hz)))
        self.put(f"{self.gpu}/min_freq", self.board.gpu_hz[0])
        self.put(f"{self.gpu}/max_freq", self.board.gpu_hz[-1])

    def _make_memory(self) -> None:
        top = self.board.emc_hz[-1]
        self.put(self.board.emc_cap, 0 if self.board.emc_cap == CAP_4_5 else top)
        if self.board.has_bpmp:
            self.put(f"{BPMP}/emc/possible_rates", " ".join(str(hz // 1000) for hz in self.board.emc_hz))
            for name, value in (("max_rate", top), ("rate", top), ("mrq_rate_locked", 0), ("state", 1)):
                self.put(f"{LOCK}/{name}", value)

    def _make_rails(self) -> None:
        for number, channels in enumerate(self.board.chips):
            for channel, (name, *measured) in enumerate(channels):
                if len(measured) == 2:
                    folder = f"{INA_HWMON}/1-004{number}/hwmon/hwmon{3 + number}"
                    millivolts, milliamperes = measured
                    self.put(f"{folder}/in{channel + 1}_label", name)
                    self.put(f"{folder}/in{channel + 1}_input", millivolts)
                    self.put(f"{folder}/curr{channel + 1}_input", milliamperes)
                    self.put(f"{folder}/in7_label", "sum of shunt voltages")
                    self.put(f"{folder}/in7_input", 1)
                else:
                    folder = f"{INA_IIO}/6-0040/iio:device0"
                    self.put(f"{folder}/rail_name_{channel}", name)
                    self.put(f"{folder}/in_power{channel}_input", measured[0])

    def _make_thermal_zones(self) -> None:
        for number, (kind, millidegrees) in enumerate(self.board.zones):
            zone = f"/sys/class/thermal/thermal_zone{number}"
            self.put(f"{zone}/type", kind)
            self.put(f"{zone}/temp", millidegrees)
            if millidegrees is None:
                self.unreadable[f"{zone}/temp"] = errno.EAGAIN
        self.put("/sys/class/hwmon/hwmon0/name", "thermal")
        if self.board.throttled:
            self.put("/sys/class/hwmon/hwmon1/name", "soctherm_oc")
        for number, count in enumerate(self.board.throttled, start=1):
            self.put(f"/sys/class/hwmon/hwmon1/oc{number}_event_cnt", count)
        if self.board.has_fan:
            self.put("/sys/devices/platform/pwm-fan/hwmon/hwmon2/pwm1", 80)

    def _set_online(self, core: int, text: str) -> None:
        super().write(f"{CPU}/cpu{core}/online", text)
        policy = next(cores for cores in self.board.policies if core in cores)
        online = [c for c in policy if c == 0 or self.location(f"{CPU}/cpu{c}/online").read_text().strip() == "1"]
        folder = self.policy(policy[0])
        if not online and self.offline_policy is None:
            shutil.rmtree(self.location(folder), ignore_errors=True)
            return
        if not self.exists(folder):
            self._make_policy(policy)
        self.put(f"{folder}/affected_cpus", " ".join(map(str, online)))

    def _is_of_offline_policy(self, path: str) -> bool:
        folder = path.rpartition("/")[0]
        affected = self.location(f"{folder}/affected_cpus")
        return affected.exists() and not affected.read_text().strip()

    def _set_limit(self, path: str, folder: str, name: str, value: int) -> None:
        """Keep a minimum below its maximum: old kernels refuse anything else, newer ones clamp it silently."""
        is_minimum = "min" in name
        other = int(
            super().read(f"{folder}/{name.replace('min', 'max') if is_minimum else name.replace('max', 'min')}")
        )
        if (value > other) if is_minimum else (value < other):
            if self.board.kernel < (5, 10):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            value = other
        super().write(path, str(value))

    def _set_cap(self, hz: int) -> None:
        top = self.board.emc_hz[-1]
        if self.board.emc_cap == CAP_6:
            super().write(CAP_6, str(top if hz < 0 else self._rounded_up(hz)))
        elif hz < top:
            super().write(CAP_4_5, str(hz))

    def _set_rate(self, hz: int) -> None:
        if super().read(f"{LOCK}/mrq_rate_locked") == "1":
            super().write(f"{LOCK}/rate", str(self._rounded_up(hz)))

    def _follow_cap(self) -> None:
        """Let an unlocked memory run at its cap, as if it were busy."""
        rate = f"{LOCK}/rate"
        if self.exists(rate) and rate not in self.deaf and super().read(f"{LOCK}/mrq_rate_locked") == "0":
            cap = int(super().read(self.board.emc_cap))
            super().write(rate, str(cap or self.board.emc_hz[-1]))

    def _rounded_up(self, hz: int) -> int:
        return next((rate for rate in self.board.emc_hz if rate >= hz), self.board.emc_hz[-1])


class Ticks(threading.Event):
    """Waits by advancing a virtual clock this many times; after that, waits until it is set."""

    def __init__(self, clock: VirtualClock, ticks: int) -> None:
        super().__init__()
        self._clock, self._left = clock, ticks
        self.spent = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        if self._left == 0:
            self.spent.set()
            return super().wait()
        assert timeout is not None, "a tick takes time"
        self._left -= 1
        self._clock.sleep_s(timeout)
        return self.is_set()


def open_sysfs(tree: FakedJetson) -> SysfsDevice:
    return SysfsDevice(tree, VirtualClock(), tree.run)
