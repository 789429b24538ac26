"""Meters over HTTP, commands and the PMIC: their answers, and everything that can be wrong with an answer."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading
import time
import urllib.parse
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from edge_agent.devices import external_meters
from edge_agent.devices.external_meters import MeterError, Polled, parse_meter
from tests.fakes.faked_host import FixedMeter
from wattfleet.common.clock import SystemClock
from wattfleet.core.errors import InvalidInputError


class FakeMeters:
    """An HTTP server on a free port of loopback; `answers` maps a path to a document, text, or what to do instead."""

    def __init__(self):
        self.answers = {}
        self.asked = []
        meters = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):  # noqa: N802 - as the library names it
                meters.asked.append(self.path)
                answer = meters.answers.get(self.path.partition("?")[0])
                if callable(answer):
                    answer(self)
                    return
                status, body = (404, b"no such page") if answer is None else (200, answer)
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def meters():
    fake = FakeMeters()
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(external_meters, "TIMEOUT_S", 0.5)


# --- Shelly and Tasmota -----------------------------------------------------------------------------------------------


def test_a_shelly_of_the_first_generation(meters):
    meters.answers["/shelly"] = {"type": "SHPLG-S", "auth": False}
    meters.answers["/status"] = {"meters": [{"power": 23.4, "is_valid": True}, {"power": 7}]}
    shelly = parse_meter(f"shelly:{meters.host}")
    assert (shelly.read_w(), shelly.read_w()) == (23.4, 23.4)
    assert meters.asked == ["/shelly", "/status", "/status"], "its generation is asked once"
    assert parse_meter(f"shelly:{meters.host}/1").read_w() == 7
    with pytest.raises(MeterError, match="has no meter 2"):
        parse_meter(f"shelly:{meters.host}/2").read_w()
    meters.answers["/status"] = {"meters": [{"power": 0, "is_valid": False}]}
    with pytest.raises(MeterError, match="not valid"):
        shelly.read_w()


def test_a_shelly_of_a_later_generation(meters):
    meters.answers["/shelly"] = {"id": "shellyplugsg3", "gen": 3}
    meters.answers["/rpc/Switch.GetStatus"] = {"id": 0, "output": True, "apower": 41.7, "voltage": 229.9}
    assert parse_meter(f"shelly:{meters.host}").read_w() == 41.7
    assert meters.asked[-1] == "/rpc/Switch.GetStatus?id=0"
    meters.answers["/rpc/Switch.GetStatus"] = {"id": 0, "output": True}
    with pytest.raises(MeterError, match="measures no power"):
        parse_meter(f"shelly:{meters.host}").read_w()


def test_a_shelly_that_was_replaced_is_asked_for_its_generation_again(meters):
    meters.answers["/shelly"] = {"type": "SHPLG-S"}
    meters.answers["/status"] = {"meters": [{"power": 23.4}]}
    shelly = parse_meter(f"shelly:{meters.host}")
    assert shelly.read_w() == 23.4
    meters.answers = {"/shelly": {"gen": 3}, "/rpc/Switch.GetStatus": {"apower": 41.7}}
    with pytest.raises(MeterError, match="HTTP 404"):
        shelly.read_w()
    assert shelly.read_w() == 41.7


def test_a_tasmota_socket(meters):
    socket_ = parse_meter(f"tasmota:{meters.host}")
    meters.answers["/cm"] = {"StatusSNS": {"Time": "2026-01-01T00:00:00", "ENERGY": {"Power": 12, "Total": 3.1}}}
    assert socket_.read_w() == 12
    assert meters.asked == ["/cm?cmnd=Status%208"]
    meters.answers["/cm"] = {"StatusSNS": {"ENERGY": {"Power": [12, 13]}}}
    with pytest.raises(MeterError, match="measures 2 channels"):
        socket_.read_w()
    meters.answers["/cm"] = {"StatusSNS": {"Time": "2026-01-01T00:00:00"}}
    with pytest.raises(MeterError, match="measure no energy"):
        socket_.read_w()
    assert meters.asked[-1] == "/cm?cmnd=Status%2010"
    meters.answers["/cm"] = {"WARNING": "Need user=<username>&password=<password>"}
    with pytest.raises(MeterError, match="remove its web password"):
        socket_.read_w()


# --- Prometheus -------------------------------------------------------------------------------------------------------


def vector(*values):
    series = [{"metric": {"socket": str(at)}, "value": [1.7e9, value]} for at, value in enumerate(values)]
    return {"status": "success", "data": {"resultType": "vector", "result": series}}


def test_a_prometheus_query_is_passed_as_written_and_answers_from_recent_samples(meters):
    meters.answers["/api/v1/query"] = vector("38.25")
    query = 'avg(socket_watts{name="pi"}) + 1?'
    assert parse_meter(f"prometheus:http://{meters.host}?{query}").read_w() == 38.25
    asked = urllib.parse.parse_qs(urllib.parse.urlsplit(meters.asked[0]).query)
    assert asked["query"] == [query] and asked["lookback_delta"] == ["10s"]
    meters.answers["/api/v1/query"] = {"status": "success", "data": {"resultType": "scalar", "result": [1, "5"]}}
    assert parse_meter(f"prometheus:http://{meters.host}?5").read_w() == 5


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (vector(), "no sample of the last 10 s"),
        (vector("1", "2"), "2 series: select one"),
        ({"status": "success", "data": {"resultType": "matrix", "result": []}}, "'matrix'"),
        ({"status": "error", "error": "parse error"}, "not answer like Prometheus"),
        (vector("many"), "not answer like Prometheus"),
        ([], "not a JSON object"),
    ],
)
def test_a_prometheus_answer_without_one_number_says_what_it_has(meters, answer, problem):
    meters.answers["/api/v1/query"] = answer
    with pytest.raises(MeterError, match=problem):
        parse_meter(f"prometheus:http://{meters.host}?watts").read_w()


# --- Hostile and slow answers -----------------------------------------------------------------------------------------


def redirect(handler):
    handler.send_response(302)
    handler.send_header("Location", "http://example.test/")
    handler.end_headers()


def unauthorized(handler):
    handler.send_response(401)
    handler.end_headers()


def endless(handler):
    handler.send_response(200)
    handler.end_headers()
    with suppress(OSError):
        for _ in range(1_000):
            handler.wfile.write(b"x" * 65_536)


def dripping(handler, text=b"HTTP/1.1 200 OK\r\nX-Filler: "):
    """One byte at a time, so that no single read takes long."""
    with suppress(OSError):
        for byte in text + b"x" * 100:
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            time.sleep(0.05)


def dripping_its_body(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    dripping(handler, b"")


def silent(handler):
    time.sleep(2)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (redirect, "a redirect, which is not followed"),
        (unauthorized, "wants a password"),
        (None, "HTTP 404: 'no such page'"),
        (b"<html>\x1b[2J", r"'<html>\?\[2J': "),
        (b"[" * 5_000, "nested"),
        (endless, "more than 256 KiB"),
        (dripping, "did not answer within 0.5 s"),
        (dripping_its_body, "did not answer within 0.5 s"),
        (silent, "did not answer within 0.5 s"),
    ],
)
def test_whatever_a_meter_answers_its_reading_ends_in_time_with_a_reason(meters, answer, problem):
    meters.answers["/cm"] = answer
    begun_s = time.monotonic()
    with pytest.raises(MeterError, match=problem):
        parse_meter(f"tasmota:{meters.host}").read_w()
    assert time.monotonic() - begun_s < 2


def test_a_handshake_that_never_ends_is_ended_in_time():
    def drip():
        taken, _ = server.accept()
        with taken, suppress(OSError):
            for byte in b"\x16\x03\x03\x40\x00" + b"x" * 100:
                taken.sendall(bytes([byte]))
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, daemon=True).start()
        begun_s = time.monotonic()
        with pytest.raises(MeterError, match="did not answer within 0.5 s"):
            parse_meter(f"prometheus:https://127.0.0.1:{server.getsockname()[1]}?watts").read_w()
        assert time.monotonic() - begun_s < 2


def test_a_meter_that_is_not_there_says_so():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(MeterError, match=r"cannot be reached: '.*refused"):
        parse_meter(f"tasmota:127.0.0.1:{port}").read_w()


@pytest.mark.parametrize(
    "spec", ["wattmeter", "shelly", "tasmota:http://x/", "shelly:a/b", "tasmota:user@host", "pmic:1"]
)
def test_what_names_no_meter_is_refused(spec):
    with pytest.raises(InvalidInputError):
        parse_meter(spec)


# --- Programs ---------------------------------------------------------------------------------------------------------


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("print('about 12')", "writes 'about 12', not a number of watts"),
        ("raise SystemExit('no bus')", "exit status 1: 'no bus'"),
        ("while True: print('x' * 65536)", "writes more than 256 KiB"),
        ("import time; time.sleep(60)", "did not end within 0.5 s"),
    ],
)
def test_a_command_that_fails_says_how(tmp_path, text, problem):
    with pytest.raises(MeterError, match=problem):
        parse_meter(f"command:{program(tmp_path, 'watts', text)}").read_w()


def test_a_command_writes_watts_and_no_shell_reads_its_line(tmp_path):
    path = program(tmp_path, "watts", "import sys; print(len(sys.argv) + 0.5)")
    assert parse_meter(f"command:{path} 'a b' $HOME;").read_w() == 3.5
    with pytest.raises(MeterError, match="cannot be started: No such file"):
        parse_meter(f"command:{tmp_path}/missing").read_w()


ADC = """     3V7_WL_SW_A current(0)=0.50000000A
       3V3_SYS_A current(1)=1.00000000A
       VDD_CORE_A current(7)=2.00000000A
     3V7_WL_SW_V volt(8)=4.00000000V
       3V3_SYS_V volt(9)=3.30000000V
       VDD_CORE_V volt(15)=0.85000000V
        EXT5V_V volt(24)=5.14850000V
         BATT_V volt(25)=0.00000000V
"""


def test_a_pis_power_is_the_sum_of_its_rails_of_which_current_is_measured(tmp_path, monkeypatch):
    program(tmp_path, "vcgencmd", f"import sys; assert sys.argv[1:] == ['pmic_read_adc']; print({ADC!r})")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert parse_meter("pmic").read_w() == pytest.approx(0.5 * 4 + 1 * 3.3 + 2 * 0.85)


@pytest.mark.parametrize("text", ["print('error=1 error_msg=\"Command not registered\"')", "raise SystemExit(255)"])
def test_an_earlier_pi_is_told_that_it_has_no_pmic(tmp_path, monkeypatch, text):
    program(tmp_path, "vcgencmd", text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(MeterError, match="only a Raspberry Pi 5 measures its power"):
        parse_meter("pmic").read_w()


# --- Polled -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("watts", "problem"),
    [
        (float("nan"), "not a number of watts"),
        (float("inf"), "not a number of watts"),
        (151_000.0, "Does it report milliwatts"),
        (0.0, "is this machine behind it"),
        (-3.0, "the right way round"),
        (MeterError("cannot be reached"), "cannot be reached"),
        (ZeroDivisionError("division"), "cannot be read: division"),
    ],
)
def test_an_implausible_answer_is_a_missing_sample_with_a_reason(watts, problem):
    polled = Polled(FixedMeter(watts), SystemClock())
    assert np.isnan(polled.read_mw())
    assert problem in polled.problem


def test_reading_often_does_not_ask_the_meter_more_often():
    meter = FixedMeter(42.0)
    polled = Polled(meter, SystemClock(), period_s=5.0)
    assert {polled.read_mw() for _ in range(200)} == {42_000.0}
    assert meter.reads == 1


def test_a_meter_that_stops_answering_is_missing_once_its_last_answer_is_old():
    class Ticking(SystemClock):
        ahead_s = 0.0

        def now_s(self):
            return super().now_s() + self.ahead_s

    meter, clock = FixedMeter(42.0), Ticking()
    polled = Polled(meter, clock, period_s=0.2)
    assert polled.read_mw() == 42_000
    meter.watts = MeterError("gone")
    while polled.problem is None:
        time.sleep(0.01)
    assert polled.read_mw() == 42_000, "one failure is bridged"
    clock.ahead_s = 5.0
    assert np.isnan(polled.read_mw())


def test_a_slow_meter_delays_nobody_after_its_first_answer():
    class Slow(FixedMeter):
        def read_w(self):
            if self.reads:
                time.sleep(0.4)
            return super().read_w()

    polled = Polled(Slow(7.0), SystemClock(), period_s=0.05)
    polled.read_mw()
    time.sleep(0.1)
    begun_s = time.monotonic()
    assert polled.read_mw() == 7_000
    assert time.monotonic() - begun_s < 0.1
