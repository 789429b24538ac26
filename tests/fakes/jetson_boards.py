"""The kernel files of five Jetsons, for the faked trees."""

from __future__ import annotations

from dataclasses import dataclass

ORIN_EMC = (204_000_000, 665_600_000, 2_133_000_000, 3_199_000_000)


def ladder_khz(steps: int, *more: int) -> tuple[int, ...]:
    return (*(115_200 + k * 76_800 for k in range(steps)), *more)


def orin_gpu_hz(first: int, steps: int, top: int) -> tuple[int, ...]:
    return (*(round((first + 102 * k) * 1e6) for k in range(steps)), top)


@dataclass(frozen=True)
class FakedBoard:
    """One kind of board with one JetPack.

    `policies` are cores that share a clock; `chips` are INA3221s, each with its three channels: name, mV and mA
    (hwmon), or name and mW (iio); `power_mw` is what the board draws by these.
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

    @property
    def cores(self) -> int:
        return sum(len(policy) for policy in self.policies)

    @property
    def modes(self) -> int:
        return self.cores * len(self.cpu_khz) * len(self.gpu_hz) * len(self.emc_hz)


CAP_4_5 = "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap"
CAP_6 = "/sys/kernel/nvpmodel_clk_cap/emc"

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
    power_mw=7_600 + 3_800 + 4_500 + 950,
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
    power_mw=7_600 + 3_800 + 4_500 + 950,
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
