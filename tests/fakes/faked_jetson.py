"""A faked Jetson: a folder with the kernel files of a board, which react to writes, and its nvpmodel."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_agent.devices.nvpmodel import NvpmodelDevice
from edge_agent.devices.sysfs import SysfsDevice
from edge_agent.devices.tree import Tree
from wattfleet.common.clock import VirtualClock
from wattfleet.common.programs import ProgramResult

# --- Jetson boards ----------------------------------------------------------------------------------------------------
# The kernel files of Jetsons, for the faked trees.


ORIN_EMC = (204_000_000, 665_600_000, 2_133_000_000, 3_199_000_000)


def ladder_khz(steps: int, *more: int) -> tuple[int, ...]:
    return (*(115_200 + k * 76_800 for k in range(steps)), *more)


def orin_gpu_hz(first: int, steps: int, top: int) -> tuple[int, ...]:
    return (*(round((first + 102 * k) * 1e6) for k in range(steps)), top)


@dataclass(frozen=True)
class FakedBoard:
    """One kind of board with one JetPack.

    `policies` are cores that share a clock; `chips` are INA3221s, each with its three channels: name, mV and mA
    (hwmon), or name and mW (iio); `power_mw` is what the board draws by these. Without `emc_cap`, the memory has a node
    of devfreq if `emc_hz` has several frequencies. `input_mw` is measured by an INA238, and `fan_enable` is the file
    beside the fan's speed, where 0 means off. Each of `further_gpus` is another node of the GPU.
    """

    name: str
    kind: str
    model: str
    compatible: str
    release: str
    jetpack: int
    kernel: tuple[int, int]
    policies: tuple[tuple[int, ...], ...]
    cpu_khz: tuple[int, ...]
    gpu: str
    gpu_of_node: str
    gpu_hz: tuple[int, ...]
    emc_cap: str
    emc_hz: tuple[int, ...]
    has_bpmp: bool
    chips: tuple[tuple[tuple[str, int, int] | tuple[str, int], ...], ...]
    power_mw: float
    zones: tuple[tuple[str, int | None], ...]
    hottest_c: float
    throttled: tuple[int, ...]
    has_fan: bool
    input_mw: int | None = None
    fan_enable: int | None = None
    further_gpus: tuple[str, ...] = ()
    tpc_mask: int | None = None
    throttle_alerts: tuple[str, ...] = ()

    @property
    def has_memory_node(self) -> bool:
        return not self.emc_cap and len(self.emc_hz) > 1

    @property
    def gpus(self) -> list[str]:
        return [f"/sys/class/devfreq/{name}" for name in (self.gpu, *self.further_gpus)]

    @property
    def cores(self) -> int:
        return sum(len(policy) for policy in self.policies)

    @property
    def modes(self) -> int:
        return self.cores * len(self.cpu_khz) * len(self.gpu_hz) * len(self.emc_hz)


CAP_4_5 = "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap"
CAP_6 = "/sys/kernel/nvpmodel_clk_cap/emc"
MEMORY_NODE = "/sys/class/devfreq/bwmgr"

_AGX_CHIPS = (
    (("VDD_GPU_SOC", 19_000, 400), ("VDD_CPU_CV", 19_000, 200), ("VIN_SYS_5V0", 5_000, 900)),
    (("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 19_000, 50), ("NC", 0, 0)),
)
_ORIN_ZONES = (("CPU-therm", 48_000), ("GPU-therm", None), ("SOC0-therm", 47_500), ("tj-thermal", 49_250))

AGX_ORIN_JP5 = FakedBoard(
    name="agx-orin-jetpack5",
    kind="agx-orin",
    model="NVIDIA Orin Jetson AGX Developer Kit",
    compatible="nvidia,p3737-0000+p3701-0000\0nvidia,p3701-0000\0nvidia,tegra234\0nvidia,tegra23x",
    release="# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref, EABI: aarch64",
    jetpack=5,
    kernel=(5, 10),
    policies=((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)),
    cpu_khz=ladder_khz(28, 2_201_600),
    gpu="17000000.ga10b",
    gpu_of_node="ga10b",
    gpu_hz=orin_gpu_hz(306, 10, 1_300_500_000),
    emc_cap=CAP_4_5,
    emc_hz=ORIN_EMC,
    has_bpmp=True,
    chips=_AGX_CHIPS,
    power_mw=7_600 + 3_800 + 4_500,
    zones=_ORIN_ZONES,
    hottest_c=49.25,
    throttled=(1, 0, 2),
    has_fan=True,
)
AGX_ORIN_JP6 = FakedBoard(
    name="agx-orin-jetpack6",
    kind="agx-orin",
    model="NVIDIA Jetson AGX Orin Developer Kit",
    compatible="nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234",
    release="# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64",
    jetpack=6,
    kernel=(5, 15),
    policies=((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)),
    cpu_khz=ladder_khz(28, 2_201_600),
    gpu="17000000.gpu",
    gpu_of_node="gpu",
    gpu_hz=orin_gpu_hz(306, 10, 1_300_500_000),
    emc_cap=CAP_6,
    emc_hz=ORIN_EMC,
    has_bpmp=True,
    chips=_AGX_CHIPS,
    power_mw=7_600 + 3_800 + 4_500,
    zones=_ORIN_ZONES,
    hottest_c=49.25,
    throttled=(0, 0, 0),
    has_fan=True,
)
ORIN_NANO = FakedBoard(
    name="orin-nano-jetpack6",
    kind="orin-nano",
    model="NVIDIA Jetson Orin Nano Developer Kit",
    compatible="nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234",
    release="# R36 (release), REVISION: 2.0, GCID: 35084178, BOARD: generic, EABI: aarch64",
    jetpack=6,
    kernel=(5, 15),
    policies=((0, 1, 2, 3), (4, 5)),
    cpu_khz=ladder_khz(19, 1_510_400),
    gpu="17000000.gpu",
    gpu_of_node="gpu",
    gpu_hz=orin_gpu_hz(306, 4, 624_750_000),
    emc_cap=CAP_6,
    emc_hz=ORIN_EMC[:3],
    has_bpmp=True,
    chips=((("VDD_IN", 5_000, 1_400), ("VDD_CPU_GPU_CV", 5_000, 500), ("VDD_SOC", 5_000, 300)),),
    power_mw=7_000,
    zones=_ORIN_ZONES,
    hottest_c=49.25,
    throttled=(0, 3, 0),
    has_fan=True,
)
XAVIER_AGX = FakedBoard(
    name="xavier-agx-jetpack5",
    kind="xavier-agx",
    model="Jetson-AGX",
    compatible="nvidia,p2972-0000\0nvidia,tegra194",
    release="# R35 (release), REVISION: 3.1, GCID: 32827747, BOARD: t186ref, EABI: aarch64",
    jetpack=5,
    kernel=(5, 10),
    policies=((0, 1), (2, 3), (4, 5), (6, 7)),
    cpu_khz=ladder_khz(29),
    gpu="17000000.gv11b",
    gpu_of_node="gv11b",
    gpu_hz=tuple(
        round(mhz * 1e6)
        for mhz in (
            *(114.75, 216.75, 318.75, 420.75, 522.75, 624.75, 675.75),
            *(828.75, 905.25, 1032.75, 1198.5, 1236.75, 1338.75, 1377),
        )
    ),
    emc_cap=CAP_4_5,
    emc_hz=tuple(round(mhz * 1e6) for mhz in (204, 408, 665.6, 800, 1065.6, 1331.2, 1600, 1866, 2133)),
    has_bpmp=True,
    chips=(
        (("GPU", 19_000, 200), ("CPU", 19_000, 100), ("SOC", 19_000, 100)),
        (("CV", 19_000, 0), ("VDDRQ", 19_000, 50), ("SYS5V", 19_000, 150)),
    ),
    power_mw=3_800 + 1_900 + 1_900 + 0 + 950 + 2_850,
    zones=(("CPU-therm", 41_000), ("GPU-therm", -256_000), ("AUX-therm", 40_000), ("Tboard_tegra", 99_000)),
    hottest_c=41.0,
    throttled=(),
    has_fan=True,
)
NANO = FakedBoard(
    name="nano-jetpack4",
    kind="nano",
    model="NVIDIA Jetson Nano Developer Kit",
    compatible="nvidia,p3450-0000\0nvidia,jetson-nano\0nvidia,tegra210",
    release="# R32 (release), REVISION: 7.1, GCID: 29818004, BOARD: t210ref, EABI: aarch64",
    jetpack=4,
    kernel=(4, 9),
    policies=((0, 1, 2, 3),),
    cpu_khz=(102_000, 204_000, 307_200, 403_200, 518_400, 614_400, 710_400, 825_600, 921_600, 1_036_800)
    + (1_132_800, 1_224_000, 1_326_000, 1_428_000, 1_479_000),
    gpu="57000000.gpu",
    gpu_of_node="gpu",
    gpu_hz=tuple(76_800_000 * k for k in range(1, 13)),
    emc_cap=CAP_4_5,
    emc_hz=(1_600_000_000,),
    has_bpmp=False,
    chips=((("POM_5V_IN", 2_500), ("POM_5V_GPU", 400), ("POM_5V_CPU", 700)),),
    power_mw=2_500,
    zones=(("AO-therm", 45_000), ("CPU-therm", 36_500), ("PMIC-Die", 100_000), ("thermal-fan-est", 60_000)),
    hottest_c=45.0,
    throttled=(),
    has_fan=False,
)

FAKED_BOARDS = (AGX_ORIN_JP5, AGX_ORIN_JP6, ORIN_NANO, XAVIER_AGX, NANO)

_R36 = "# R36 (release), REVISION: 4.7, GCID: 1, BOARD: generic, EABI: aarch64"
_R39 = "# R39 (release), REVISION: 2.0, GCID: 45755727, BOARD: generic, EABI: aarch64"
_JETPACK_7: dict[str, Any] = {"release": _R39, "jetpack": 7, "kernel": (6, 8)}


def _orin(name: str, kind: str, kit: str, module: str, **facts: Any) -> FakedBoard:
    base = AGX_ORIN_JP6 if kind == "agx-orin" else ORIN_NANO
    compatible = f"nvidia,{kit}+{module}\0nvidia,{module.removesuffix('-super')}\0nvidia,tegra234"
    values = {"kind": kind, "model": f"NVIDIA Jetson {name}", "compatible": compatible, "release": _R36} | facts
    return replace(base, name=name, **values)


def gpu_steps(highest_mhz: float) -> tuple[int, ...]:
    return tuple(int(hz) for hz in range(306_000_000, int(highest_mhz * 1e6) + 1, 102_000_000))


_SUPER: dict[str, Any] = {"emc_hz": ORIN_EMC, "cpu_khz": ladder_khz(22)}
_NX: dict[str, Any] = {"cpu_khz": ladder_khz(25, 1_984_000), "emc_hz": ORIN_EMC}
_EIGHT_CORES: dict[str, Any] = {"policies": ((0, 1, 2, 3), (4, 5, 6, 7))}
_KIT = "p3768-0000"

ORIN_NANO_SUPER = _orin(
    "Orin Nano 8GB Super", "orin-nano", _KIT, "p3767-0005-super", gpu_hz=gpu_steps(1020), **_SUPER,
    model="NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
)  # fmt: skip
XAVIER_NX = replace(
    ORIN_NANO,
    name="Xavier NX",
    kind="xavier-nx",
    model="NVIDIA Jetson Xavier NX Developer Kit",
    compatible="nvidia,p3449-0000+p3668-0000\0nvidia,p3509-0000+p3668-0000\0nvidia,tegra194",
    release="# R35 (release), REVISION: 6.5, GCID: 1, BOARD: t186ref, EABI: aarch64",
    jetpack=5,
    kernel=(5, 10),
    policies=((0, 1), (2, 3), (4, 5)),
    gpu="17000000.gv11b",
    gpu_of_node="gv11b",
    gpu_hz=(114_750_000, 204_000_000, 1_109_250_000),
    emc_cap=CAP_4_5,
    emc_hz=(204_000_000, 408_000_000, 665_600_000, 1_600_000_000, 1_866_000_000),
)
# VDD_GPU is gated, and measures slightly less than nothing.
_THOR_CHIPS = ((("VDD_GPU", 19_000, -4), ("VDD_CPU_SOC_MSS", 19_000, 700), ("VIN_SYS_5V0", 5_000, 2_400)),)
THOR_T5000 = replace(
    ORIN_NANO,
    name="Thor T5000",
    kind="agx-thor",
    model="NVIDIA Jetson AGX Thor Developer Kit",
    compatible="nvidia,p4071-0000+p3834-0008\0nvidia,p3834-0008\0nvidia,tegra264",
    policies=tuple((core,) for core in range(14)),
    cpu_khz=(972_000, 1_296_000, 1_998_000, 2_601_000),
    gpu="gpu-gpc-0",
    gpu_of_node="",
    gpu_hz=(315_000_000, 1_386_000_000, 1_530_000_000, 1_575_000_000),
    further_gpus=("gpu-gpc-1", "gpu-gpc-2"),
    emc_cap="",
    emc_hz=(665_600_000, 2_133_000_000, 4_266_000_000),
    has_bpmp=False,
    chips=_THOR_CHIPS,
    input_mw=41_200,
    power_mw=41_200,
    zones=(("soc012-thermal", 45_000), ("tj-thermal", 48_000)),
    hottest_c=48.0,
    fan_enable=1,
    tpc_mask=0,
    throttled=(),
    throttle_alerts=("pwm-fan", "cpu-throttle-alert", "gpu-throttle-alert"),
    **_JETPACK_7,
)
THOR_T4000 = replace(
    THOR_T5000,
    name="Thor T4000",
    model="NVIDIA Jetson T4000",
    compatible="nvidia,p4071-0000+p3834-0000\0nvidia,p3834-0000\0nvidia,tegra264",
    policies=tuple((core,) for core in range(12)),
    further_gpus=(),
    # The node of the memory lists no frequencies.
    emc_hz=(4_266_000_000,),
)
JETSONS = (
    _orin("AGX Orin 32GB", "agx-orin", "p3737-0000", "p3701-0004", gpu_hz=gpu_steps(918), **_EIGHT_CORES),
    _orin("AGX Orin 64GB", "agx-orin", "p3737-0000", "p3701-0005", tpc_mask=0, **_JETPACK_7),
    _orin("AGX Orin Industrial", "agx-orin", "p3740-0002", "p3701-0008", gpu_hz=gpu_steps(1185)),
    _orin("Orin NX 8GB", "orin-nx", _KIT, "p3767-0001", gpu_hz=gpu_steps(765), **_NX),
    _orin("Orin NX 8GB Super", "orin-nx", _KIT, "p3767-0001-super", gpu_hz=gpu_steps(1173), **_NX),
    _orin("Orin NX 16GB", "orin-nx", _KIT, "p3767-0000", gpu_hz=gpu_steps(918), **_NX, **_EIGHT_CORES),
    _orin(
        "Orin NX 16GB Super",
        "orin-nx",
        _KIT,
        "p3767-0000-super",
        gpu_hz=gpu_steps(1173),
        **_NX,
        **_EIGHT_CORES,
        **_JETPACK_7,
    ),  # fmt: skip
    _orin("Orin Nano 4GB", "orin-nano", _KIT, "p3767-0004", **_JETPACK_7),
    _orin("Orin Nano 4GB Super", "orin-nano", _KIT, "p3767-0004-super", gpu_hz=gpu_steps(1020), **_SUPER),
    _orin("Orin Nano 8GB", "orin-nano", _KIT, "p3767-0003"),
    ORIN_NANO_SUPER,
    replace(XAVIER_AGX, name="AGX Xavier"),
    XAVIER_NX,
    THOR_T4000,
    THOR_T5000,
    replace(NANO, name="Nano"),
)
"""Every module that is supported, in one of its configurations; `AGX_ORIN_JP5` and others are further ones."""


# --- Jetson tree ------------------------------------------------------------------------------------------------------
# A folder with a Jetson's kernel files, which react to writes as the kernel does.

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
        knobs += self.glob("/sys/class/devfreq/*/m*_freq")
        knobs += [self.board.emc_cap] if self.board.emc_cap else []
        knobs += [f"{LOCK}/mrq_rate_locked", f"{LOCK}/state"] if self.board.has_bpmp else []
        knobs += [self.fan] if self.board.has_fan else []
        knobs += self.glob("/sys/devices/platform/pwm-fan*/hwmon/hwmon*/pwm1_enable")
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
        elif self.board.emc_cap and path == self.board.emc_cap:
            self._set_cap(int(text))
        elif path == f"{LOCK}/rate":
            self._set_rate(int(text))
        else:
            super().write(path, text)
        if self.board.has_bpmp and path in (self.board.emc_cap, f"{LOCK}/mrq_rate_locked"):
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
        if self.board.gpu_of_node:
            self.put(f"{self.gpu}/device/of_node/name", f"{self.board.gpu_of_node}\0")
        for node in self.board.gpus:
            self._make_node(node, self.board.gpu_hz)
        if self.board.tpc_mask is not None:
            self.put("/sys/devices/platform/gpu.0/tpc_pg_mask", self.board.tpc_mask)

    def _make_node(self, node: str, table: tuple[int, ...], has_table: bool = True) -> None:
        if has_table:
            self.put(f"{node}/available_frequencies", " ".join(map(str, table)))
        self.put(f"{node}/min_freq", table[0])
        self.put(f"{node}/max_freq", table[-1])

    def _make_memory(self) -> None:
        top = self.board.emc_hz[-1]
        if not self.board.emc_cap:
            self._make_node(MEMORY_NODE, self.board.emc_hz, has_table=self.board.has_memory_node)
            return
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

        if self.board.input_mw is not None:
            folder = "/sys/bus/i2c/drivers/ina238/2-0044/hwmon/hwmon5"
            self.put(f"{folder}/power1_input", 1000 * self.board.input_mw)
            self.put(f"{folder}/in1_input", 20_000)
            self.put(f"{folder}/curr1_input", self.board.input_mw // 20)

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
        for number, alert in enumerate(self.board.throttle_alerts):
            self.put(f"/sys/class/thermal/cooling_device{number}/type", alert)
            self.put(f"/sys/class/thermal/cooling_device{number}/cur_state", 0)
        for number, count in enumerate(self.board.throttled, start=1):
            self.put(f"/sys/class/hwmon/hwmon1/oc{number}_event_cnt", count)
        if self.board.has_fan:
            self.put("/sys/devices/platform/pwm-fan/hwmon/hwmon2/pwm1", 80)
        if self.board.fan_enable is not None:
            self.put(f"{self.fan}_enable", self.board.fan_enable)

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


# --- Faked nvpmodel ---------------------------------------------------------------------------------------------------
# NVIDIA's nvpmodel on a faked Jetson, with the behaviours that are known of it.

CONF_IN_FORCE = "/var/lib/nvpmodel/conf_file_path"


def conf_text(tree: FakedJetson) -> str:
    """A configuration like NVIDIA's: clusters on JetPack 5, cores on JetPack 6, and a gap in the IDs."""
    board = tree.board
    clocks = [(k, policy[0]) for k, policy in enumerate(board.policies)]
    if board.jetpack >= 6:
        clocks = [(core, policy[0]) for policy in board.policies for core in policy]
    lines = ["# Copyright", "", "< PARAM TYPE=FILE NAME=CPU_ONLINE >"]
    lines += [f"CORE_{core} {CPU}/cpu{core}/online" for core in range(board.cores)]
    lines += ["", "< PARAM TYPE=FILE NAME=TPC_POWER_GATING >", "TPC_PG_MASK /sys/devices/gpu.0/tpc_pg_mask"]
    lines += ["", "< PARAM TYPE=FILE NAME=GPU_POWER_CONTROL_DISABLE >"]
    lines += ["GPU_PWR_CNTL_DIS /sys/devices/gpu.0/power/control"]
    for number, policy in clocks:
        lines += ["", f"< PARAM TYPE=CLOCK NAME=CPU_A78_{number} >"]
        folder = f"{CPU}/cpu{number if board.jetpack >= 6 else policy}/cpufreq"
        lines += [f"FREQ_TABLE {folder}/scaling_available_frequencies"]
        lines += [f"{limit.upper()}_FREQ {folder}/scaling_{limit}_freq" for limit in ("max", "min")]
    lines += ["", "< PARAM TYPE=CLOCK NAME=GPU >", f"FREQ_TABLE {tree.gpu}/available_frequencies"]
    lines += [f"MAX_FREQ {tree.gpu}/max_freq", f"MIN_FREQ {tree.gpu}/min_freq"]
    lines += ["", "< PARAM TYPE=CLOCK NAME=EMC >", f"MAX_FREQ {board.emc_cap}"] if board.emc_cap else []
    half, quarter = board.cores // 2, max(board.cores // 4, 1)
    uncapped = -1 if board.emc_cap == CAP_6 else 0
    for mode_id, name, cores, khz, hz, mem_hz, mask in (
        (0, "MAXN", board.cores, -1, -1, uncapped, 0),
        (1, "15W", half, 1_113_600, 420_750_000, board.emc_hz[0], 0),
        (3, "10W", quarter, 1_113_600, 420_750_000, board.emc_hz[0], 252),
    ):
        lines += ["", f"< POWER_MODEL ID={mode_id} NAME={name} >"]
        lines += [f"CPU_ONLINE CORE_{core} {int(core < cores)}" for core in range(board.cores)]
        lines += [f"TPC_POWER_GATING TPC_PG_MASK {mask}"]
        for number, policy in clocks:
            if (number if board.jetpack >= 6 else policy) < cores:
                lines += [f"CPU_A78_{number} MIN_FREQ {board.cpu_khz[0]}", f"CPU_A78_{number} MAX_FREQ {khz}"]
        lines += [f"GPU MIN_FREQ {board.gpu_hz[0]}", f"GPU MAX_FREQ {hz}"]
        lines += ["GPU_POWER_CONTROL_DISABLE GPU_PWR_CNTL_DIS auto"]
        lines += [f"EMC MAX_FREQ {mem_hz}"] if board.emc_cap else []
    return "\n".join([*lines, "", "< PM_CONFIG DEFAULT=1 >", "< FAN_CONFIG DEFAULT=quiet >", ""])


class FakedNvpmodel:
    """Behaves like nvpmodel: `mood` is works, works-but-fails (as on JetPack 7), chroot, ignores, fails or missing."""

    def __init__(self, tree: FakedJetson) -> None:
        self.tree, self.mood, self.mode_id, self.mask, self.rebooted = tree, "works", 0, "0", False
        self.answers: list[str] = []
        tree.put("/etc/nvpmodel.conf", conf_text(tree))

    def run(self, command: Sequence[str], answer: str) -> ProgramResult:
        if command[0] != "nvpmodel":
            return self.tree.run(command, answer)
        if self.mood == "missing":
            return ProgramResult(None, "No such file or directory")
        if command[1] == "-q":
            return ProgramResult(0, f"NVPM WARN: fan mode is not set!\nNV Power Mode: SOME\n{self.mode_id}\n")
        _, _, conf, _, mode_id = command
        if self.mood == "chroot":
            return ProgramResult(0, "Running in chroot, ignoring request\n")
        if self.mood == "fails":
            return ProgramResult(255, "NVPM ERROR: failed to set power mode!\n")
        if self.mood == "ignores":
            return ProgramResult(0, "")
        return self._set(conf, int(mode_id), answer)

    def _set(self, conf: str, mode_id: int, answer: str) -> ProgramResult:
        place = self.tree.location(conf)
        text = (place if place.exists() else type(place)(conf)).read_text()
        stanza = re.search(rf"< POWER_MODEL ID={mode_id} NAME=\S+ >\n(.*?)\n<", text, re.S)
        assert stanza, f"{conf} has no mode {mode_id}"
        settings = [line.split() for line in stanza[1].splitlines() if line]
        mask = next(value for _, argument, value in settings if argument == "TPC_PG_MASK")
        if mask != self.mask:
            self.answers.append(answer)
            self.rebooted |= answer.strip().lower() == "yes"
            return ProgramResult(0, "NVPM WARN: Reboot required for changing to this power mode\nenter YES/yes:")
        self._write(settings)
        self.mode_id = mode_id
        self.tree.put(CONF_IN_FORCE, conf)
        return ProgramResult(1, "NVPM ERROR: optMask is 1") if self.mood == "works-but-fails" else ProgramResult(0, "")

    def _write(self, settings: list[list[str]]) -> None:
        tree, board = self.tree, self.tree.board
        for parameter, argument, value in settings:
            if parameter == "CPU_ONLINE" and argument != "CORE_0":
                tree.write(f"{CPU}/cpu{argument[5:]}/online", value)
        limits = {(parameter, argument): int(value) for parameter, argument, value in settings if "_FREQ" in argument}
        for parameter in dict.fromkeys(parameter for parameter, _ in limits):
            highest = limits[parameter, "MAX_FREQ"]
            if parameter == "EMC":
                if highest == 0 or highest == -1:
                    tree.put(board.emc_cap, 0 if highest == 0 else board.emc_hz[-1])
                else:
                    tree.write(board.emc_cap, str(highest))
                continue
            low, high, table = f"{tree.gpu}/min_freq", f"{tree.gpu}/max_freq", board.gpu_hz
            if parameter != "GPU":
                number = int(parameter.rpartition("_")[2])
                cores = board.policies[number] if board.jetpack < 6 else next(p for p in board.policies if number in p)
                folder, table = tree.policy(cores[0]), board.cpu_khz
                low, high = f"{folder}/scaling_min_freq", f"{folder}/scaling_max_freq"
                active = tree.exists(folder) and tree.read(f"{folder}/affected_cpus")
                assert active, "nvpmodel fails on the clock of cores that are offline"
            if highest == -1:
                highest = table[-1]
            rounded = max((value for value in table if value <= highest), default=table[0])
            if parameter != "GPU":
                rounded = min(table, key=lambda value: abs(value - highest))
            tree.put(low, min(limits[parameter, "MIN_FREQ"], rounded))
            tree.put(high, rounded)


def open_nvpmodel(tree: FakedJetson, nvpmodel: FakedNvpmodel, state_directory: Path) -> NvpmodelDevice:
    return NvpmodelDevice(tree, VirtualClock(), nvpmodel.run, state_directory)
