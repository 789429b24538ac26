"""The folder of a device's SuperNode: its key for Flower, the authorities to trust, and addresses.

The agent writes it, and the SuperNode, which runs as a normal user, reads it. Therefore the folder has the mode 750,
its key the mode 640, and both have the group `wattfleet`, which may also use the agent's socket. Without that group,
only their owner may read them. The key identifies the device only to the SuperLink; the agent's own key stays
unreadable.
"""

from __future__ import annotations

import grp
import json
import os
import stat
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from wattfleet.common.atomic_files import read_regular_file, replace_file
from wattfleet.common.identity.identity_folder import SECRET_MODE, Identity, make_private_folder
from wattfleet.core.errors import InvalidInputError

GROUP = "wattfleet"
KEY, TRUSTED, FACTS = "supernode.key", "trusted.pem", "supernode.json"
_SHARED_FOLDER_MODE, _SHARED_KEY_MODE = 0o750, 0o640


@dataclass(frozen=True)
class SuperNodeFacts:
    """What a SuperNode needs in addition to keys.

    Attributes:
        device_id: the device.
        superlink: host:port of Flower's SuperLink; empty if unknown.
        agent_socket: the agent's socket; empty for the default one.
    """

    device_id: str
    superlink: str = ""
    agent_socket: str = ""


@dataclass(frozen=True)
class SuperNodeKey:
    """A new key of a SuperNode: ECDSA P-384, as in Flower's own documentation."""

    private: bytes
    public: bytes

    @classmethod
    def create(cls) -> SuperNodeKey:
        """Create a key pair in OpenSSH format."""
        key = ec.generate_private_key(ec.SECP384R1())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        return cls(private, public)


def write_supernode(folder: Path, key: SuperNodeKey, identity: Identity) -> None:
    """Write the folder of a device that has just enrolled.

    Args:
        folder: the folder; created if absent.
        key: the key with which the device enrolled.
        identity: the device's identity.

    Raises:
        OSError: the folder cannot be written.
    """
    make_private_folder(folder)
    replace_file(folder / KEY, key.private, mode=SECRET_MODE)
    _write(folder, SuperNodeFacts(identity.peer.name, identity.superlink), identity.trusted_pem)
    _share(folder)


def update_supernode(folder: Path, identity: Identity, agent_socket: str | None = None) -> None:
    """Write a renewed identity to the SuperNode's folder, and share the folder; does nothing if there is none.

    Args:
        folder: the SuperNode's folder.
        identity: the device's identity.
        agent_socket: the agent's socket; None if it has not changed.

    Raises:
        InvalidInputError: the folder is damaged.
        OSError: the folder cannot be written.
    """
    facts = read_facts(folder)
    if facts is None:
        return
    known = replace(facts, superlink=identity.superlink or facts.superlink)
    if agent_socket is not None:
        known = replace(known, agent_socket=agent_socket)
    if known != facts or read_regular_file(folder / TRUSTED) != identity.trusted_pem:
        _write(folder, known, identity.trusted_pem)
    _share(folder)


def read_facts(folder: Path) -> SuperNodeFacts | None:
    """Read what the SuperNode needs; None if the folder has no key for it.

    Raises:
        InvalidInputError: a file is missing or damaged, or this user may not read it.
    """
    try:
        os.stat(folder / KEY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(folder, error) from None
    try:
        for name in (KEY, TRUSTED):
            read_regular_file(folder / name)
        facts = json.loads(read_regular_file(folder / FACTS))
        names = {field.name for field in fields(SuperNodeFacts)}
        return SuperNodeFacts(**{name: str(value) for name, value in facts.items() if name in names})
    except OSError as error:
        raise _unreadable(folder, error) from None
    except (AttributeError, TypeError, ValueError):
        raise InvalidInputError(f"{folder / FACTS} is damaged: enrol again with `wattfleet agent join`") from None


def _write(folder: Path, facts: SuperNodeFacts, trusted_pem: bytes) -> None:
    replace_file(folder / TRUSTED, trusted_pem)
    replace_file(folder / FACTS, json.dumps(asdict(facts)).encode())


def _share(folder: Path) -> None:
    """Give the group access to the folder, if the group exists and this user may assign files to it.

    The folder is in the state directory, which only its group may enter.
    """
    try:
        group = grp.getgrnam(GROUP).gr_gid
        state = folder.parent.stat()
        if state.st_gid != group and not state.st_mode & stat.S_IXOTH:
            os.chown(folder.parent, -1, group)
        for path, mode in (
            (folder, _SHARED_FOLDER_MODE),
            (folder / KEY, _SHARED_KEY_MODE),
            (folder / TRUSTED, _SHARED_KEY_MODE),
            (folder / FACTS, _SHARED_KEY_MODE),
        ):
            if path.stat().st_gid != group:
                os.chown(path, -1, group)
            os.chmod(path, mode)
    except (KeyError, PermissionError):
        return


def _unreadable(folder: Path, error: OSError) -> InvalidInputError:
    remedy = "enrol again with `wattfleet agent join`"
    if isinstance(error, PermissionError):
        remedy = (
            f"add this user to the group {GROUP} with `sudo usermod -aG {GROUP} USER`, log in again, and start the"
            " agent once, which shares the folder with the group"
        )
    return InvalidInputError(f"the SuperNode's folder {folder} cannot be read: {error.strerror}: {remedy}")
