"""A Jetson that is set with NVIDIA's tool `nvpmodel`, and checked through the kernel's files."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import chain
from pathlib import Path

from edge_agent.devices.device import Knobs, ModeNotAppliedError
from edge_agent.devices.jetson.knobs import CpuSettings, noting
from edge_agent.devices.jetson.nvpmodel_conf import (
    SYSTEM_CONF,
    Argument,
    NvpmodelConf,
    NvpmodelMode,
    is_cpu_clock,
    limited_cpu,
    parse_conf,
    preset_mode,
)
from edge_agent.devices.sysfs import JetsonSettings, RebootNeededError, SysfsDevice, as_numbers
from edge_agent.devices.tree import Tree
from wattfleet.common.atomic_files import make_state_folder, replace_file
from wattfleet.common.clock import Clock
from wattfleet.common.programs import ProgramResult, RunProgram
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode

CUSTOM_CONF = "nvpmodel.conf"
"""A copy of NVIDIA's configuration with one more mode, in the state directory."""

# The file in which nvpmodel records the configuration that it last used.
_CURRENT_CONF = "/var/lib/nvpmodel/conf_file_path"
_CUSTOM_NAME = "WATTFLEET"
_KEPT_ID, _KEPT_CONF = "nvpmodel/id", "nvpmodel/conf"
_NO_REBOOT = "no\n"


class NvpmodelDevice(SysfsDevice):
    """A Jetson that is set with `nvpmodel` (a `Device`).

    The system's configuration is never edited. A mode is added to a copy of it in the state directory. The GPU's power
    gating is not changed, since a change needs a reboot. nvpmodel's answers are not trusted: every setting is read
    back.

    Args:
        tree: the board's files.
        clock: the time base of measurements.
        run: runs the system's programs.
        state_directory: directory for the copy, created when a mode is applied.

    Raises:
        InvalidInputError: as for `SysfsDevice`, or the configuration cannot be parsed.
        ModeNotAppliedError: nvpmodel does not report the current mode.
    """

    def __init__(self, tree: Tree, clock: Clock, run: RunProgram, state_directory: Path) -> None:
        super().__init__(tree, clock, run)
        self._run = run
        self._custom_conf = state_directory / CUSTOM_CONF
        self._conf = self._read_conf(SYSTEM_CONF)
        self._base = self._mode_in_force()

    def try_knobs(self) -> None:
        """Find out whether the memory's cap can be raised; if not, the memory keeps its frequency."""
        if self.memory.try_cap(uses_lock=False):
            self._list_modes()

    def apply(self, mode: PowerMode) -> None:
        """Apply a mode.

        Raises:
            InvalidInputError: the board does not offer this mode.
            ModeNotAppliedError: nvpmodel refused it, or another mode was read back.
            RebootNeededError: the mode needs a reboot.
        """
        self.require_offered(mode)
        conf = self._conf.with_mode(_CUSTOM_NAME, self._stanza(mode))
        try:
            make_state_folder(self._custom_conf.parent)
            replace_file(self._custom_conf, conf.text().encode())
        except OSError as error:
            raise ModeNotAppliedError(f"{self._custom_conf}: cannot be written: {error.strerror}") from None
        to = self._settings(mode, locks_memory=False)

        def raise_limits() -> None:
            result = self._raise(to, str(self._custom_conf), conf.modes[-1].mode_id)
            found = self.differences(mode)
            if found and result.code != 0:
                # No knob is to blame.
                raise ModeNotAppliedError(
                    f"nvpmodel did not set the mode {mode.label()}: {_reason(result)}; {'; '.join(found)}"
                )
            if found:
                raise self.not_reached(f"nvpmodel set the mode {mode.label()}, but: ", found)

        self._change(to, mode.label(), raise_limits)

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe how the current settings differ from an applied mode.

        nvpmodel caps the memory without locking it.
        """
        to = self._settings(mode)
        found = [*self.cpu.differences(to.cpu), *self.gpu.differences(to.gpu_hz)]
        memory_hz = self.memory.frequency_hz()
        if memory_hz != mode.mem_hz:
            found.append(f"{self.memory.interface}: wanted {mode.mem_hz}, found {memory_hz}")
        return found

    def apply_preset(self, name: str) -> PowerMode:
        """Apply one of NVIDIA's modes and return the mode read back.

        Raises:
            InvalidInputError: there is no such preset.
            ModeNotAppliedError: nvpmodel refused it, or another mode was read back.
            RebootNeededError: the mode needs a reboot.
        """
        preset = self._conf.mode_of_name(name)
        wanted = preset_mode(preset, self.space)
        to = self._preset_settings(preset, wanted)
        before = self._saved(as_numbers(self._board_knobs()))

        def raise_limits() -> None:
            self._raise(to, SYSTEM_CONF, preset.mode_id)
            self._require_preset(preset, wanted)

        try:
            self._change(to, name, raise_limits)
        except RebootNeededError as error:
            if failed := self._put_back(before):
                raise ModeNotAppliedError(f"{error}; not restored: {'; '.join(failed)}") from None
            raise
        self._base = preset
        return self.current_mode()

    def _nvpmodel_modes(self) -> tuple[NvpmodelMode, ...]:
        return self._conf.modes

    def _require_preset(self, preset: NvpmodelMode, wanted: PowerMode) -> None:
        """Check that a preset is in force."""
        if (mode_id := self._mode_id()) != preset.mode_id:
            raise ModeNotAppliedError(f"nvpmodel did not set {preset.name}: it reports mode {mode_id}")
        found = self.current_mode()
        tables = ((wanted.cores,), self.space.cpu_khz, self.space.gpu_hz, self.space.mem_hz)
        for knob, expected, held, table in zip(PowerMode._fields, wanted, found, tables, strict=True):
            # nvpmodel may round a limit up or down, so a difference of one step of the table is accepted.
            place = table.index(expected)
            if not table[max(place - 1, 0)] <= held <= table[min(place + 1, len(table) - 1)]:
                raise ModeNotAppliedError(f"nvpmodel set {preset.name}, but {knob}: wanted {expected}, found {held}")

    def _preset_settings(self, preset: NvpmodelMode, wanted: PowerMode) -> JetsonSettings:
        """Return the widest ranges that a preset allows.

        Args:
            preset: the preset.
            wanted: its mode.
        """
        lowest = self.space.lowest
        limits_khz = {
            _first_core(self._conf.paths[setting]): (lowest.cpu_khz, limited_cpu(self.space.cpu_khz, int(value)))
            for setting, value in preset.settings.items()
            if is_cpu_clock(setting[0]) and setting[1] == "MAX_FREQ" and setting in self._conf.paths
        }
        online = (
            core for core in range(self.cpu.cores) if preset.settings.get(("CPU_ONLINE", f"CORE_{core}"), "1") != "0"
        )
        return JetsonSettings(
            CpuSettings(frozenset(online), (lowest.cpu_khz, wanted.cpu_khz), limits_khz),
            self.gpu.at(lowest.gpu_hz, wanted.gpu_hz),
            self.memory.capped_at(wanted.mem_hz),
        )

    def knobs(self) -> Knobs:
        """Return the current settings, for `restore`.

        Raises:
            ModeNotAppliedError: a setting cannot be read, or nvpmodel does not report the current mode.
        """
        return {_KEPT_ID: str(self._mode_id()), _KEPT_CONF: self._current_conf(), **super().knobs()}

    def restore(self, knobs: Knobs) -> None:
        """Restore settings that `knobs` returned, in this process or an earlier one.

        After all reductions, nvpmodel's mode is restored, since it persists over a reboot, then each single setting. If
        the owner had lowered a setting below nvpmodel's mode, that mode is in force for a moment.

        Raises:
            InvalidInputError: the settings are not this board's.
            ModeNotAppliedError: some were refused, or other values were read back.
        """
        kept = dict(knobs)
        mode_id, conf_path = kept.pop(_KEPT_ID, ""), kept.pop(_KEPT_CONF, "")
        if not (mode_id.isdecimal() and conf_path):
            raise InvalidInputError(f"{self.board_kind}: cannot restore without {_KEPT_ID} and {_KEPT_CONF}")
        self.require_restorable(kept)
        base = self._read_conf(conf_path).mode_of_id(int(mode_id))
        to = self._saved(as_numbers(kept))
        failed: list[str] = []
        for step in chain(self._reductions(to), self._arrivals(to)):
            with suppress(ModeNotAppliedError):  # each one is tried again
                step()
        with noting(failed):
            self._activate(conf_path, int(mode_id))
        with noting(failed):
            super().restore(kept)
        if failed:
            raise ModeNotAppliedError("; ".join(failed))
        self._base = base

    def _raise(self, to: JetsonSettings, conf_path: str, mode_id: int) -> ProgramResult:
        """Let nvpmodel set a mode after the reductions to it, with all cores online at its clocks; return its answer.

        nvpmodel would bring cores online at their old clocks, and set the clocks later.
        """
        for step in self._arrivals(to):
            step()
        result = self._activate(conf_path, mode_id)
        # Its configuration may have no entry for the memory, or for each node of the GPU.
        for step in chain(self.gpu.increases(to.gpu_hz), self.memory.increases(to.memory)):
            step()
        return result

    def _activate(self, conf_path: str, mode_id: int) -> ProgramResult:
        result = self._run(["nvpmodel", "-f", conf_path, "-m", str(mode_id)], _NO_REBOOT)
        output = result.output.lower()
        if "reboot" in output:
            raise RebootNeededError(
                f"nvpmodel: mode {mode_id} of {conf_path} needs a reboot, so it was not applied. To apply"
                f" it, run `nvpmodel -f {conf_path} -m {mode_id}` yourself and reboot"
            )
        if "chroot" in output:
            raise ModeNotAppliedError(
                "nvpmodel refuses to run in a chroot and changed nothing; run the agent on the host, not in a"
                " container, or use --device sysfs"
            )
        # On JetPack 7, it may apply a mode and exit with a failure. Every knob is read back anyway. The mode that it
        # reports may be of an earlier copy of the configuration, so the caller looks at the result again.
        if result.code != 0 and (self._current_conf(), self._mode_id()) != (conf_path, mode_id):
            raise ModeNotAppliedError(f"nvpmodel -f {conf_path} -m {mode_id}: {_reason(result)}")
        return result

    def _mode_in_force(self) -> NvpmodelMode:
        path, mode_id = self._current_conf(), self._mode_id()
        conf = self._read_conf(path)
        try:
            return conf.mode_of_id(mode_id)
        except InvalidInputError as error:
            raise ModeNotAppliedError(
                f"{path}: {error}. nvpmodel reports a mode of another configuration; run"
                f" `sudo nvpmodel -m {conf.default}`"
            ) from None

    def _mode_id(self) -> int:
        result = self._run(["nvpmodel", "-q"], _NO_REBOOT)
        if "power mode is not set" in result.output:
            raise ModeNotAppliedError(
                f"nvpmodel -q: its power mode is not set; run `sudo nvpmodel -m {self._conf.default}`"
            )
        found = re.search(r"NV Power Mode:.*\n\s*(\d+)", result.output)
        if found is None:
            raise ModeNotAppliedError(f"nvpmodel -q does not report the current mode: {_reason(result)}")
        return int(found[1])

    def _current_conf(self) -> str:
        try:
            return self._tree.read(_CURRENT_CONF) or SYSTEM_CONF
        except OSError:
            return SYSTEM_CONF

    def _read_conf(self, path: str) -> NvpmodelConf:
        try:
            # This process has written the copy, so it is not below `root`.
            own = path == str(self._custom_conf)
            return parse_conf(self._custom_conf.read_text() if own else self._tree.read(path), path)
        except OSError as error:
            raise InvalidInputError(
                f"{path}: cannot be read: {error.strerror}; check that nvpmodel is installed"
            ) from None

    def _stanza(self, mode: PowerMode) -> dict[Argument, str]:
        """Return all settings of a mode; those outside the mode's four values keep the base mode's value."""
        stanza = dict(self._base.settings)
        for setting, path in self._conf.paths.items():
            parameter, argument = setting
            if parameter == "CPU_ONLINE":
                stanza[setting] = str(int(int(argument.removeprefix("CORE_")) < mode.cores))
            elif parameter == "EMC" and argument == "MAX_FREQ":
                stanza[setting] = str(self.memory.as_cap(mode.mem_hz))
            elif argument in ("MIN_FREQ", "MAX_FREQ"):
                if parameter == "GPU":
                    stanza[setting] = str(mode.gpu_hz)
                elif is_cpu_clock(parameter) and _first_core(path) < mode.cores:
                    stanza[setting] = str(mode.cpu_khz)
                elif is_cpu_clock(parameter):
                    # The clock of offline cores does not have files.
                    stanza.pop(setting, None)
        return stanza


def _first_core(path: str) -> int:
    """Return the first core of a clock, from the path of the file that sets it."""
    found = re.search(r"/(?:cpu|policy)(\d+)/", path)
    return int(found[1]) if found else 0


def _reason(result: ProgramResult) -> str:
    return result.output.strip() or f"exit status {result.code}"
