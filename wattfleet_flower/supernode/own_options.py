"""Options of Flower's SuperNode that follow from the device's enrolment. The user's own options take precedence."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.common.config import parse_config_args

from wattfleet.errors import InvalidInputError
from wattfleet_identity.supernode_folder import KEY, TRUSTED, SuperNodeFacts, read_facts

ENVIRONMENT_VARIABLE = "WATTFLEET_SUPERNODE"
DEFAULT_FOLDER = Path("/var/lib/wattfleet/supernode")


@dataclass(frozen=True)
class Enrolled:
    """A device's enrolment, as the SuperNode uses it.

    Attributes:
        folder: the folder with the SuperNode's key.
        facts: device id, agent socket and SuperLink address from the enrolment.
    """

    folder: Path
    facts: SuperNodeFacts

    @property
    def trusted_file(self) -> Path:
        """The file with the authorities to trust. It changes when the agent renews its certificate."""
        return self.folder / TRUSTED


def enrolment(named: Path | None, flower_options: Sequence[str]) -> Enrolled | None:
    """Return the enrolment to use; None if there is none, or if the user has switched TLS off.

    Args:
        named: the folder that the user named; None for the environment variable's folder or else the default.
        flower_options: the options for Flower.

    Raises:
        InvalidInputError: the named folder has no key, a folder cannot be read, or options contradict each other.
    """
    given = _given(flower_options)
    if given.insecure:
        if named is not None:
            raise InvalidInputError("--insecure switches TLS off, but --enrolled needs TLS: leave out one of them")
        return None
    if named is None and (variable := os.environ.get(ENVIRONMENT_VARIABLE)):
        named = Path(variable)
    folder = named or DEFAULT_FOLDER
    try:
        facts = read_facts(folder)
    except InvalidInputError:
        if named is None and given.root_certificates is not None:  # the user provides what is needed
            return None
        raise
    if facts is not None:
        return Enrolled(folder.absolute(), facts)
    if named is not None:
        raise InvalidInputError(
            f"{folder} has no SuperNode key: enrol the device with `wattfleet agent join`, or name the folder"
            " `supernode` in the agent's state directory"
        )
    return None


def further_options(enrolled: Enrolled, flower_options: Sequence[str]) -> list[str]:
    """Return the options for Flower, extended by those that follow from an enrolment.

    Raises:
        InvalidInputError: the SuperLink's address is not known, or the node configuration cannot be read.
    """
    given, facts = _given(flower_options), enrolled.facts
    further: list[str] = []
    if given.superlink is None:
        if not facts.superlink:
            raise InvalidInputError(
                "the SuperLink's address is not known: pass --superlink HOST:PORT, or restart the coordinator with"
                " --superlink-address HOST:PORT and enrol the device again"
            )
        further += ["--superlink", facts.superlink]
    if given.root_certificates is None:
        further += ["--root-certificates", str(enrolled.trusted_file)]
    if given.auth_supernode_private_key is None:
        further += ["--auth-supernode-private-key", str(enrolled.folder / KEY)]
    own = {"device-id": facts.device_id} | ({"agent-socket": facts.agent_socket} if facts.agent_socket else {})
    return [*flower_options, *further, "--node-config", _node_config(given.node_config, own)]


def _node_config(given: str | None, own: dict[str, str]) -> str:
    """Return the node configuration, extended by the device's own keys unless it has them already."""
    try:
        values = parse_config_args([given] if given else None)
    except Exception as error:  # errors of Flower, of TOML and of reading the file
        raise InvalidInputError(f"--node-config: {error}") from None
    return " ".join(f"{key}={json.dumps(value)}" for key, value in {**own, **values}.items())


def _given(flower_options: Sequence[str]) -> argparse.Namespace:
    """Parse the Flower options that matter here. Flower parses and checks all of its options itself."""
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("--superlink", "--root-certificates", "--auth-supernode-private-key", "--node-config"):
        parser.add_argument(name)
    parser.add_argument("--insecure", action="store_true")
    return parser.parse_known_args(flower_options)[0]
