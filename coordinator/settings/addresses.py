"""Settings of the coordinator's addresses and identity, and of the SuperLink's address."""

from __future__ import annotations

from pathlib import Path

from wattfleet_io.settings.model import Group, Names, setting


class ServerSettings(Group):
    """Addresses: where the coordinator listens, and how it stops."""

    address: str = setting(
        "127.0.0.1:7070", "Serve gRPC on this host:port; port 0 picks a free port.", option="--address"
    )
    metrics_address: str = setting(
        "127.0.0.1:9464",
        "Serve Prometheus' /metrics on this host:port; port 0 picks a free port.",
        option="--metrics-address",
    )
    page_address: str | None = setting(
        None,
        'Serve the web page on this host:port, or "none" for no page. From other machines it needs a certificate.',
        option="--page-address",
        unset="on loopback, at the port after that of --metrics-address",
    )
    max_http_connections: int = setting(
        128,
        "Limit on open connections to the page, and the same to /metrics; half of them for one host. A further one "
        "closes one that has sent no request. With a low limit on open files, an eighth of that counts instead.",
        ge=2,
    )
    http_timeout_s: float = setting(
        10.0,
        "Close a connection to the page or to /metrics if the other side takes longer for the TLS handshake, for a "
        "request, or to accept what is sent to it.",
        unit="s",
        gt=0,
    )
    metrics_devices: Names = setting(
        (),
        "Export metrics of individual devices only for these: id:NAME, tag:NAME or site:NAME. id:none exports none."
        " Metrics of the whole fleet count every device.",
        unset="all devices",
    )
    idle_connection_s: float = setting(
        300.0,
        "Close a gRPC connection without a request for this long; an agent's session is one request.",
        unit="s",
        ge=1,
        le=86_400,
    )
    announce: Path | None = setting(
        None, "Write the bound addresses to this file, as JSON.", option="--announce", unset="no file"
    )
    stop_grace_s: float = setting(2.0, "Time for open requests to finish when the coordinator stops.", unit="s", ge=0)
    stop_limit_s: float = setting(
        10.0, "Terminate the process this long after SIGTERM, even if it hangs.", unit="s", gt=0
    )


class IdentitySettings(Group):
    """Identity: the coordinator's certificate, and who may call it (docs/security.md)."""

    directory: Path = setting(
        Path("wattfleet-identity"),
        "Serve with the authority in this directory, which `wattfleet coordinator init` makes. Without it, everything"
        " is plaintext.",
        option="--identity",
    )
    insecure: bool = setting(
        False,
        "Serve plaintext even to other machines: anybody there can read and change everything.",
        option="--insecure",
    )
    enrolment_address: str | None = setting(
        None,
        "Serve machines that have no certificate yet on this host:port.",
        option="--enrolment-address",
        unset="the port after that of --address, or a free one if that is 0",
    )
    operator_address: str | None = setting(
        None,
        "Serve operators and viewers only on this host:port.",
        option="--operator-address",
        unset="on --address, together with all others",
    )
    plaintext_address: str | None = setting(
        None,
        "Also serve agents and Flower apps without certificates on this host:port, while a fleet moves to certificates."
        " A device that has one is refused there.",
        unset="nowhere",
    )
    public_address: str | None = setting(
        None,
        "Tell machines that enrol to connect to this host:port.",
        option="--public-address",
        unset="that of --address",
    )
    certificate_days: float = setting(
        30.0, "Issue certificates for this long; they are renewed after two thirds of it.", unit="days", gt=0, le=3650
    )


class SuperLinkSettings(Group):
    """SuperLink: Flower's server, whose TLS certificate comes from the fleet's authority (docs/flower.md)."""

    address: str | None = setting(
        None,
        "Announce that Flower's SuperLink is at this host:port, and issue a certificate for it.",
        option="--superlink-address",
        unset="unknown; SuperNodes need --superlink",
    )
    hosts: Names = setting(
        (),
        "Further name or IP address of the SuperLink's machine, for its certificate. Repeatable.",
        option="--superlink-host",
        unset="that of --superlink-address, and loopback",
    )
