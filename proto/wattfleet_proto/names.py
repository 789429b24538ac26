"""Names, ids and words that both sides of a connection use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path

from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.v1 import session_pb2

# --- Version ----------------------------------------------------------------------------------------------------------
# The protocol version of this release, and which versions it understands.


MAJOR, MINOR = 1, 0


class ProtocolVersionError(WattfleetError):
    """The other side has another major version of the protocol: update the older of the two."""


def own_version() -> session_pb2.ProtocolVersion:
    """Return the version of this release."""
    return session_pb2.ProtocolVersion(major=MAJOR, minor=MINOR)


def common_version(theirs: session_pb2.ProtocolVersion) -> session_pb2.ProtocolVersion:
    """Return the version to use with another side: the older of the two minor versions.

    Args:
        theirs: the other side's version.

    Raises:
        ProtocolVersionError: the major versions differ.
    """
    if theirs.major != MAJOR:
        raise ProtocolVersionError(
            f"protocol {theirs.major}.{theirs.minor} is incompatible with protocol {MAJOR}.{MINOR}:"
            " update the older of agent and coordinator"
        )
    return session_pb2.ProtocolVersion(major=MAJOR, minor=min(theirs.minor, MINOR))


# --- Local socket -----------------------------------------------------------------------------------------------------
# The path of the agent's socket for Flower's ClientApp, and for inference servers.

DEFAULT_SOCKET = "/run/wattfleet/agent.sock"

CURRENT_SOCKET: ContextVar[str] = ContextVar("the agent's socket of this context's training", default=DEFAULT_SOCKET)
"""Set by the mod while the app trains."""


def owner_socket(socket: Path) -> Path:
    """The socket beside an agent's, on which only the agent's own user may change what the device does."""
    return socket.with_name(f"{socket.stem}-owner{socket.suffix}")


# --- Metric names -----------------------------------------------------------------------------------------------------
# Names of the metrics that a run reports for its rounds.

CLIENT_METRICS_PREFIX = "clientapp_"
"""Tells the metrics of the clients' evaluation from those of `evaluate_fn`; Flower's `Result` names both kinds so."""


def metric_order(name: str) -> tuple[bool, str]:
    """A key to sort names by: the metrics of `evaluate_fn` before those of the clients, each by name."""
    return name.startswith(CLIENT_METRICS_PREFIX), name


# --- Plan ids ---------------------------------------------------------------------------------------------------------
# Ids of plans: of a run's rounds, and those that grants to measure have in place of one.

_TO_MEASURE = "measuring-"


def plan_id_to_measure(run_id: str, number: int) -> str:
    """The id that stands in place of a plan's for devices that measure outside of rounds."""
    return f"{run_id}/{_TO_MEASURE}{number}"


def is_to_measure(plan_id: str) -> bool:
    """Whether an id stands in place of a plan's, for devices that measure outside of rounds."""
    return plan_id.rpartition("/")[2].startswith(_TO_MEASURE)


def plan_in_words(plan_id: str, run_name: str) -> str:
    """What a plan is of, such as "round 3 of run digits-0714-1532", or "measurements of run digits-0714-1532".

    Args:
        plan_id: the id.
        run_name: what people call its run.
    """
    what = "measurements" if is_to_measure(plan_id) else f"round {plan_id.rpartition('/')[2]}"
    return f"{what} of run {run_name}"


# --- Run names --------------------------------------------------------------------------------------------------------
# Which names and labels a run may have: apps check them before a run starts, and the coordinator when it does.

LONGEST_RUN_NAME = 60
"""Characters of a run's name: it fits a column of a table."""

MAX_LABELS = 16
LONGEST_LABEL_KEY, LONGEST_LABEL_VALUE = 40, 100

_SHOWN_CHARACTERS = 80


def require_run_name(name: str) -> None:
    """Check the name that an app gives to its run.

    Raises:
        InvalidInputError: it is empty or too long, has spaces or characters that are not printable, or only digits,
            which would look like Flower's own id of a run.
    """
    if not _is_word(name, LONGEST_RUN_NAME) or name.isdecimal():
        raise InvalidInputError(
            f"a run's name must have 1 to {LONGEST_RUN_NAME} printable characters, no spaces and not only digits, not"
            f" {_shown(name)}"
        )


def require_labels(labels: Mapping[str, str]) -> None:
    """Check the labels that an app gives to its run.

    Raises:
        InvalidInputError: there are too many, or a key or a value is not valid.
    """
    if len(labels) > MAX_LABELS:
        raise InvalidInputError(f"a run has at most {MAX_LABELS} labels, not {len(labels):,}: leave some out")
    for key, value in labels.items():
        if not (isinstance(key, str) and _is_word(key, LONGEST_LABEL_KEY) and "=" not in key):
            raise InvalidInputError(
                f"the key of a label must have 1 to {LONGEST_LABEL_KEY} printable characters, no spaces and no '=', not"
                f" {_shown(key)}"
            )
        if not (isinstance(value, str) and value.strip() and len(value) <= LONGEST_LABEL_VALUE and value.isprintable()):
            raise InvalidInputError(
                f"the label {key!r} must have a text of 1 to {LONGEST_LABEL_VALUE} printable characters, not"
                f" {_shown(value)}"
            )


def label_of(text: str) -> tuple[str, str]:
    """Read a label that was written as `key=value`.

    Raises:
        InvalidInputError: it has another form, or its key or its value is not valid.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise InvalidInputError(f"a label is written as KEY=VALUE, such as site=lab, not {_shown(text)}")
    require_labels({key: value})
    return key, value


def _is_word(text: str, longest: int) -> bool:
    return bool(text) and len(text) <= longest and text.isprintable() and not any(map(str.isspace, text))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


# --- Run end ----------------------------------------------------------------------------------------------------------
# How the end of a run is described in `FinishRunRequest.error` and `RunView.error`.

STOPPED = "stopped "
"""Begins the text if somebody has stopped the run. Any other text is the error that has ended it."""


def is_stopped(error: str) -> bool:
    """Whether somebody has stopped a run.

    Args:
        error: why the run ended early.
    """
    return error.startswith(STOPPED)


# --- Hot boards -------------------------------------------------------------------------------------------------------
# When a board is hot, for the agents that measure it and for those who look at it.

HOT_C = 85.0
"""From this temperature of the chip on, degrees Celsius. Agents discard what they measure above it, unless they are
told another limit, and boards throttle near 95."""

COOL_C = 82.0
"""A hot board is no longer hot below this temperature, degrees Celsius. A board that keeps close to `HOT_C` would
otherwise be hot and not hot many times an hour."""


# --- Signed references ------------------------------------------------------------------------------------------------
# How the signed metadata of references names its files and what they describe, for both sides.
#
# The files are those of The Update Framework (TUF) with consistent snapshots: `timestamp.json`, and
# `VERSION.ROLE.json` of the other roles.

TIMESTAMP_FILE = "timestamp.json"

MAX_ROOTS = 256
"""Limit of the root's versions: an agent asks for those that it lacks one after the other."""

_NAME = re.compile(r"timestamp\.json|[1-9][0-9]{0,11}\.(root|snapshot|targets)\.json")


def is_metadata_name(name: str) -> bool:
    """Whether a file of metadata may have this name; it contains no folder."""
    return _NAME.fullmatch(name) is not None


def metadata_name(role: str, version: int) -> str:
    """The name of a version of `root`, `snapshot` or `targets`."""
    return f"{version}.{role}.json"


def target_names(digest: str) -> tuple[str, str]:
    """The names by which the metadata describes a reference's manifest and its weights.

    Args:
        digest: sha256 of the manifest, hexadecimal.
    """
    return f"{digest}/manifest.json", f"{digest}/weights.safetensors"


def digests_named(targets: list[str]) -> list[str]:
    """The digests of the references that are named with both of their files, in order."""
    named = {target.partition("/")[0] for target in targets}
    return sorted(digest for digest in named if set(target_names(digest)) <= set(targets))
