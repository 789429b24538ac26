"""The events that may occur in a world, as steps between which time passes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.worlds.timeline import near_s, near_timeout_s

if TYPE_CHECKING:
    from tests.worlds.agent import Device
    from tests.worlds.flower import FlowerServer
    from tests.worlds.world import World

STEPS = 45


@dataclass(frozen=True)
class Step:
    """One step of a world.

    Attributes:
        rule: the event.
        wait_s: seconds that pass before it.
        seed: seed of the details.
    """

    rule: str
    wait_s: float
    seed: int

    def __str__(self) -> str:
        return f"{self.wait_s:6.2f} s, then {self.rule} ({self.seed})"


def _device(world: World) -> Device:
    if world.rng.random() < 0.5:  # often the same device, since failures come together
        world.focus = world.rng.choice(list(world.devices.values()))
    return world.focus


def _server(world: World) -> FlowerServer:
    return world.rng.choice(world.servers)


def plan(world: World) -> None:
    _server(world).plan()


def plan_and_finish(world: World) -> None:
    """A round is planned, and abandoned almost immediately."""
    server = _server(world)
    server.plan()

    def finish() -> None:
        if server.open:
            server.finish_round(max(server.open))

    if world.rng.random() < 0.3:
        plan_id = f"{server.run_id}/{server.number}"
        world.timeline.after(0.6 * world.rng.random(), partial(world.coordinator.abandon, plan_id))
    else:
        world.timeline.after(1.5 * world.rng.random(), finish)


def plan_and_crash(world: World) -> None:
    """The coordinator crashes while it plans; an app still requests to train for the plan."""
    server, device = _server(world), _device(world)
    server.plan()
    plan_id = f"{server.run_id}/{server.number}"
    down_s = 1.0 + world.rng.random() * 5.0
    if world.rng.random() < 0.5:
        world.coordinator.stored.fails_until_s = world.timeline.now_s + 3.0
    world.timeline.after(world.rng.random(), lambda: world.coordinator.crash(down_s))
    if world.rng.random() < 0.5:
        world.timeline.after(1.0, lambda: device.ask_to_train(plan_id, 30.0, False))


def survey(world: World) -> None:
    _server(world).survey()


def measure_beside(world: World) -> None:
    """A round is planned, and what it leaves out measures."""
    server = _server(world)
    if not server.open:
        server.plan()
    world.timeline.after(1.0 + world.rng.random(), partial(server.measure, None))


def measure_in_trouble(world: World) -> None:
    """While devices begin to measure, the coordinator or an agent crashes, or their run, round or Flower server ends.

    An app may train for what its agent was granted, although no Flower server has sent it the training.
    """
    rng, server, device = world.rng, _server(world), _device(world)
    crash = partial(world.coordinator.crash, 1.0 + 5.0 * rng.random())
    server.measure(None)

    def finish_round() -> None:
        if server.open:
            server.finish_round(max(server.open))

    def ask_for_held() -> None:
        if (held := device.held.in_force) is not None:
            device.ask_to_train(held.plan_id, 30.0, False)

    ends = (server.finish_run, finish_round, partial(server.restart, rng.random() < 0.5))
    troubles = (crash, partial(device.restart, 1.0 + 5.0 * rng.random()), *ends)
    if rng.random() < 0.4:
        world.coordinator.stored.fails_until_s = world.timeline.now_s + 3.0
        world.timeline.after(2.0 * rng.random(), ask_for_held)
        world.timeline.after(2.0 * rng.random(), crash)
    else:
        world.timeline.after(1.5 * rng.random(), rng.choice(troubles))


def plan_over_measuring(world: World) -> None:
    """A round needs devices that measure for another run; often, the coordinator crashes just after it is planned."""
    rng = world.rng
    server, other = rng.sample(list(world.servers), 2)
    other.measure(None)
    crash = partial(world.coordinator.crash, 1.0 + 5.0 * rng.random())
    crashes = rng.random() < 0.7

    def look(plan_id: str, left: int) -> None:
        if plan_id in server.open:
            world.timeline.after(0.5 * rng.random(), crash)
        elif left:
            world.timeline.after(0.2, partial(look, plan_id, left - 1))

    def plan() -> None:
        server.plan()
        look(f"{server.run_id}/{server.number}", 60 if crashes else 0)

    world.timeline.after(1.0 + 5.0 * rng.random(), plan)


def finish_unheard(world: World) -> None:
    """A training finishes while the session is lost; then the agent and Flower's node restart.

    Its observation may be lost a second time, after the Hello and a lease.
    """
    device = _device(world)
    training = device.training
    if training is None or device.stream is None:
        return
    device.stream.up.lose()
    device.app_finishes()
    down_s, again_s = 4.0 + world.rng.random(), 5.0 * world.rng.random()
    if world.rng.random() < 0.5:
        device.next_lost_after = 2
    world.timeline.after(down_s, lambda: device.restart(1.0))
    world.timeline.after(down_s + again_s, lambda: device.ask_to_train(training.plan_id, 30.0, False))


def finish_round(world: World) -> None:
    server = _server(world)
    if server.open:
        server.finish_round(world.rng.choice(sorted(server.open)))


def give_up_device(world: World) -> None:
    server = _server(world)
    server.give_up(_device(world).id)
    server.plan()


def repeat_message(world: World) -> None:
    server = _server(world)
    if server.sent:
        server.arrive(*world.rng.choice(server.sent[-6:]))


def made_up_plan(world: World) -> None:
    plans = [plan for server in world.servers for _, plan in server.sent[-4:]]
    plans += [server.next_plan_id for server in world.servers]
    _device(world).ask_to_train(world.rng.choice(plans), world.rng.random() * 50.0, False)


def change_budget(world: World) -> None:
    if world.rng.random() < 0.5:
        _cut_to(world, 0.4 + 0.7 * world.rng.random())
    else:
        world.set_budget(float(world.rng.randint(8, 100)))


def cut_in_trouble(world: World) -> None:
    """The budget falls, possibly twice, while it is hard to reach a training device."""
    training = [device for device in world.devices.values() if device.training is not None]
    if not training:
        return
    device, trouble = world.rng.choice(training), world.rng.randrange(4)
    world.focus = device
    world.note(f"{device.id} is hard to reach: {('flaps', 'answers lost', 'answers late', 'hangs up')[trouble]}")
    if trouble == 0:
        device.flaps_until_s = world.timeline.now_s + 60.0
        device.hang_up()
    elif trouble == 3:
        device.hang_up()
    elif device.stream is not None and trouble == 1:
        device.stream.down.lose()
    elif device.stream is not None:
        device.stream.down.stall(14.0 * world.rng.random())
    for seconds in (world.rng.random(), 12.0 * world.rng.random())[: world.rng.randint(1, 2)]:
        share = 0.2 + 0.8 * world.rng.random()
        world.timeline.after(seconds, partial(_cut_to, world, share))


def cut_around_a_timeout(world: World) -> None:
    """The budget falls twice, about a time-out apart; at about the second moment, a device can be reached again."""
    training = [device for device in world.devices.values() if device.training is not None]
    if not training:
        return
    rng, device = world.rng, world.rng.choice(training)
    wait_s = near_timeout_s(rng)
    back_s = max(0.0, wait_s + near_s(rng))
    trouble = rng.choice(("answers late", "reports late", "both late", "unreachable", "flaps"))
    world.focus = device
    world.note(f"{device.id} is hard to reach for {back_s:.2f} s: {trouble}")
    if trouble == "unreachable":
        device.unreachable_until_s = world.timeline.now_s + back_s
        device.hang_up()
    elif trouble == "flaps":
        device.flaps_until_s = world.timeline.now_s + back_s
        device.hang_up()
    elif device.stream is not None:
        if trouble != "reports late":
            device.stream.down.stall(back_s)
        if trouble != "answers late":
            device.stream.up.stall(back_s)
    _cut_to(world, 0.5 + 0.5 * rng.random())
    world.timeline.after(wait_s, partial(_cut_to, world, 0.2 + 0.7 * rng.random()))


def restart_around_a_timeout(world: World) -> None:
    """The coordinator or an agent is down for about a time-out, while the budget falls."""
    rng, device = world.rng, _device(world)
    down_s = near_timeout_s(rng)
    if rng.random() < 0.5:
        world.coordinator.crash(down_s)
    else:
        device.restart(down_s)
    world.timeline.after(max(0.0, down_s + near_s(rng)), partial(_cut_to, world, 0.2 + 0.8 * rng.random()))


def _cut_to(world: World, share: float) -> None:
    drawn_w = sum(device.drawn_w for device in world.devices.values())
    world.set_budget(float(round(share * drawn_w)))


def lose(world: World) -> None:
    """A session becomes half-open."""
    device, which = _device(world), world.rng.randrange(4)
    if device.stream is not None and world.rng.random() < 0.3:  # its last answers arrive late
        stream, seconds = device.stream, world.rng.random() * 14.0
        world.note(f"{device.id}: answers stalled for {seconds:.1f} s, then lost")
        stream.down.stall(seconds)
        world.timeline.after(seconds + 0.01, stream.down.lose)
        return
    if device.stream is not None:
        world.note(f"{device.id}: {('up', 'down', 'both', 'both')[which]} lost")
        if which != 1:
            device.stream.up.lose()
        if which != 0:
            device.stream.down.lose()
    if which == 3:
        device.unreachable_until_s = world.timeline.now_s + world.rng.random() * 60.0


def flap(world: World) -> None:
    """For a while, each session of a device is lost after a few answers."""
    device = _device(world)
    device.flaps_until_s = world.timeline.now_s + world.rng.random() * 60.0
    world.note(f"{device.id}: flaps until {device.flaps_until_s:.1f} s")
    device.hang_up()


def stall(world: World) -> None:
    device = _device(world)
    if device.stream is not None:
        seconds = world.rng.random() * 20.0
        world.note(f"{device.id}: stalled for {seconds:.1f} s")
        if world.rng.random() < 0.7:
            device.stream.down.stall(seconds)
        if world.rng.random() < 0.7:
            device.stream.up.stall(seconds)


def drop(world: World) -> None:
    device = _device(world)
    world.note(f"{device.id}: hangs up")
    device.hang_up()


def restart_agent(world: World) -> None:
    device, down_s = _device(world), world.rng.random() * 10.0
    device.restart(down_s)
    sent = [(server, plan_id) for server in world.servers for to, plan_id in server.sent[-4:] if to == device.id]
    if sent and world.rng.random() < 0.5:  # Flower's node also restarts, and receives its message again
        server, plan_id = world.rng.choice(sent)
        world.timeline.after(down_s + world.rng.random() * 5.0, lambda: server.arrive(device.id, plan_id))


def restart_coordinator(world: World) -> None:
    world.coordinator.crash(world.rng.random() * (3.0 if world.rng.random() < 0.7 else 30.0))


def fail_store(world: World) -> None:
    world.coordinator.stored.fails_until_s = world.timeline.now_s + world.rng.random() * 20.0


def restart_server(world: World) -> None:
    _server(world).restart(world.rng.random() < 0.5)


def finish_run(world: World) -> None:
    _server(world).finish_run()


def abandon(world: World) -> None:
    fleet = world.coordinator.fleet
    if fleet is not None and (in_flight := sorted(each.plan_id for each in fleet.rounds.in_flight())):
        world.coordinator.abandon(world.rng.choice(in_flight))


def change_date(world: World) -> None:
    """The date jumps a day ahead or an hour back."""
    world.date_s += world.rng.choice((86_400.0, -3_600.0))


def drain(world: World) -> None:
    world.coordinator.drain(_device(world).id, world.rng.random() < 0.6)


def app_dies(world: World) -> None:
    _device(world).app_dies()


def profile(world: World) -> None:
    _device(world).profile(world.rng.random() * 20.0)


def wait(world: World) -> None:
    pass


RULES: dict[str, tuple[int, Callable[[World], None]]] = {
    "plan": (20, plan),
    "plan and finish": (3, plan_and_finish),
    "plan and crash": (2, plan_and_crash),
    "survey and plan": (6, survey),
    "measure beside a round": (6, measure_beside),
    "measure in trouble": (3, measure_in_trouble),
    "plan over measuring": (3, plan_over_measuring),
    "finish unheard": (2, finish_unheard),
    "finish round": (5, finish_round),
    "give a device up and plan": (4, give_up_device),
    "repeat a message": (5, repeat_message),
    "ask for a made-up plan": (4, made_up_plan),
    "change the budget": (10, change_budget),
    "cut in trouble": (7, cut_in_trouble),
    "cut around a time-out": (5, cut_around_a_timeout),
    "restart around a time-out": (2, restart_around_a_timeout),
    "lose a session": (7, lose),
    "flap": (3, flap),
    "stall a session": (4, stall),
    "drop a session": (3, drop),
    "restart an agent": (4, restart_agent),
    "restart the coordinator": (4, restart_coordinator),
    "fail the store": (3, fail_store),
    "restart a Flower server": (2, restart_server),
    "finish a run": (2, finish_run),
    "abandon a round": (1, abandon),
    "change the date": (2, change_date),
    "drain": (2, drain),
    "kill an app": (2, app_dies),
    "profile": (3, profile),
    "wait": (4, wait),
}

NOTHING = "wait"

PROFILING = "profile"
"""A rule that is off by default: profiling is not granted."""


MEASURING = ("survey and plan", "measure beside a round", "measure in trouble", "plan over measuring")
"""The rules that let devices measure."""


def steps_of(seed: int, profiling: bool = False, measuring: bool = True) -> list[Step]:
    """The steps of a random world, with or without the rules that let devices profile or measure."""
    rng = random.Random(seed * 2 + 1)
    rules = [name for name in RULES if (profiling or name != PROFILING) and (measuring or name not in MEASURING)]
    weights = [RULES[name][0] for name in rules]
    return [
        Step(rule, max(0.0, round(_wait_s(rng), 2)), rng.randrange(1 << 30))
        for rule in rng.choices(rules, weights, k=rng.randint(5, STEPS))
    ]


def _wait_s(rng: random.Random) -> float:
    """Seconds between two steps: many events are almost simultaneous or a time-out apart; some come much later."""
    if rng.random() < 0.15:
        return near_timeout_s(rng)
    return rng.random() * rng.choices((0.3, 3.0, 8.0, 40.0), (35, 30, 20, 15))[0]
