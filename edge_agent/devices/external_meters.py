"""Power meters that a machine does not have built in: a socket with a meter, a Prometheus server, a command, a PMIC.

Such a meter answers slowly, over a network, or not at all. A thread therefore reads it once in its period, and everyone
else gets the latest answer at once. An answer is bounded in time and size, no redirect is followed, and whatever is not
a plausible number of watts is a missing sample, with the reason in the log and in `doctor`.
"""

from __future__ import annotations

import http.client
import logging
import math
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import threading
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from wattfleet.common.clock import Clock
from wattfleet.common.parsing import parse_json_object
from wattfleet.core.errors import InvalidInputError, WattfleetError

_log = logging.getLogger(__name__)

TIMEOUT_S = 3.0
"""Time limit of one reading, s."""
MAX_BYTES = 256 * 1024
"""Limit on the size of an answer."""
MIN_PERIOD_S, MAX_PERIOD_S = 0.2, 5.0
_MIN_W, _MAX_W = 0.1, 20_000.0
"""No machine that trains draws less or more."""
_MAX_SHOWN = 80
_IDLE_S = 20.0
"""A meter that nobody asked for so long is no longer read, s."""


class MeterError(WattfleetError):
    """A meter gave no plausible watts; the message says why, and what to do."""


class ExternalMeter(ABC):
    """A meter that is read once in a period.

    Attributes:
        statement: what it measures, for people.
        period_s: seconds between two of its own samples; reading it more often only repeats them.
    """

    statement: str
    period_s: float = 1.0

    @abstractmethod
    def read_w(self) -> float:
        """Return the current power, W, within `TIMEOUT_S`.

        Raises:
            MeterError: it does not answer, or not with plausible watts.
        """


def parse_meter(spec: str) -> ExternalMeter:
    """Return the meter that a machine's file names.

    Args:
        spec: `prometheus:<URL>?<query>`, `command:<command line>`, `shelly:<host>`, `tasmota:<host>` or `pmic`. A host
            may have a port, and a Shelly of several channels `/<channel>`.

    Raises:
        InvalidInputError: it names no meter.
    """
    kind, _, which = spec.partition(":")
    if spec == "pmic":
        return Pmic()
    if kind not in _KINDS or not which.strip():
        raise InvalidInputError(
            f"unknown meter {spec!r}: use built-in, pmic, shelly:<host>, tasmota:<host>, prometheus:<URL>?<query> or"
            " command:<command line>"
        )
    return _KINDS[kind](which.strip())


class Polled:
    """Reads a meter in a thread of its own, and keeps the latest answer.

    Args:
        meter: the meter.
        clock: measures the age of an answer.
        period_s: seconds between two readings; None for the meter's own.
    """

    def __init__(self, meter: ExternalMeter, clock: Clock, period_s: float | None = None) -> None:
        self.meter = meter
        self.period_s = period_s or meter.period_s
        self._clock = clock
        self._changed = threading.Condition()
        self._latest: tuple[float, float] | None = None
        self._problem: str | None = None
        self._asked_s = -math.inf
        self._is_running = False

    def read_mw(self) -> float:
        """Return the latest power, mW; NaN if there is none that is recent. Waits only for the first answer."""
        with self._changed:
            self._asked_s = self._clock.now_s()
            if not self._is_running:
                self._latest = self._problem = None
                self._is_running = True
                threading.Thread(target=self._run, name="external-meter", daemon=True).start()
            self._changed.wait_for(lambda: self._latest or self._problem, TIMEOUT_S + 1.0)
            if self._latest is None or self._clock.now_s() - self._latest[0] > self._stale_s:
                return math.nan
            return self._latest[1] * 1e3

    @property
    def problem(self) -> str | None:
        """Why the latest reading failed; None if it did not, or there was none."""
        with self._changed:
            return self._problem

    @property
    def _stale_s(self) -> float:
        return 2 * self.period_s + TIMEOUT_S

    def _run(self) -> None:
        while True:
            begun_s, latest, problem = self._clock.now_s(), None, None
            try:
                latest = self._clock.now_s(), _plausible(self.meter.read_w())
            except MeterError as error:
                problem = str(error)
            except Exception as error:  # a thread that ended would leave its last value for ever
                problem = f"cannot be read: {error}"
                if problem != self._problem:
                    _log.exception("%s cannot be read", self.meter.statement)
            with self._changed:
                if problem is not None and problem != self._problem:
                    _log.warning("%s: %s", self.meter.statement, problem)
                self._latest, self._problem = latest or self._latest, problem
                self._changed.notify_all()
                left_s = self.period_s - (self._clock.now_s() - begun_s)
                self._changed.wait(max(0.01, left_s))
                if self._clock.now_s() - self._asked_s > _IDLE_S:
                    self._is_running = False
                    return


def _plausible(watts: float) -> float:
    if not math.isfinite(watts):
        raise MeterError(f"answers {watts}, which is not a number of watts")
    if watts > _MAX_W:
        raise MeterError(f"answers {watts:.6g} W, more than any machine draws. Does it report milliwatts?")
    if watts < _MIN_W:
        raise MeterError(f"answers {watts:g} W: is this machine behind it, and the meter the right way round?")
    return watts


# --- HTTP -------------------------------------------------------------------------------------------------------------


def _get(url: str) -> bytes:
    """Return the answer to a GET request, bounded in time from the connection on, and in size.

    Raises:
        MeterError: there is no answer, or it is no success.
    """
    parts = urllib.parse.urlsplit(url)
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    host, context = parts.hostname or "", ssl.create_default_context() if is_tls else None
    connection: http.client.HTTPConnection
    connection = (
        http.client.HTTPSConnection(host, port, context=context) if is_tls else http.client.HTTPConnection(host, port)
    )
    is_late = threading.Event()
    held: socket.socket | None = None

    def give_up() -> None:
        is_late.set()
        # The timeout of the socket only bounds each of its reads.
        if held is not None:
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(TIMEOUT_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        raw = socket.create_connection((host, port), TIMEOUT_S)
        connection.sock = raw
        # A duplicate, since the socket is taken away by TLS before its handshake, and by the answer before its body.
        held = raw.dup()
        if is_late.is_set():
            raise TimeoutError
        if context is not None:
            connection.sock = context.wrap_socket(raw, server_hostname=host)
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection.request("GET", path, headers={"Accept-Encoding": "identity", "Connection": "close"})
        answer = connection.getresponse()
        body = answer.read(MAX_BYTES + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if is_late.is_set() or isinstance(error, TimeoutError):
            raise MeterError(f"{parts.netloc} did not answer within {TIMEOUT_S:g} s") from None
        raise MeterError(f"{parts.netloc} cannot be reached: {_excerpt(str(error) or type(error).__name__)}") from None
    finally:
        timer.cancel()
        connection.close()
        if held is not None:
            held.close()
    if is_late.is_set():
        raise MeterError(f"{parts.netloc} did not answer within {TIMEOUT_S:g} s")
    if 300 <= answer.status < 400:
        raise MeterError(f"{parts.netloc} answers with a redirect, which is not followed: name the address it leads to")
    if answer.status == 401:
        raise MeterError(f"{parts.netloc} wants a password: switch its authentication off, or use command:<...>")
    if answer.status != 200:
        raise MeterError(f"{parts.netloc} answers HTTP {answer.status}: {_excerpt(body)}")
    if len(body) > MAX_BYTES:
        raise MeterError(f"{parts.netloc} answers more than {MAX_BYTES // 1024} KiB: is it a meter?")
    return body


def _get_json(url: str) -> dict[str, Any]:
    body = _get(url)
    try:
        return parse_json_object(body)
    except ValueError as error:
        raise MeterError(f"{urllib.parse.urlsplit(url).netloc} answers {_excerpt(body)}: {error}") from None


def _excerpt(text: str | bytes) -> str:
    shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    plain = "".join(sign if sign.isprintable() else "?" for sign in shown[:_MAX_SHOWN])
    return repr(plain) + ("..." if len(shown) > _MAX_SHOWN else "")


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MeterError(f"{what} is {_excerpt(str(value))}, which is not a number of watts")
    return float(value)


def _host(text: str) -> str:
    """Check a host, with a port or without, and return it.

    Raises:
        InvalidInputError: it is neither a name nor an address.
    """
    if "://" in text:
        raise InvalidInputError(f"{text!r} is a URL: write its host without {text.partition('://')[0]}://")
    try:
        parts = urllib.parse.urlsplit(f"http://{text}")
        good = re.fullmatch(r"[\w.:\[\]-]+", text) and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise InvalidInputError(f"{text!r} is no host: write a name or address, such as 192.168.1.20")
    return text


class Shelly(ExternalMeter):
    """A Shelly: Gen1 by `/status`, later ones by `Switch.GetStatus` of their RPC. It samples about once a second.

    Args:
        where: its host, and `/<channel>` if it is not channel 0.

    Raises:
        InvalidInputError: it is no host.
    """

    def __init__(self, where: str) -> None:
        host, _, channel = (where, "", "") if "://" in where else where.partition("/")
        if not re.fullmatch(r"\d{0,2}", channel):
            raise InvalidInputError(f"shelly:{where}: {channel!r} is no channel: write shelly:<host>/0")
        self._host, self._channel = _host(host), int(channel or 0)
        self._generation: int | None = None
        self.statement = f"the Shelly {where}"

    def read_w(self) -> float:
        """Return the power of its channel, W."""
        try:
            return self._read_w()
        except MeterError:
            # Another device may have its address since.
            self._generation = None
            raise

    def _read_w(self) -> float:
        if self._generation is None:
            found = _get_json(f"http://{self._host}/shelly")
            self._generation = found["gen"] if isinstance(found.get("gen"), int) else 1
        if self._generation >= 2:
            status = _get_json(f"http://{self._host}/rpc/Switch.GetStatus?id={self._channel}")
            if "apower" not in status:
                raise MeterError(f"{self._host}: channel {self._channel} measures no power")
            return _number(status["apower"], f"apower of {self._host}")
        status = _get_json(f"http://{self._host}/status")
        meters = status.get("meters") or status.get("emeters")
        if not isinstance(meters, list) or len(meters) <= self._channel or not isinstance(meters[self._channel], dict):
            raise MeterError(f"{self._host}: has no meter {self._channel}")
        meter = meters[self._channel]
        if meter.get("is_valid") is False:
            raise MeterError(f"{self._host}: says itself that its meter is not valid")
        return _number(meter.get("power"), f"power of {self._host}")


class Tasmota(ExternalMeter):
    """A socket with Tasmota, by `Status 8`, or `Status 10` of versions that answer only that.

    Args:
        where: its host.

    Raises:
        InvalidInputError: it is no host.
    """

    def __init__(self, where: str) -> None:
        self._host = _host(where)
        self.statement = f"the Tasmota socket {where}"

    def read_w(self) -> float:
        """Return its power, W."""
        for status in (8, 10):
            answer = _get_json(f"http://{self._host}/cm?cmnd=Status%20{status}")
            sensors = answer.get("StatusSNS")
            energy = sensors.get("ENERGY") if isinstance(sensors, dict) else None
            if isinstance(energy, dict):
                power = energy.get("Power")
                if isinstance(power, list):
                    raise MeterError(f"{self._host}: measures {len(power)} channels; use command:<...> for one of them")
                return _number(power, f"Power of {self._host}")
            if isinstance(warning := answer.get("WARNING"), str):
                raise MeterError(f"{self._host}: {_excerpt(warning)}: remove its web password, or use command:<...>")
        raise MeterError(f"{self._host}: its sensors measure no energy")


class PrometheusMeter(ExternalMeter):
    """The answer of a Prometheus server to an instant query, in watts.

    Args:
        where: the server's URL, `?`, and PromQL that returns one series or a scalar.

    Raises:
        InvalidInputError: it has no URL or no query.
    """

    period_s = 5.0
    _OLDEST_S = 10
    """The oldest sample that the server answers from, s."""

    def __init__(self, where: str) -> None:
        url, _, query = where.partition("?")
        try:
            parts = urllib.parse.urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and parts.port != 0
        except ValueError:
            good = False
        if not good or not query.strip():
            raise InvalidInputError(
                f"prometheus:{where}: write a server and a query, such as"
                " prometheus:http://127.0.0.1:9090?socket_watts{name='pi'}"
            )
        self._url, self._query = url.rstrip("/"), query.strip()
        self.statement = f"the query {self._query!r} at {self._url}"

    def read_w(self) -> float:
        """Return the answer, W."""
        parameters = {"query": self._query, "timeout": f"{TIMEOUT_S:g}s", "lookback_delta": f"{self._OLDEST_S}s"}
        answer = _get_json(f"{self._url}/api/v1/query?{urllib.parse.urlencode(parameters)}")
        try:
            kind, result = answer["data"]["resultType"], answer["data"]["result"]
            if kind == "vector" and len(result) != 1:
                old = f"no sample of the last {self._OLDEST_S} s: let Prometheus scrape it every few seconds"
                what = f"{len(result)} series: select one" if result else old
                raise MeterError(f"{self._query!r} returns {what}")
            if kind not in ("vector", "scalar"):
                raise MeterError(f"{self._query!r} returns a {_excerpt(str(kind))}, not one series or a scalar")
            return float((result if kind == "scalar" else result[0]["value"])[1])
        except (KeyError, IndexError, TypeError, ValueError):
            raise MeterError(f"{self._url} does not answer like Prometheus: {_excerpt(str(answer))}") from None


# --- Programs ---------------------------------------------------------------------------------------------------------


def _output_of(command: list[str]) -> str:
    """Return what a program writes, within the limits on time and size.

    Raises:
        MeterError: it cannot be started, fails, or exceeds a limit.
    """
    name = command[0]
    try:
        # In a session of its own, so that its children end with it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise MeterError(f"{name} cannot be started: {error.strerror}") from None
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(TIMEOUT_S, end)
    timer.daemon = True
    timer.start()
    try:
        with process:
            assert process.stdout is not None
            output = process.stdout.read(MAX_BYTES + 1)
            if len(output) > MAX_BYTES:
                end()
                raise MeterError(f"{name} writes more than {MAX_BYTES // 1024} KiB")
    finally:
        timer.cancel()
    if is_late.is_set():
        raise MeterError(f"{name} did not end within {TIMEOUT_S:g} s")
    text = output.decode("utf-8", "replace").strip()
    if process.returncode:
        raise MeterError(f"{name} fails with exit status {process.returncode}: {_excerpt(text)}")
    return text


class Command(ExternalMeter):
    """A program that writes the current watts as a number. No shell is involved.

    Args:
        line: the command line, which begins with the absolute path of the program.

    Raises:
        InvalidInputError: its quotes do not match, or the path is not absolute.
    """

    def __init__(self, line: str) -> None:
        try:
            self._command = shlex.split(line)
        except ValueError as error:
            raise InvalidInputError(f"command:{line}: {error}") from None
        if not self._command or not self._command[0].startswith("/"):
            raise InvalidInputError(
                f"command:{line}: write the absolute path of the program, such as /usr/local/bin/watts"
            )
        self.statement = f"the command {line!r}"

    def read_w(self) -> float:
        """Return what it writes, W."""
        text = _output_of(self._command)
        try:
            return float(text)
        except ValueError:
            raise MeterError(f"{self._command[0]} writes {_excerpt(text)}, not a number of watts") from None


_READING = re.compile(r"^\s*(\w+)_([AV])\s+\w+\(\d+\)=(-?[\d.]+)([AV])\s*$", re.MULTILINE)


class Pmic(ExternalMeter):
    """The power chip of a Raspberry Pi 5: the sum of the power of its rails, by `vcgencmd`.

    Its rails are those of the board itself. It misses what is drawn through USB and the 5 V pins, and what is lost
    before the rails. Earlier models have no such chip.
    """

    statement = "the PMIC of a Raspberry Pi 5, without USB devices and the 5 V pins"

    def __init__(self, run: Callable[[list[str]], str] = _output_of) -> None:
        self._run = run

    def read_w(self) -> float:
        """Return the sum of its rails, W."""
        try:
            text = self._run(["vcgencmd", "pmic_read_adc"])
        except MeterError as error:
            raise MeterError(
                f"{error}; only a Raspberry Pi 5 measures its power, for root and the group video"
            ) from None
        found: dict[str, dict[str, float]] = {}
        for rail, quantity, value, _ in _READING.findall(text):
            with suppress(ValueError):
                found.setdefault(rail, {})[quantity] = float(value)
        # The voltages of the input and the clock's battery have no current beside them.
        rails = [each for each in found.values() if len(each) == 2]
        if not rails:
            raise MeterError(f"vcgencmd reports no rail: {_excerpt(text)}; only a Raspberry Pi 5 measures its power")
        return sum(each["A"] * each["V"] for each in rails)


_KINDS: dict[str, Callable[[str], ExternalMeter]] = {
    "shelly": Shelly,
    "tasmota": Tasmota,
    "prometheus": PrometheusMeter,
    "command": Command,
}
