"""The faults of a link, and the form in which the tests apply them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

import pytest

from tests.fakes.faulty_link import Direction, FaultyLink
from tests.faults.fleet import REAL, SHORT, Pace

IS_LONG = "FAULTS_DEVICES" in os.environ
DEVICES = int(os.environ.get("FAULTS_DEVICES", "5"))
PACE = REAL if IS_LONG else SHORT


@dataclass(frozen=True)
class Fault:
    """A fault of a link.

    Attributes:
        name: the fault in words.
        begin: begins the fault.
        cuts: whether nothing passes in at least one direction until the fault ends.
        end: ends the fault.
    """

    name: str
    begin: Callable[[FaultyLink, Pace], None]
    cuts: bool = False
    end: Callable[[FaultyLink], None] = FaultyLink.heal

    def __str__(self) -> str:
        return self.name


def _latency(link: FaultyLink, pace: Pace) -> None:
    link.latency_s = pace.latency_s
    link.reset()  # a new connection takes several round trips


def _loss(link: FaultyLink, pace: Pace) -> None:
    link.loss = 0.5


def _bandwidth(link: FaultyLink, pace: Pace) -> None:
    link.bytes_per_s = 64_000.0
    link.reset()


PARTITION = Fault("partition", lambda link, _: link.partition(), cuts=True)
FAULTS = [
    Fault("latency", _latency),
    Fault("50 % loss", _loss),
    Fault("64 kB per s", _bandwidth),
    Fault("half-open to the server", lambda link, _: link.half_open(Direction.TO_SERVER), cuts=True),
    Fault("half-open to the client", lambda link, _: link.half_open(Direction.TO_CLIENT), cuts=True),
    PARTITION,
    Fault("forgotten connections", lambda link, _: link.forget()),
    Fault("all reset at once", lambda link, _: link.reset()),
]

NO_FAULT = Fault("no fault", lambda link, _: None)


def on_each_transport(short: Collection[str]) -> list[pytest.ParameterSet]:
    """Every fault on plaintext and on mutual TLS; in the short form each on one of the two, alternating.

    Args:
        short: the faults that are part of the short form on this link; the links together cover all faults.
    """
    if IS_LONG:
        return [_case(fault, is_certified) for fault in FAULTS for is_certified in (False, True)]
    return [_case(fault, number % 2 == 1, fault.name not in short) for number, fault in enumerate(FAULTS)]


def _case(fault: Fault, is_certified: bool, is_slow: bool = False) -> pytest.ParameterSet:
    return pytest.param((fault, is_certified), marks=[pytest.mark.slow] if is_slow else [])


def name_of(case: tuple[Fault, bool]) -> str:
    """The name of a case, for the test's id."""
    fault, is_certified = case
    return f"{fault} {'with' if is_certified else 'without'} TLS"
