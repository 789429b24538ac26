"""A mode change never passes through a state that draws more than both of its ends.

Every write is priced: by the worst case of the simulated board's parameters, with every clock at its highest limit and
everything busy.
"""

import errno
import os
import random
from contextlib import contextmanager
from dataclasses import replace

import pytest

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.sysfs import RebootNeededError
from edge_agent.devices.virtual.physics import board_parameters
from tests.fakes.faked_jetson import (
    AGX_ORIN_JP5,
    CAP_4_5,
    CPU,
    FAKED_BOARDS,
    LOCK,
    MEMORY_NODE,
    NANO,
    THOR_T5000,
    XAVIER_AGX,
    FakedJetson,
    FakedNvpmodel,
    open_nvpmodel,
    open_sysfs,
)
from wattfleet.core.modes import PowerMode

# Thor holds its memory through a node, and its GPU has several. Few cores, since every write of a change is tried.
THOR = replace(THOR_T5000, policies=((0,), (1,), (2,), (3,)))
PRICED_BOARDS = (*FAKED_BOARDS, THOR)
BOARDS = pytest.mark.parametrize("board", PRICED_BOARDS, ids=lambda board: board.name)
# How kernels show a CPU policy whose cores are all offline.
KERNELS = {"vanishes": None, "EINVAL": errno.EINVAL, "EBUSY": errno.EBUSY}
OFFLINE_POLICIES = pytest.mark.parametrize(
    ("board", "offline_policy"),
    [
        pytest.param(
            board,
            offline_policy,
            id=f"{board.name}-{kernel}",
            marks=() if offline_policy == errno.EINVAL or board is XAVIER_AGX else pytest.mark.slow,
        )
        for board in PRICED_BOARDS
        for kernel, offline_policy in KERNELS.items()
    ],
)
HOW_MANY = pytest.mark.parametrize("count", [1, pytest.param(8, marks=pytest.mark.slow)], ids=["few", "many"])
TOLERANCE_MW = 1e-6


class PricedJetson(FakedJetson):
    """A Jetson that notes its price after every write; the write with the number `fatal` fails, and all later ones
    to the same file, or it alone with `fails_once`."""

    def __init__(self, root, board, offline_policy=errno.EINVAL):
        self.prices = None
        super().__init__(root, board, offline_policy)
        self.fatal, self.fails_once, self.stuck, self.count = None, False, None, 0
        # The parameters of these two are not known.
        kind = {NANO: "orin-nano", THOR: "agx-orin"}.get(board, board.kind)
        self.power = board_parameters(kind).power

    def write(self, path, text):
        if self.count == self.fatal or path == self.stuck:
            self.stuck = None if self.fails_once else path
            self.count += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        self.count += 1
        # The kernel changes further files in the same moment.
        prices, self.prices = self.prices, None
        try:
            super().write(path, text)
        finally:
            self.prices = prices
        self._note(path)

    def put(self, path, value):
        super().put(path, value)
        self._note(path)

    def _note(self, path):
        if self.prices is not None and path.startswith("/sys"):
            self.prices.append((self.price(), path))

    def number(self, path):
        return int(self.location(path).read_text())

    def is_online(self, core):
        file = self.location(f"{CPU}/cpu{core}/online")
        return core == 0 or file.read_text().strip() == "1"

    def memory_hz(self):
        if self.board.has_bpmp and self.number(f"{LOCK}/mrq_rate_locked"):
            return self.number(f"{LOCK}/rate")
        if self.board.has_memory_node:
            return self.number(f"{MEMORY_NODE}/max_freq")
        return self.number(self.board.emc_cap) or self.board.emc_hz[-1]

    def price(self):
        """The most that the board may draw with its current settings, mW."""
        clocks = [
            self.number(f"{self.policy(cores[0])}/scaling_max_freq")
            for cores in self.board.policies
            for core in cores
            if self.is_online(core)
        ]
        gpu_hz = max(self.number(f"{node}/max_freq") for node in self.board.gpus)
        return self.price_of(clocks, gpu_hz, self.memory_hz())

    def price_of(self, clocks_khz, gpu_hz, mem_hz):
        power, gpu, mem = self.power, gpu_hz / 1e9, mem_hz / 1e9
        total = power.floor_mw
        for khz in clocks_khz:
            ghz = khz / 1e6
            above = max(ghz - power.core_knee_ghz, 0)
            total += (power.core_clock_mw + power.core_busy_mw) * ghz * (1 + power.core_voltage * above**2)
        above = max(gpu - power.gpu_knee_ghz, 0)
        of_gpu = power.gpu_clock_mw + power.gpu_busy_mw + power.gpu_stall_mw
        total += of_gpu * gpu * (1 + power.gpu_voltage * above**2)
        return total + (power.mem_clock_mw + power.mem_traffic_mw + power.mem_compute_mw) * mem

    def arriving(self, mem_hz):
        """The price of the lowest clocks, but for one core that has just come online at the highest."""
        board = self.board
        clocks = [board.cpu_khz[0]] * (board.cores - 1) + [board.cpu_khz[-1]]
        return self.price_of(clocks, board.gpu_hz[0], mem_hz)

    @contextmanager
    def priced(self, arrivals_at_old_clocks=False):
        """Check every state until the end of the block against both ends, or against the lowest state in which the
        first core of a policy can come online, if it may keep an unknown clock."""
        self.prices = []
        before, mem_hz = self.price(), self.memory_hz()
        yield
        prices, self.prices = self.prices, None
        most = max(before, self.price())
        if arrivals_at_old_clocks:
            most = max(most, self.arriving(min(mem_hz, self.memory_hz())))
        above = [(price, path) for price, path in prices if price > most + TOLERANCE_MW]
        assert not above, f"above {most:.0f} mW: {above}"


def random_mode(draw, space):
    """Any mode, often with a knob at one of its ends."""
    knobs = (space.cores, space.cpu_khz, space.gpu_hz, space.mem_hz)
    return PowerMode(*(draw.choice((knob[0], knob[-1], draw.choice(knob), draw.choice(knob))) for knob in knobs))


def leave_in_any_state(draw, tree):
    """Leave the board in any state that its owner may have left it in."""
    board = tree.board
    for policy in board.policies:
        low, high = sorted(draw.choices(board.cpu_khz, k=2))
        tree.put(f"{tree.policy(policy[0])}/scaling_min_freq", low)
        tree.put(f"{tree.policy(policy[0])}/scaling_max_freq", high)
    for node in board.gpus:
        low, high = sorted(draw.choices(board.gpu_hz, k=2))
        tree.put(f"{node}/min_freq", low)
        tree.put(f"{node}/max_freq", high)
    if board.has_memory_node:
        low, high = sorted(draw.choices(board.emc_hz, k=2))
        tree.put(f"{MEMORY_NODE}/min_freq", low)
        tree.put(f"{MEMORY_NODE}/max_freq", high)
    else:
        tree.write(board.emc_cap, str(draw.choice((*board.emc_hz[:-1], 0 if board.emc_cap == CAP_4_5 else -1))))
    if board.has_bpmp and draw.random() < 0.5:
        tree.write(f"{LOCK}/mrq_rate_locked", "1")
        tree.write(f"{LOCK}/rate", str(draw.choice(board.emc_hz)))
    for core in range(draw.randint(1, board.cores), board.cores):
        tree.write(f"{CPU}/cpu{core}/online", "0")


@OFFLINE_POLICIES
@HOW_MANY
def test_no_state_between_two_modes_draws_more_than_both(tmp_path, board, offline_policy, count):
    draw = random.Random(1)
    tree = PricedJetson(tmp_path, board, offline_policy)
    device = open_sysfs(tree)
    device.apply(device.space.highest)
    lowest, highest = device.space.lowest, device.space.highest
    named = [lowest, highest, lowest._replace(cores=highest.cores), highest._replace(cores=1), lowest]
    # Few fast cores and a slow GPU, then many slow cores and a fast GPU: once, many fast cores ran for a moment.
    named += [highest._replace(cores=2, gpu_hz=lowest.gpu_hz), lowest._replace(cores=4, gpu_hz=highest.gpu_hz)]
    for mode in named + [random_mode(draw, device.space) for _ in range(8 * count)]:
        # If the kernel forgets the limits of offline cores, a core is back with the highest until they are set.
        with tree.priced(arrivals_at_old_clocks=offline_policy is None):
            device.apply(mode)
        assert device.current_mode() == mode


@OFFLINE_POLICIES
@HOW_MANY
def test_no_state_on_the_way_from_or_to_the_owners_settings_draws_more(tmp_path, board, offline_policy, count):
    draw = random.Random(2)
    for number in range(2 * count):
        tree = PricedJetson(tmp_path / str(number), board, offline_policy)
        leave_in_any_state(draw, tree)
        device = open_sysfs(tree)
        before, kept = tree.everything(), device.knobs()
        for mode in [random_mode(draw, device.space) for _ in range(2)]:
            with tree.priced(arrivals_at_old_clocks=True):
                device.apply(mode)
        with tree.priced(arrivals_at_old_clocks=True):
            device.restore(kept)
        # If the kernel hides the limits of offline cores, those that the owner had set are unknown.
        hidden = [cores[0] for cores in board.policies if f"policy/{cores[0]}/max_khz" not in kept]
        unknown = {f"{tree.policy(core)}/scaling_{limit}_freq" for core in hidden for limit in ("min", "max")}
        after = tree.everything()
        assert {path for path in before if after.get(path) != before[path]} <= unknown


def test_while_a_core_runs_at_an_old_clock_everything_else_is_at_its_lowest(tmp_path):
    # The owner's cores 8 to 11 are offline with a limit of 2.2 GHz, which can be lowered only while one is online.
    tree = PricedJetson(tmp_path, AGX_ORIN_JP5)
    for core in range(8, 12):
        tree.write(f"{CPU}/cpu{core}/online", "0")
    device = open_sysfs(tree)
    slow = device.space.lowest._replace(cores=8, gpu_hz=AGX_ORIN_JP5.gpu_hz[3])
    device.apply(slow)
    tree.prices = []
    device.apply(slow._replace(cores=12, mem_hz=AGX_ORIN_JP5.emc_hz[1]))
    at_old_clock = next(price for price, path in tree.prices if path == f"{CPU}/cpu8/online")
    assert at_old_clock <= tree.arriving(AGX_ORIN_JP5.emc_hz[0])
    # The mode change left the lowest limit with these cores when it took them offline, so nothing has to wait again.
    device.apply(slow)
    tree.written.clear()
    device.apply(slow._replace(cores=12))
    assert f"{tree.gpu}/max_freq" not in [path for path, value in tree.written if int(value) != slow.gpu_hz]


@BOARDS
def test_a_mode_change_writes_each_setting_once(tmp_path, board):
    draw = random.Random(3)
    tree = PricedJetson(tmp_path, board)
    device = open_sysfs(tree)
    for mode in [random_mode(draw, device.space) for _ in range(8)]:
        tree.written.clear()
        device.apply(mode)
        paths = [path for path, _ in tree.written]
        assert len(set(paths)) == len(paths)


@BOARDS
@pytest.mark.parametrize("fails_once", [True, False], ids=["once", "stuck"])
@HOW_MANY
def test_a_change_that_fails_leaves_the_cheaper_settings(tmp_path, board, fails_once, count):
    draw = random.Random(4)
    tree = PricedJetson(tmp_path, board)
    leave_in_any_state(draw, tree)
    device = open_sysfs(tree)
    before, kept = tree.everything(), device.knobs()
    for _ in range(count):
        old_mode, new_mode = (random_mode(draw, device.space) for _ in range(2))
        device.apply(new_mode)
        new, number, has_failed = tree.price(), 0, True
        while has_failed:
            tree.stuck = None
            device.apply(old_mode)
            old, tree.prices = tree.price(), []
            tree.count, tree.fatal, tree.fails_once = 0, number, fails_once
            try:
                device.apply(new_mode)
            except ModeNotAppliedError as error:
                assert f"the kernel refused it: {os.strerror(errno.EIO)}" in str(error)
            else:
                has_failed = False
            assert all(price <= max(old, new) + TOLERANCE_MW for price, _ in tree.prices)
            if has_failed:
                was_raised = any(price > tree.prices[0][0] + TOLERANCE_MW for price, _ in tree.prices)
                assert tree.price() <= (min(old, new) if was_raised else old) + TOLERANCE_MW
            tree.prices = tree.fatal = None
            number += 1
        assert number > 4
    device.restore(kept)
    assert tree.everything() == before


@BOARDS
@HOW_MANY
def test_nvpmodel_never_passes_through_a_state_that_draws_more(tmp_path, board, count):
    draw = random.Random(5)
    tree = PricedJetson(tmp_path / "root", board)
    nvpmodel = FakedNvpmodel(tree)
    device = open_nvpmodel(tree, nvpmodel, tmp_path / "state")
    kept = device.knobs()
    for mode in [random_mode(draw, device.space) for _ in range(count)]:
        with tree.priced():
            device.apply(mode)
        preset = draw.choice(["MAXN", "15W"])
        with tree.priced():
            device.apply_preset(preset)
        with tree.priced():
            device.apply(mode)
        with pytest.raises(RebootNeededError), tree.priced():
            device.apply_preset("10W")
        assert device.differences(mode) == []
        with tree.priced():
            device.restore(kept)
    nvpmodel.mood = "fails"
    before = tree.price()
    with pytest.raises(ModeNotAppliedError), tree.priced():
        device.apply(device.space.lowest)
    assert tree.price() < before


@BOARDS
def test_a_setting_that_silently_keeps_its_value_stops_every_increase(tmp_path, board):
    tree = PricedJetson(tmp_path, board)
    device = open_sysfs(tree)
    lowest, highest = device.space.lowest, device.space.highest
    device.apply(highest._replace(cores=1, cpu_khz=lowest.cpu_khz))
    tree.deaf.add(f"{tree.gpu}/max_freq")
    with pytest.raises(ModeNotAppliedError, match="was not applied: .*max_freq: wanted"), tree.priced():
        device.apply(lowest._replace(cores=highest.cores, cpu_khz=highest.cpu_khz))
    assert device.current_mode() == lowest._replace(gpu_hz=highest.gpu_hz)


@OFFLINE_POLICIES
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_restoring_that_fails_at_any_write_is_completed_by_the_next(tmp_path, board, offline_policy, step):
    draw = random.Random(6)
    tree = PricedJetson(tmp_path, board, offline_policy)
    for core in range(board.cores // 2, board.cores):
        tree.write(f"{CPU}/cpu{core}/online", "0")
    device = open_sysfs(tree)
    before, kept = tree.everything(), device.knobs()
    number, has_failed = 0, True
    while has_failed:
        device.apply(random_mode(draw, device.space))
        tree.count, tree.fatal, has_failed = 0, number, False
        try:
            device.restore(kept)
        except ModeNotAppliedError as error:
            assert f"the kernel refused it: {os.strerror(errno.EIO)}" in str(error)
            has_failed = True
        tree.fatal = tree.stuck = None
        device.restore(kept)
        assert tree.everything() == before
        number += step
    assert number > 5
