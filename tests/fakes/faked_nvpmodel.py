"""NVIDIA's nvpmodel on a faked Jetson, with the behaviours that are known of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from edge_agent.devices.nvpmodel import NvpmodelDevice
from tests.fakes.jetson_boards import CAP_6
from tests.fakes.jetson_tree import CPU, FakedJetson
from wattfleet_io.clock import VirtualClock
from wattfleet_io.programs import ProgramResult

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
    lines += ["", "< PARAM TYPE=CLOCK NAME=EMC >", f"MAX_FREQ {board.emc_cap}"]
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
        lines += ["GPU_POWER_CONTROL_DISABLE GPU_PWR_CNTL_DIS auto", f"EMC MAX_FREQ {mem_hz}"]
    return "\n".join([*lines, "", "< PM_CONFIG DEFAULT=1 >", "< FAN_CONFIG DEFAULT=quiet >", ""])


class FakedNvpmodel:
    """Behaves like nvpmodel: `mood` is works, reboots, chroot, ignores, fails or missing."""

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
        return ProgramResult(0, "")

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
            tree.put(low, min(limits[parameter, "MIN_FREQ"], rounded))
            tree.put(high, rounded)


def open_nvpmodel(tree: FakedJetson, nvpmodel: FakedNvpmodel, state_directory: Path) -> NvpmodelDevice:
    return NvpmodelDevice(tree, VirtualClock(), nvpmodel.run, state_directory)
